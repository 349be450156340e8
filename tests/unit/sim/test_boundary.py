"""After which step all go over: behind the first settled one in which everybody knew."""

from __future__ import annotations

from holdfast.sim.boundary import Boundary

NONE = ()


def prepared(step, *, late=False):
    boundary = Boundary()
    boundary.resume(-5)
    boundary.prepare(7, step, late=late)
    return boundary


def first(boundary, *, staggered, intervals=NONE):
    """The first step that is run in the new generation."""
    return next(step for step in range(100) if boundary.lies_before(step, intervals, staggered=staggered))


def test_all_go_over_behind_the_step_in_which_everybody_knew():
    assert first(prepared(9), staggered=False) == 10
    assert first(prepared(9, late=True), staggered=False) == 11


def test_where_updates_are_ahead_that_is_known_a_step_later_unless_something_needs_the_state():
    assert first(prepared(9), staggered=True) == 11
    assert first(prepared(9), staggered=True, intervals=(0, 10)) == 10
    after_recovery = prepared(9)
    after_recovery.resume(9)
    assert first(after_recovery, staggered=True) == 10


def test_whoever_catches_up_is_waited_for_and_being_told_again_changes_nothing():
    boundary = prepared(9)
    boundary.catch_up(14)
    boundary.prepare(7, 20, late=True)
    assert first(boundary, staggered=False) == 15
