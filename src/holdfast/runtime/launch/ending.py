"""What is left to do once a job has ended."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config.job import HuggingFaceModel, Job
from holdfast.control.messages import Ended, Progress
from holdfast.core.ids import WorkerId
from holdfast.errors import HoldfastError, StorageError, describe_exit
from holdfast.plain import one_line
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.node.agent import NodeAgent
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.entries import DIGEST, MODEL
from holdfast.runtime.node.local import LOOK_S, Asking, LocalProcesses
from holdfast.storage.blobs import open_store

__all__ = ["JobOutcome", "delete_logs", "outcome_of", "tell_preempted", "with_hashes", "write_model"]

_WHY = 200
_HASHED_PER_S = 10e6
"""Bytes; any disk and processor does better."""
_LATE = "gave no answer within {limit_s:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ended: see :class:`holdfast.control.messages.Ended`; the hashes are of a job that was done.

    ``no_hashes``: why such a job has none; else empty. ``last``: the newest step that we heard of. ``restarts``: how
    often a coordinator died. ``resumed_from``: the step of the checkpoint that it went on from. ``scripts_failed``: the
    workers whose script failed behind its loop.
    """

    outcome: str
    detail: str
    step: int
    directory: str
    generations: int
    lost_layers: tuple[int, ...] = ()
    members: tuple[WorkerId, ...] = ()
    weights_sha256: str | None = None
    state_sha256: str | None = None
    no_hashes: str = ""
    last: Progress | None = None
    restarts: int = 0
    resumed_from: int | None = None
    scripts_failed: tuple[str, ...] = ()


def outcome_of(briefing: Briefing, ended: Ended, agent: NodeAgent, restarts: int, *, hashes: bool = True) -> JobOutcome:
    """Returns how a job ended, once all is over that scripts do on this machine behind their loop.

    Args:
        briefing: what its processes were told.
        ended: what the coordinator said.
        agent: of this machine.
        restarts: how often a coordinator of this machine died.
        hashes: whether those of what was trained are to be computed.
    """
    outcome = JobOutcome(
        outcome=ended.outcome,
        detail=ended.detail,
        step=ended.step,
        directory=ended.directory,
        generations=ended.generations,
        lost_layers=ended.lost_layers,
        members=ended.members,
        last=agent.last,
        restarts=restarts,
        resumed_from=briefing.resumed_from,
    )
    if ended.outcome != "done":
        return outcome
    if hashes:
        emulated = briefing.request.emulate is not None
        outcome = with_hashes(outcome, agent.local, emulated=emulated)
        if isinstance(briefing.job.model, HuggingFaceModel) and not emulated:
            write_model(briefing.job, outcome.directory, agent.local)
    if briefing.job.loops:
        failed = _await_scripts(ended.members, agent.group.newest, agent.local)
        outcome = replace(outcome, scripts_failed=failed)
    return outcome


def tell_preempted(detail: str, checkpoint: int, run_dir: Path) -> str:
    """Returns what became of the checkpoint that was to be made before the end, and how to go on.

    Args:
        detail: why there is none of the last steps; empty if there is.
        checkpoint: the step of the newest; 0: there is none at all.
        run_dir: of the run.
    """
    last = f"the last is of step {checkpoint}" if checkpoint else "there is none"
    written = f"the checkpoint of step {checkpoint} is written"
    what = f"no checkpoint of the last steps, {detail}; {last}" if detail else written
    return f"{what}; go on with --run-dir {run_dir} --resume auto"


def with_hashes(outcome: JobOutcome, local: LocalProcesses, *, emulated: bool) -> JobOutcome:
    """Returns how a job ended that was done, with hashes of what was trained; ``emulated``: its layers are digests."""
    if emulated:
        return replace(outcome, weights_sha256=_emulated_digest(Path(outcome.directory)))
    try:
        weights, state = _digest_twice(outcome.directory, local).split()
    except HoldfastError as error:  # all is trained and saved: that must not be lost over them
        why = f"they could not be computed, in two tries: {one_line(str(error), _WHY)}"
        return replace(outcome, no_hashes=f"{why}; the layers are in {outcome.directory}")
    return replace(outcome, weights_sha256=weights, state_sha256=state)


def _emulated_digest(directory: Path) -> str:
    """Emulated layers are saved as their digests: the digest of these, in order."""
    texts = [path.read_bytes() for path in sorted(directory.glob("layer-*.txt"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _digest_twice(directory: str, local: LocalProcesses) -> str:
    """The hashes of what was trained; whatever goes wrong over them, it is tried once more."""
    try:
        return _digest(directory, local)
    except HoldfastError as error:
        why = one_line(str(error), _WHY)
        local.teller.say(f"the hashes of what was trained: {why}; they are computed once more")
        return _digest(directory, local)


def _digest(directory: str, local: LocalProcesses) -> str:
    local.start_server()
    local.teller.prepare_quietly("computing the hashes of what was trained")
    limit_s = local.start_s + _bytes_in(Path(directory)) / _HASHED_PER_S
    try:
        return local.ask(DIGEST, directory, asking=Asking(limit_s=limit_s, overdue=_LATE))
    finally:
        local.teller.prepared()


def _bytes_in(directory: Path) -> int:
    """How much there is to read; 0 if that cannot be told."""
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except OSError:
        return 0


def write_model(job: Job, directory: str, local: LocalProcesses) -> None:
    """Has a model of transformers' written as that reads it, beside the layers; what goes wrong over it is told."""
    local.start_server()
    local.teller.prepare_quietly("writing the model as transformers reads it")
    limit_s = local.start_s + _bytes_in(Path(directory)) / _HASHED_PER_S
    try:
        local.ask(MODEL, job, directory, asking=Asking(limit_s=limit_s, overdue=_LATE))
    except HoldfastError as error:  # all is trained and saved
        why = one_line(str(error), _WHY)
        local.teller.say(f"{directory}: transformers' own files could not be written: {why}; holdfast export does it")
    finally:
        local.teller.prepared()


def _await_scripts(members: Iterable[WorkerId], newest: Iterable[Child], local: LocalProcesses) -> tuple[str, ...]:
    """Waits for what scripts do behind their loop: it takes as long as it takes.

    Returns the workers whose script failed there. One that was killed has not failed, if another came to its end.

    Args:
        members: who was in the job to its end; who came too late has no such.
        newest: the newest process of each worker; it may have ended.
        local: whose they are.
    """
    behind = {str(worker) for worker in members}
    statuses: dict[str, int | None] = {}
    for child in (child for child in newest if child.name in behind):
        while not child.ended.wait(LOOK_S):
            local.check()
        statuses[child.name] = child.status
        if child.status:
            how = describe_exit(child.status)
            local.teller.say(f"worker {child.name}: its script ended behind its loop: {how}")
    some_ended = 0 in statuses.values()
    return tuple(name for name, status in statuses.items() if status and (status > 0 or not some_ended))


def delete_logs(briefing: Briefing) -> None:
    """However the job has ended: nobody can replay from its logs any more."""
    if briefing.logs is None:
        return
    shutil.rmtree(briefing.logs, ignore_errors=True)
    if briefing.logs_url is not None:
        with contextlib.suppress(StorageError):  # it was told while the job ran, if the store is away
            store = open_store(briefing.logs_url)
            for name in store.list():
                store.delete(name)
