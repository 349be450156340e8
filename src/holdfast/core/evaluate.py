"""Times a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts
from holdfast.core.schedule import Op, OpKind
from holdfast.core.work_costs import WorkCosts
from holdfast.errors import InvalidSchedule

__all__ = ["Span", "Timeline", "evaluate", "op_time", "peak_memory", "steady_period", "timeline"]


@dataclass(frozen=True, slots=True)
class Span:
    """One operation in time, in the units of the costs."""

    worker: WorkerId
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a plan in time, in the units of the costs.

    Attributes:
        spans: all operations, by worker and then in order.
        makespan: from the first start to the last end, without the optimizer.
        period: steady-state time between the starts of consecutive steps. With the optimizer step synchronous over all
            workers, the makespan and the longest optimizer step; staggered, the longest time over all workers from
            their first start to the end of their own optimizer step, which waits for the last end on any owner of any
            of their layers. Where layers are tied, for that on any owner of any of them. Followers are like owners;
            workers that compute nothing are not counted.
        peak_memory: the most memory that each worker holds at any time, sorted by worker.
    """

    spans: tuple[Span, ...]
    makespan: float
    period: float
    peak_memory: tuple[tuple[WorkerId, float], ...]

    def of(self, worker: WorkerId) -> tuple[Span, ...]:
        """Returns the operations of a worker, in order; empty for a worker without any."""
        return tuple(span for span in self.spans if span.worker == worker)


def evaluate(plan: Plan, costs: Costs, *, staggered: bool = False, ties: tuple[tuple[int, ...], ...] = ()) -> Timeline:
    """Returns when every operation runs, if each starts as soon as its worker is free and its input is there.

    An output takes the communication cost of the cut to reach the next worker and occupies neither of the two.
    Computation never waits for memory: the orders decide what is held.

    Args:
        plan: a plan that :func:`holdfast.core.validate.validate` accepts.
        costs: costs per layer of the same model.
        staggered: whether each stage runs its optimizer step as soon as its own workers are done.
        ties: tuples of layers that share weights, and are updated together.

    Raises:
        InvalidSchedule: workers wait for one another, so that the step never ends.

    Cost: linear in the number of operations.
    """
    work = WorkCosts(plan.placement, plan.routes, costs)
    return _timeline(plan, work, _Run(plan, costs, work).spans(), staggered=staggered, ties=ties)


def timeline(
    plan: Plan,
    costs: Costs,
    spans: tuple[Span, ...],
    *,
    staggered: bool = False,
    ties: tuple[tuple[int, ...], ...] = (),
) -> Timeline:
    """Returns what the times of all operations come to.

    Args:
        plan: the plan that was timed.
        costs: costs per layer of the same model.
        spans: all operations, by worker and then in order.
        staggered: whether each stage runs its optimizer step as soon as its own workers are done.
        ties: tuples of layers that share weights, and are updated together.
    """
    work = WorkCosts(plan.placement, plan.routes, costs)
    return _timeline(plan, work, spans, staggered=staggered, ties=ties)


def _timeline(
    plan: Plan, work: WorkCosts, spans: tuple[Span, ...], *, staggered: bool, ties: tuple[tuple[int, ...], ...]
) -> Timeline:
    stages = work.whole
    makespan = max((span.end for span in spans), default=0) - min((span.start for span in spans), default=0)
    longest = max(stage.optimizer for stage in stages.values())
    return Timeline(
        spans=spans,
        makespan=makespan,
        period=_staggered_period(plan, stages, spans, ties) if staggered else makespan + longest,
        peak_memory=tuple((worker, peak_memory(row, worker, work)) for worker, row in plan.orders.rows),
    )


def _staggered_period(
    plan: Plan, stages: dict[WorkerId, StageCosts], spans: tuple[Span, ...], ties: tuple[tuple[int, ...], ...]
) -> float:
    first: dict[WorkerId, float] = {}
    last: dict[WorkerId, float] = {}
    for span in spans:
        first[span.worker] = min(span.start, first.get(span.worker, span.start))
        last[span.worker] = max(span.end, last.get(span.worker, span.end))
    members = [[w for w in workers if w in first] for workers in plan.placement.members_by_layer]
    period = 0.0
    for unit in (*((layer,) for layer in range(len(members))), *ties):
        together = [worker for layer in unit for worker in members[layer]]
        reduced = max((last[worker] for worker in together), default=0)
        period = max([period, *(reduced + stages[worker].optimizer - first[worker] for worker in together)])
    return period


