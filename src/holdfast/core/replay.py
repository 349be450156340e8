"""Layers that nobody living holds, computed again: from a checkpoint of them, and from what others logged.

It is a plan that spans a part of the layers, step after step of the past: what comes in at its ends, the verdict over
each step and the sums of weights tied to other layers are read from logs; nothing is sent but contributions to sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.lower import Compute, Instruction, Payload, Recall, Reduce, Reduction, WorkerProgram
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Plan
from holdfast.core.routes import Routes
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.errors import ConfigError

__all__ = ["Replay", "Wanted", "ends_of", "lower_replay", "place_of", "wanted"]

Wanted = tuple[Payload, int, int]
"""What is read of a step: an activation or a gradient, its boundary and micro-batch; or a sum, its tie and 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Some layers, and their steps that are run again.

    Every worker holds all of the layers, and runs every so-manieth micro-batch; their sums are made over all of them.
    So nobody waits for anybody within a step, and there are no bubbles.

    Attributes:
        layers: which, contiguous.
        workers: who, sorted.
        start: the step whose beginning the checkpoint has.
        stop: the first step that is not run again, not before ``start``.
        microbatches: of a step, sorted.
    """

    layers: LayerRange
    workers: tuple[WorkerId, ...]
    start: int
    stop: int
    microbatches: tuple[MicroBatch, ...]

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


def lower_replay(
    replay: Replay, worker: WorkerId, num_layers: int, ties: tuple[tuple[int, ...], ...] = ()
) -> WorkerProgram:
    """Returns what one worker runs in every step of a replay: one micro-batch after the other, forward and backward.

    Sums of weights that are tied to other layers are recalled; there is no exchange of votes.

    Args:
        replay: it.
        worker: one of its workers.
        num_layers: of the model.
        ties: tuples of layers that share weights.
    """
    reductions, standing = _sums(replay, ties)
    share = replay.share(worker)
    operations: list[Instruction] = [_recalled(layers, ties) for layers in standing]
    for microbatch in share:
        operations += _run(replay.layers, microbatch, num_layers)
    operations += [Reduce(each) for each in reductions]
    ordered = tuple(operations)
    return WorkerProgram(
        worker=worker,
        operations=ordered,
        reductions=reductions,
        verdict=(),
        riding=ordered,
        layers=tuple(replay.layers.indices),
    )


def wanted(program: WorkerProgram) -> frozenset[Wanted]:
    """Returns what a worker's program recalls in every step."""
    recalled = (each for each in program.operations if isinstance(each, Recall))
    return frozenset((each.payload, each.boundary, each.microbatch.number) for each in recalled)


def place_of(replay: Replay, num_layers: int) -> Plan:
    """Returns a plan that only says which layers are whose: for whoever makes compute engines."""
    rows = tuple((worker, replay.layers) for worker in replay.workers)
    return Plan(
        placement=Placement(num_layers=num_layers, ranges=rows),
        routes=Routes(()),
        orders=Orders(tuple((worker, ()) for worker in replay.workers)),
    )


def _sums(
    replay: Replay, ties: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Reduction, ...], tuple[tuple[int, ...], ...]]:
    """The reductions of the layers, and the ties with others, whose sums are logged."""
    ours = set(replay.layers.indices)
    meeting = [tie for tie in ties if not ours.isdisjoint(tie)]
    within = [tie for tie in meeting if ours.issuperset(tie)]
    layers = [(layer,) for layer in reversed(replay.layers.indices)]
    reductions = tuple(Reduction(each, replay.workers) for each in (*layers, *within))
    return reductions, tuple(tie for tie in meeting if tie not in within)


def _recalled(layers: tuple[int, ...], ties: tuple[tuple[int, ...], ...]) -> Recall:
    return Recall(Payload.SUM, MicroBatch(number=0, pipeline=0, index=0), ties.index(layers), layers=layers)


def _run(layers: LayerRange, microbatch: MicroBatch, num_layers: int) -> Iterator[Instruction]:
    if layers.start > 0:
        yield Recall(Payload.ACTIVATION, microbatch, layers.start)
    yield Compute(Op(OpKind.F, microbatch), layers)
    if layers.stop < num_layers:
        yield Recall(Payload.GRADIENT, microbatch, layers.stop)
    yield Compute(Op(OpKind.B, microbatch), layers)


def ends_of(layers: LayerRange, num_layers: int) -> frozenset[tuple[Payload, int]]:
    """Returns what goes out of layers at their ends."""
    ends = ((Payload.ACTIVATION, layers.stop), (Payload.GRADIENT, layers.start))
    return frozenset(end for end in ends if 0 < end[1] < num_layers)
