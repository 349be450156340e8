"""The membership: who takes part in the job, and what to do next, as values and pure functions.

:func:`decide` is the whole of it; its module, ``decision``, has the picture of all states. The others do one job each
and import one way only, from what is decided first to what that ends in: pyproject.toml has their order.
"""

from holdfast.control.membership.decision import decide, end
from holdfast.control.membership.recovering import plan_recovery, unplanned
from holdfast.control.membership.starting import Starting
from holdfast.control.membership.state import (
    AnswerPlanned,
    Closed,
    Handover,
    Improved,
    Membership,
    Output,
    Phase,
    Record,
    Tell,
    Tick,
    Upcoming,
)
from holdfast.control.membership.storing import restore, to_store

__all__ = [
    "AnswerPlanned",
    "Closed",
    "Handover",
    "Improved",
    "Membership",
    "Output",
    "Phase",
    "Record",
    "Starting",
    "Tell",
    "Tick",
    "Upcoming",
    "decide",
    "end",
    "plan_recovery",
    "restore",
    "to_store",
    "unplanned",
]
