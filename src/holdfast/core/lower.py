"""Lowering: from the operations of a plan to the instructions of each worker, messages and reductions included."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import cycle

from holdfast.core.ids import Batch, MicroBatch, WorkerId, beside
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.routes import Visit
from holdfast.core.schedule import Op, OpKind
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
    "Step",
    "Sum",
    "WorkerProgram",
    "format_instructions",
    "groups",
    "lower",
    "lower_worker",
    "parse_instructions",
]

_MESSAGE = re.compile(r"(SEND|RECV)_([A-Z]+)(\d+)\.(\d+)([<>])(\d+\.\d+)", re.ASCII)


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
class Send:
    """Send a message without waiting for it to arrive. Text: ``SEND_ACT1.5>1.3``.

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

    def __str__(self) -> str:
        return f"SEND_{self.payload.value}{self.microbatch}>{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. Text: ``RECV_GRAD1.5<1.3``; see :class:`Send`."""

    payload: Payload
    microbatch: MicroBatch
    peer: WorkerId
    boundary: int = field(default=0, compare=False)
    layers: tuple[int, ...] = field(default=(), compare=False)

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
class Step:
    """Run the optimizer on one layer. Text: ``STEP_L3``."""

    layer: int

    def __str__(self) -> str:
        return f"STEP_L{self.layer}"


