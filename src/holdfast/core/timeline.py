"""A step of a plan in time, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, StageCosts
from holdfast.core.schedule import Op, OpKind
from holdfast.core.work_costs import WorkCosts

__all__ = ["Span", "Timeline", "activation_memory", "peak_memory", "timeline"]


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
