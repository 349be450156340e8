"""Which answers to pulses are worth a line."""

import math

import pytest
from tests.processes import process_of

from holdfast.control.comparing import Comparing
from holdfast.control.messages import Pulsed
from holdfast.telemetry.clocks import WINDOW_S

AHEAD_S = 3600.0
OURS, THEIRS, THIRDS = (12 * digit for digit in "abc")


@pytest.fixture
def ours():
    return Comparing(OURS)


def heard(comparing, at, round_trip_s, *, ahead_s=AHEAD_S, clock=THEIRS):
    """An answer to a pulse of that time; the ways there and back take equally long."""
    now_s = at + round_trip_s / 2 + ahead_s
    answer = Pulsed(process=process_of(None, 1), clock=clock, sent_s=at, now_s=now_s)
    return comparing.heard(answer, at + round_trip_s)


def test_the_first_one_is_and_whatever_is_twice_as_good(ours):
    at, first = heard(ours, 10.0, 0.008)
    assert at == pytest.approx(10.004)
    assert (first.mine, first.other) == (OURS, THEIRS)
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
    assert heard(ours, 10.0, 0.002, clock=THIRDS)
    assert heard(ours, 10.0, 0.002, clock=OURS) is None


@pytest.mark.parametrize(
    ("sent_s", "now_s", "clock"),
    [
        (11.0, 1.0, THEIRS),
        (math.nan, 1.0, THEIRS),
        (-math.inf, 1.0, THEIRS),
        (9.0, math.inf, THEIRS),
        (-1.7e308, 1.7e308, THEIRS),
        (9.0, 9.5, "../../etc"),
    ],
)
def test_what_cannot_be_is_no_answer(ours, sent_s, now_s, clock):
    answer = Pulsed(process=process_of(None, 1), clock=clock, sent_s=sent_s, now_s=now_s)
    assert ours.heard(answer, 10.0) is None
