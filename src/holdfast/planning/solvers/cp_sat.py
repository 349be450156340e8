"""The child process that solves a schedule with CP-SAT: a problem as JSON on stdin, the best found on stdout.

Short times in whole numbers are solved by counting (:mod:`holdfast.planning.solvers.counting`), other problems with a
variable for every start (:mod:`holdfast.planning.solvers.starts`); large ones in whole numbers are improved window by
window (:mod:`holdfast.planning.solvers.windows`). The largest ones are left as they are.
"""

from __future__ import annotations

from typing import Any

from holdfast.planning.solvers import counting, starts, windows
from holdfast.planning.solvers.child import answer

__all__ = ["solve"]


def solve(given: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"status", "value", "bound", "starts"}``; ``starts`` is empty if nothing was found.

    Args:
        given: as :func:`holdfast.planning.solvers.process.given_of` makes it.
    """
    if counting.suits(given):
        return counting.solve(given)
    if windows.suits(given):
        return windows.solve(given)
    if windows.too_large(given):
        return {"status": "UNKNOWN", "value": None, "bound": given["goal"], "starts": []}
    return starts.solve(given)


if __name__ == "__main__":
    answer(solve)
