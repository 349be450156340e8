"""Operations in columns: what each lasts, takes and frees. All that schedules them knows no more of them.

Operations are whole numbers, an entry of every column each; they may be the visits of whole micro-batches, or pieces of
a step that was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["INPUT", "Operations", "as_graph", "tails"]

INPUT = 1
"""The kind of those for which a worker may wait: I, or B."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Who runs what, how long that takes, and what has to be over before.

    Attributes:
        worker: the worker of every operation.
        kind: 0 for F, INPUT for I and B, 2 for W; only patience asks.
        length: its time.
        opens: whether it takes one of the places that its worker has for micro-batches; such operations queue apart.
        closes: whether it gives one back, if it does not open.
        takes: memory that it takes at its start, if it opens.
        gives: memory that it gives back at its end, if it does not open.
        own: what is ready on the same worker once it ends; -1: nothing.
        sends: what its message makes ready on another worker; -1: it has none.
        lag: how long that message is on its way; like all times not negative.
        more: what else waits for it, and how long behind its end.
        several: for how much those wait that wait for more than one thing.
        roots: those that wait for nothing.
        late: those whose message is on its way as all begins, by the moment at which it comes.
        room: memory of every worker; infinite without a limit.
    """

    worker: Sequence[int]
    kind: Sequence[int]
    length: Sequence[float]
    opens: Sequence[bool]
    closes: Sequence[bool]
    takes: Sequence[float]
    gives: Sequence[float]
    own: Sequence[int]
    sends: Sequence[int]
    lag: Sequence[float]
    roots: Sequence[int]
    room: Sequence[float]
    more: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)
    several: Mapping[int, int] = field(default_factory=dict)
    late: Mapping[float, Sequence[int]] = field(default_factory=dict)

    def behind(self, number: int) -> list[tuple[int, float]]:
        """What waits for an operation, and how long behind its end."""
        found = list(self.more.get(number, ()))
        if self.own[number] >= 0:
            found.append((self.own[number], 0.0))
        if self.sends[number] >= 0:
            found.append((self.sends[number], self.lag[number]))
        return found


def tails(operations: Operations) -> list[float]:
    """Returns the longest way from the start of every operation to the end of all that waits for it."""
    missing = [operations.several.get(number, 1) for number in range(len(operations.worker))]
    come = [*operations.roots, *(number for some in operations.late.values() for number in some)]
    order: list[int] = []
    while come:
        number = come.pop()
        missing[number] -= 1
        if not missing[number]:
            order.append(number)
            come += [then for then, _ in operations.behind(number)]
    found = [0.0] * len(operations.worker)
    for number in reversed(order):
        ways = (lag + found[then] for then, lag in operations.behind(number))
        found[number] = operations.length[number] + max(ways, default=0.0)
    return found


def as_graph(
    *,
    worker: Sequence[int],
    length: Sequence[float],
    opens: Sequence[bool],
    closes: Sequence[bool],
    edges: Iterable[tuple[int, int, float]],
    late: Iterable[tuple[int, float]] = (),
) -> Operations:
    """Returns operations of any graph, whose workers have memory enough.

    Args:
        worker: the worker of every operation, all from 0 on.
        length: its time.
        opens: whether it takes a place.
        closes: whether it gives one back.
        edges: an operation, one that waits for it, and how long behind its end.
        late: operations that wait for a message that is on its way, and when it comes.
    """
    more: dict[int, list[tuple[int, float]]] = {}
    waits = [0] * len(worker)
    for before, after, lag in edges:
        more.setdefault(before, []).append((after, lag))
        waits[after] += 1
    coming: dict[float, list[int]] = {}
    for number, at in late:
        if at > 0:
            coming.setdefault(at, []).append(number)
            waits[number] += 1
    nothing, nobody = (0.0,) * len(worker), (-1,) * len(worker)
    return Operations(
        worker=worker,
        kind=(0,) * len(worker),
        length=length,
        opens=opens,
        closes=closes,
        takes=nothing,
        gives=nothing,
        own=nobody,
        sends=nobody,
        lag=nothing,
        more=more,
        several={number: count for number, count in enumerate(waits) if count > 1},
        roots=[number for number, count in enumerate(waits) if not count],
        late=coming,
        room=(float("inf"),) * (1 + max(worker, default=-1)),
    )
