"""Who fills which slot of a regular grid, so that plans for slots become plans for the workers in them.

Planners name workers by their slot, ``pipeline.stage``. Workers keep their ids for life, and fill another slot after
the grid has shrunk or after they have changed places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.plan import Ahead, Plan
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.schedule import Op, Orders
from holdfast.errors import ConfigError

__all__ = ["Slots", "exchanged", "renamed", "slots_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A regular grid of workers: every pipeline is cut in the same way and has equally many micro-batches.

    Attributes:
        stages: the layers of stage 0, 1, ...
        rows: the workers of pipeline 0, 1, ..., by stage.
        microbatches: the micro-batches of pipeline 0, 1, ...
    """

    stages: tuple[LayerRange, ...]
    rows: tuple[tuple[WorkerId, ...], ...]
    microbatches: tuple[tuple[MicroBatch, ...], ...]

    @property
    def workers(self) -> dict[WorkerId, WorkerId]:
        """The worker in every slot."""
        return {WorkerId(p, s): worker for p, row in enumerate(self.rows) for s, worker in enumerate(row)}

    def places(self, workers: Iterable[WorkerId]) -> frozenset[WorkerId]:
        """Returns the slots of workers.

        Raises:
            ConfigError: one of them has none.
        """
        place_of = {worker: place for place, worker in self.workers.items()}
        wanted = frozenset(workers)
        if unknown := wanted - place_of.keys():
            raise ConfigError(f"worker {min(unknown)} has no place among the {len(place_of)} of the grid")
        return frozenset(place_of[worker] for worker in wanted)

    def filled(self, plan: Plan) -> Plan:
        """Returns the plan for workers that a plan for slots is."""
        places = Batch(tuple(map(len, self.microbatches))).microbatches
        names = dict(zip(places, chain.from_iterable(self.microbatches), strict=True))
        return renamed(plan, self.workers, names)


def slots_of(plan: Plan) -> Slots | None:
    """Returns who fills which slot in the plan of a whole grid; None if that is not regular, or stages have lanes.

    Pipelines are in the order of their micro-batches, which follow one another in each; lanes take them by turns.

    Args:
        plan: a plan in which every worker computes.
    """
    served: dict[tuple[Visit, ...], list[MicroBatch]] = {}
    for route in plan.routes.routes:
        served.setdefault(route.visits, []).append(route.microbatch)
    cuts = {tuple(visit.layers for visit in row) for row in served}
    filled = sorted((visit.worker, visit.layers) for row in served for visit in row)
    alone = tuple(filled) == plan.placement.ranges and not plan.placement.followed
    in_turn = tuple(chain.from_iterable(served.values())) != plan.routes.microbatches
    if len(cuts) != 1 or not alone or in_turn or len({len(each) for each in served.values()}) != 1:
        return None
    rows = tuple(tuple(visit.worker for visit in row) for row in served)
    return Slots(stages=cuts.pop(), rows=rows, microbatches=tuple(map(tuple, served.values())))


def exchanged(plan: Plan, pairs: Iterable[tuple[WorkerId, WorkerId]]) -> Plan:
    """Returns a plan in which the two workers of each pair have changed places; no worker is in two pairs."""
    both = tuple(pairs)
    return renamed(plan, dict(both) | {other: one for one, other in both})


def renamed(
    plan: Plan, workers: Mapping[WorkerId, WorkerId], microbatches: Mapping[MicroBatch, MicroBatch] | None = None
) -> Plan:
    """Returns a plan in which others do what these do.

    Args:
        plan: a plan.
        workers: who takes whose part; no two take the same. Those that are not in it keep theirs.
        microbatches: likewise.
    """
    other = {} if microbatches is None else microbatches

    def who(worker: WorkerId) -> WorkerId:
        return workers.get(worker, worker)

    def what(microbatch: MicroBatch) -> MicroBatch:
        return other.get(microbatch, microbatch)

    placement, routes, orders = plan.placement, plan.routes.routes, plan.orders
    return Plan(
        placement=Placement(
            num_layers=placement.num_layers,
            ranges=tuple(sorted((who(worker), layers) for worker, layers in placement.ranges)),
            followed=tuple(sorted((who(worker), layers) for worker, layers in placement.followed)),
        ),
        routes=Routes(
            tuple(
                sorted(
                    (
                        Route(
                            what(route.microbatch),
                            tuple(Visit(who(visit.worker), visit.layers) for visit in route.visits),
                        )
                        for route in routes
                    ),
                    key=lambda route: route.microbatch,
                )
            )
        ),
        orders=Orders(
            tuple(
                sorted(
                    (who(worker), tuple(Op(op.kind, what(op.microbatch)) for op in row)) for worker, row in orders.rows
                )
            )
        ),
        ahead=tuple(sorted(Ahead(who(each.worker), what(each.microbatch), each.layers) for each in plan.ahead)),
    )
