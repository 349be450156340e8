"""What may come before anybody has asked for it: the messages of a generation's plan, those of two steps at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.core.ids import WorkerId
from holdfast.runtime.tensors import num_bytes
from holdfast.runtime.transport.links.parts import longest_parts
from holdfast.runtime.transport.links.wire import BadFrame, Kind, Label, label_of, label_of_sum
from holdfast.runtime.transport.port import Expected, MessageKey, SumKey

__all__ = ["Allowance"]

_UNPLANNED_BYTES = 4 << 30
"""May wait where no plan is known."""
_STEPS = 2
"""Nobody begins a step before all have begun the one before: docs/staggered.md has the proof."""


class Allowance:
    """How much waits to be asked for, and how much may.

    Args:
        sizes: of every message of a step, by its sender and its label in step 0: the most bytes, and how many such
            there may be, as of the parts of a sum; None: not known.
    """

    def __init__(self, sizes: Mapping[tuple[WorkerId, Label], tuple[int, int]] | None = None) -> None:
        self._sizes = sizes
        self._most_bytes, self._most_messages = _UNPLANNED_BYTES, None
        if sizes is not None:
            self._most_bytes = _STEPS * sum(size * times for size, times in sizes.values())
            self._most_messages = _STEPS * sum(times for _, times in sizes.values())
        self._bytes = self._count = 0

    @classmethod
    def of(cls, worker: WorkerId, generation: int, expected: Expected | None) -> Allowance:
        """Returns that of a worker in a generation."""
        return cls(None if expected is None else dict(_sizes(worker, generation, expected)))

    def park(self, source: WorkerId, label: Label, size: int) -> None:
        """A message begins to come that nobody has asked for.

        Raises:
            BadFrame: the plan has no such message, or none as long, or as many wait as may.
        """
        self.check(source, label, size)
        if self._bytes + size > self._most_bytes or self._count == self._most_messages:
            raise BadFrame(
                f"{label} of {size} bytes: {self._count} messages of {self._bytes} bytes wait, and no more may"
            )
        self._bytes += size
        self._count += 1

    def check(self, source: WorkerId, label: Label, size: int) -> None:
        """Checks a message of which whoever asked for it does not know how long it is.

        Raises:
            BadFrame: the plan has no such message, or none as long.
        """
        if self._sizes is None:
            return
        of_sums = label.kind is Kind.PART
        most, _ = self._sizes.get(
            (source, label._replace(step=0, microbatch=0 if of_sums else label.microbatch)), (None, 0)
        )
        if most is None:
            raise BadFrame(f"{label}: the plan has no such message")
        if size > most:
            raise BadFrame(f"{label} of {size} bytes: the plan gives it {most}")

    def ask(self, size: int) -> None:
        """Somebody asks for a message that has begun to come."""
        self._bytes -= size
        self._count -= 1


def _sizes(
    worker: WorkerId, generation: int, expected: Expected
) -> Iterator[tuple[tuple[WorkerId, Label], tuple[int, int]]]:
    for receive, spec in expected.messages:
        yield (receive.peer, label_of(MessageKey.of(receive, generation, 0))), (num_bytes(spec), 1)
    for reduction, size in expected.sums:
        key = SumKey(generation, 0, reduction)
        for kind, most in longest_parts(size, len(reduction.workers)).items():
            for other in reduction.workers:
                if other != worker:
                    yield (other, label_of_sum(key, kind)), (most, size.parts if kind is Kind.PART else 1)
