"""Layers that nobody living holds, computed again: from a checkpoint of them, and from what others logged.

It is a plan that spans a part of the layers, step after step of the past: what comes in at its ends, the verdict over
each step and the sums of weights tied to other layers are read from logs; nothing is sent but contributions to sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import MicroBatch, WorkerId, intervals
from holdfast.core.instructions import Reduction
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.routes import Routes
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.core.step_plan import Piece, Standing, StepPlan, SumPlan
from holdfast.errors import ConfigError

__all__ = ["Replay", "place_of", "replayed_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Some layers, and their steps that are run again.

    Every worker holds all of the layers, and runs every so-manieth micro-batch; their sums are made over all of them.
    So nobody waits for anybody within a step but for sums, and there are no bubbles.

    Attributes:
        layers: which, contiguous.
        workers: who, sorted.
        start: the step whose beginning the checkpoint has.
        stop: the first step that is not run again, not before ``start``.
        microbatches: of a step, sorted.
        shared: layers that share weights, some of which others replay at the same time, and all who do: in each step
            they make these sums together.
    """

    layers: LayerRange
    workers: tuple[WorkerId, ...]
    start: int
    stop: int
    microbatches: tuple[MicroBatch, ...]
    shared: tuple[tuple[tuple[int, ...], tuple[WorkerId, ...]], ...] = ()

    def __post_init__(self) -> None:
        """Checks that somebody runs it, and that time goes forward."""
        if not self.workers or self.stop < self.start:
            raise ConfigError(
                f"a replay of layers {self.layers} by {len(self.workers)} worker(s) from step {self.start} to "
                f"{self.stop} is impossible: expected at least one, and no step before the first"
            )

    def share(self, worker: WorkerId) -> tuple[MicroBatch, ...]:
        """Returns the micro-batches that a worker runs, in order."""
        return self.microbatches[self.workers.index(worker) :: len(self.workers)]


def replayed_step(
    replay: Replay, worker: WorkerId, num_layers: int, ties: tuple[tuple[int, ...], ...] = ()
) -> StepPlan:
    """Returns what one worker does in every step of a replay: one micro-batch after the other, forward and backward.

    Sums of weights that are tied to other layers are recalled, unless these are replayed, too; there is no exchange of
    votes.

    Args:
        replay: it.
        worker: one of its workers.
        num_layers: of the model.
        ties: tuples of layers that share weights.
    """
    ours, shared = set(replay.layers.indices), dict(replay.shared)
    over: dict[tuple[int, ...], tuple[WorkerId, ...]] = {
        (layer,): replay.workers for layer in reversed(replay.layers.indices)
    }
    over |= {tie: shared.get(tie, replay.workers) for tie in ties if tie in shared or ours.issuperset(tie)}
    counted = intervals(each.number for each in replay.microbatches)
    return StepPlan(
        worker=worker,
        num_layers=num_layers,
        span=replay.layers,
        pieces=tuple(
            Piece(op=Op(kind, microbatch), layers=replay.layers)
            for microbatch in replay.share(worker)
            for kind in (OpKind.F, OpKind.B)
        ),
        sums=tuple(SumPlan(reduction=Reduction(*each), contributions=counted) for each in over.items()),
        standing=tuple(
            Standing(layers=tie, holder=None) for tie in ties if not ours.isdisjoint(tie) and tie not in over
        ),
        updates=tuple(replay.layers.indices),
        ties=ties,
    )


def place_of(replay: Replay, num_layers: int) -> Plan:
    """Returns a plan that only says which layers are whose: for whoever makes compute engines."""
    rows = tuple((worker, replay.layers) for worker in replay.workers)
    return Plan(
        placement=Placement(num_layers=num_layers, ranges=rows),
        routes=Routes(()),
        orders=Orders(tuple((worker, ()) for worker in replay.workers)),
    )
