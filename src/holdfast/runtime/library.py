"""Fills the plan library of a running job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.core.seats import seats_of
from holdfast.planning.library import PlanLibrary
from holdfast.planning.training import seated_grid
from holdfast.runtime.processes import LibrarySpec

__all__ = ["fill_library"]

SEARCH_S = 5.0
"""How long a better schedule is searched for, for each of those that are not known to be the best."""


def fill_library(
    spec: LibrarySpec, *, search_s: float = SEARCH_S, note: Callable[[str], None] = lambda text: None
) -> None:
    """Makes what is missing, fewest failures first, then searches for better schedules, and returns.

    Args:
        spec: what to make plans for; they are made for the places of its plan, which is of a regular grid.
        search_s: seconds for each search.
        note: called with a line about a file that cannot be read or written.
    """
    seats, library = seats_of(spec.plan), PlanLibrary(Path(spec.folder), note)
    assert seats is not None
    grid = seated_grid(seats, spec.terms)
    while library.step(grid, spec.failures, spec.terms.technique, time_limit_s=search_s) is not None:
        pass
