"""The remainder of an interrupted step: what is left to be done of it, as a plan that begins in the middle.

Sums cannot be taken apart, so whoever ran a whole micro-batch again would count it twice in layers that live. A
remainder is therefore told per layer and micro-batch: each *piece* runs some layers of a micro-batch, takes its input
from a named source, and adds to sums or does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.core.ids import MicroBatch, WorkerId, beside
from holdfast.core.lower import Compute, Instruction, Payload, Recall, Receive, Reduce, Reduction, Send, WorkerProgram
from holdfast.core.placement import LayerRange
from holdfast.core.progress import Progress
from holdfast.core.schedule import Op, OpKind
from holdfast.core.validate import dry_run
from holdfast.errors import InvalidSchedule

__all__ = ["Piece", "Remainder", "Resent", "Row", "Standing", "lower_remainder", "validate_remainder"]


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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Resent:
    """A message out of a worker's log, for one that has not got it."""

    payload: Payload
    microbatch: MicroBatch
    boundary: int
    target: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one worker does.

    Attributes:
        worker: who.
        resent: what it sends first, out of its log.
        pieces: what it runs then, in order.
    """

    worker: WorkerId
    resent: tuple[Resent, ...] = ()
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A reduction that a survivor completed: its sum stands for all, and nothing is added to it any more.

    Attributes:
        layers: of the reduction.
        holder: who gives it to the others.
        takers: who has not got it, sorted.
    """

    layers: tuple[int, ...]
    holder: WorkerId
    takers: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What is left of a step, for all workers or one of them.

    Attributes:
        step: which.
        rows: per worker, sorted.
        standing: the reductions that are complete, in the order of :attr:`Reduction.name`'s layers.
        redone: (layer, micro-batch) pairs that were run before, were lost, and are run again.
        regenerated: pairs that are run again only because a message of theirs is missing.
        lasts: how long it takes, in the units of the costs that it was planned with.
        left_out: global numbers of the micro-batches that count in no reduction which does not stand: it is the mean
            of the others.
    """

    step: int
    rows: tuple[Row, ...]
    standing: tuple[Standing, ...] = ()
    redone: tuple[tuple[int, int], ...] = ()
    regenerated: tuple[tuple[int, int], ...] = ()
    lasts: float = 0.0
    left_out: tuple[int, ...] = ()

    def row(self, worker: WorkerId) -> Row:
        """Returns what a worker does; nothing if it is not told."""
        return next((row for row in self.rows if row.worker == worker), Row(worker=worker))

    def excerpt(self, worker: WorkerId) -> Remainder:
        """Returns what one worker has to know of it."""
        return replace(self, rows=(self.row(worker),), redone=(), regenerated=())


def lower_remainder(
    remainder: Remainder, program: WorkerProgram, num_layers: int, ties: tuple[tuple[int, ...], ...] = ()
) -> WorkerProgram:
    """Returns the program of one worker for what is left of a step.

    It sends first what is there already: out of its log, and sums that stand. Behind the piece that is the last to add
    to a layer it contributes to the layer's sum, in the order in which all do. Sums of others come last, and then the
    verdict and the updates of any step.

    Args:
        remainder: it, or the worker's excerpt.
        program: of the worker, for a whole step of the plan that runs from now on.
        num_layers: of the model.
        ties: tuples of layers that share weights.
    """
    row = remainder.row(program.worker)
    standing = {each.layers: each for each in remainder.standing}
    open_sums = tuple(each for each in program.reductions if each.layers not in standing)
    given = [each for each in remainder.standing if each.holder == program.worker]
    taken = [each for each in remainder.standing if program.worker in each.takers]
    operations = (
        *(part for each in row.resent for part in _resend(each)),
        *(Send(Payload.SUM, _name(each.layers, ties), to, layers=each.layers) for each in given for to in each.takers),
        *_operations(row, open_sums, num_layers),
        *(Receive(Payload.SUM, _name(each.layers, ties), each.holder, layers=each.layers) for each in taken),
    )
    return replace(program, operations=operations, riding=operations, reductions=open_sums)


def validate_remainder(
    remainder: Remainder,
    programs: Iterable[WorkerProgram],
    progress: Mapping[WorkerId, Progress],
    numbers: Iterable[int],
) -> None:
    """Returns if a remainder is right: with what is there already, it then counts every pair once, and ends.

    Rules: no worker waits for ever, every message is received; whatever a worker recalls or sends again is in its log;
    backward passes go over forward passes that are there, or come before; every reduction that does not stand has each
    of its (layer, micro-batch) pairs once: in a kept sum, or added by one piece; of what is left out it has none.

    Args:
        remainder: for all workers.
        programs: lowered, of all workers.
        progress: what they kept, of the same step.
        numbers: global numbers of all micro-batches of the step.

    Raises:
        InvalidSchedule: a rule is broken.
    """
    lowered = tuple(programs)
    flaw = dry_run({program.worker: program.closing for program in lowered})
    if flaw is not None:
        raise InvalidSchedule(flaw.rule, worker=str(flaw.worker), position=flaw.position)
    for program in lowered:
        kept = progress.get(program.worker, Progress(step=remainder.step))
        _Kept.of(kept, program.worker).follow(program.operations)
    _check_counts(remainder, lowered, progress, tuple(numbers))


def _resend(each: Resent) -> tuple[Instruction, ...]:
    message = Send(each.payload, each.microbatch, each.target, each.boundary)
    return Recall(each.payload, each.microbatch, each.boundary), message


def _name(layers: tuple[int, ...], ties: tuple[tuple[int, ...], ...]) -> MicroBatch:
    """What a sum goes by among messages: by its layer, or by its tie."""
    return beside(0, layers[0]) if len(layers) == 1 else beside(1, ties.index(layers))


def _operations(row: Row, sums: tuple[Reduction, ...], num_layers: int) -> Iterator[Instruction]:
    left = list(sums)
    adding = [{*piece.layers.indices} if _completes(piece) else set[int]() for piece in row.pieces]
    for at, piece in enumerate(row.pieces):
        yield from _piece(piece, num_layers)
        to_come = set[int]().union(*adding[at + 1 :]) if adding[at] else None
        while to_come is not None and left and to_come.isdisjoint(left[0].layers):
            yield Reduce(left.pop(0))
    yield from map(Reduce, left)


def _completes(piece: Piece) -> bool:
    return piece.adds and piece.op.kind in (OpKind.B, OpKind.W)


def _piece(piece: Piece, num_layers: int) -> Iterator[Instruction]:
    forward = piece.op.kind is OpKind.F
    taken, given = (Payload.ACTIVATION,) * 2 if forward else (Payload.GRADIENT,) * 2
    boundary = piece.takes(num_layers)
    if boundary is not None and piece.source is not None:
        yield Receive(taken, piece.op.microbatch, piece.source, boundary)
    elif boundary is not None:
        yield Recall(taken, piece.op.microbatch, boundary)
    yield Compute(piece.op, piece.layers, adds=piece.adds)
    for target in piece.targets:
        yield Send(given, piece.op.microbatch, target, piece.layers.stop if forward else piece.layers.start)


class _Kept:
    """What one worker has, while it goes through its instructions."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._log: set[tuple[Payload, int, int]] = set()
        self._forward: dict[int, list[LayerRange]] = defaultdict(list)
        self._halves: dict[int, list[LayerRange]] = defaultdict(list)

    @classmethod
    def of(cls, progress: Progress, worker: WorkerId) -> _Kept:
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


def _check_counts(
    remainder: Remainder,
    programs: tuple[WorkerProgram, ...],
    progress: Mapping[WorkerId, Progress],
    numbers: tuple[int, ...],
) -> None:
    counts: Counter[tuple[tuple[int, ...], int, int]] = Counter()
    left_out = frozenset(remainder.left_out)
    for program in programs:
        kept = progress.get(program.worker, Progress(step=remainder.step))
        held = [(layer, m) for layer, found in kept.counted for m in found if m not in left_out]
        added = [(i, p.op.microbatch.number) for p in remainder.row(program.worker).pieces for i in _added(p)]
        for sums in program.reductions:
            counts.update((sums.layers, layer, m) for layer, m in (*held, *added) if layer in sums.layers)
    for layers in sorted({each.layers for program in programs for each in program.reductions}):
        for layer in layers:
            for m in numbers:
                if counts[layers, layer, m] != (m not in left_out):
                    found, wanted = counts[layers, layer, m], "never" if m in left_out else "once"
                    raise InvalidSchedule(f"micro-batch {m} counts {found} times for layer {layer}, expected {wanted}")


def _added(piece: Piece) -> Iterable[int]:
    return piece.layers.indices if _completes(piece) else ()
