"""What one worker does in one step, and what the step's sums are to come to.

There is one such value for every kind of step: a whole one, what is left of an interrupted one, one that is replayed
from logs, one with fewer contributions, one of which something is audited. Each has a builder
(:mod:`holdfast.core.whole_step`, :mod:`holdfast.core.remainder`, :mod:`holdfast.core.replay`); all are lowered
(:func:`holdfast.core.lower.lower_step`) and run in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.ids import Interval, MicroBatch, WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import InvalidSchedule

__all__ = ["Audit", "Chain", "Piece", "Resent", "Standing", "StepPlan", "SumPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An operation, or a part of one, on some layers of a micro-batch.

    Attributes:
        op: F, B, I or W.
        layers: which layers.
        adds: whether a backward pass adds to sums, and whether one will go over a forward pass. If not it is
            *regeneration*: it only makes a message again that somebody lacks, and nothing of it is kept.
        source: who sends what it takes; None: it is here, made by another piece, logged, or, at the ends of the model,
            samples or the loss.
        targets: to whom its result is sent, sorted.
    """

    op: Op
    layers: LayerRange
    adds: bool = True
    source: WorkerId | None = None
    targets: tuple[WorkerId, ...] = ()

    def takes(self, num_layers: int) -> int | None:
        """Returns the boundary of what it takes; None if it takes nothing, or begins with samples or the loss."""
        boundary = {OpKind.F: self.layers.start, OpKind.W: 0}.get(self.op.kind, self.layers.stop)
        return boundary if 0 < boundary < num_layers else None

    @property
    def completes(self) -> bool:
        """Whether it adds to the gradients of its layers."""
        return self.adds and self.op.kind in (OpKind.B, OpKind.W)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Resent:
    """A message out of a worker's log, for one that has not got it."""

    payload: Payload
    microbatch: MicroBatch
    boundary: int
    target: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPlan:
    """A sum that is made in a step.

    Attributes:
        reduction: which, and over whom.
        contributions: the micro-batches of which it expects the gradients, each once, as ascending intervals.
    """

    reduction: Reduction
    contributions: tuple[Interval, ...]

    @property
    def divisor(self) -> int:
        """By how many micro-batches the sum is divided: the mean is over those that it expects."""
        return sum(stop - start for start, stop in self.contributions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A reduction that is complete: its sum stands for all, and nothing is added to it any more.

    Attributes:
        layers: of the reduction.
        holder: who gives it to the others; None: it is in each one's log.
        takers: who has not got it, sorted.
    """

    layers: tuple[int, ...]
    holder: WorkerId | None
    takers: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """A way that a verdict takes.

    Attributes:
        name: unique among the chains.
        rides: the micro-batch whose route it follows, but for a listener between.
        workers: the way of the vote; the verdict comes back.
    """

    name: MicroBatch
    rides: MicroBatch
    workers: tuple[WorkerId, ...]

    @property
    def turned(self) -> Chain:
        """The chain from its other end."""
        return replace(self, workers=self.workers[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What of a step is computed a second time.

    Attributes:
        layer: of which layer.
        microbatch: global number of the micro-batch.
        runner: who runs it, by the plan.
        auditors: who computes it again.
    """

    layer: int
    microbatch: int
    runner: WorkerId
    auditors: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a worker does in a step.

    Attributes:
        worker: who.
        num_layers: of the model.
        span: the layers that the step is of: all, or in a replay those that are replayed.
        pieces: what it runs, in order.
        sums: those that are made and that it takes part in, in the order in which all contribute.
        resent: what it sends first, out of its log.
        standing: the sums of the step that stand already.
        chains: the ways of the verdict that lead by it; none: the verdict is known.
        updates: the layers that it updates, ascending.
        ties: tuples of layers that share weights, of the whole model.
        goes_on: whether it goes on with what is kept of an interrupted step.
        audit: what of it is computed a second time; None: nothing.
    """

    worker: WorkerId
    num_layers: int
    span: LayerRange
    pieces: tuple[Piece, ...]
    sums: tuple[SumPlan, ...]
    resent: tuple[Resent, ...] = ()
    standing: tuple[Standing, ...] = ()
    chains: tuple[Chain, ...] = ()
    updates: tuple[int, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    goes_on: bool = False
    audit: Audit | None = None

    def __post_init__(self) -> None:
        """Checks that all sums expect the same."""
        if any(each.contributions != self.counted for each in self.sums):
            raise InvalidSchedule("sums of one step expect other micro-batches", worker=str(self.worker))

    @property
    def counted(self) -> tuple[Interval, ...] | None:
        """The micro-batches that the sums expect that are made; None if none is."""
        return self.sums[0].contributions if self.sums else None

    @property
    def ends(self) -> frozenset[tuple[Payload, int]]:
        """What goes out of the span at its ends."""
        ends = ((Payload.ACTIVATION, self.span.stop), (Payload.GRADIENT, self.span.start))
        return frozenset(end for end in ends if 0 < end[1] < self.num_layers)

    @property
    def order(self) -> tuple[Op, ...]:
        """The operations that it runs, in order."""
        return tuple(piece.op for piece in self.pieces)
