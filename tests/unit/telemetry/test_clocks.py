"""What one clock shows when another shows a time, by comparisons."""

import subprocess
import sys

import pytest

from holdfast.telemetry.clocks import Clocks, is_clock, this_clock
from holdfast.telemetry.events import ClockCompared


def compared(mine, other, ahead_s, within_s=0.001):
    return ClockCompared(mine=mine, other=other, ahead_s=ahead_s, within_s=within_s)


@pytest.fixture
def clocks():
    return Clocks()


def told(clocks, time, clock, to):
    return clocks.told(time, clocks.way(clock, to))


def test_both_tell_each_others_times(clocks):
    clocks.learn(100.0, compared("a", "b", 3600.0))
    assert told(clocks, 3705.0, "b", "a") == pytest.approx(105.0)
    assert told(clocks, 105.0, "a", "b") == pytest.approx(3705.0)
    assert told(clocks, 105.0, "a", "a") == 105.0


def test_two_that_were_never_compared_are_told_by_a_third(clocks):
    """As when the coordinator's machine is lost, and a machine comes that it never saw."""
    clocks.learn(100.0, compared("a", "b", 3600.0))
    clocks.learn(3800.0, compared("b", "c", -3000.0))
    assert clocks.way("c", "a") == ("c", "b", "a")
    assert told(clocks, 810.0, "c", "a") == pytest.approx(210.0)


def test_of_a_clock_that_was_compared_with_none_nothing_is_told(clocks):
    clocks.learn(100.0, compared("a", "b", 3600.0))
    clocks.learn(100.0, compared("c", "d", 1.0))
    assert clocks.way("d", "a") is None
    assert clocks.way("e", "a") is None


def test_between_two_comparisons_a_clock_drifts(clocks):
    """Before the first and after the last one nothing is known of that."""
    clocks.learn(200.0, compared("a", "b", 0.02))
    clocks.learn(100.0, compared("a", "b", 0.01))
    for at, ahead in ((0.0, 0.01), (100.0, 0.01), (150.0, 0.015), (200.0, 0.02), (900.0, 0.02)):
        assert told(clocks, at, "a", "b") == pytest.approx(at + ahead)
        assert told(clocks, at + ahead, "b", "a") == pytest.approx(at)


def test_a_comparison_gives_way_to_one_soon_after_that_is_twice_as_good(clocks):
    clocks.learn(100.0, compared("a", "b", 5.03, within_s=0.05))
    clocks.learn(101.0, compared("a", "b", 5.0, within_s=0.001))
    assert told(clocks, 100.0, "a", "b") == pytest.approx(105.0)
    clocks.learn(300.0, compared("a", "b", 5.1, within_s=0.0001))
    assert told(clocks, 101.0, "a", "b") == pytest.approx(106.0), "it is long ago: the clock may have drifted since"


def test_all_processes_of_one_start_have_this_clock():
    program = "from holdfast.telemetry.clocks import this_clock; print(this_clock())"
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout.strip() == this_clock()
    assert is_clock(this_clock())
    assert not is_clock(this_clock() + "\n")
