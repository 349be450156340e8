"""Which answers to pulses are worth a line."""

import math

import pytest
from tests.processes import process_of

from holdfast.control.comparing import Comparing
from holdfast.control.messages import Pulsed
from holdfast.telemetry.clocks import WINDOW_S

AHEAD_S = 3600.0


@pytest.fixture
def ours():
    return Comparing("ours")


def heard(comparing, at, round_trip_s, *, ahead_s=AHEAD_S, clock="theirs"):
    """An answer to a pulse of that time; the ways there and back take equally long."""
    now_s = at + round_trip_s / 2 + ahead_s
    answer = Pulsed(process=process_of(None, 1), clock=clock, sent_s=at, now_s=now_s)
    return comparing.heard(answer, at + round_trip_s)


def test_the_first_one_is_and_whatever_is_twice_as_good(ours):
    at, first = heard(ours, 10.0, 0.008)
    assert at == pytest.approx(10.004)
    assert (first.mine, first.other) == ("ours", "theirs")
    assert (first.ahead_s, first.within_s) == pytest.approx((AHEAD_S, 0.004))
    assert heard(ours, 11.0, 0.006) is None
    assert heard(ours, 12.0, 0.003)[1].within_s == pytest.approx(0.0015)


def test_the_best_of_a_minute_is_told_as_of_when_it_was(ours):
    heard(ours, 10.0, 0.002)
    assert [heard(ours, at, trip) for at, trip in ((20.0, 0.009), (30.0, 0.003), (40.0, 0.005))] == [None] * 3
    at, best = heard(ours, 10.0 + WINDOW_S, 0.1)
    assert (at, best.within_s) == pytest.approx((30.0015, 0.0015))
    assert heard(ours, 11.0 + WINDOW_S, 0.1) is None, "the next minute has begun"


def test_each_clock_is_told_by_itself_and_our_own_never(ours):
    assert heard(ours, 10.0, 0.002)
    assert heard(ours, 10.0, 0.002, clock="thirds")
    assert heard(ours, 10.0, 0.002, clock="ours") is None


@pytest.mark.parametrize(("sent_s", "now_s"), [(11.0, 1.0), (math.nan, 1.0), (-math.inf, 1.0), (9.0, math.inf)])
def test_what_cannot_be_is_no_answer(ours, sent_s, now_s):
    answer = Pulsed(process=process_of(None, 1), clock="theirs", sent_s=sent_s, now_s=now_s)
    assert ours.heard(answer, 10.0) is None
