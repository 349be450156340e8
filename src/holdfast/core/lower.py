"""Lowering: from the operations of a plan to the instructions of each worker, messages and reductions included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.plan import Plan
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import InvalidSchedule

__all__ = [
    "Compute",
    "Instruction",
    "Payload",
    "Receive",
    "Reduce",
    "Reduction",
    "Send",
    "Step",
    "WorkerProgram",
    "format_instructions",
    "groups",
    "lower",
    "lower_worker",
    "message_number",
    "parse_instructions",
]

_CHAINS = 1 << 20  # more than a pipeline has micro-batches and stages
_MESSAGE = re.compile(r"(SEND|RECV)_([A-Z]+)(\d+\.\d+)([<>])(\d+\.\d+)", re.ASCII)


class Payload(StrEnum):
    """What a message between two workers carries."""

    ACTIVATION = "ACT"
    """A layer's output, towards the last stage."""
    GRADIENT = "GRAD"
    """The gradient of that output, towards the first stage."""
    TALLY = "TALLY"
    """What the workers so far know of the step: finite or not, norms."""
    VERDICT = "VERDICT"
    """What the chain decided: commit, clip or skip."""


@dataclass(frozen=True, slots=True, order=True)
class Reduction:
    """One sum of gradients over workers.

    Attributes:
        layers: one layer: its own gradient, over all its owners; several: the weights that are tied between these
            layers, over the owners of any of them.
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
    """Run one operation. Text: ``F1.5``."""

    op: Op

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message without waiting for it to arrive. Text: ``SEND_ACT1.5>1.3``."""

    payload: Payload
    microbatch: MicroBatch
    peer: WorkerId

    def __str__(self) -> str:
        return f"SEND_{self.payload.value}{self.microbatch}>{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. Text: ``RECV_GRAD1.5<1.3``."""

    payload: Payload
    microbatch: MicroBatch
    peer: WorkerId

    def __str__(self) -> str:
        return f"RECV_{self.payload.value}{self.microbatch}<{self.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in a reduction, or do it locally if nobody else does. Text: ``REDUCE_L3``."""

    reduction: Reduction

    def __str__(self) -> str:
        return f"REDUCE_{self.reduction.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """Run the optimizer on one layer. Text: ``STEP_L3``."""

    layer: int

    def __str__(self) -> str:
        return f"STEP_L{self.layer}"


Instruction = Compute | Send | Receive | Reduce | Step


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """What one worker runs in one step, in order."""

    worker: WorkerId
    instructions: tuple[Instruction, ...]


def lower(plan: Plan, ties: tuple[tuple[int, ...], ...] = ()) -> tuple[WorkerProgram, ...]:
    """Returns the program of every worker, sorted by worker.

    Every operation receives its input if that comes from another worker, computes, and sends its result on. Then come
    the reductions: own layers from the last to the first, as backward finishes them, then the ties that touch own
    layers. Then the verdict: along the route of micro-batch ``p.0`` of every pipeline p that adds a worker, a tally
    travels to the last worker and the verdict back; a worker that no such route visits takes a peer's place on a copy
    of one, under a name beyond all micro-batches. Last come the optimizer steps, in ascending order of layers.
    Everywhere all workers go through common reductions and chains in the same order, so these cannot deadlock.

    Args:
        plan: the plan; its orders are not checked here but in :func:`holdfast.core.validate.validate`.
        ties: tuples of layers that share weights.

    Raises:
        InvalidSchedule: an operation runs on a worker that its micro-batch does not visit, or a worker is in no chain.
    """
    shared = _Shared.of(plan, ties)
    return tuple(shared.program(worker) for worker in plan.workers)


def lower_worker(plan: Plan, worker: WorkerId, ties: tuple[tuple[int, ...], ...] = ()) -> WorkerProgram:
    """Returns the program of one worker; see :func:`lower`. Cheaper where nobody needs the others'."""
    return _Shared.of(plan, ties).program(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the programs of all workers are made from."""

    plan: Plan
    routes: dict[MicroBatch, tuple[WorkerId, ...]]
    reductions: tuple[Reduction, ...]
    chains: tuple[tuple[MicroBatch, tuple[WorkerId, ...]], ...]
    rows: dict[WorkerId, tuple[Op, ...]]

    @classmethod
    def of(cls, plan: Plan, ties: tuple[tuple[int, ...], ...]) -> _Shared:
        return cls(
            plan=plan,
            routes={route.microbatch: route.workers for route in plan.routes.routes},
            reductions=_reductions(plan, ties),
            chains=_chains(plan),
            rows=dict(plan.orders.rows),
        )

    def program(self, worker: WorkerId) -> WorkerProgram:
        instructions = (
            *_operations(worker, self.rows.get(worker, ()), self.routes),
            *(Reduce(reduction) for reduction in self.reductions if worker in reduction.workers),
            *_verdict(worker, self.chains),
            *(Step(layer) for layer in self.plan.placement.layers_of(worker).indices),
        )
        return WorkerProgram(worker, instructions)


def groups(programs: Iterable[WorkerProgram]) -> tuple[tuple[WorkerId, ...], ...]:
    """Returns the communication groups that programs need, without duplicates, sorted: used links and reductions.

    One worker's program alone gives the groups that this worker is in.
    """
    found: set[tuple[WorkerId, ...]] = set()
    for program in programs:
        for instruction in program.instructions:
            match instruction:
                case Send(peer=peer) | Receive(peer=peer):
                    found.add((min(program.worker, peer), max(program.worker, peer)))
                case Reduce(reduction) if len(reduction.workers) > 1:
                    found.add(reduction.workers)
                case _:
                    pass
    return tuple(sorted(found))


def message_number(payload: Payload, microbatch: MicroBatch, microbatches: int) -> int:
    """Returns the number under which a message travels: unique among the messages of its kind in one step.

    Args:
        payload: what it carries; verdicts have a numbering of their own.
        microbatch: its micro-batch, or the name of its chain.
        microbatches: micro-batches per pipeline.
    """
    if payload in (Payload.TALLY, Payload.VERDICT):
        return microbatch.pipeline * _CHAINS + microbatch.index
    return microbatch.number(microbatches)


def format_instructions(instructions: Iterable[Instruction]) -> str:
    """Returns the text form of one worker's instructions, separated by blanks."""
    return " ".join(str(instruction) for instruction in instructions)


def parse_instructions(text: str, reductions: Iterable[Reduction] = ()) -> tuple[Instruction, ...]:
    """Returns the instructions that :func:`format_instructions` wrote.

    Args:
        text: one worker's instructions.
        reductions: where to look up by name who takes part in a reduction, which the text does not say.

    Raises:
        InvalidSchedule: a word is no instruction, or names a reduction that was not given; it carries the position.
    """
    known = {reduction.name: reduction for reduction in reductions}
    return tuple(_parse_instruction(word, position, known) for position, word in enumerate(text.split()))


def _reductions(plan: Plan, ties: tuple[tuple[int, ...], ...]) -> tuple[Reduction, ...]:
    owners: list[list[WorkerId]] = [[] for _ in range(plan.placement.num_layers)]
    for worker, layers in plan.placement.ranges:
        for layer in layers.indices:
            owners[layer].append(worker)
    units = [(layer,) for layer in reversed(range(plan.placement.num_layers))] + list(ties)
    members = [(unit, tuple(sorted({worker for layer in unit for worker in owners[layer]}))) for unit in units]
    return tuple(Reduction(unit, workers) for unit, workers in members if workers)


def _chains(plan: Plan) -> tuple[tuple[MicroBatch, tuple[WorkerId, ...]], ...]:
    """The routes that the verdict takes: in order of pipelines, those that add a worker."""
    chains: list[tuple[MicroBatch, tuple[WorkerId, ...]]] = []
    covered: set[WorkerId] = set()
    for route in plan.routes.routes:
        if route.microbatch.index == 0 and not covered.issuperset(route.workers):
            chains.append((route.microbatch, route.workers))
            covered.update(route.workers)
    beyond = 1 + max((route.microbatch.index for route in plan.routes.routes), default=-1)
    for worker in plan.workers:
        if worker not in covered:
            name = MicroBatch(worker.pipeline, beyond + worker.stage)
            chains.append((name, _beside(plan, worker)))
    return tuple(chains)


def _beside(plan: Plan, worker: WorkerId) -> tuple[WorkerId, ...]:
    """A route on which this worker, which no chain visits, takes the place of a peer."""
    held = dict(plan.placement.ranges)
    for route in plan.routes.routes:
        peers = [visited for visited in route.workers if held.get(visited) == held[worker]]
        if peers and worker not in route.workers:
            return tuple(worker if visited == peers[0] else visited for visited in route.workers)
    raise InvalidSchedule("no pipeline's first micro-batch visits this worker: no verdict", worker=str(worker))


def _operations(
    worker: WorkerId, row: tuple[Op, ...], routes: dict[MicroBatch, tuple[WorkerId, ...]]
) -> Iterator[Instruction]:
    for position, op in enumerate(row):
        route = routes.get(op.microbatch, ())
        if worker not in route:
            rule = "the micro-batch does not visit this worker"
            raise InvalidSchedule(rule, worker=str(worker), position=position, op=str(op))
        yield from _operation(worker, op, route)


def _operation(worker: WorkerId, op: Op, route: tuple[WorkerId, ...]) -> Iterator[Instruction]:
    if op.kind is OpKind.W:
        yield Compute(op)
        return
    before, after = _neighbours(worker, route)
    payload = Payload.ACTIVATION
    if op.kind is not OpKind.F:
        before, after, payload = after, before, Payload.GRADIENT
    if before is not None:
        yield Receive(payload, op.microbatch, before)
    yield Compute(op)
    if after is not None:
        yield Send(payload, op.microbatch, after)


def _verdict(worker: WorkerId, chains: tuple[tuple[MicroBatch, tuple[WorkerId, ...]], ...]) -> Iterator[Instruction]:
    own = [(microbatch, *_neighbours(worker, chain)) for microbatch, chain in chains if worker in chain]
    for microbatch, before, after in own:
        if before is not None:
            yield Receive(Payload.TALLY, microbatch, before)
        if after is not None:
            yield Send(Payload.TALLY, microbatch, after)
    for microbatch, before, after in own:
        if after is not None:
            yield Receive(Payload.VERDICT, microbatch, after)
        if before is not None:
            yield Send(Payload.VERDICT, microbatch, before)


def _neighbours(worker: WorkerId, route: tuple[WorkerId, ...]) -> tuple[WorkerId | None, WorkerId | None]:
    at = route.index(worker)
    return (route[at - 1] if at > 0 else None, route[at + 1] if at + 1 < len(route) else None)


def _parse_instruction(word: str, position: int, known: dict[str, Reduction]) -> Instruction:
    if word.startswith(("SEND_", "RECV_")):
        return _parse_message(word, position)
    if word.startswith("REDUCE_"):
        if word.removeprefix("REDUCE_") not in known:
            raise InvalidSchedule(f"nobody is known to take part in {word!r}", position=position, op=word)
        return Reduce(known[word.removeprefix("REDUCE_")])
    if word.startswith("STEP_L") and word.removeprefix("STEP_L").isdecimal():
        return Step(int(word.removeprefix("STEP_L")))
    try:
        return Compute(Op.parse(word))
    except InvalidSchedule as error:
        raise InvalidSchedule(error.rule, position=position, op=word) from error


def _parse_message(word: str, position: int) -> Instruction:
    match = _MESSAGE.fullmatch(word)
    if match is None or match[2] not in set(Payload) or (match[1] == "SEND") != (match[4] == ">"):
        rule = f"{word!r} is no message: expected such as SEND_ACT1.5>1.3 or RECV_GRAD1.5<1.3"
        raise InvalidSchedule(rule, position=position, op=word)
    kind = Send if match[1] == "SEND" else Receive
    return kind(Payload(match[2]), MicroBatch.parse(match[3]), WorkerId.parse(match[5]))
