"""How a worker's heartbeats say what it is at: busy or waiting, for how long, against what it is used to."""

from __future__ import annotations

import pytest

from holdfast.core.work import Busy
from holdfast.protocol.pace import Pace

EXCUSED_S = 30.0


class Clocks:
    """Two clocks, of which one stands still during pauses."""

    def __init__(self):
        self.now, self.awake = 1000.0, 7.0
        self.pace = Pace(lambda: self.awake, EXCUSED_S, lambda: self.now)

    def spend(self, seconds):
        self.now += seconds
        self.awake += seconds

    def pause(self, seconds):
        self.now += seconds


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def pace(clocks):
    return clocks.pace


def test_work_is_measured_and_waiting_is_not(clocks, pace):
    pace.move(waiting=False)
    clocks.spend(0.02)
    assert pace.busy_s() == pytest.approx(0.02)
    pace.move(waiting=True)
    assert pace.slowest_s == pytest.approx(0.02)
    clocks.spend(0.05)
    assert pace.busy_s() == 0.0
    pace.move(waiting=False)
    assert (pace.slowest_s, pace.moves) == (pytest.approx(0.02), 3)
    assert pace.busy_s() > 0.0, "work that has just begun is no wait"


def test_a_pause_makes_nothing_slow(clocks, pace):
    pace.move(waiting=False)
    clocks.spend(0.02)
    clocks.pause(EXCUSED_S - 1.0)
    clocks.spend(0.03)
    assert pace.busy_s() == pytest.approx(0.05)
    pace.move(waiting=True)
    assert pace.slowest_s == pytest.approx(0.05)


def test_what_looks_like_a_pause_is_not_excused_for_ever(clocks, pace):
    """A thread that holds Python's lock keeps the sleeper from waking, too."""
    pace.move(waiting=False)
    clocks.pause(EXCUSED_S + 5.0)
    assert pace.busy_s() == pytest.approx(5.0)


def test_what_the_first_step_took_is_not_held_for_usual(clocks, pace):
    """Libraries load in it; a stall would be borne for eight times as long otherwise, for the rest of the job."""
    pace.move(waiting=False)
    clocks.spend(0.02)
    pace.move(waiting=True)
    pace.warm_up()
    assert pace.warm
    assert pace.slowest_s == 0.0


def test_the_first_operation_of_one_that_only_took_part_so_far_is_a_first_step_again(pace):
    pace.warm_up()
    pace.compute()
    assert not pace.warm
    pace.warm_up()
    pace.compute()
    assert pace.warm


def test_while_an_engine_is_built_nothing_counts_as_usual(pace):
    """A worker that changes places may take as long for that as when it was started."""
    pace.compute()
    pace.warm_up()
    pace.cool_down()
    assert not pace.warm
    pace.warm_up()
    pace.compute()
    assert not pace.warm, "the first operation on other layers"


def test_what_an_operation_loads_is_no_computing(clocks, pace):
    pace.move(waiting=False)
    clocks.spend(0.02)
    with pace.loading:
        clocks.spend(7.0)
        assert pace.busy() == (Busy.LOADING, pytest.approx(7.0), 0.0)
    clocks.spend(0.03)
    assert pace.busy() == (Busy.COMPUTING, pytest.approx(0.03), pytest.approx(0.02))
    pace.move(waiting=True)
    assert pace.slowest_s == pytest.approx(0.03)
    pace.move(waiting=False)
    with pace.loading:
        assert pace.busy() == (Busy.LOADING, pytest.approx(0.0, abs=1e-5), pytest.approx(7.0))
    pace.warm_up()
    with pace.loading:
        assert pace.busy()[2] == pytest.approx(0.0), "what came in the first step does not count"


def test_loading_that_raises_is_over(clocks, pace):
    pace.move(waiting=False)
    with pytest.raises(OSError, match="away"), pace.loading:
        raise OSError("away")
    assert pace.busy()[0] is Busy.COMPUTING


def test_what_a_script_does_while_we_wait_is_none_of_our_work(clocks, pace):
    """A script that compiles something outside of its loop."""
    pace.move(waiting=True)
    pace.turn_to(Busy.COMPILING)
    clocks.spend(50.0)
    assert pace.busy_s() == 0.0
    pace.move(waiting=False)
    clocks.spend(0.01)
    assert pace.busy() == (Busy.COMPUTING, pytest.approx(0.01), 0.0)


def test_a_part_ends_with_its_operation(clocks, pace):
    pace.move(waiting=False)
    pace.turn_to(Busy.COMPILING)
    clocks.spend(4.0)
    pace.move(waiting=False)
    clocks.spend(0.01)
    assert pace.busy() == (Busy.COMPUTING, pytest.approx(0.01), 0.0)


def test_where_nobody_tells_of_compiling_the_first_operations_are_it(clocks, pace):
    pace.compiles_unseen = True
    pace.move(waiting=False)
    clocks.spend(50.0)
    assert pace.busy()[0] is Busy.COMPILING
    pace.warm_up()
    assert pace.busy()[0] is Busy.COMPUTING