def steady_period(
    plan: Plan, costs: Costs, *, staggered: bool = False, ties: tuple[tuple[int, ...], ...] = (), steps: int = 12
) -> float:
    """Returns the time between consecutive steps when many are run one after another, each as soon as it can be.

    That is what a run should show. Where every worker computes something, it is never longer than the period of a
    schedule with the same orders, whose stages may have to wait for one another a little differently in the first
    steps.

    Args:
        plan: a plan that :func:`holdfast.core.validate.validate` accepts.
        costs: costs per layer of the same model.
        staggered: whether each layer is updated as soon as its own owners are done.
        ties: tuples of layers that share weights, and are updated together.
        steps: how many are run; the second half counts.

    Raises:
        InvalidSchedule: workers wait for one another, so that the step never ends.
    """
    work = WorkCosts(plan.placement, plan.routes, costs)
    stages = work.whole
    units = [*((layer,) for layer in range(plan.placement.num_layers)), *ties]
    members = plan.placement.members_by_layer
    together = [{worker for layer in unit for worker in members[layer]} for unit in units]
    if not staggered:
        together = [set(stages)]
    free = dict.fromkeys(stages, 0.0)
    begins: list[float] = []
    for _ in range(steps):
        spans = _Run(plan, costs, work, free).spans()
        begins.append(min(span.start for span in spans))
        ends = dict(free)
        for span in spans:
            ends[span.worker] = max(ends[span.worker], span.end)
        reduced = [(workers, max(ends[worker] for worker in workers)) for workers in together]
        free = {
            worker: max(end for workers, end in reduced if worker in workers) + stage.optimizer
            for worker, stage in stages.items()
        }
    half = steps // 2
    return (begins[-1] - begins[-1 - half]) / half


def op_time(kind: OpKind, stage: StageCosts) -> float:
    """Returns how long an operation occupies its worker."""
    match kind:
        case OpKind.F:
            return stage.forward
        case OpKind.B:
            return stage.backward
        case OpKind.I:
            return stage.input_apart
        case OpKind.W:
            return stage.weight


def peak_memory(row: tuple[Op, ...], worker: WorkerId, work: WorkCosts) -> float:
    """Returns the most memory that a worker holds while it runs its operations, which only their order decides."""
    return max(activation_memory(row, worker, work), default=work.whole[worker].state)


def activation_memory(row: tuple[Op, ...], worker: WorkerId, work: WorkCosts) -> tuple[float, ...]:
    """Returns the memory held during every operation of a worker's row, with that of its layers' state."""
    held = work.whole[worker].state
    during: list[float] = []
    for op in row:
        visit = work.of(worker, op.microbatch)
        held += visit.takes if op.kind is OpKind.F else 0
        during.append(held)
        held -= visit.gives_input if op.kind in (OpKind.I, OpKind.B) else 0
        held -= visit.gives_weight if op.kind in (OpKind.W, OpKind.B) else 0
    return tuple(during)


_Output = tuple[WorkerId, MicroBatch, bool]
"""What an operation waits for: the forward (True) or backward result of a worker for a micro-batch."""


class _Run:
    """Runs the orders in no particular sequence of workers; a worker that lacks its input is woken when it arrives."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        work: WorkCosts,
        free: Mapping[WorkerId, float] | None = None,
    ) -> None:
        self._free = free or {}
        self._rows = dict(plan.orders.rows)
        self._routes = {route.microbatch: route.workers for route in plan.routes.routes}
        self._cuts = {route.microbatch: route.visits for route in plan.routes.routes}
        self._comm = costs.comm
        self._work = work
        self._spans: dict[WorkerId, list[Span]] = {worker: [] for worker in self._rows}
        self._ends: dict[_Output, float] = {}
        self._waiting: dict[_Output, WorkerId] = {}

    def spans(self) -> tuple[Span, ...]:
        ready = list(reversed(self._rows))
        while ready:
            ready.extend(self._advance(ready.pop()))
        for output, worker in self._waiting.items():
            self._refuse(worker, output)
        return tuple(span for row in self._spans.values() for span in row)

    def _advance(self, worker: WorkerId) -> list[WorkerId]:
        """Runs a worker's operations until one lacks its input; returns the workers that waited for results."""
        done, woken = self._spans[worker], []
        now = done[-1].end if done else self._free.get(worker, 0)
        for op in self._rows[worker][len(done) :]:
            needs, delay = self._input(worker, op)
            if needs is not None and needs not in self._ends:
                self._waiting[needs] = worker
                break
            start = now if needs is None else max(now, self._ends[needs] + delay)
            now = start + op_time(op.kind, self._work.of(worker, op.microbatch))
            done.append(Span(worker, op, start, now))
            woken += self._finish(worker, op, now)
        return woken

    def _input(self, worker: WorkerId, op: Op) -> tuple[_Output | None, float]:
        route = self._routes[op.microbatch]
        forward = op.kind is OpKind.F
        here = route.index(worker)
        at = here + (-1 if forward else 1)
        if not 0 <= at < len(route):
            return None, 0
        cut = self._cuts[op.microbatch][min(at, here)].layers.stop - 1
        return (route[at], op.microbatch, forward), self._comm[cut]

    def _finish(self, worker: WorkerId, op: Op, end: float) -> list[WorkerId]:
        if op.kind is OpKind.W:
            return []
        output = (worker, op.microbatch, op.kind is OpKind.F)
        self._ends[output] = end
        return [self._waiting.pop(output)] if output in self._waiting else []

    def _refuse(self, worker: WorkerId, output: _Output) -> None:
        position = len(self._spans[worker])
        what = f"{'forward' if output[2] else 'backward'} result of micro-batch {output[1]} from worker {output[0]}"
        op = str(self._rows[worker][position])
        raise InvalidSchedule(f"waits for ever for the {what}", worker=str(worker), position=position, op=op)
