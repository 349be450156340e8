"""Lowering: from what a worker does in a step to its instructions, messages and reductions included."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from holdfast.core.ids import MicroBatch, WorkerId, beside
from holdfast.core.instructions import (
    Compute,
    Instruction,
    Payload,
    Recall,
    Receive,
    Reduce,
    Reduction,
    Send,
)
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.program import WorkerProgram
from holdfast.core.schedule import OpKind
from holdfast.core.step_plan import Audit, Chain, Piece, Resent, Standing, StepPlan
from holdfast.core.whole_step import whole_step, whole_steps

__all__ = ["audit_message", "lower", "lower_step", "lower_worker", "with_audit"]


def lower(plan: Plan, ties: tuple[tuple[int, ...], ...] = ()) -> tuple[WorkerProgram, ...]:
    """Returns the program of every worker for a whole step, sorted by worker; see :func:`lower_step`.

    Args:
        plan: the plan; its orders are not checked here but in :func:`holdfast.core.validate.validate`.
        ties: tuples of layers that share weights.

    Raises:
        InvalidSchedule: an operation runs on a worker that its micro-batch does not visit, or nobody computes.
    """
    return tuple(map(lower_step, whole_steps(plan, ties)))


def lower_worker(plan: Plan, worker: WorkerId, ties: tuple[tuple[int, ...], ...] = ()) -> WorkerProgram:
    """Returns the program of one worker for a whole step. Cheaper than :func:`lower` where nobody needs the others'."""
    return lower_step(whole_step(plan, worker, ties))


def lower_step(step: StepPlan) -> WorkerProgram:
    """Returns the program of one worker.

    It sends first what is there already: out of its log, and sums that stand. Every operation receives its input if
    that comes from another worker, or recalls it from the log, computes, and sends its result on. The last one that
    adds to a layer's gradient is run in parts, and behind the part that completes a layer comes the worker's
    contribution to its sum with others, so that this is on its way while the layers before are computed. All workers
    contribute in one order, own layers from the last to the first, as backward finishes them, then the ties that touch
    own layers; what is complete sooner waits for its turn, and what a worker never computes goes with what it does.

    Behind the operations come the sums that others hold, those that are made, and the verdict: along every route that
    adds a worker, first those of micro-batches ``p.0``, a vote travels from the last worker to the first, where
    backward ends, and the verdict back; a listener, which no route visits, has a chain of its own under a name beyond
    all micro-batches: a route, and it behind the worker that runs the last of its layers. Last come the optimizer
    steps, in ascending order of layers. Everywhere all workers go through common reductions and chains in the same
    order, so these cannot deadlock.

    In the staggered form the verdict on a step rides on the next one, the other way round: a chain's vote goes from
    worker to worker right before the activation of the micro-batch whose route it follows, its verdict right before the
    gradient. It waits for nothing that the activation or gradient would not wait for, so it cannot deadlock where the
    operations do not. Nothing rides on a step that goes on with an interrupted one.

    Of an audited sample the runner sends what it has computed as soon as it has, whatever others do. An auditor waits
    for that behind all its operations, and contributes to the sum of the layer, and those after it, only then: nobody's
    operations wait for a sum, so this cannot deadlock where the operations do not.
    """
    plain = tuple(_operations(step, ()))
    riding = plain if step.goes_on else tuple(_operations(step, step.chains))
    turned = [chain.turned for chain in step.chains]
    recalls = (each for each in plain if isinstance(each, Recall))
    program = WorkerProgram(
        step=step,
        operations=plain,
        verdict=(*_votes(step.worker, turned), *_verdicts(step.worker, turned)),
        riding=riding,
        recalled=frozenset((each.payload, each.boundary, each.microbatch.number) for each in recalls),
    )
    return program if step.audit is None else with_audit(program, step.audit)


# --- operations -------------------------------------------------------------------------------------------------------


def _operations(step: StepPlan, chains: tuple[Chain, ...]) -> Iterator[Instruction]:
    """All up to the sums; with what ``chains`` say of the step before between them."""
    for each in step.resent:
        yield from _resend(each)
    yield from _given(step)
    before, alone = _rides(step, chains)
    for chain in alone:
        yield from _votes(step.worker, [chain])
        yield from _verdicts(step.worker, [chain])
    turns = _Turns.of(step)
    for at, piece in enumerate(step.pieces):
        riding = before.get(piece.op.microbatch, ()) if piece.adds else ()
        if piece.op.kind is OpKind.F:
            yield from _votes(step.worker, riding)
        elif piece.op.kind is not OpKind.W:
            yield from _verdicts(step.worker, riding)
        yield from _piece(piece, step.num_layers, turns.parts(at, piece))
    yield from map(Reduce, turns.left)
    yield from _taken(step)


def _rides(step: StepPlan, chains: tuple[Chain, ...]) -> tuple[dict[MicroBatch, list[Chain]], list[Chain]]:
    """The chains that ride on each micro-batch that is run here; and those of a listener, which runs none.

    It passes the vote on as soon as it comes, and waits for the verdict.
    """
    run = {piece.op.microbatch for piece in step.pieces}
    before: dict[MicroBatch, list[Chain]] = {}
    for chain in chains:
        before.setdefault(chain.rides, []).append(chain)
    return before, [chain for chain in chains if chain.rides not in run]


