"""What a worker does in a step, one instruction after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import Op
from holdfast.errors import InvalidSchedule

__all__ = [
    "Compute",
    "Instruction",
    "Payload",
    "Recall",
    "Receive",
    "Reduce",
    "Reduction",
    "Send",
    "UpdateLayer",
    "Sum",
]


class Payload(StrEnum):
    """What a message between two workers carries."""

    ACTIVATION = "ACT"
    """A layer's output, towards the last stage."""
    GRADIENT = "GRAD"
    """The gradient of that output, towards the first stage."""
    VOTE = "VOTE"
    """What the workers so far know of the step: finite or not, norms."""
    VERDICT = "VERDICT"
    """What the chain decided: commit, clip or skip."""
    SUM = "SUM"
    """A sum that stands, for an owner that has not got it."""
    AUDIT = "AUDIT"
    """What was computed of one layer and micro-batch, and of what, for an owner that computes it a second time."""


@dataclass(frozen=True, slots=True, order=True)
class Reduction:
    """One sum of gradients over workers.

    Attributes:
        layers: one layer: its own gradient, over all that hold or follow it; several: the weights that are tied between
            these layers, over those of any of them.
        workers: who takes part, sorted; one worker alone reduces locally.
    """

    layers: tuple[int, ...]
    workers: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        if not self.layers or not self.workers or tuple(sorted(set(self.workers))) != self.workers:
            raise InvalidSchedule(f"a reduction needs layers and sorted workers, found {self.layers}, {self.workers}")

    @property
    def name(self) -> str:
        """``L3`` for a layer, ``L0+9`` for the weights tied between layers 0 and 9."""
        return "L" + "+".join(str(layer) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one operation, or the next part of it. Text: ``F1.5``; ``B1.5`` as often as it has parts.

    Attributes:
        op: the operation.
        layers: what it runs over; the text does not say it, so it is None in what was read.
        last: whether it ends the operation. The text does not say it.
        adds: whether a backward pass adds to sums, or only makes a message again. The text does not say it.
    """

    op: Op
    layers: LayerRange | None = field(default=None, compare=False)
    last: bool = field(default=True, compare=False)
    adds: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class _Message:
    """What a message is, at either end.

    Attributes:
        payload: what it carries.
        microbatch: of which micro-batch, or under which name of a chain or a sum.
        peer: the other end.
        boundary: how many layers lie before it, of an activation or a gradient; else 0. The text does not say it.
        layers: of the reduction, of a sum. The text does not say it.
    """

    payload: Payload
    microbatch: MicroBatch
    peer: WorkerId
    boundary: int = field(default=0, compare=False)
    layers: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Send(_Message):
    """Send a message without waiting for it to arrive. Text: ``SEND_ACT1.5>1.3``."""

    def __str__(self) -> str:
        return f"SEND_{self.payload.value}{self.microbatch}>{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive(_Message):
    """Wait for a message. Text: ``RECV_GRAD1.5<1.3``."""

    def __str__(self) -> str:
        return f"RECV_{self.payload.value}{self.microbatch}<{self.peer}"


@dataclass(frozen=True, slots=True)
class Recall:
    """Take an activation or a gradient out of the own log. Text: ``RECALL_ACT1.5@2``, with the boundary.

    Or, in a replay, the sum of weights that are tied between ``layers``, by the number of the tie.
    """

    payload: Payload
    microbatch: MicroBatch
    boundary: int
    layers: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"RECALL_{self.payload.value}{self.microbatch}@{self.boundary}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Contribute to a reduction, or do it locally if nobody else does; waits for nobody. Text: ``REDUCE_L3``."""

    reduction: Reduction

    def __str__(self) -> str:
        return f"REDUCE_{self.reduction.name}"


@dataclass(frozen=True, slots=True)
class Sum:
    """Wait for the sum of a reduction. Text: ``SUM_L3``."""

    reduction: Reduction

    def __str__(self) -> str:
        return f"SUM_{self.reduction.name}"


@dataclass(frozen=True, slots=True)
class UpdateLayer:
    """Run the optimizer on one layer. Text: ``STEP_L3``."""

    layer: int

    def __str__(self) -> str:
        return f"STEP_L{self.layer}"


Instruction = Compute | Send | Receive | Recall | Reduce | Sum | UpdateLayer
