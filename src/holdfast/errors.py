"""Every error that Holdfast raises on purpose, as one tree.

HoldfastError
├── ConfigError                 the user changes something: job file, flag, path, port (exit code 2)
│   └── LedElsewhere            the job of this run directory goes on, led from another machine
├── PlanningError
│   ├── InfeasiblePlan          no plan exists for these workers (exit code 3 while training)
│   ├── InvalidSchedule         a schedule breaks a rule: worker, position, operation, rule
│   └── SolverTimeout           no solution within the time limit
├── ClusterError                somebody else failed; only the step loop turns these into a recovery
│   ├── PeerLost                a peer's connection is gone: worker, generation
│   ├── StaleGeneration         this generation was superseded: stop, join the newer one
│   ├── StepRefused             an update ahead of its verdict does not stand: step
│   ├── StepDisputed            what was computed a second time has other bits: step
│   ├── StepVoid                the script's loop was stopped before it: step
│   └── CoordinatorUnavailable  the coordinator does not answer
│       └── NobodyLeads         coordinators answer, and none of them leads yet
├── RecoveryError
│   ├── StateUnavailable        no living worker holds some layers: layers
│   ├── TooFewWorkers           fewer are left than are to go on (exit code 3)
│   ├── DecisionsLost           what the coordinator decided is not known any more (exit code 3)
│   ├── NotUndoable             this update has no inverse: operator
│   └── ReplicaDiverged         owners of one layer disagree bitwise: our bug, or broken hardware
├── ProgramFailed               the program raised, whoever ran it; what lives was saved (exit code 1)
├── WorkFailed                  what a worker does raised: phase, kind, layer, item, microbatch
├── StorageError
│   ├── NotSaved                what was trained cannot be written: no space, for example
│   ├── MissingBlob             nothing under this name
│   ├── StoreAway               the store does not answer now; it may come back
│   ├── CorruptBlob             the bytes are not those that were written: expected, actual
│   └── LogGap                  a log lacks an entry
├── NodeLeft                    this machine has left the job, which goes on on others (exit code 75)
└── InternalError               our bug: never retried (exit code 1)
    └── LedgerError             a micro-batch was counted not exactly once: layer, microbatch, count
"""

from __future__ import annotations

from typing import Any

from holdfast.plain import one_line

__all__ = [
    "ClusterError",
    "ConfigError",
    "CoordinatorUnavailable",
    "CorruptBlob",
    "DecisionsLost",
    "HoldfastError",
    "InfeasiblePlan",
    "InternalError",
    "InvalidSchedule",
    "LedgerError",
    "LogGap",
    "MissingBlob",
    "NobodyLeads",
    "NotSaved",
    "NotUndoable",
    "PeerLost",
    "PlanningError",
    "ProgramFailed",
    "RecoveryError",
    "ReplicaDiverged",
    "SolverTimeout",
    "StaleGeneration",
    "StateUnavailable",
    "StepDisputed",
    "StepRefused",
    "StepVoid",
    "StorageError",
    "StoreAway",
    "TooFewWorkers",
    "WorkFailed",
    "installing",
]


class HoldfastError(Exception):
    """The root of every error raised on purpose.

    Attributes:
        resume: what a run that it ended can go on from, as ``--resume`` takes it; empty if from nothing.
    """

    resume: str = ""


class ConfigError(HoldfastError):
    """The user's input cannot be used; the message names the key or path and what would be right, in one line.

    Args:
        message: may hold parts of that input as they are; what is no plain text is replaced.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class LedElsewhere(ConfigError):
    """The job of this run directory goes on, led from another machine: nobody can begin it once more."""


class NodeLeft(HoldfastError):
    """The workers of this machine have left the job as they were told to, and it goes on on others."""


class PlanningError(HoldfastError):
    """No usable plan could be made."""


class InfeasiblePlan(PlanningError):
    """No plan exists for these workers, grid or memory."""


class InvalidSchedule(PlanningError):
    """A schedule breaks a rule.

    Attributes:
        worker: the worker in whose row the fault is, as text such as ``1.2``; empty if it is no single row.
        position: 0-based index in that worker's order; -1 if it is no single place.
        op: the operation there, as text; empty if none.
        rule: the rule that is broken, one sentence.
    """

    def __init__(self, rule: str, *, worker: str = "", position: int = -1, op: str = "", table: str = "") -> None:
        self.rule = rule
        self.worker = worker
        self.position = position
        self.op = op
        place = f" at worker {worker}" if worker else ""
        place += f", position {position} ({op})" if position >= 0 else ""
        super().__init__(f"invalid schedule{place}: {rule}" + (f"\n{table}" if table else ""))


class SolverTimeout(PlanningError):
    """A solver found nothing within its time limit."""


class ClusterError(HoldfastError):
    """Another process failed or this one was superseded; the step loop answers with a recovery."""


class PeerLost(ClusterError):
    """The connection to a peer is gone.

    Attributes:
        worker: the peer, as text such as ``1.2``; empty if it is not known which one.
        generation: the generation whose transport noticed.
    """

    def __init__(self, worker: str, generation: int, detail: str = "") -> None:
        self.worker = worker
        self.generation = generation
        who = f"worker {worker}" if worker else "a peer"
        super().__init__(f"lost {who} in generation {generation}" + (f": {detail}" if detail else ""))


class StaleGeneration(ClusterError):
    """This generation was superseded by a newer one."""

    def __init__(self, generation: int, newer: int | None = None) -> None:
        self.generation = generation
        self.newer = newer
        super().__init__(f"generation {generation} is over" + (f", superseded by {newer}" if newer is not None else ""))


class StepRefused(ClusterError):
    """A step whose updates were made ahead of its verdict does not count as they took for granted: it is made again."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} was updated ahead of its verdict, which refuses that")


