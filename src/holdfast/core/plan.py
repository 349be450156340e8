"""A plan: placement, routes and orders, which is all that a step needs to know."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.placement import LayerRange, Placement
from holdfast.core.routes import Routes
from holdfast.core.schedule import Orders, format_orders

__all__ = ["Ahead", "Plan", "with_followers", "with_listeners"]


@dataclass(frozen=True, slots=True, order=True)
class Ahead:
    """A forward pass that adds to nothing: right behind its own one a worker runs layers that come next, too.

    What comes out is kept with what the worker hands on, and nothing else: should the worker that it does it for be
    lost, it can send that message.

    Attributes:
        worker: who, of the owners of these layers.
        microbatch: of which.
        layers: right behind those that the worker runs of it by its route.
    """

    worker: WorkerId
    microbatch: MicroBatch
    layers: LayerRange


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds which layers, where every micro-batch goes, and in which order every worker works.

    A plan is only a value: :func:`holdfast.core.validate.validate` proves it right.

    Attributes:
        placement: who holds and follows what.
        routes: where every micro-batch goes.
        orders: what every worker runs, in order.
        ahead: what is run besides, and adds to nothing, sorted.
    """

    placement: Placement
    routes: Routes
    orders: Orders
    ahead: tuple[Ahead, ...] = ()

    def __hash__(self) -> int:
        """Of all of it, gone through once: plans are keys."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.routes, self.orders, self.ahead))

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The living workers, sorted."""
        return self.placement.workers

    def writer_of(self, layer: int) -> WorkerId | None:
        """Returns who writes a layer into a checkpoint: layers are spread over their owners; None without an owner."""
        owners = self.placement.owners(layer)
        return owners[layer % len(owners)] if owners else None

    def digest(self) -> str:
        """Returns the SHA-256, in hexadecimal, of the plan's canonical text: equal for equal plans on any machine."""
        return hashlib.sha256(self.text().encode("ascii")).hexdigest()

    def text(self) -> str:
        """Returns the canonical text: layers per worker, visits per micro-batch, operations per worker."""
        lines = [f"layers {self.placement.num_layers}"]
        lines += [f"hold {worker}: {layers}" for worker, layers in self.placement.ranges]
        lines += [f"follow {worker}: {layers}" for worker, layers in self.placement.followed]
        whole = self.placement.single_ranges
        for route in self.routes.routes:
            stops = (
                f"{visit.worker}" if whole.get(visit.worker) == visit.layers else f"{visit.worker}[{visit.layers}]"
                for visit in route.visits
            )
            lines.append(f"route {route.microbatch}: {' '.join(stops)}")
        lines += [f"ahead {each.worker}: {each.microbatch} {each.layers}" for each in self.ahead]
        return "\n".join(lines) + "\n" + format_orders(self.orders)


def with_followers(plan: Plan, rows: Iterable[tuple[WorkerId, LayerRange]]) -> Plan:
    """Returns the plan with workers that follow layers: they take part in their reductions, verdicts and updates.

    Args:
        plan: a plan in which nobody follows any.
        rows: who follows which range. Those that are not in the plan compute nothing.
    """
    return _placed(plan, replace(plan.placement, followed=tuple(sorted(rows))))


def with_listeners(plan: Plan, rows: Iterable[tuple[WorkerId, LayerRange]]) -> Plan:
    """Returns the plan with more owners that compute nothing: they take part in reductions, verdicts and updates.

    Args:
        plan: a plan without these workers.
        rows: who holds which range.
    """
    return _placed(plan, replace(plan.placement, ranges=tuple(sorted((*plan.placement.ranges, *rows)))))


def _placed(plan: Plan, placement: Placement) -> Plan:
    new = frozenset(placement.workers) - frozenset(plan.orders.workers)
    orders = Orders(tuple(sorted((*plan.orders.rows, *((worker, ()) for worker in new)))))
    return replace(plan, placement=placement, orders=orders)
