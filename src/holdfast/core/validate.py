"""Proves a plan right, or shows where it is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.instructions import Compute, Instruction, Payload, Receive, Reduce, Reduction, Send, Sum
from holdfast.core.lower import lower
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.program import WorkerProgram
from holdfast.core.schedule import Op, OpKind, Orders
from holdfast.core.timeline import activation_memory
from holdfast.core.work_costs import WorkCosts
from holdfast.errors import InvalidSchedule

__all__ = ["Flaw", "dry_run", "render_table", "validate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """What is wrong with programs.

    Attributes:
        rule: the rule that is broken.
        worker: whose program breaks it.
        position: 0-based index of the instruction in that program.
    """

    rule: str
    worker: WorkerId
    position: int


def validate(plan: Plan, *, ties: tuple[tuple[int, ...], ...] = (), costs: Costs | None = None) -> None:
    """Returns if a plan is right. It then computes every layer of every micro-batch once, and ends.

    Rules: every layer has an owner; every route covers all layers once, in order, in visits to owners; every worker has
    a row; a micro-batch has on each worker of its route, and on no other, one F and then either one B, or one I and
    then one W; what is run ahead are own layers behind those that one runs; the lowered programs run to their end when
    sends never wait, and every message is sent once and received once; the memory held never exceeds the limit, if the
    costs have one.

    Args:
        plan: the plan.
        ties: tuples of layers that share weights.
        costs: costs per layer; needed only for the memory limit.

    Raises:
        InvalidSchedule: a rule is broken; it carries the place, and its text shows the orders with the place marked.
    """
    _check_routes(plan)
    _check_rows(plan)
    _check_ahead(plan)
    _check_programs(plan, lower(plan, ties))
    if costs is not None:
        _check_memory(plan, costs)


def render_table(orders: Orders, mark: tuple[WorkerId, int] | None = None) -> str:
    """Returns the orders as an aligned table.

    Args:
        orders: what to show.
        mark: a worker and a position in its order that gets ``<-- ERROR HERE``; a position outside means the row's end.
    """
    width = max((len(str(op)) for _, row in orders.rows for op in row), default=0)
    lines = []
    for worker, row in orders.rows:
        words = [str(op).ljust(width) for op in row]
        if mark is not None and mark[0] == worker:
            at = mark[1] + 1 if 0 <= mark[1] < len(row) else len(row)
            words.insert(at, "<-- ERROR HERE")
        lines.append(f"{worker}: {' '.join(words)}".rstrip())
    return "\n".join(lines)


def dry_run(programs: Mapping[WorkerId, tuple[Instruction, ...]]) -> Flaw | None:
    """Runs the instructions of all workers in no particular sequence; sends never wait, reductions wait for all.

    Returns:
        None if all end and every message is sent once and received once; else the first thing that is wrong. If
        workers wait for one another, its rule names all of these.
    """
    return _DryRun(programs).fault()


def _invalid(
    plan: Plan, rule: str, worker: WorkerId | None = None, position: int = -1, op: object = ""
) -> InvalidSchedule:
    table = render_table(plan.orders, None if worker is None else (worker, position))
    name = "" if worker is None else str(worker)
    return InvalidSchedule(rule, worker=name, position=position, op=str(op), table=table)


def _check_routes(plan: Plan) -> None:
    unowned = plan.placement.unowned_layers()
    if unowned:
        raise _invalid(plan, f"layer(s) {', '.join(map(str, unowned))} have no owner")
    if not plan.routes.routes:
        raise _invalid(plan, "there is no micro-batch")
    placement, present = plan.placement, frozenset(plan.placement.workers)
    whole = frozenset(placement.ranges)
    for route in plan.routes.routes:
        next_layer = 0
        for visit in route.visits:
            worker, layers = visit.worker, visit.layers
            if worker not in present:
                raise _invalid(
                    plan, f"micro-batch {route.microbatch} visits a worker that is not in the placement", worker
                )
            if layers.start != next_layer:
                rule = f"micro-batch {route.microbatch} needs layer {next_layer} here, but runs layers {layers}"
                raise _invalid(plan, rule, worker)
            if (worker, layers) not in whole and not placement.holds(worker, layers):
                held = ", ".join(map(str, placement.held_by(worker))) or "none"
                rule = f"micro-batch {route.microbatch} runs layers {layers} here, where layers {held} are"
                raise _invalid(plan, rule, worker)
            next_layer = layers.stop
        if next_layer < plan.placement.num_layers:
            raise _invalid(plan, f"the route of micro-batch {route.microbatch} ends before layer {next_layer}")


def _check_rows(plan: Plan) -> None:
    visits: dict[WorkerId, set[MicroBatch]] = {worker: set() for worker in plan.workers}
    for route in plan.routes.routes:
        for worker in route.workers:
            visits[worker].add(route.microbatch)
    for worker in plan.orders.workers:
        if worker not in visits:
            raise _invalid(plan, "the worker is not in the placement", worker)
    rows = dict(plan.orders.rows)
    for worker, expected in visits.items():
        if worker not in rows:
            raise _invalid(plan, "the worker has no row", worker)
        _check_row(plan, worker, rows[worker], expected)


def _check_ahead(plan: Plan) -> None:
    named = [(each.worker, each.microbatch) for each in plan.ahead]
    if named != sorted(set(named)):
        raise _invalid(plan, "what is run ahead must be sorted, at most once for a worker and a micro-batch")
    runs = {(visit.worker, route.microbatch): visit.layers for route in plan.routes.routes for visit in route.visits}
    for each in plan.ahead:
        own = runs.get((each.worker, each.microbatch))
        if own is None or own.stop != each.layers.start or not plan.placement.holds(each.worker, each.layers):
            rule = f"runs layers {each.layers} of micro-batch {each.microbatch} ahead, which are not its next ones"
            raise _invalid(plan, rule, each.worker)


def _check_row(plan: Plan, worker: WorkerId, row: tuple[Op, ...], expected: set[MicroBatch]) -> None:
    seen: defaultdict[MicroBatch, str] = defaultdict(str)
    for position, op in enumerate(row):
        if op.microbatch not in expected:
            raise _invalid(plan, f"micro-batch {op.microbatch} does not visit this worker", worker, position, op)
        rule = _broken_rule(seen[op.microbatch], op.kind)
        if rule:
            raise _invalid(plan, rule, worker, position, op)
        seen[op.microbatch] += op.kind.value
    for microbatch in sorted(expected):
        if seen[microbatch] not in ("FB", "FIW"):
            done = " ".join(seen[microbatch]) or "nothing"
            raise _invalid(plan, f"micro-batch {microbatch} needs F B or F I W here, found {done}", worker)


def _broken_rule(before: str, kind: OpKind) -> str:
    """Returns which rule an operation breaks after those that its micro-batch already had, or nothing."""
    if kind.value in before:
        return f"{kind.value} of this micro-batch is already done"
    allowed = {"": "F", "F": "BI", "FI": "W"}.get(before, "")
    if kind.value in allowed:
        return ""
    return f"{kind.value} cannot follow {' '.join(before) or 'nothing'}: expected F, then either B, or I and then W"


def _check_programs(plan: Plan, programs: tuple[WorkerProgram, ...]) -> None:
    form = {program.worker: program.closing for program in programs}
    fault = dry_run(form)
    if fault is None:
        return
    plain = {program.worker: program.instructions for program in programs}
    simpler = dry_run(plain)
    if simpler is not None:  # told without messages that have no part in it
        form, fault = plain, simpler
    instructions = form[fault.worker]
    position = sum(isinstance(done, Compute) and done.last for done in instructions[: fault.position])
    raise _invalid(plan, fault.rule, fault.worker, position, instructions[fault.position])


def _check_memory(plan: Plan, costs: Costs) -> None:
    work = WorkCosts(plan.placement, plan.routes, costs)
    for worker, row in plan.orders.rows:
        capacity = work.whole[worker].capacity
        if capacity is None:
            continue
        for position, held in enumerate(activation_memory(row, worker, work)):
            if held > capacity * (1 + 1e-9):
                rule = f"holds {held} of memory, more than the {capacity} that it has"
                raise _invalid(plan, rule, worker, position, row[position])


_Message = tuple[Payload, MicroBatch, int, WorkerId, WorkerId]
"""What, of which micro-batch, at which boundary of layers, from whom, to whom."""


class _DryRun:
    def __init__(self, programs: Mapping[WorkerId, tuple[Instruction, ...]]) -> None:
        self._programs = programs
        self._at = dict.fromkeys(self._programs, 0)
        self._sent: dict[_Message, int] = {}
        self._received: set[_Message] = set()
        self._arrived: defaultdict[Reduction, set[WorkerId]] = defaultdict(set)
        self._sums: defaultdict[tuple[WorkerId, ...], list[Reduction]] = defaultdict(list)
        self._taken_part: defaultdict[tuple[WorkerId, tuple[WorkerId, ...]], int] = defaultdict(int)

    def fault(self) -> Flaw | None:
        ready = list(self._programs)[::-1]
        while ready:
            worker = ready.pop()
            while self._at[worker] < len(self._programs[worker]):
                rule = self._send(worker)
                if rule:
                    return Flaw(rule=rule, worker=worker, position=self._at[worker])
                if not self._may_pass(worker):
                    break
                ready += self._pass(worker)
        return self._stuck() or self._unread()

    def _send(self, worker: WorkerId) -> str:
        """Registers what a worker does to others when it comes to its next instruction; returns a broken rule."""
        match self._instruction(worker):
            case Send(payload, microbatch, peer, boundary):
                message = (payload, microbatch, boundary, worker, peer)
                if message in self._sent:
                    return "the same message is sent twice"
                self._sent[message] = self._at[worker]
            case Reduce(reduction) if worker not in reduction.workers:
                return "the worker has no part in this reduction"
            case Reduce(reduction):
                self._arrived[reduction].add(worker)
                return self._out_of_turn(worker, reduction)
            case _:
                pass
        return ""

    def _out_of_turn(self, worker: WorkerId, reduction: Reduction) -> str:
        """Which of the sums of the same workers it is that somebody contributes to is told by their order alone."""
        sums, turn = self._sums[reduction.workers], self._taken_part[worker, reduction.workers]
        self._taken_part[worker, reduction.workers] += 1
        if turn == len(sums):
            sums.append(reduction)
        return "" if sums[turn] == reduction else f"the others have {sums[turn].name} here"

    def _may_pass(self, worker: WorkerId) -> bool:
        match self._instruction(worker):
            case Receive(payload, microbatch, peer, boundary):
                message = (payload, microbatch, boundary, peer, worker)
                return message in self._sent and message not in self._received
            case Sum(reduction):
                return len(self._arrived[reduction]) == len(reduction.workers)
        return True

    def _pass(self, worker: WorkerId) -> list[WorkerId]:
        """Goes on to the next instruction; returns the workers that this may free."""
        instruction = self._instruction(worker)
        self._at[worker] += 1
        match instruction:
            case Receive(payload, microbatch, peer, boundary):
                self._received.add((payload, microbatch, boundary, peer, worker))
            case Send(peer=peer) if peer in self._programs:
                return [peer]
            case Reduce(reduction):
                return [peer for peer in reduction.workers if peer != worker and peer in self._programs]
        return []

    def _instruction(self, worker: WorkerId) -> Instruction:
        return self._programs[worker][self._at[worker]]

    def _blockers(self, worker: WorkerId) -> list[WorkerId]:
        """The workers that a stuck worker waits for; none if it has ended."""
        if self._at[worker] == len(self._programs[worker]):
            return []
        match self._instruction(worker):
            case Receive(peer=peer):
                return [peer]
            case Sum(reduction):
                return [peer for peer in reduction.workers if peer not in self._arrived[reduction]]
        return []

    def _stuck(self) -> Flaw | None:
        """Follows who waits for whom, until somebody comes twice or the one waited for is not waiting."""
        worker = next((worker for worker in self._programs if self._blockers(worker)), None)
        if worker is None:
            return None
        chain: list[WorkerId] = []
        while worker not in chain:
            chain.append(worker)
            blocker = self._blockers(worker)[0]
            if blocker not in self._programs or not self._blockers(blocker):
                rule = f"waits for ever for worker {blocker}, which has ended"
                return Flaw(rule=rule, worker=worker, position=self._at[worker])
            worker = blocker
        cycle = chain[chain.index(worker) :]
        waits = ", ".join(f"{each} at {self._instruction(each)}" for each in cycle)
        return Flaw(rule=f"workers wait for one another: {waits}", worker=cycle[0], position=self._at[cycle[0]])

    def _unread(self) -> Flaw | None:
        for message, position in self._sent.items():
            if message not in self._received:
                return Flaw(rule="nobody receives this message", worker=message[3], position=position)
        return None
