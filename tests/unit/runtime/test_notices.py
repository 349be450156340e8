"""Which signals are one notice, and which end a job at once."""

import os
import signal

import pytest

from holdfast.runtime.node import signals
from holdfast.runtime.node.signals import Signals, notice_from_cloud


@pytest.fixture
def heard(monkeypatch):
    """Sends signals, one after another, each a while behind the one before; returns which are notices, and an end."""
    monkeypatch.setattr(signals, "ONE_NOTICE_S", 0.0)

    def send(*which):
        answering, told = Signals(), []
        with answering.answered(), answering.heard(on_notice=lambda: told.append("notice"), wake=lambda: None):
            for each in which:
                notice_from_cloud() if each == "cloud" else os.kill(os.getpid(), each)
                if answering.interrupted is not None:
                    return [*told, "end"]
        return told

    return send


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("sent", "come"),
    [
        ((TERM,), ["notice"]),
        ((USR1, USR1), ["notice"]),
        ((TERM, USR1), ["notice"]),
        ((TERM, TERM), ["notice", "end"]),
        ((USR1, TERM), ["notice", "end"]),
        ((TERM, signal.SIGINT), ["notice", "end"]),
        (("cloud",), ["notice"]),
        (("cloud", TERM), ["notice"]),
        ((TERM, "cloud"), ["notice"]),
        (("cloud", TERM, TERM), ["notice", "end"]),
        ((TERM, "cloud", TERM, TERM), ["notice", "end"]),
        (("cloud", signal.SIGINT), ["notice", "end"]),
    ],
)
def test_what_a_cloud_and_its_system_say_is_one_notice(heard, sent, come):
    assert heard(*sent) == come


def test_what_the_system_says_in_the_same_moment_is_its_part_of_the_notice(monkeypatch):
    """The next SIGTERM is somebody else's."""
    answering = Signals()
    with answering.answered(), answering.heard(on_notice=lambda: None, wake=lambda: None):
        monkeypatch.setattr(signals, "ONE_NOTICE_S", 3600.0)
        notice_from_cloud()
        os.kill(os.getpid(), TERM)
        monkeypatch.setattr(signals, "ONE_NOTICE_S", 0.0)
        assert answering.interrupted is None
        os.kill(os.getpid(), TERM)
        assert answering.interrupted is not None


def test_where_no_notice_is_wanted_a_cloud_ends_the_job():
    answering = Signals()
    with answering.answered(), answering.heard(on_notice=None, wake=lambda: None):
        notice_from_cloud()
    assert answering.interrupted.signal_number == signal.SIGTERM
