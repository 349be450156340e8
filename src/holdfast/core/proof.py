"""Proves the steps of all workers right together, whatever kind of step it is, or says what is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from holdfast.core.ids import Interval, WorkerId
from holdfast.core.instructions import Compute, Instruction, Payload, Recall
from holdfast.core.placement import LayerRange
from holdfast.core.program import WorkerProgram
from holdfast.core.progress import StepProgress
from holdfast.core.schedule import Op, OpKind
from holdfast.core.validate import dry_run
from holdfast.errors import InvalidSchedule

__all__ = ["prove_steps"]

_Pair = tuple[int, int]
"""A layer, and the global number of a micro-batch."""


def prove_steps(programs: Iterable[WorkerProgram], progress: Mapping[WorkerId, StepProgress]) -> None:
    """Returns if what all workers do is right: with what is there already, each sum has what it expects, and all end.

    Rules: no worker waits for ever, every message is received; whatever a worker recalls or sends again is in its log;
    backward passes go over forward passes that are there, or come before; every sum has each layer of each micro-batch
    that it expects once: in a kept sum, or added by one piece; of any other it has none.

    Args:
        programs: of all workers.
        progress: what they keep of the step, if it was interrupted; else empty.

    Raises:
        InvalidSchedule: a rule is broken.
    """
    lowered = tuple(programs)
    flaw = dry_run({program.worker: program.closing for program in lowered})
    if flaw is not None:
        raise InvalidSchedule(flaw.rule, worker=str(flaw.worker), position=flaw.position)
    nothing = StepProgress(step=0)
    for program in lowered:
        _Kept.of(progress.get(program.worker, nothing), program.worker).follow(program.operations)
    _check_counts(lowered, progress)


class _Kept:
    """What one worker has, while it goes through its instructions."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._log: set[tuple[Payload, int, int]] = set()
        self._forward: dict[int, list[LayerRange]] = defaultdict(list)
        self._halves: dict[int, list[LayerRange]] = defaultdict(list)

    @classmethod
    def of(cls, progress: StepProgress, worker: WorkerId) -> _Kept:
        kept = cls(worker)
        kept._log |= {(each.payload, each.boundary, m) for each in progress.logged for m in each.numbers}
        for part in progress.contexts:
            kept._forward[part.number].append(part.layers)
        for part in progress.halves:
            kept._halves[part.number].append(part.layers)
        return kept

    def follow(self, instructions: tuple[Instruction, ...]) -> None:
        """Raises InvalidSchedule where something is not there."""
        for at, each in enumerate(instructions):
            match each:
                case Recall(payload, microbatch, boundary):
                    if (payload, boundary, microbatch.number) not in self._log:
                        self._refuse(f"{each} is not in the log", at)
                case Compute(op=op, layers=LayerRange() as layers, adds=adds):
                    self._run(op, layers, at, kept=adds or op.kind is not OpKind.F)
                case _:
                    pass

    def _run(self, op: Op, layers: LayerRange, at: int, *, kept: bool) -> None:
        number = op.microbatch.number
        if op.kind is OpKind.F:
            if kept and any(layers.meets(other) for other in self._forward[number]):
                self._refuse(f"{op} on layers {layers}, which were run forward already", at)
            self._forward[number] += [layers] if kept else []
            self._log.add((Payload.ACTIVATION, layers.stop, number))
        elif op.kind is OpKind.W:
            self._go_over(self._halves[number], op, layers, at)
        else:
            self._go_over(self._forward[number], op, layers, at)
            self._log.add((Payload.GRADIENT, layers.start, number))
            if op.kind is OpKind.I:
                self._halves[number].append(layers)

    def _go_over(self, there: list[LayerRange], op: Op, layers: LayerRange, at: int) -> None:
        """Takes the last layers of what is there."""
        for index, other in enumerate(there):
            if other.holds(layers) and other.stop == layers.stop:
                there[index : index + 1] = [LayerRange(other.start, layers.start)] if other.start < layers.start else []
                return
        self._refuse(f"{op} on layers {layers}, of which there is nothing to go back over", at)

    def _refuse(self, rule: str, at: int) -> None:
        raise InvalidSchedule(rule, worker=str(self._worker), position=at)


def _check_counts(programs: tuple[WorkerProgram, ...], progress: Mapping[WorkerId, StepProgress]) -> None:
    counts: defaultdict[tuple[int, ...], Counter[_Pair]] = defaultdict(Counter)
    expected: dict[tuple[int, ...], tuple[Interval, ...]] = {}
    for program in programs:
        pairs = (*_held(progress.get(program.worker)), *_added(program))
        for each in program.step.sums:
            layers = each.reduction.layers
            if expected.setdefault(layers, each.contributions) != each.contributions:
                raise InvalidSchedule(f"workers expect other contributions to {each.reduction.name}")
            counts[layers].update(pair for pair in pairs if pair[0] in layers)
    for layers, contributions in sorted(expected.items()):
        _check_sum(layers, counts[layers], frozenset(m for a, b in contributions for m in range(a, b)))


def _check_sum(layers: tuple[int, ...], counts: Counter[_Pair], expected: frozenset[int]) -> None:
    numbers = sorted(expected | {number for _, number in counts})
    for layer in layers:
        for m in numbers:
            if counts[layer, m] != (m in expected):
                wanted = "once" if m in expected else "never"
                raise InvalidSchedule(
                    f"micro-batch {m} counts {counts[layer, m]} times for layer {layer}, expected {wanted}"
                )


def _held(progress: StepProgress | None) -> Iterator[_Pair]:
    if progress is not None:
        yield from ((layer, m) for layer, found in progress.counted for m in found)


def _added(program: WorkerProgram) -> Iterator[_Pair]:
    for piece in program.step.pieces:
        if piece.completes:
            yield from ((layer, piece.op.microbatch.number) for layer in piece.layers.indices)
