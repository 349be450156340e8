"""What crossed boundaries between visits in a step, kept until nobody can need it again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.instructions import Payload
from holdfast.core.progress import Logged

__all__ = ["StepLog"]

_Key = tuple[Payload, int, int]
"""What, at which boundary of layers, of which micro-batch."""


@dataclass(slots=True, kw_only=True)
class StepLog:
    """The results of a worker's own operations, by step, micro-batch, boundary and direction, whoever they were for.

    Nothing is copied: what is kept is what was sent. A step is kept until the worker has begun the next one and knows
    the verdict over it, since it can be gone on with as long as all have its beginning: no more than two steps, and one
    where steps are settled before the next begins.

    Attributes:
        most_bytes: what does not fit beside the rest is not kept, and is computed again if it is needed; None: no
            limit.
        num_bytes: how much is kept.
        peak_bytes: how much was at most.
    """

    most_bytes: int | None = None
    num_bytes: int = 0
    peak_bytes: int = 0
    _kept: defaultdict[int, dict[_Key, Any]] = field(default_factory=lambda: defaultdict(dict))

    def keep(
        self, step: int, payload: Payload, boundary: int, number: int, value: Any, *, always: bool = False
    ) -> None:
        """Keeps a message that nobody changes any more; ``always``: whatever the limit is."""
        size = int(value.nbytes)
        if not always and self.most_bytes is not None and self.num_bytes + size > self.most_bytes:
            return
        self.drop(step, payload, boundary, number)
        self._kept[step][payload, boundary, number] = value
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def recall(self, step: int, payload: Payload, boundary: int, number: int) -> Any:
        """Returns what was kept; it stays here."""
        return self._kept[step][payload, boundary, number]

    def drop(self, step: int, payload: Payload, boundary: int, number: int) -> None:
        """Forgets one message, if it is here."""
        value = self._kept[step].pop((payload, boundary, number), None)
        self.num_bytes -= 0 if value is None else int(value.nbytes)

    def forget_before(self, step: int) -> None:
        """Forgets the steps before one."""
        self._forget([kept for kept in self._kept if kept < step])

    def forget_from(self, step: int) -> None:
        """Forgets a step and those behind it, which will be run again."""
        self._forget([kept for kept in self._kept if kept >= step])

    def _forget(self, steps: list[int]) -> None:
        for step in steps:
            self.num_bytes -= sum(int(value.nbytes) for value in self._kept.pop(step).values())

    def of(self, step: int) -> tuple[Logged, ...]:
        """Returns what is kept of a step, sorted."""
        found = defaultdict[tuple[Payload, int], list[int]](list)
        for payload, boundary, number in sorted(self._kept.get(step, ())):
            found[payload, boundary].append(number)
        return tuple(Logged(payload, boundary, tuple(numbers)) for (payload, boundary), numbers in found.items())