@dataclass(slots=True)
class _Turns:
    """When a worker contributes to its reductions, while it goes through its pieces.

    Attributes:
        completes: per layer that is not complete yet, the place of the piece that is the last to add to its gradient.
        left: the reductions that were not contributed to yet, in order.
    """

    completes: dict[int, int]
    left: deque[Reduction]

    @classmethod
    def of(cls, step: StepPlan) -> _Turns:
        adding = [(at, piece) for at, piece in enumerate(step.pieces) if piece.completes]
        completes = {layer: at for at, piece in adding for layer in piece.layers.indices}
        return cls(completes, deque(each.reduction for each in step.sums))

    def parts(self, at: int, piece: Piece) -> Iterator[tuple[Compute, list[Reduce]]]:
        """Runs a piece as far as that lets the worker contribute to sums with others, then on."""
        layers, stop, ready = piece.layers, piece.layers.stop, list[Reduce]()
        for layer in reversed(layers.indices):
            if self.completes.get(layer) == at:
                del self.completes[layer]
                ready += self._due()
            last = layer == layers.start
            if last or any(len(reduce.reduction.workers) > 1 for reduce in ready):
                yield Compute(piece.op, LayerRange(layer, stop), last, piece.adds), ready
                stop, ready = layer, []

    def _due(self) -> Iterator[Reduce]:
        while self.left and self.completes.keys().isdisjoint(self.left[0].layers):
            yield Reduce(self.left.popleft())


def _piece(piece: Piece, num_layers: int, parts: Iterable[tuple[Compute, list[Reduce]]]) -> Iterator[Instruction]:
    forward, microbatch = piece.op.kind is OpKind.F, piece.op.microbatch
    payload = Payload.ACTIVATION if forward else Payload.GRADIENT
    boundary = piece.takes(num_layers)
    if boundary is not None and piece.source is not None:
        yield Receive(payload, microbatch, piece.source, boundary)
    elif boundary is not None:
        yield Recall(payload, microbatch, boundary)
    for part, reductions in parts:
        yield part
        if part.last:
            for target in piece.targets:
                yield Send(payload, microbatch, target, piece.layers.stop if forward else piece.layers.start)
        yield from reductions


# --- what is there already --------------------------------------------------------------------------------------------


def _resend(each: Resent) -> Iterator[Instruction]:
    yield Recall(each.payload, each.microbatch, each.boundary)
    yield Send(each.payload, each.microbatch, each.target, each.boundary)


def _given(step: StepPlan) -> Iterator[Instruction]:
    for each in step.standing:
        if each.holder is None:
            yield Recall(Payload.SUM, _NONE, step.ties.index(each.layers), layers=each.layers)
        elif each.holder == step.worker:
            yield from (Send(Payload.SUM, _name(each, step), to, layers=each.layers) for to in each.takers)


def _taken(step: StepPlan) -> Iterator[Instruction]:
    for each in step.standing:
        if each.holder is not None and step.worker in each.takers:
            yield Receive(Payload.SUM, _name(each, step), each.holder, layers=each.layers)


_NONE = MicroBatch(number=0, pipeline=0, index=0)


def _name(each: Standing, step: StepPlan) -> MicroBatch:
    """What a sum goes by among messages: by its layer, or by its tie."""
    return beside(0, each.layers[0]) if len(each.layers) == 1 else beside(1, step.ties.index(each.layers))


# --- the verdict ------------------------------------------------------------------------------------------------------


def _votes(worker: WorkerId, chains: Iterable[Chain]) -> Iterator[Send | Receive]:
    """What a worker takes and passes on of votes, towards the last worker of each chain."""
    for chain in chains:
        before, after = _neighbours(worker, chain.workers)
        if before is not None:
            yield Receive(Payload.VOTE, chain.name, before)
        if after is not None:
            yield Send(Payload.VOTE, chain.name, after)


def _verdicts(worker: WorkerId, chains: Iterable[Chain]) -> Iterator[Send | Receive]:
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


# --- audits -----------------------------------------------------------------------------------------------------------


def audit_message(layer: int, runner: WorkerId) -> Receive:
    """Returns what an auditor receives of a sample of a layer."""
    return Receive(Payload.AUDIT, beside(0, layer), runner, layers=(layer,))


def with_audit(program: WorkerProgram, audit: Audit) -> WorkerProgram:
    """Returns a worker's program with what an audit of the step takes; see :func:`lower_step`."""
    return replace(
        program,
        step=replace(program.step, audit=audit),
        operations=_audited(program.worker, audit, program.operations),
        riding=_audited(program.worker, audit, program.riding),
    )


def _audited(worker: WorkerId, audit: Audit, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    if worker == audit.runner:
        return _sending(audit, instructions)
    return _waiting(audit, instructions) if worker in audit.auditors else instructions


def _sending(audit: Audit, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    ends = (i for i, each in enumerate(instructions) if isinstance(each, Compute) and _ends_with(audit, each))
    at = max(ends) + 1
    sends = (Send(Payload.AUDIT, beside(0, audit.layer), auditor) for auditor in audit.auditors)
    return (*instructions[:at], *sends, *instructions[at:])


def _ends_with(audit: Audit, compute: Compute) -> bool:
    """Whether this gives the gradients of the sample's weights."""
    assert compute.layers is not None, "only what was read does not say what it runs over"
    adds = compute.op.kind in (OpKind.B, OpKind.W)
    return adds and compute.op.microbatch.number == audit.microbatch and audit.layer in compute.layers


def _waiting(audit: Audit, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    reduces = [each for each in instructions if isinstance(each, Reduce)]
    at = next(i for i, each in enumerate(reduces) if each.reduction.layers == (audit.layer,))
    late = frozenset(each.reduction for each in reduces[at:])
    others = (each for each in instructions if not (isinstance(each, Reduce) and each.reduction in late))
    return (*others, audit_message(audit.layer, audit.runner), *reduces[at:])
