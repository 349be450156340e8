"""How a worker's heartbeats say what it is at: busy or waiting, for how long, against what it is used to."""

from __future__ import annotations

from holdfast.runtime.shell import Pace


def spend(pace, seconds):
    """As if what goes on had begun earlier."""
    pace.since -= seconds


def test_work_is_measured_and_waiting_is_not():
    pace = Pace()
    pace.move(waiting=False)
    spend(pace, 0.02)
    assert pace.busy_s() >= 0.02
    pace.move(waiting=True)
    slowest_s = pace.slowest_s
    assert slowest_s >= 0.02
    spend(pace, 0.05)
    assert pace.busy_s() == 0.0
    pace.move(waiting=False)
    assert (pace.slowest_s, pace.moves) == (slowest_s, 3)


def test_what_the_first_step_took_is_not_held_for_usual():
    """Libraries load in it; a stall would be borne for eight times as long otherwise, for the rest of the job."""
    pace = Pace()
    pace.move(waiting=False)
    spend(pace, 0.02)
    pace.move(waiting=True)
    pace.warm_up()
    assert pace.warm
    assert pace.slowest_s == 0.0


def test_the_first_operation_of_one_that_only_took_part_so_far_is_a_first_step_again():
    pace = Pace()
    pace.warm_up()
    pace.compute()
    assert not pace.warm
    pace.warm_up()
    pace.compute()
    assert pace.warm


def test_while_an_engine_is_built_nothing_counts_as_usual():
    """A worker that changes places may take as long for that as when it was started."""
    pace = Pace()
    pace.compute()
    pace.warm_up()
    pace.cool_down()
    assert not pace.warm
    pace.warm_up()
    pace.compute()
    assert not pace.warm, "the first operation on other layers"
