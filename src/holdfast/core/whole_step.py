"""The whole step of a plan, for each of its workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

from holdfast.core.ids import MicroBatch, WorkerId, beside
from holdfast.core.instructions import Reduction
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.routes import Visit
from holdfast.core.schedule import Op, OpKind
from holdfast.core.step_plan import Chain, Piece, StepPlan, SumPlan
from holdfast.errors import InvalidSchedule

__all__ = ["whole_step", "whole_steps"]

_Ties = tuple[tuple[int, ...], ...]
_Stops = dict[MicroBatch, tuple[Visit | None, Visit, Visit | None]]
"""For every micro-batch that visits a worker: the visit before, the worker's own, and the one after."""


def whole_steps(plan: Plan, ties: _Ties = ()) -> tuple[StepPlan, ...]:
    """Returns what every worker does in a whole step, sorted by worker.

    Args:
        plan: the plan; its orders are not checked here but in :func:`holdfast.core.validate.validate`.
        ties: tuples of layers that share weights.

    Raises:
        InvalidSchedule: an operation runs on a worker that its micro-batch does not visit, or nobody computes.
    """
    shared = _Shared.of(plan, ties, plan.workers)
    return tuple(shared.step(worker) for worker in plan.workers)


def whole_step(plan: Plan, worker: WorkerId, ties: _Ties = ()) -> StepPlan:
    """Returns what one worker does in a whole step; see :func:`whole_steps`. An excerpt of the plan suffices."""
    return _Shared.of(plan, ties, (worker,)).step(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the steps of some workers are made from."""

    plan: Plan
    ties: _Ties
    stops: dict[WorkerId, _Stops]
    sums: tuple[SumPlan, ...]
    chains: tuple[Chain, ...]
    rows: dict[WorkerId, tuple[Op, ...]]
    ahead: Mapping[WorkerId, dict[MicroBatch, LayerRange]]

    @classmethod
    def of(cls, plan: Plan, ties: _Ties, workers: tuple[WorkerId, ...]) -> _Shared:
        return cls(
            plan=plan,
            ties=ties,
            stops=_stops(plan, workers),
            sums=tuple(_sums(plan, ties)),
            chains=_chains(plan),
            rows=dict(plan.orders.rows),
            ahead=_ahead(plan),
        )

    def step(self, worker: WorkerId) -> StepPlan:
        num_layers = self.plan.placement.num_layers
        return StepPlan(
            worker=worker,
            num_layers=num_layers,
            span=LayerRange(0, num_layers),
            pieces=tuple(
                _pieces(worker, self.rows.get(worker, ()), self.stops.get(worker, {}), self.ahead.get(worker, {}))
            ),
            sums=tuple(each for each in self.sums if worker in each.reduction.workers),
            chains=tuple(chain for chain in self.chains if worker in chain.workers),
            updates=self.plan.placement.layers_of(worker),
            ties=self.ties,
        )


def _ahead(plan: Plan) -> Mapping[WorkerId, dict[MicroBatch, LayerRange]]:
    found: defaultdict[WorkerId, dict[MicroBatch, LayerRange]] = defaultdict(dict)
    for each in plan.ahead:
        found[each.worker][each.microbatch] = each.layers
    return found


def _pieces(
    worker: WorkerId, row: tuple[Op, ...], stops: _Stops, ahead: Mapping[MicroBatch, LayerRange]
) -> Iterator[Piece]:
    for position, op in enumerate(row):
        if op.microbatch not in stops:
            rule = "the micro-batch does not visit this worker"
            raise InvalidSchedule(rule, worker=str(worker), position=position, op=str(op))
        before, visit, after = stops[op.microbatch]
        if op.kind is OpKind.W:
            before = after = None
        elif op.kind is not OpKind.F:
            before, after = after, before
        yield Piece(
            op=op,
            layers=visit.layers,
            source=None if before is None else before.worker,
            targets=() if after is None else (after.worker,),
        )
        if op.kind is OpKind.F and op.microbatch in ahead:
            yield Piece(op=op, layers=ahead[op.microbatch], adds=False)


def _sums(plan: Plan, ties: _Ties) -> Iterator[SumPlan]:
    sharing, counted = plan.placement.members_by_layer, plan.routes.counted
    for unit in (*((layer,) for layer in reversed(range(plan.placement.num_layers))), *ties):
        if workers := tuple(sorted({worker for layer in unit for worker in sharing[layer]})):
            yield SumPlan(reduction=Reduction(unit, workers), contributions=counted)


def _stops(plan: Plan, workers: tuple[WorkerId, ...]) -> dict[WorkerId, _Stops]:
    found: dict[WorkerId, _Stops] = {worker: {} for worker in workers}
    for route in plan.routes.routes:
        visits = (None, *route.visits, None)
        for at, visit in enumerate(route.visits, start=1):
            if visit.worker in found:
                found[visit.worker][route.microbatch] = (visits[at - 1], visit, visits[at + 1])
    return found


def _chains(plan: Plan) -> tuple[Chain, ...]:
    """The routes that the verdict takes: by index and pipeline, those that add a worker; then one per listener.

    Only a worker that computes nothing is visited by none. One that computes must ride on a micro-batch of its own: it
    could not wait for another's before all that it runs without making others wait. A listener stands behind whoever
    runs the last of its layers, as it can vote no sooner; in the staggered form all before it would wait for that.
    """
    routes = plan.routes.covering
    chains = [Chain(route.microbatch, route.microbatch, route.workers) for route in routes]
    covered = {worker for chain in chains for worker in chain.workers}
    listeners = [worker for worker in plan.workers if worker not in covered]
    if listeners and not chains:
        raise InvalidSchedule("the worker listens, and nobody computes: no verdict", worker=str(listeners[0]))
    beyond = 1 + max((route.microbatch.index for route in plan.routes.routes), default=-1)
    for worker, along in zip(listeners, cycle(routes), strict=False):
        name, last = beside(worker.pipeline, beyond + worker.stage), plan.placement.layers_of(worker)[-1]
        behind = 1 + next(at for at, visit in enumerate(along.visits) if last in visit.layers.indices)
        chains.append(Chain(name, along.microbatch, (*along.workers[:behind], worker, *along.workers[behind:])))
    return tuple(chains)
