"""After which step all go over into a generation that was prepared while others were run."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Boundary"]


class Boundary:
    """What workers tell each other with the sums of each step (docs/recovery.md).

    With its first contribution each says whether it knows of the generation, and holds what it follows. All go over
    behind the first settled step in which everybody said so. A step is settled at its end; where updates are ahead of
    that, at the end of the next one, but for the first step after a recovery, and those whose state something needs.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._known_in = 0  # the first step in which everybody says so
        self._resumed = 0

    def resume(self, step: int) -> None:
        """Training goes on from this step after a recovery."""
        self._resumed = step

    def prepare(self, generation: int, step: int, *, late: bool) -> None:
        """All hear of a generation during a step; ``late``: behind somebody's first contribution to it."""
        if generation != self._generation:
            self._generation, self._known_in = generation, step + late

    def catch_up(self, step: int) -> None:
        """Somebody holds what it follows from this step on."""
        self._known_in = step

    def lies_before(self, step: int, intervals: Iterable[int], *, staggered: bool) -> bool:
        """Return whether all go over before this step, provided that everybody holds what it follows.

        Args:
            step: the next one.
            intervals: of checkpoints and the like, in steps: something needs the state before each multiple; 0: none.
            staggered: whether updates are ahead of the verdict.
        """
        last = step - 1
        needed = any(every and step % every == 0 for every in intervals)
        at_its_end = not staggered or last == self._resumed or needed
        return self._known_in <= last - (not at_its_end)
