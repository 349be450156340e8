"""The process that fills the plan library of a running job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.slots import slots_of
from holdfast.errors import (
    HoldfastError,
)
from holdfast.planning.library import PlanLibrary
from holdfast.planning.planner import Solver
from holdfast.planning.training import grid_of_slots
from holdfast.runtime.specs import LibrarySpec
from holdfast.telemetry.events import (
    Event,
    EventLog,
    LibraryFilled,
    Notice,
)

__all__ = ["fill_library", "run_library"]

_LEAST = 19
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
    slots, library = slots_of(spec.plan), PlanLibrary(Path(spec.folder), note)
    assert slots is not None
    grid = grid_of_slots(slots, spec.terms)
    technique, engine = spec.terms.technique, Solver.AUTO
    while library.step(grid, spec.failures, technique, time_limit_s=search_s, engine=engine) is not None:
        pass


def run_library(spec: LibrarySpec) -> None:
    """Fills a job's plan library while training runs, whenever nothing else wants the processor, and ends.

    After failure: training goes on with the plans that are there, and with those made at once.
    """
    os.nice(_LEAST)
    log = EventLog(spec.events)

    def tell(event: Event) -> None:
        log.write(time.monotonic(), event)

    try:
        fill_library(spec, note=lambda text: tell(Notice(worker="library", text=text)))
        tell(LibraryFilled(failures=spec.failures))
    except HoldfastError as error:
        tell(Notice(worker="library", text=f"no further plan is made ahead: {error}"))
    os._exit(0)
