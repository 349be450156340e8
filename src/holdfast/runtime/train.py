"""Trains a job on this machine and tells how it went."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast.config.job import Job
from holdfast.control.messages import Progress
from holdfast.core.faults import Fault
from holdfast.core.profile import Profile
from holdfast.errors import (
    ConfigError,
    DecisionsLost,
    InternalError,
    ProgramFailed,
    StateUnavailable,
    TooFewWorkers,
)
from holdfast.runtime.launch.directory import end_the_one_before
from holdfast.runtime.launch.ending import JobOutcome
from holdfast.runtime.launch.hearing import Hearing
from holdfast.runtime.launch.launcher import Launcher
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.resume import check_same_job, jobs_before, parse_resume, resume_auto
from holdfast.runtime.rundir import RunDirLock, attempts
from holdfast.runtime.specs import ResumeFrom
from holdfast.runtime.summary import SUMMARY, Summary, done_before, events_of, summarise, write_summary
from holdfast.telemetry.events import Event, Notice
from holdfast.telemetry.report import report

__all__ = ["Summary", "default_directory", "train"]

_SUMMARY_S, _LOOK_S = 15.0, 0.1


def train(
    job: Job,
    *,
    run_dir: str | Path | None = None,
    faults: Iterable[Fault] = (),
    emulate: Profile | None = None,
    resume: str | Path | None = None,
    accept: Iterable[str] = (),
    slots: int | None = None,
    leaves: bool = False,
    token: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Trains a job to its end, with the workers that are left when some die.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: what to train, see :func:`holdfast.config.load.load_job`.
        run_dir: an empty or new directory, or with ``resume="auto"`` that of earlier attempts; default
            ``runs/NAME-DATE-TIME``, with ``auto`` ``runs/NAME``.
        faults: what is to be killed when, to see that training survives it.
        emulate: sleep as long as this profile says instead of computing, on its number of layers; for timing protocols
            and plans, not for training. Model and data of the job are not even built.
        resume: go on from the newest sound checkpoint of a run directory, a folder or a URL; with ``@STEP`` behind it,
            from that one. ``auto`` begins, or goes on with what the same call began in the same run directory, or with
            what is in the job's ``checkpoint.url``; if that is done already, nothing is changed. None: as the job says.
        accept: keys of the job that may differ from those of the job which made the checkpoint, such as
            ``model.dropout``, or ``optimizer`` for all of its; the run is then no longer the one that was begun.
        slots: how many workers may begin on this machine, 0 or more; the others wait for agents of other machines, see
            :class:`holdfast.runtime.launch.joining.Joiner`. None: all begin here.
        leaves: whether a notice to end (SIGTERM, SIGHUP, SIGUSR1, SIGUSR2) ends no job, but has the workers of this
            machine leave it; then others have to be there.
        token: what those agents have to know; empty: one is drawn, and written into the run directory.
        on_event: called with what is worth a line: what is done before the first step and after the last (Preparing,
            every second while it goes on); how the layers of a lost node are to come back (Chosen); workers that are
            lost or have come; checkpoints that were rejected, and why; what the model or the data do not do the same
            every time; what cannot be written while training goes on.
        on_progress: called after every step. Both are called in one thread of their own, in the order in which things
            happen, and nothing waits for them but the return; what they raise ends the job.

    Raises:
        ConfigError: the job cannot be used, or cannot go on from that checkpoint; nothing was overwritten. Or no step
            has changed the weights, which are saved in ``RUN_DIR/final`` all the same.
        DecisionsLost: the store of decisions was emptied, exchanged or damaged; what lives was saved as well.
        ProgramFailed: model, data or optimizer raised, on more than one worker; what lives was saved there, too.
        StateUnavailable: a layer lost its last owner; what lives was saved in ``RUN_DIR/final``.
        TooFewWorkers: fewer are left than are to go on; all was saved there.
        Interrupted: SIGINT or SIGTERM came; every process is ended.
        NodeLeft: the workers of this machine were told to go, and have; the job goes on on others.
    """
    wanted = job.resume if resume is None else str(resume)
    auto = wanted == "auto"
    directory = Path(run_dir) if run_dir is not None else default_directory(job, auto=auto)
    accepted, planned = tuple(accept), tuple(faults)
    with Hearing() as hearing, RunDirLock(directory) as claim:
        on_event, on_progress = hearing.of(on_event), hearing.of(on_progress)
        before: tuple[Job, ...] = ()
        if auto:
            claim.take()
            before = jobs_before(directory, lambda text: on_event(Notice(worker="agent", text=text)))
            check_same_job(job, directory, before, accepted)
            done = done_before(directory, on_event)
            if done is None and end_the_one_before(directory):
                _await_summary(directory)
                done = done_before(directory, on_event)
            if done is not None and done.step >= _steps_of(job, before):
                return _changed(job, summarise(directory, done, planned, done_before=True))
        request = RunRequest(
            job=job,
            run_dir=directory,
            faults=_still_due(planned, directory) if auto else planned,
            emulate=emulate,
            resume=_resume_from(wanted, job, directory, before),
            accept=accepted,
            again=auto,
            slots=slots,
            leaves=leaves,
            token=token,
        )
        outcome = Launcher(request=request, claim=claim, on_event=on_event, on_progress=on_progress).run()
        summary = summarise(directory, outcome, planned)
        write_summary(summary, on_event)
    try:
        _raise_unless_done(outcome, summary)
    except (StateUnavailable, TooFewWorkers, DecisionsLost) as error:
        error.resume = _to_go_on_from(summary, wanted)
        raise
    return _changed(job, summary)


