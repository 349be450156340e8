"""Groups where logging has a price instead of a limit: bounds on what groups within the limit can cost at least.

With a price p for every logged byte, the least of recovery + p (logged - room) is a shortest path over machines, and
no groups within the limit have a recovery below it. The bound is best for one p; that of others may be better for a
part of the machines, so all that are tried are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.planning.groups.costs import GroupCosts

__all__ = ["Numbers", "Relaxed", "relaxed"]

Numbers = npt.NDArray[np.float64]
_PRICES = 24
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """What prices tell of groups; recovery is a share of that of all machines as one group, bytes are of all bytes.

    Attributes:
        edges: what a group costs, by its first machine and the machine behind it; infinite where none may be.
        logged: what the boundary before each machine takes; none before the first and behind the last.
        room: the limit.
        prices: those that were tried; axis: price.
        paid: the least that groups before a machine cost, logs up to the boundary before it included; axes: price,
            machine.
        to_pay: the least that groups from a machine on cost, logs behind it included; axes: price, machine.
        starts: the best groups within the limit that a price gave, by their first machines.
    """

    edges: Numbers
    logged: Numbers
    room: float
    prices: Numbers
    paid: Numbers
    to_pay: Numbers
    starts: tuple[int, ...]

    def bounds(self, stored: Numbers, machine: int) -> Numbers:
        """Returns what groups from a machine on cost at least, where this much is logged before it."""
        left = self.room - stored
        best: Numbers = (self.to_pay[:, machine, None] - self.prices[:, None] * left).max(axis=0)
        return best

    def possible(self, most: float) -> npt.NDArray[np.bool_]:
        """Returns which groups can be in groups that fit and cost at most this; axes as of :attr:`edges`."""
        found = np.isfinite(self.edges)
        for price, paid, to_pay in zip(self.prices, self.paid, self.to_pay, strict=True):
            through = paid[:-1, None] + self.edges + (price * self.logged + to_pay)[None, :]
            found &= through - price * self.room <= most
        return found


def relaxed(costs: GroupCosts) -> Relaxed:
    """Returns bounds of a chain of which not all boundaries can be logged.

    Seen as lines, cost over price, groupings that log too much and groupings that fit meet: where the best two known do
    is the next price. It is the best of all once the shortest path at it is no better than these two.

    Cost: O(N^2) for each price.
    """
    edges, logged, room = _shares(costs)
    prices, rows = [0.0], [_to_pay(edges, logged, 0.0)]
    fitting = tuple(place for place in range(edges.shape[0]) if not place or not costs.stored[place - 1])
    low, high = (_told(edges, logged, starts) for starts in (_path(edges, logged, 0.0, rows[0]), fitting))
    while len(prices) < _PRICES and low[1] > high[1]:
        price = (high[0] - low[0]) / (low[1] - high[1])
        prices.append(price)
        rows.append(_to_pay(edges, logged, price))
        starts = _path(edges, logged, price, rows[-1])
        here = _told(edges, logged, starts)
        if here[0] + price * here[1] >= low[0] + price * low[1] - _ROUNDING:
            break
        if here[1] <= room:
            high, fitting = here, starts
        else:
            low = here
    return Relaxed(
        edges=edges,
        logged=logged,
        room=room,
        prices=np.array(prices),
        paid=np.array([_paid(edges, logged, price) for price in prices]),
        to_pay=np.array(rows),
        starts=fitting,
    )


def _shares(costs: GroupCosts) -> tuple[Numbers, Numbers, float]:
    """Returns edges, what is logged before machines, and the limit, as shares: see :class:`Relaxed`."""
    count, whole, every = costs.chain.num_machines, costs.weighted(0, costs.chain.num_machines), sum(costs.stored)
    edges = np.full((count, count + 1), np.inf)
    for first in range(count):
        for stop in range(first + 1, count + 1):
            edges[first, stop] = costs.weighted(first, stop) / whole
            if stop < count and not costs.stored[stop - 1]:
                break
    return edges, np.array([0.0, *(each / every for each in costs.stored), 0.0]), costs.room / every


def _to_pay(edges: Numbers, logged: Numbers, price: float) -> Numbers:
    found = np.zeros(len(logged))
    for first in reversed(range(len(logged) - 1)):
        found[first] = (edges[first] + price * logged + found)[first + 1 :].min()
    return found


def _paid(edges: Numbers, logged: Numbers, price: float) -> Numbers:
    found = np.zeros(len(logged))
    for stop in range(1, len(logged)):
        found[stop] = (found[:stop] + edges[:stop, stop]).min() + price * logged[stop]
    return found


def _path(edges: Numbers, logged: Numbers, price: float, to_pay: Numbers) -> tuple[int, ...]:
    """Returns the first machines of the best groups at a price."""
    starts, first = [], 0
    while first < len(logged) - 1:
        starts.append(first)
        first += 1 + int((edges[first] + price * logged + to_pay)[first + 1 :].argmin())
    return tuple(starts)


def _told(edges: Numbers, logged: Numbers, starts: tuple[int, ...]) -> tuple[float, float]:
    """Returns recovery and logs of groups."""
    stops = [*starts[1:], len(logged) - 1]
    return float(edges[list(starts), stops].sum()), float(logged[stops].sum())
