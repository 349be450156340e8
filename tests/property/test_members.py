"""Whether all have said something is answered by counting while it can be, and always as by going through all."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.control.membership import GridState, Membership
from holdfast.control.membership.roster import Roster
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(3, split_evenly(4, 2), 2)
WORKERS = st.frozensets(st.sampled_from([*PLAN.workers, WorkerId(7, 0), WorkerId(0, 9)]))


@given(lost=WORKERS, arriving=WORKERS, told=WORKERS)
def test_counting_says_the_same_as_going_through_all(lost, arriving, told):
    roster = Roster(lost=lost, arriving=arriving)
    state = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=9, directory="out"), roster=roster)
    for everybody in (told, told | frozenset(state.alive)):
        assert state.has_all(everybody) == (everybody >= frozenset(state.alive))
    for worker in (*PLAN.workers, *told):
        assert state.is_alive(worker) == (worker in state.alive)
    assert "0.0" not in PLAN.placement
