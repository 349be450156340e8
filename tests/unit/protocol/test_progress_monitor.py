"""How a worker's heartbeats say what it is at: busy or waiting, for how long, against what it is used to."""

from __future__ import annotations

import pytest

from holdfast.core.work import Busy
from holdfast.protocol.progress_monitor import ProgressMonitor

EXCUSED_S = 30.0


class Clocks:
    """Two clocks, of which one stands still during pauses."""

    def __init__(self):
        self.now, self.awake = 1000.0, 7.0
        self.monitor = ProgressMonitor(lambda: self.awake, EXCUSED_S, lambda: self.now)

    def spend(self, seconds):
        self.now += seconds
        self.awake += seconds

    def pause(self, seconds):
        self.now += seconds


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def monitor(clocks):
    return clocks.monitor


def test_work_is_measured_and_waiting_is_not(clocks, monitor):
    monitor.move(waiting=False)
    clocks.spend(0.02)
    assert monitor.busy_s() == pytest.approx(0.02)
    monitor.move(waiting=True)
    assert monitor.slowest_s == pytest.approx(0.02)
    clocks.spend(0.05)
    assert monitor.busy_s() == 0.0
    monitor.move(waiting=False)
    assert (monitor.slowest_s, monitor.moves) == (pytest.approx(0.02), 3)
    assert monitor.busy_s() > 0.0, "work that has just begun is no wait"


def test_a_pause_makes_nothing_slow(clocks, monitor):
    monitor.move(waiting=False)
    clocks.spend(0.02)
    clocks.pause(EXCUSED_S - 1.0)
    clocks.spend(0.03)
    assert monitor.busy_s() == pytest.approx(0.05)
    monitor.move(waiting=True)
    assert monitor.slowest_s == pytest.approx(0.05)


def test_what_looks_like_a_pause_is_not_excused_for_ever(clocks, monitor):
    """A thread that holds Python's lock keeps the sleeper from waking, too."""
    monitor.move(waiting=False)
    clocks.pause(EXCUSED_S + 5.0)
    assert monitor.busy_s() == pytest.approx(5.0)


def test_what_the_first_step_took_is_not_held_for_usual(clocks, monitor):
    """Libraries load in it; a stall would be borne for eight times as long otherwise, for the rest of the job."""
    monitor.move(waiting=False)
    clocks.spend(0.02)
    monitor.move(waiting=True)
    monitor.warm_up()
    assert monitor.warm
    assert monitor.slowest_s == 0.0


def test_the_first_operation_of_one_that_only_took_part_so_far_is_a_first_step_again(monitor):
    monitor.warm_up()
    monitor.compute()
    assert not monitor.warm
    monitor.warm_up()
    monitor.compute()
    assert monitor.warm


def test_while_an_engine_is_built_nothing_counts_as_usual(monitor):
    """A worker that changes places may take as long for that as when it was started."""
    monitor.compute()
    monitor.warm_up()
    monitor.cool_down()
    assert not monitor.warm
    monitor.warm_up()
    monitor.compute()
    assert not monitor.warm, "the first operation on other layers"


def test_what_an_operation_loads_is_no_computing(clocks, monitor):
    monitor.move(waiting=False)
    clocks.spend(0.02)
    with monitor.loading:
        clocks.spend(7.0)
        assert monitor.busy() == (Busy.LOADING, pytest.approx(7.0), 0.0)
    clocks.spend(0.03)
    assert monitor.busy() == (Busy.COMPUTING, pytest.approx(0.03), pytest.approx(0.02))
    monitor.move(waiting=True)
    assert monitor.slowest_s == pytest.approx(0.03)
    monitor.move(waiting=False)
    with monitor.loading:
        assert monitor.busy() == (Busy.LOADING, pytest.approx(0.0, abs=1e-5), pytest.approx(7.0))
    monitor.warm_up()
    with monitor.loading:
        assert monitor.busy()[2] == pytest.approx(0.0), "what came in the first step does not count"


def test_loading_that_raises_is_over(clocks, monitor):
    monitor.move(waiting=False)
    with pytest.raises(OSError, match="away"), monitor.loading:
        raise OSError("away")
    assert monitor.busy()[0] is Busy.COMPUTING


def test_what_a_script_does_while_we_wait_is_none_of_our_work(clocks, monitor):
    """A script that compiles something outside of its loop."""
    monitor.move(waiting=True)
    monitor.turn_to(Busy.COMPILING)
    clocks.spend(50.0)
    assert monitor.busy_s() == 0.0
    monitor.move(waiting=False)
    clocks.spend(0.01)
    assert monitor.busy() == (Busy.COMPUTING, pytest.approx(0.01), 0.0)


def test_a_part_ends_with_its_operation(clocks, monitor):
    monitor.move(waiting=False)
    monitor.turn_to(Busy.COMPILING)
    clocks.spend(4.0)
    monitor.move(waiting=False)
    clocks.spend(0.01)
    assert monitor.busy() == (Busy.COMPUTING, pytest.approx(0.01), 0.0)


def test_where_nobody_tells_of_compiling_the_first_operations_are_it(clocks, monitor):
    monitor.compiles_unseen = True
    monitor.move(waiting=False)
    clocks.spend(50.0)
    assert monitor.busy()[0] is Busy.COMPILING
    monitor.warm_up()
    assert monitor.busy()[0] is Busy.COMPUTING
