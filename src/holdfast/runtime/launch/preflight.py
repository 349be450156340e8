"""What can be said of a run before any of its processes that train is started: what is wrong, and what is planned.

All of it are pure functions. Who asks the machine, runs the probe and looks for checkpoints is the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from holdfast.config.job import Job
from holdfast.core.evaluation import Evaluating
from holdfast.core.faults import Fault, Point
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Profile
from holdfast.core.sum_order import better_chunks
from holdfast.errors import ConfigError, HoldfastError
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.resume import check_accepted
from holdfast.runtime.specs import Found, Probed
from holdfast.settings.planning import JobPlans, plans_of
from holdfast.settings.ways import Decided, decided

__all__ = ["PreflightFindings", "Machine", "decide", "going_on", "preflight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known of the machine that a run is to begin on.

    Attributes:
        probed: what the job's model and data were found to be there; None: it has not been tried out yet.
        profile: what its layers were measured to cost there; None: nobody knows.
        processors: that all its workers share; None: each has its own, or needs none.
    """

    probed: Probed | None = None
    profile: Profile | None = None
    processors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFindings:
    """What was found out about a run.

    Attributes:
        errors: why it cannot begin, the first one to be told.
        warnings: what a person should know, a line each.
        planned: what is planned; None: there are errors, or too little is known.
    """

    errors: tuple[HoldfastError, ...] = ()
    warnings: tuple[str, ...] = ()
    planned: JobPlans | None = None

    def check(self) -> None:
        """Raises the first error, if there is one."""
        if self.errors:
            raise self.errors[0]


def preflight(request: RunRequest, machine: Machine) -> PreflightFindings:
    """Returns what is wrong with a run, and what is planned for it once the probe has run.

    Args:
        request: what was asked for; its job, once the probe has run, as its script says.
        machine: what is known so far.
    """
    errors = _errors(*(partial(_check_fault, request, fault, machine) for fault in request.faults))
    probed = machine.probed
    if probed is None:
        checks = (_check_networks, _check_coordinators)
        asked = (partial(check_accepted, request.job, request.accept), *(partial(check, request) for check in checks))
        return PreflightFindings(errors=errors + _errors(*asked))
    if errors:
        return PreflightFindings(errors=errors)
    try:
        _check_devices(request, probed)
        planned = plans_of(
            request.job, probed.facts.layers, machine.profile, probed.ties, processors=machine.processors
        )
    except HoldfastError as error:
        return PreflightFindings(errors=(error,))
    return PreflightFindings(warnings=(*probed.warnings, *_sums_told(request.job)), planned=planned)


def _sums_told(job: Job) -> Iterator[str]:
    """That workers could send less of what sums are made of, if they could."""
    if job.train.sum_chunks is not None:
        return
    found = better_chunks(job.grid.batch.counts, tuple(map(max, job.lanes)))
    if found is None:
        return
    chunks, now, then = found
    key = "hf.steps(..., sum_chunks=" if job.loops else "train.sum_chunks: "
    yield (
        f"sums: some workers send gradients in {now} parts; {key}{chunks}{')' * job.loops} has all send {then} "
        "(other bits, the same on any grid)"
    )


def _errors(*checks: Callable[[], None]) -> tuple[HoldfastError, ...]:
    """What these checks raise, in order."""
    found: list[HoldfastError] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(error)
    return tuple(found)


def _check_fault(request: RunRequest, fault: Fault, machine: Machine) -> None:
    _check_target(request, fault)
    if (request.job.loops or not request.job.train.steps) and machine.probed is None:
        return  # its script, or data, are yet to say how many steps it has
    steps, evaluate = request.job.train.steps, request.job.evaluate
    if fault.point is Point.EVALUATE:
        due = evaluate is not None and Evaluating(every=evaluate.every, microbatches=1).due(fault.step, steps)
        if not due:
            raise ConfigError(f"--fault {fault}: the state before step {fault.step} is not evaluated (evaluate.every)")
    elif fault.step >= steps:
        raise ConfigError(f"--fault {fault}: the last step is {steps - 1}")