def _steps_of(job: Job, before: Sequence[Job]) -> float:
    """How many steps a job has; where its epochs are yet to be counted, as many as these were in the attempt before."""
    if job.train.steps or job.train.epochs is None:
        return job.train.steps
    return next((each.train.steps for each in before[:1] if each.train.epochs == job.train.epochs), math.inf)


def _await_summary(directory: Path) -> None:
    """Waits for whoever has led a job to its end on another machine to sum up, but not for long: it may be gone."""
    until = time.monotonic() + _SUMMARY_S
    while not (directory / SUMMARY).exists() and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _changed(job: Job, summary: Summary) -> Summary:
    """Returns what a run came to.

    Raises:
        ConfigError: to nothing.
    """
    if summary.unchanged_from is None:
        return summary
    first, last = summary.unchanged_from, summary.steps - 1
    scale = job.train.loss_scale
    scaled = "" if scale is None else f", train.loss_scale (it began with {scale.initial:g})"
    raise ConfigError(
        f"no step has changed the weights: in each from {first} to {last} the loss or a gradient was not finite, so "
        f"all were omitted; what is in {summary.run_dir / 'final'} was trained by none of them. Expected finite ones: "
        f"look at the data, the loss and the first weights{scaled}"
    )


def _to_go_on_from(summary: Summary, resumed: str | None) -> str:
    """The run directory if a checkpoint was made, or may have been; else what this run had itself gone on from."""
    if summary.report.checkpoints or summary.report.missing or resumed == "auto":
        return str(summary.run_dir)
    return resumed or ""


def default_directory(job: Job, *, auto: bool) -> Path:
    """Returns where a run is written if nothing is said; ``auto``: whether it may be another attempt at one."""
    return Path("runs") / (job.name if auto else f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _resume_from(wanted: str | None, job: Job, directory: Path, before: Sequence[Job]) -> ResumeFrom | None:
    if wanted is None:
        return None
    return resume_auto(job, directory, before) if wanted == "auto" else parse_resume(wanted)


def _still_due(faults: tuple[Fault, ...], directory: Path) -> tuple[Fault, ...]:
    """The faults that no earlier attempt was struck by."""
    fired = {spec for each in (*attempts(directory), directory) for spec in report(events_of(each)).fired}
    return tuple(fault for fault in faults if str(fault) not in fired)


def _raise_unless_done(outcome: JobOutcome, summary: Summary) -> None:
    match outcome.outcome:
        case "done":
            return
        case "lost":
            detail = (
                f"step {summary.steps} of what lives is saved in {outcome.directory}"
                if outcome.directory
                else outcome.detail
            )
            raise StateUnavailable(outcome.lost_layers, detail)
        case "too-few":
            raise TooFewWorkers(
                f"{outcome.detail}; step {summary.steps} is saved in {outcome.directory}; with resilience.degraded: "
                "allow training would go on"
            )
        case "forgotten":
            raise DecisionsLost(f"{outcome.detail}; step {summary.steps} of what lives is saved in {outcome.directory}")
        case "user-error":
            raise ConfigError(outcome.detail)
        case "program":
            raise ProgramFailed(outcome.detail)
        case _:
            raise InternalError(outcome.detail)
