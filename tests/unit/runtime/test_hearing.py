"""Who hears of a job is told everything in its order, and keeps nobody waiting."""

import threading

import pytest
from tests.waiting import LIMIT_S

from holdfast.runtime.launch.hearing import Hearing


def test_all_is_heard_in_its_order_by_one_thread_and_nobody_waits():
    go, heard = threading.Event(), []

    def hears(text):
        assert go.wait(LIMIT_S)
        heard.append((text, threading.current_thread()))

    with Hearing() as hearing:
        one, other = hearing.of(lambda number: hears(f"number {number}")), hearing.of(hears)
        one(1)
        other("a")
        one(2)
        assert heard == []
        go.set()
    assert [text for text, _ in heard] == ["number 1", "a", "number 2"]
    (thread,) = {thread for _, thread in heard}
    assert thread is not threading.current_thread()


def told_twice(fails):
    """Whoever hears the first has failed when the second is told."""
    with Hearing() as hearing:
        tell = hearing.of(fails)
        tell(1)
        hearing._thread.join(LIMIT_S)
        tell(2)


def test_what_a_call_raises_is_raised_where_the_next_thing_is_told():
    heard = []

    def fails(number):
        heard.append(number)
        raise ValueError("not to my taste")

    with pytest.raises(ValueError, match="not to my taste"):
        told_twice(fails)
    assert heard == [1]


def told_once(fails, then=lambda: None):
    with Hearing() as hearing:
        hearing.of(fails)(1)
        then()


def test_what_the_last_call_raises_is_raised_at_the_end_unless_something_else_was():
    def fails(number):
        raise ValueError(number)

    def ends():
        raise KeyError

    with pytest.raises(ValueError, match="1"):
        told_once(fails)
    with pytest.raises(KeyError):
        told_once(fails, then=ends)
