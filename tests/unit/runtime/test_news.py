"""Lines on who is lost or has come, why, and how long it took."""

from __future__ import annotations

from holdfast.control.messages import Progress
from holdfast.runtime.node.news import Reporter
from holdfast.telemetry.events import Detected, HandingOver, Migrating, Notice, Parted, Seated, Synced

LOST = Detected(worker="1.2", how="process ended: signal 9", generation=1)


def progress(alive=11):
    return Progress(step=7, loss=None, omitted=False, alive=alive, generation=2)


def came(worker="1.2"):
    return Synced(worker=worker, entered=30, step=33, bytes=10)


def test_a_loss_is_told_at_once_and_how_long_it_took_when_the_others_go_on():
    reporter = Reporter(of=12)
    assert reporter.progressed(progress(12), 1.0) is None
    assert reporter.tell(LOST, 10.0) == "worker 1.2 is lost: process ended: signal 9"
    assert reporter.progressed(progress(), 10.5) == (
        "training goes on with 11 of 12 workers, 0.50 s after the loss of 1.2"
    )
    assert reporter.progressed(progress(), 11.0) is None


def test_losses_that_are_answered_together_are_told_together_since_the_first():
    reporter = Reporter(of=12)
    reporter.tell(LOST, 10.0)
    reporter.tell(Detected(worker="0.1", how="no sign of life for 2.0 s", generation=2), 10.25)
    assert reporter.progressed(progress(10), 11.0) == (
        "training goes on with 10 of 12 workers, 1.00 s after the loss of 0.1, 1.2"
    )


def test_one_that_comes_is_told_with_the_time_since_it_was_started_here():
    reporter = Reporter(of=12)
    reporter.asked("1.2", 20.0)
    assert reporter.tell(came(), 21.5) == (
        "worker 1.2 has come: it takes part from step 33 on, 1.50 s after it was started"
    )
    assert reporter.tell(came("0.0"), 22.0) == "worker 0.0 has come: it takes part from step 33 on"


def test_the_loss_of_a_spare_holds_nobody_up():
    reporter = Reporter(of=12)
    lost = Detected(worker="3.0", how="process ended: signal 9", generation=1, spare=True)
    assert reporter.tell(lost, 10.0) == "worker 3.0, a spare, is lost: process ended: signal 9"
    assert reporter.progressed(progress(12), 10.5) is None


def test_a_spare_that_takes_a_place_is_told():
    assert Reporter(of=12).tell(Seated(worker="3.0", place="1.2"), 1.0) == (
        "worker 3.0 takes the place of 1.2, which is lost"
    )


def test_one_that_goes_in_order_and_any_other_news():
    reporter = Reporter(of=12)
    gone = reporter.tell(Parted(worker="1.2", step=7), 1.0)
    assert gone == "worker 1.2 has gone as it was told to, before step 7"
    assert reporter.tell(Notice(worker="1.2", text="was lost while starting"), 1.0) == (
        "worker 1.2: was lost while starting"
    )
    assert reporter.progressed(progress(), 2.0) is None


def test_one_that_changes_places_has_not_come():
    reporter = Reporter(of=12)
    moves = Migrating(generation=3, moves=(("0.1", "1.2"), ("0.2", "1.1")), before=2.0, meanwhile=2.5, period=1.0)
    assert reporter.tell(moves, 1.0) == (
        "workers change places, for a better plan: 0.1 takes that of 1.2, 0.2 takes that of 1.1"
    )
    assert reporter.tell(came("0.1"), 2.0) == "worker 0.1 has the state of its new place: it computes from step 33 on"
    reporter.tell(Detected(worker="0.2", how="process ended: signal 9", generation=3), 3.0)
    reporter.asked("0.2", 3.0)
    assert reporter.tell(came("0.2"), 4.0).startswith("worker 0.2 has come: "), "another process"
    assert reporter.tell(came("0.1"), 5.0).startswith("worker 0.1 has come: ")


def test_one_that_takes_layers_over_has_not_come():
    reporter = Reporter(of=4)
    taken = HandingOver(generation=3, takes=(("0.1", "2:4"), ("1.0", "1:2")))
    assert reporter.tell(taken, 1.0) == "layers are handed from worker to worker: 0.1 takes 2:4, 1.0 takes 1:2"
    said = "worker 0.1 has the state of the layers that it takes over, before step 33"
    assert reporter.tell(came("0.1"), 2.0) == said
    reporter.tell(Detected(worker="1.0", how="process ended: signal 9", generation=3), 3.0)
    assert reporter.tell(came("1.0"), 4.0).startswith("worker 1.0 has come: "), "another process"


def test_one_that_was_to_take_layers_over_and_does_something_else_is_told_of_as_that():
    """What it was to take may have been given up: the last that was told of it counts."""
    reporter = Reporter(of=4)
    taken = HandingOver(generation=3, takes=(("0.1", "2:4"), ("1.0", "1:2")))
    reporter.tell(taken, 1.0)
    reporter.tell(Parted(worker="1.0", step=7), 2.0)
    assert reporter.tell(came("1.0"), 3.0).startswith("worker 1.0 has come: "), "another process"
    reporter.tell(Migrating(generation=5, moves=(("0.1", "1.1"),), before=2.0, meanwhile=2.5, period=1.0), 4.0)
    assert reporter.tell(came("0.1"), 5.0) == "worker 0.1 has the state of its new place: it computes from step 33 on"
    assert reporter.tell(came("0.1"), 6.0).startswith("worker 0.1 has come: ")