class StepVoid(ClusterError):
    """Some worker's script had stopped its loop before this step: nobody updates with it, and it was the last."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"the loop was stopped before step {step}")


class StepDisputed(ClusterError):
    """What was computed of a step a second time has other bits: it must not be committed.

    Attributes:
        step: which.
        found: what both say that they computed.
    """

    def __init__(self, step: int, found: Any) -> None:
        self.step = step
        self.found = found
        super().__init__(f"step {step} is disputed: what was computed a second time has other bits")


class CoordinatorUnavailable(ClusterError):
    """The coordinator does not answer."""


class NobodyLeads(CoordinatorUnavailable):
    """Coordinators of the job answer, and none of them leads yet, or any more."""


class RecoveryError(HoldfastError):
    """A recovery cannot be carried out."""


class StateUnavailable(RecoveryError):
    """No living worker holds these layers.

    Attributes:
        layers: indices of the layers that are lost.
    """

    def __init__(self, layers: tuple[int, ...], detail: str = "") -> None:
        self.layers = layers
        names = ", ".join(str(layer) for layer in layers)
        super().__init__(f"no living worker holds layer(s) {names}" + (f": {detail}" if detail else ""))


class TooFewWorkers(RecoveryError):
    """Every layer has an owner, but fewer workers are left than the job is to go on with: what lives is saved."""


class DecisionsLost(RecoveryError):
    """The store of decisions was emptied, replaced or damaged: nothing can be decided any more, what lives is saved."""


class NotUndoable(RecoveryError):
    """An optimizer's update has no inverse; the message names the operator."""


class ReplicaDiverged(RecoveryError):
    """Owners of one layer hold different bits: a bug of ours or broken hardware, never to be trained on."""


class ProgramFailed(HoldfastError):
    """The model, the data or the optimizer raised, and not on one worker alone: the message has the first traceback."""


class WorkFailed(HoldfastError):
    """Code that a worker runs for the job raised: its model, its data, its optimizer, or a write of its own.

    Whether that is this worker's loss or the program's fault shows when it is known whether others meet it, too.

    Attributes:
        phase: what was done, as in :class:`holdfast.core.work.WorkPhase`.
        kind: the class of what was raised.
        layer: on which layer; None if on none.
        item: with which item of the data; None if with none.
        microbatch: for which micro-batch of the step, its global number; None if for none.
    """

    def __init__(
        self,
        phase: str,
        error: BaseException,
        *,
        layer: int | None = None,
        item: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        self.phase = phase
        self.kind = type(error).__name__
        self.layer = layer
        self.item = item
        self.microbatch = microbatch
        self.detail = f"{self.kind}: {error}"
        super().__init__(f"{place_of(phase, layer, item, microbatch)}: {self.detail}")


def place_of(phase: str, layer: int | None, item: int | None, microbatch: int | None) -> str:
    """Returns what was done, for people: ``forward of layer 3, micro-batch 5``."""
    of = f" of layer {layer}" if layer is not None else ""
    of += f" of item {item}" if item is not None else ""
    return f"{phase}{of}" + (f", micro-batch {microbatch}" if microbatch is not None else "")


def installing(extra: str) -> str:
    """Returns how what an extra of this package needs is installed.

    >>> installing("tls")
    "pip install 'holdfast[tls]', in a clone pip install -e '.[tls]'"
    """
    return f"pip install 'holdfast[{extra}]', in a clone pip install -e '.[{extra}]'"


def describe_exit(status: int | None) -> str:
    """Says how a process ended; ``status`` is its exit code, or minus the signal's number."""
    return f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"


class StorageError(HoldfastError):
    """A blob store or a file failed."""


class NotSaved(StorageError):
    """The trained layers cannot be written where they are to be; whatever lies there may be a part of them."""


class StoreAway(StorageError):
    """The store does not answer now, or has no leader; what was asked may have taken effect."""


class MissingBlob(StorageError):
    """Nothing is stored under this name."""


class CorruptBlob(StorageError):
    """The bytes read are not those that were written.

    Attributes:
        expected: the checksum that was recorded.
        actual: the checksum of what was read.
    """

    def __init__(self, name: str, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{name} is corrupt: expected {expected}, found {actual}")


class LogGap(StorageError):
    """A log lacks an entry that a replay needs."""


class InternalError(HoldfastError):
    """Our bug: reported with what is needed to find it, never retried."""


class LedgerError(InternalError):
    """A micro-batch was counted not exactly once for a layer, so the optimizer must not run.

    Attributes:
        layer: index of the layer.
        microbatch: global number of the micro-batch.
        count: how often its gradient was added.
    """

    def __init__(self, layer: int, microbatch: int, count: int) -> None:
        self.layer = layer
        self.microbatch = microbatch
        self.count = count
        counted = f"ledger: layer {layer} counts micro-batch {microbatch} {count} times"
        super().__init__(f"{counted}, expected exactly once; no update was made")