def _check_target(request: RunRequest, fault: Fault) -> None:
    job, last_node = request.job, request.num_nodes - 1
    if fault.node is not None and fault.node > last_node:
        raise ConfigError(f"--fault {fault}: there is no node {fault.node}; nodes are 0 to {last_node}")
    worker = fault.worker
    if worker is not None and not job.has(worker) and worker not in job.spares:
        last = (WorkerId(len(job.sizes) - 1, job.sizes[-1] - 1), *job.spares)[-1]
        raise ConfigError(f"--fault {fault}: there is no worker {worker}; workers are 0.0 to {last}")


def _check_coordinators(request: RunRequest) -> None:
    several, port = request.coordinators > 1, request.job.control.port
    if several and (request.store == "sqlite" or (request.slots is None and port)):
        raise ConfigError(
            f"control.coordinators: {request.coordinators} need a control.store that others see: etcd://HOST:PORT, a "
            "shared folder or s3://BUCKET/PREFIX; and control.port: 0, if all are to be on this machine"
        )
    if request.leaves and (request.slots is None or not several):
        raise ConfigError(
            "--notice leave: no other machine could go on with the job; expected --listen, and coordinators that stand "
            "by (a control.store that all machines see, and no control.coordinators: 1)"
        )


def _check_networks(request: RunRequest) -> None:
    if request.isolated and request.slots is not None:
        raise ConfigError(
            "--fault partition: cuts networks of nodes that are made on one machine, on which all workers have to begin"
        )
    whole = [fault for fault in request.faults if fault.node is not None]
    if whole and request.begin_here < request.job.most_workers:
        raise ConfigError(
            f"--fault {whole[0]}: strikes workers of one machine, in groups (grid.workers_per_node), and "
            f"{request.job.most_workers - request.begin_here} may be on other ones; expected room for all here, or "
            "kill the agent there instead"
        )
    if request.job.control.tls is not None and request.isolated:
        raise ConfigError(
            "control.tls: cannot be used with partition faults, whose networks have addresses of their own"
        )


def _check_devices(request: RunRequest, probed: Probed) -> None:
    job, workers = request.job, min(request.begin_here, request.job.most_workers)
    if job.train.device == "cuda" and workers > len(probed.gpus):
        raise ConfigError(
            f"train.device: cuda is a GPU for each worker, and there are {workers} workers here and {len(probed.gpus)} "
            "visible GPUs; expected as many, or cuda:0, which all of them share"
        )


def going_on(request: RunRequest, found: Found | None) -> RunRequest:
    """Returns what is asked for once it is known which checkpoint the run goes on from.

    Args:
        request: as it was.
        found: the checkpoint; None: there is none.

    Raises:
        ConfigError: a fault is to strike in a step before it.
    """
    if request.resume is None or found is None:
        return replace(request, resume=None)
    faults = request.faults
    if request.resume.auto:  # the same command as before: what is over stays over
        faults = tuple(fault for fault in faults if fault.step >= found.step)
    for fault in faults:
        if fault.after_s is None and fault.step < found.step:
            raise ConfigError(
                f"--fault {fault}: the run goes on from step {found.step}, earlier ones are not run again"
            )
    resume = replace(request.resume, url=found.url, step=found.step, best=found.best)
    return replace(request, resume=resume, faults=faults)


def decide(request: RunRequest, machine: Machine, findings: PreflightFindings) -> Decided:
    """Decides how the job recovers from the loss of a node: its processes are told what its file leaves open.

    Args:
        request: the run, with the checkpoint that it goes on from.
        machine: what is known of where it runs.
        findings: what was planned.
    """
    assert machine.probed is not None, "it was tried out"
    assert findings.planned is not None, "else there are errors"
    known = machine.profile or machine.probed.sizes
    assert known is not None, "what is not emulated has sizes"
    return decided(findings.planned.job, findings.planned.plan, known, restorable=request.resume is not None)
