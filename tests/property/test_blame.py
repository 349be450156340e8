"""Whose fault exceptions are: the answer does not depend on the order in which reports came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.processes import process_of

from holdfast.control.membership.blame import Program, judge, recent
from holdfast.control.messages import Raised
from holdfast.core.ids import WorkerId
from holdfast.core.work import WorkPhase

NUMBERS = st.integers(0, 8)


@st.composite
def reports(draw, last=4):
    """At most one of each process, as a worker that has stopped reports no more."""
    found = []
    for number in draw(st.lists(NUMBERS, unique=True, max_size=6)):
        phase = draw(st.sampled_from([WorkPhase.LOADING, WorkPhase.FORWARD, WorkPhase.OTHER]))
        found.append(
            Raised(
                worker=WorkerId(*divmod(number, 3)),
                process=process_of(WorkerId(0, 0), number),
                generation=draw(st.integers(1, 2)),
                step=draw(st.integers(3, last)),
                phase=phase,
                kind=draw(st.sampled_from(["ValueError", "KeyError"])),
                error="it",
                layer=draw(st.integers(0, 1)) if phase is WorkPhase.FORWARD else None,
                item=draw(st.integers(0, 1)) if phase is WorkPhase.LOADING else None,
                microbatch=draw(st.none() | st.integers(0, 5)),
            )
        )
    return found


def place(report):
    return report.step, report.phase, report.kind, report.layer, report.item


@given(reports(), st.integers(0, 6), st.randoms(use_true_random=False))
def test_the_order_of_reports_changes_nothing_but_who_was_first(found, tolerate, random):
    shuffled = random.sample(found, len(found))
    one, other = judge(found, found, tolerate), judge(shuffled, shuffled, tolerate)
    assert (one is None) == (other is None)


@given(reports(), st.integers(0, 6))
def test_it_is_the_program_where_two_met_the_same_or_too_many_were_lost(found, tolerate):
    places = [place(each) for each in found]
    shared = [each for each in found if places.count(place(each)) > 1]
    verdict = judge(found, found, tolerate)
    if shared:
        assert verdict is not None
        assert verdict.first == shared[0]
    else:
        assert (verdict is None) == (len(found) <= max(1, tolerate))
        assert verdict is None or verdict.first == found[0]


@given(reports(), st.data())
def test_reports_that_come_one_by_one_are_judged_as_if_together(found, data):
    """Judged alone and then with what the redo brings: what is the program together is so when the last has come."""
    cut = data.draw(st.integers(0, len(found)))
    early, late = judge(found[:cut], (), 9), judge(found, (), 9)
    assert early is None or late is not None
    if early is not None:
        assert late.first in found
        assert place(late.first) in [place(each) for each in found]


@given(reports(last=300))
def test_losses_count_for_a_hundred_steps(found):
    newest = max((each.step for each in found), default=0)
    assert recent(found) == tuple(each for each in found if each.step > newest - 100)


def test_it_is_told_where_what_and_the_first_traceback():
    first = Raised(
        worker=WorkerId(1, 2),
        process=process_of(WorkerId(1, 2), 4),
        generation=1,
        step=3,
        phase=WorkPhase.FORWARD,
        kind="ValueError",
        error="ValueError: no such token",
        layer=5,
        microbatch=2,
        traceback="Traceback:\n  first\n",
    )
    again = Raised(
        worker=WorkerId(0, 2),
        process=process_of(WorkerId(0, 2), 5),
        generation=2,
        step=3,
        phase=WorkPhase.FORWARD,
        kind="ValueError",
        error="ValueError: another text",
        layer=5,
        microbatch=7,
    )
    verdict = judge([first, again], (), 0)
    assert isinstance(verdict, Program)
    assert verdict.detail == (
        "worker 1.2, step 3, forward of layer 5, micro-batch 2: ValueError: no such token; "
        "worker 0.2 met the same, so it is the program\nTraceback:\n  first"
    )
