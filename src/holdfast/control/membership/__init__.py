"""The membership: who takes part in the job, and what to do next, as values and pure functions.

:func:`decide` is the whole of it; its module, ``decision``, has the picture of all states. The others do one job each
and import one way only, from what is decided first to what that ends in: pyproject.toml has their order.
"""

from holdfast.control.membership.agreement import Forming, Restoring
from holdfast.control.membership.blame import Exceptions
from holdfast.control.membership.decision import decide, end
from holdfast.control.membership.gathering import HEARD_S, unplaced
from holdfast.control.membership.grid import GridState
from holdfast.control.membership.recovering import plan_recovery, unplanned
from holdfast.control.membership.roster import Contact, Roster
from holdfast.control.membership.running import Prospects, Reports, Running, Situation, Upcoming
from holdfast.control.membership.starting import Starting, Vacancies
from holdfast.control.membership.state import (
    AnswerPlanned,
    Closed,
    Handover,
    Improved,
    Membership,
    Output,
    Phase,
    Record,
    Stay,
    Tell,
    Tick,
    Unadvised,
)
from holdfast.control.membership.storing import StoredDecision, restore, to_store
from holdfast.control.membership.vacancies import matched
from holdfast.control.membership.watching import node_due

__all__ = [
    "HEARD_S",
    "AnswerPlanned",
    "Closed",
    "Contact",
    "Exceptions",
    "Forming",
    "GridState",
    "Prospects",
    "Reports",
    "Restoring",
    "Roster",
    "Running",
    "Vacancies",
    "Handover",
    "Improved",
    "Membership",
    "Output",
    "Phase",
    "Record",
    "Situation",
    "Starting",
    "Stay",
    "StoredDecision",
    "Tell",
    "Tick",
    "Unadvised",
    "Upcoming",
    "decide",
    "end",
    "matched",
    "node_due",
    "plan_recovery",
    "restore",
    "to_store",
    "unplaced",
    "unplanned",
]