Instruction = Compute | Send | Receive | Recall | Reduce | Sum | Step


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram:
    """What one worker runs in one step.

    Attributes:
        worker: whose.
        operations: what it computes, receives, sends and contributes to sums, in order.
        reductions: the sums that it takes part in, in the order in which it contributes.
        verdict: the exchange of votes that settles a step at its end.
        riding: ``operations``, and between them the exchange that settles the step *before*: every message of it
            travels right before the activation or gradient of one micro-batch between the same workers, so nobody waits
            for it longer than for that.
        layers: the layers that it updates, ascending.
    """

    worker: WorkerId
    operations: tuple[Instruction, ...]
    reductions: tuple[Reduction, ...]
    verdict: tuple[Send | Receive, ...]
    riding: tuple[Instruction, ...]
    layers: tuple[int, ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """A whole step that is settled at its end, with the optimizer after the verdict."""
        return (*self.operations, *self._after_operations)

    @property
    def closing(self) -> tuple[Instruction, ...]:
        """A whole step that settles the one before, and itself at its end: all that any form of a step has.

        The other forms leave out one or both of the exchanges, on all workers alike. That makes nobody wait for more,
        so they cannot deadlock where this one does not.
        """
        return (*self.riding, *self._after_operations)

    @property
    def _after_operations(self) -> tuple[Instruction, ...]:
        return (*map(Sum, self.reductions), *self.verdict, *map(Step, self.layers))


def lower(plan: Plan, ties: tuple[tuple[int, ...], ...] = ()) -> tuple[WorkerProgram, ...]:
    """Returns the program of every worker, sorted by worker.

    Every operation receives its input if that comes from another worker, computes, and sends its result on. The last
    one that adds to a layer's gradient is run in parts, and behind the part that completes a layer comes the worker's
    contribution to its sum with others, so that this is on its way while the layers before are computed. All workers
    contribute in one order, own layers from the last to the first, as backward finishes them, then the ties that touch
    own layers; what is complete sooner waits for its turn, and what a worker never computes goes with what it does.

    Behind the operations come the sums and the verdict: along every route that adds a worker, first those of
    micro-batches ``p.0``, a vote travels from the last worker to the first, where backward ends, and the verdict back;
    a listener, which no route visits, has a chain of its own under a name beyond all micro-batches: a route, and it
    before the first worker. Last come the optimizer steps, in ascending order of layers. Everywhere all workers go
    through common reductions and chains in the same order, so these cannot deadlock.

    In the staggered form the verdict on a step rides on the next one, the other way round: a chain's vote goes from
    worker to worker right before the activation of the micro-batch whose route it follows, its verdict right before the
    gradient. It waits for nothing that the activation or gradient would not wait for, so it cannot deadlock where the
    operations do not.

    Args:
        plan: the plan; its orders are not checked here but in :func:`holdfast.core.validate.validate`.
        ties: tuples of layers that share weights.

    Raises:
        InvalidSchedule: an operation runs on a worker that its micro-batch does not visit, or nobody computes.
    """
    shared = _Shared.of(plan, ties, plan.workers)
    return tuple(shared.program(worker) for worker in plan.workers)


def lower_worker(plan: Plan, worker: WorkerId, ties: tuple[tuple[int, ...], ...] = ()) -> WorkerProgram:
    """Returns the program of one worker; see :func:`lower`. Cheaper where nobody needs the others'."""
    return _Shared.of(plan, ties, (worker,)).program(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the programs of some workers are made from."""

    plan: Plan
    stops: dict[WorkerId, _Stops]
    reductions: tuple[Reduction, ...]
    chains: tuple[_Chain, ...]
    rows: dict[WorkerId, tuple[Op, ...]]

    @classmethod
    def of(cls, plan: Plan, ties: tuple[tuple[int, ...], ...], workers: tuple[WorkerId, ...]) -> _Shared:
        return cls(
            plan=plan,
            stops=_stops(plan, workers),
            reductions=_reductions(plan, ties),
            chains=_chains(plan),
            rows=dict(plan.orders.rows),
        )

    def program(self, worker: WorkerId) -> WorkerProgram:
        row, own = self.rows.get(worker, ()), [chain for chain in self.chains if worker in chain.workers]
        stops = self.stops.get(worker, {})
        turned = [chain.turned for chain in own]
        reductions = tuple(reduction for reduction in self.reductions if worker in reduction.workers)
        return WorkerProgram(
            worker=worker,
            operations=tuple(_operations(worker, row, stops, {}, _Turns.of(row, stops, reductions))),
            reductions=reductions,
            verdict=(*_votes(worker, turned), *_verdicts(worker, turned)),
            riding=tuple(_riding(worker, row, stops, own, _Turns.of(row, stops, reductions))),
            layers=self.plan.placement.layers_of(worker),
        )


def groups(programs: Iterable[WorkerProgram]) -> tuple[tuple[WorkerId, ...], ...]:
    """Returns the communication groups that programs need, without duplicates, sorted: used links and reductions.

    One worker's program alone gives the groups that this worker is in.
    """
    found: set[tuple[WorkerId, ...]] = set()
    for program in programs:
        for instruction in (*program.operations, *program.verdict):
            if isinstance(instruction, Send | Receive):
                peer = instruction.peer
                found.add((min(program.worker, peer), max(program.worker, peer)))
        found.update(reduction.workers for reduction in program.reductions if len(reduction.workers) > 1)
    return tuple(sorted(found))


def format_instructions(instructions: Iterable[Instruction]) -> str:
    """Returns the text form of one worker's instructions, separated by blanks."""
    return " ".join(str(instruction) for instruction in instructions)


def parse_instructions(text: str, batch: Batch, reductions: Iterable[Reduction] = ()) -> tuple[Instruction, ...]:
    """Returns the instructions that :func:`format_instructions` wrote.

    Args:
        text: one worker's instructions.
        batch: the micro-batches that they are about.
        reductions: where to look up by name who takes part in a reduction, which the text does not say.

    Raises:
        InvalidSchedule: a word is no instruction, or names a reduction that was not given; it carries the position.
    """
    known = {reduction.name: reduction for reduction in reductions}
    return tuple(_parse_instruction(word, position, batch, known) for position, word in enumerate(text.split()))


def _reductions(plan: Plan, ties: tuple[tuple[int, ...], ...]) -> tuple[Reduction, ...]:
    sharing = plan.placement.members_by_layer
    units = [(layer,) for layer in reversed(range(plan.placement.num_layers))] + list(ties)
    members = [(unit, tuple(sorted({worker for layer in unit for worker in sharing[layer]}))) for unit in units]
    return tuple(Reduction(unit, workers) for unit, workers in members if workers)


_Stops = dict[MicroBatch, tuple[Visit | None, Visit, Visit | None]]
"""For every micro-batch that visits a worker: the visit before, the worker's own, and the one after."""


def _stops(plan: Plan, workers: tuple[WorkerId, ...]) -> dict[WorkerId, _Stops]:
    found: dict[WorkerId, _Stops] = {worker: {} for worker in workers}
    for route in plan.routes.routes:
        visits = (None, *route.visits, None)
        for at, visit in enumerate(route.visits, start=1):
            if visit.worker in found:
                found[visit.worker][route.microbatch] = (visits[at - 1], visit, visits[at + 1])
    return found


@dataclass(frozen=True, slots=True)
class _Chain:
    """A way that a verdict takes.

    Attributes:
        name: unique among the chains.
        rides: the micro-batch whose route it follows, but for a listener before it.
        workers: the way of the vote; the verdict comes back.
    """

    name: MicroBatch
    rides: MicroBatch
    workers: tuple[WorkerId, ...]

    @property
    def turned(self) -> _Chain:
        """The chain from its other end."""
        return replace(self, workers=self.workers[::-1])


def _chains(plan: Plan) -> tuple[_Chain, ...]:
    """The routes that the verdict takes: by index and pipeline, those that add a worker; then one per listener.

    Only a worker that computes nothing is visited by none. One that computes must ride on a micro-batch of its own: it
    could not wait for another's before all that it runs without making others wait.
    """
    chains = [_Chain(route.microbatch, route.microbatch, route.workers) for route in plan.routes.covering]
    covered = {worker for chain in chains for worker in chain.workers}
    listeners = [worker for worker in plan.workers if worker not in covered]
    if listeners and not chains:
        raise InvalidSchedule("the worker listens, and nobody computes: no verdict", worker=str(listeners[0]))
    beyond = 1 + max((route.microbatch.index for route in plan.routes.routes), default=-1)
    for worker, along in zip(listeners, cycle(tuple(chains)), strict=False):
        name = beside(worker.pipeline, beyond + worker.stage)
        chains.append(_Chain(name, along.rides, (worker, *along.workers)))
    return tuple(chains)


@dataclass(slots=True)
class _Turns:
    """When a worker contributes to its reductions, while it goes through its operations.

    Attributes:
        completes: per layer that is not complete yet, the operation that is the last to add to its gradient.
        left: the reductions that were not contributed to yet, in order.
    """

    completes: dict[int, Op]
    left: deque[Reduction]

    @classmethod
    def of(cls, row: tuple[Op, ...], stops: _Stops, reductions: tuple[Reduction, ...]) -> _Turns:
        adding = [op for op in row if op.kind in (OpKind.B, OpKind.W) and op.microbatch in stops]
        completes = {layer: op for op in adding for layer in stops[op.microbatch][1].layers.indices}
        return cls(completes, deque(reductions))

    def parts(self, op: Op, layers: LayerRange) -> Iterator[tuple[Compute, list[Reduce]]]:
        """Runs an operation as far as that lets the worker contribute to sums with others, then on."""
        stop, ready = layers.stop, list[Reduce]()
        for layer in reversed(layers.indices):
            if self.completes.get(layer) == op:
                del self.completes[layer]
                ready += self._due()
            last = layer == layers.start
            if last or any(len(reduce.reduction.workers) > 1 for reduce in ready):
                yield Compute(op, LayerRange(layer, stop), last), ready
                stop, ready = layer, []

    def _due(self) -> Iterator[Reduce]:
        while self.left and self.completes.keys().isdisjoint(self.left[0].layers):
            yield Reduce(self.left.popleft())


def _riding(
    worker: WorkerId, row: tuple[Op, ...], stops: _Stops, chains: list[_Chain], turns: _Turns
) -> Iterator[Instruction]:
    """The operations, and before F and the backward of the micro-batches that chains ride on, the chains' messages.

    A listener runs no micro-batch: it sends its vote at once, and waits for the verdict.
    """
    before: dict[MicroBatch, list[_Chain]] = {}
    for chain in chains:
        if chain.rides in stops:
            before.setdefault(chain.rides, []).append(chain)
        else:
            yield from _votes(worker, [chain])
            yield from _verdicts(worker, [chain])
    yield from _operations(worker, row, stops, before, turns)


def _operations(
    worker: WorkerId, row: tuple[Op, ...], stops: _Stops, before: dict[MicroBatch, list[_Chain]], turns: _Turns
) -> Iterator[Instruction]:
    for position, op in enumerate(row):
        if op.microbatch not in stops:
            rule = "the micro-batch does not visit this worker"
            raise InvalidSchedule(rule, worker=str(worker), position=position, op=str(op))
        if op.kind is OpKind.F:
            yield from _votes(worker, before.get(op.microbatch, ()))
        elif op.kind is not OpKind.W:
            yield from _verdicts(worker, before.get(op.microbatch, ()))
        yield from _operation(op, *stops[op.microbatch], turns)
    yield from map(Reduce, turns.left)


def _operation(op: Op, before: Visit | None, visit: Visit, after: Visit | None, turns: _Turns) -> Iterator[Instruction]:
    first, last, payload = visit.layers.start, visit.layers.stop, Payload.ACTIVATION
    if op.kind is OpKind.W:
        before = after = None
    elif op.kind is not OpKind.F:
        before, after, first, last, payload = after, before, last, first, Payload.GRADIENT
    if before is not None:
        yield Receive(payload, op.microbatch, before.worker, first)
    for part, reductions in turns.parts(op, visit.layers):
        yield part
        if part.last and after is not None:
            yield Send(payload, op.microbatch, after.worker, last)
        yield from reductions


def _votes(worker: WorkerId, chains: Iterable[_Chain]) -> Iterator[Send | Receive]:
    """What a worker takes and passes on of votes, towards the last worker of each chain."""
    for chain in chains:
        before, after = _neighbours(worker, chain.workers)
        if before is not None:
            yield Receive(Payload.VOTE, chain.name, before)
        if after is not None:
            yield Send(Payload.VOTE, chain.name, after)


def _verdicts(worker: WorkerId, chains: Iterable[_Chain]) -> Iterator[Send | Receive]:
    """What a worker takes and passes on of verdicts, from the last worker of each chain."""
    for chain in chains:
        before, after = _neighbours(worker, chain.workers)
        if after is not None:
            yield Receive(Payload.VERDICT, chain.name, after)
        if before is not None:
            yield Send(Payload.VERDICT, chain.name, before)


def _neighbours(worker: WorkerId, route: tuple[WorkerId, ...]) -> tuple[WorkerId | None, WorkerId | None]:
    at = route.index(worker)
    return (route[at - 1] if at > 0 else None, route[at + 1] if at + 1 < len(route) else None)


def _parse_instruction(word: str, position: int, batch: Batch, known: dict[str, Reduction]) -> Instruction:
    if word.startswith(("SEND_", "RECV_")):
        return _parse_message(word, position, batch)
    for prefix, kind in (("REDUCE_", Reduce), ("SUM_", Sum)):
        if word.startswith(prefix):
            if word.removeprefix(prefix) not in known:
                raise InvalidSchedule(f"nobody is known to take part in {word!r}", position=position, op=word)
            return kind(known[word.removeprefix(prefix)])
    if word.startswith("STEP_L") and word.removeprefix("STEP_L").isdecimal():
        return Step(int(word.removeprefix("STEP_L")))
    try:
        return Compute(Op.parse(word, batch))
    except InvalidSchedule as error:
        raise InvalidSchedule(error.rule, position=position, op=word) from error


def _parse_message(word: str, position: int, batch: Batch) -> Instruction:
    match = _MESSAGE.fullmatch(word)
    if match is None or match[2] not in set(Payload) or (match[1] == "SEND") != (match[5] == ">"):
        rule = f"{word!r} is no message: expected such as SEND_ACT1.5>1.3 or RECV_GRAD1.5<1.3"
        raise InvalidSchedule(rule, position=position, op=word)
    kind = Send if match[1] == "SEND" else Receive
    payload, pipeline, index = Payload(match[2]), int(match[3]), int(match[4])
    name = batch.named(pipeline, index) if batch.has(pipeline, index) else beside(pipeline, index)
    return kind(payload, name, WorkerId.parse(match[6]))
