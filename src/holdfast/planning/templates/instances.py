"""Which pipelines to make of so many nodes: the best multiset of templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import InfeasiblePlan
from holdfast.planning.templates.batches import fastest_shares
from holdfast.planning.templates.pace import Pace

__all__ = ["Instance", "best_instance"]

_Totals = npt.NDArray[np.int64]
_NEVER = -(1 << 40)
"""Less than any total, and still if totals are added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Pipelines that run side by side.

    Attributes:
        sizes: how many nodes pipeline 0, 1, ... has, ascending.
        microbatches: how many micro-batches each gets.
        dormant: nodes that no pipeline has.
    """

    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]
    dormant: int


def best_instance(paces: Mapping[int, Pace], nodes: int, at_least: int, microbatches: int) -> Instance:
    """Returns the pipelines that use all nodes and run a step in the least time, exactly.

    Where no pipelines can use all nodes, as many nodes as must be are dormant.

    Args:
        paces: how fast a pipeline is, by its nodes.
        nodes: nodes that there are.
        at_least: the fewest pipelines, f + 1, at least 1.
        microbatches: of a step, at least one for every pipeline.

    Raises:
        InfeasiblePlan: there are too few nodes, or micro-batches, for so many pipelines.

    Within a given time a pipeline of each size runs so many micro-batches and no more, so the most that all nodes can
    run is a knapsack; the least time in which that is all of the micro-batches is found by halving, down to the last
    bit.

    Source: Oobleck, section 4.2, which lists all multisets; their number grows exponentially (6.8e9 for 256
        nodes and sizes from 8 on).

    Cost: half a second for 1,024 nodes and 128 sizes.
    """
    used = _most_used(tuple(paces), nodes, at_least, microbatches)
    if used is None:
        raise InfeasiblePlan(
            f"{nodes} nodes and {microbatches} micro-batches do not make {at_least} pipeline(s) of at least "
            f"{min(paces, default=0)} nodes: expected more nodes, more micro-batches or fewer failures to tolerate"
        )
    low, high = 0.0, max(pace.seconds(microbatches) for pace in paces.values())
    best = _within(paces, used, at_least, microbatches, high)
    while low < (middle := (low + high) / 2) < high:
        found = _within(paces, used, at_least, microbatches, middle)
        if found is None:
            low = middle
        else:
            best = found
            high = _slowest(paces, found, microbatches)[1]
    assert best is not None, "one pipeline may run all micro-batches within the longest time"
    return Instance(sizes=best, microbatches=_slowest(paces, best, microbatches)[0], dormant=nodes - used)


def _slowest(paces: Mapping[int, Pace], sizes: Sequence[int], microbatches: int) -> tuple[tuple[int, ...], float]:
    """Returns the best shares of pipelines, and the time of the slowest."""
    chosen = [paces[size] for size in sizes]
    shares = fastest_shares(chosen, microbatches)
    return shares, max(pace.seconds(share) for pace, share in zip(chosen, shares, strict=True))


def _within(
    paces: Mapping[int, Pace], nodes: int, at_least: int, microbatches: int, seconds: float
) -> tuple[int, ...] | None:
    """Returns pipelines on all nodes that run so many micro-batches within a time; None if there are none."""
    most = {size: pace.most_within(seconds, microbatches) for size, pace in paces.items()}
    most = {size: count for size, count in most.items() if count}
    return _Knapsack(most, nodes, at_least, microbatches).filled() if most else None


def _most_used(sizes: Sequence[int], nodes: int, at_least: int, microbatches: int) -> int | None:
    """Returns how many of so many nodes pipelines can use; None if there are no such pipelines."""
    if not sizes or at_least > microbatches:
        return None
    possible = np.flatnonzero(_Knapsack(dict.fromkeys(sizes, 1), nodes, at_least, microbatches).totals >= 0)
    return int(possible[-1]) if len(possible) else None


class _Knapsack:
    """The most micro-batches that pipelines on so many nodes can run within some time.

    Attributes:
        totals: the most, by nodes; negative where no allowed number of pipelines uses exactly these.
    """

    def __init__(self, most: Mapping[int, int], nodes: int, at_least: int, microbatches: int) -> None:
        """Takes the most that a pipeline of each size can run, all above 0."""
        self._sizes: _Totals = np.array(sorted(most), dtype=np.int64)
        self._most: _Totals = np.array([most[size] for size in sorted(most)], dtype=np.int64)
        self._nodes, self._at_least, self._microbatches = nodes, at_least, microbatches
        self._bounded = microbatches < nodes // min(most)
        self._rows = [np.where(np.arange(nodes + 1) == 0, 0, _NEVER)]
        for _ in range(microbatches if self._bounded else at_least):
            self._rows.append(self._one_more(self._rows[-1]))
        if not self._bounded:
            self._rows[-1] = self._any_more(self._rows[-1])
        self.totals: _Totals = np.max(self._rows[at_least:], axis=0)

    def _one_more(self, row: _Totals) -> _Totals:
        """Returns the totals with one pipeline more."""
        found = np.full_like(row, _NEVER)
        for size, most in zip(self._sizes.tolist(), self._most.tolist(), strict=True):
            if size <= self._nodes:
                np.maximum(found[size:], row[: len(row) - size] + most, out=found[size:])
        return np.where(found < 0, _NEVER, found)

    def _any_more(self, row: _Totals) -> _Totals:
        """Returns the totals with any number of pipelines more."""
        found = row.copy()
        for nodes in range(int(self._sizes[0]), self._nodes + 1):
            fits = int(np.searchsorted(self._sizes, nodes, side="right"))
            found[nodes] = max(found[nodes], (found[nodes - self._sizes[:fits]] + self._most[:fits]).max())
        return np.where(found < 0, _NEVER, found)

    def filled(self) -> tuple[int, ...] | None:
        """Returns pipelines, by their sizes, that use all nodes and run all micro-batches; None if there are none."""
        nodes, total = self._nodes, int(self.totals[self._nodes])
        if total < self._microbatches:
            return None
        pipelines = next(c for c in range(self._at_least, len(self._rows)) if self._rows[c][nodes] == total)
        found = []
        while nodes:
            size, most, pipelines = self._last_of(pipelines, nodes, total)
            found.append(size)
            nodes, total = nodes - size, total - most
        return tuple(sorted(found))

    def _last_of(self, pipelines: int, nodes: int, total: int) -> tuple[int, int, int]:
        """Returns a pipeline of those that reach a total: its size, what it runs, and how many there are besides."""
        open_end = not self._bounded and pipelines == self._at_least
        for besides in (pipelines, pipelines - 1) if open_end else (pipelines - 1,):
            for size, most in zip(self._sizes.tolist(), self._most.tolist(), strict=True):
                if size <= nodes and self._rows[besides][nodes - size] + most == total:
                    return size, most, besides
        raise AssertionError(f"{total} micro-batches on {nodes} nodes come from no row")
