"""The logs of several machines make one story."""

import time
from contextlib import closing

import pytest

from holdfast.core.nodes import NodeId
from holdfast.errors import StorageError
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import (
    ClockCompared,
    CoordinatorReady,
    Detected,
    EventLog,
    JobEnded,
    JobStarted,
    Notice,
    WorkerReady,
)
from holdfast.telemetry.story import EVENTS, StoryReader, node_log, read_story

AHEAD_S = 3600.0
STARTED = JobStarted(name="j", workers=2, steps=3, samples_per_step=8, wall_time=1e9, clock="first")
DONE = JobEnded(outcome="done", step=3)


def compared(mine, other, ahead_s):
    return ClockCompared(mine=mine, other=other, ahead_s=ahead_s, within_s=0.001)


def ready(worker):
    return WorkerReady(worker=worker, pid=7)


@pytest.fixture
def write(tmp_path):
    """Appends events to the log of a machine; of the first one if none is named."""

    def append(*timed, node="", clock=""):
        path = node_log(tmp_path, NodeId(node, 16 * "a"), clock) if node else tmp_path / EVENTS
        path.parent.mkdir(exist_ok=True)
        with closing(EventLog(path)) as log:
            for at, event, *decision in timed:
                assert log.write(at, event, *decision)

    return append


def test_all_are_told_by_the_first_clock_in_the_order_of_time(tmp_path, write):
    write((10.0, STARTED), (11.0, compared("first", "second", AHEAD_S)), (14.0, ready("0.0")), (20.0, DONE))
    write(
        (3612.0, ready("1.0")), (3615.0, Notice(worker="agent", text="look")), (3620.5, DONE), node="n2", clock="second"
    )
    assert [(at, event) for at, event in read_story(tmp_path) if not isinstance(event, ClockCompared)] == [
        (10.0, STARTED),
        (12.0, ready("1.0")),
        (14.0, ready("0.0")),
        (15.0, Notice(worker="agent on n2", text="look")),
        (20.0, DONE),
    ]


def test_what_a_decision_records_is_told_once_whoever_tells_it_again_on_whichever_machine(tmp_path, write):
    lost, late = (Detected(worker=worker, how="signal 9", generation=1) for worker in ("0.0", "1.0"))
    text = Notice(worker="coordinator", text="node n1 is gone")
    write((10.0, STARTED), (11.0, compared("first", "second", AHEAD_S)), (12.0, lost, 4), (12.0, text, 4))
    leads = CoordinatorReady(pid=7, generation=2, node="n2")
    again = ((3614.0, lost, 4), (3614.0, text, 4))
    write((3614.0, leads), *again, (3616.0, late, 5), node="n2", clock="second")
    assert [event for _, event in read_story(tmp_path)][2:] == [lost, text, leads, late]


def test_a_clock_that_is_known_later_is_waited_for(tmp_path, write):
    """Also one that only another machine has compared: of that the first one was gone already."""
    write((10.0, STARTED), (11.0, compared("first", "second", AHEAD_S)))
    write((500.0, ready("1.0")), node="n/3", clock="third")
    reader = StoryReader(tmp_path)
    assert [event for _, event in reader.read()][1:] == [compared("first", "second", AHEAD_S)]
    text = "1 events are not told, as nothing says what time it was there"
    assert reader.gaps() == [(11.0, Notice(worker="agent on n-3", text=text))]
    write((3700.0, compared("second", "third", -3000.0)), node="n2", clock="second")
    assert [(at, event) for at, event in reader.read() if isinstance(event, WorkerReady)] == [
        (pytest.approx(-100.0), ready("1.0"))
    ]
    assert reader.gaps() == []
    write((900.0, ready("0.0")), node="n/3", clock="third")
    assert reader.read() == [(pytest.approx(300.0), ready("0.0"))], "what is new"


def test_a_machine_that_was_started_again_has_another_clock(tmp_path, write):
    write(
        (10.0, STARTED), *((11.0, compared("first", clock, ahead)) for clock, ahead in (("old", 100.0), ("new", -5.0)))
    )
    write((120.0, ready("1.0")), node="n2", clock="old")
    write((20.0, ready("1.0")), node="n2", clock="new")
    assert [at for at, event in read_story(tmp_path) if isinstance(event, WorkerReady)] == [20.0, 25.0]


def test_a_log_that_is_damaged_hides_no_others(tmp_path, write):
    write((10.0, STARTED), (11.0, ready("0.0")))
    damaged = node_log(tmp_path, NodeId("n2", 16 * "a"), "second")
    damaged.parent.mkdir()
    damaged.write_text('{"time":1,"data":{"event":"unheard"}}\n')
    *told, (at, gap) = read_story(tmp_path)
    assert told == [(10.0, STARTED), (11.0, ready("0.0"))]
    assert (at, gap.worker) == (11.0, "agent on n2"), "at the end of what is told"
    assert gap.text.startswith(f"its log cannot be read: {damaged}: is no log of events")
    (tmp_path / EVENTS).write_text("{}\n")
    with pytest.raises(StorageError, match="is no log of events"):
        read_story(tmp_path)


def test_a_run_that_was_begun_anew_is_told_from_its_beginning(tmp_path, write):
    reader = StoryReader(tmp_path)
    write((10.0, STARTED), (11.0, ready("0.0"), 7), (12.0, ready("1.0")), (13.0, DONE))
    assert len(reader.read()) == 4
    (tmp_path / EVENTS).unlink()
    write((20.0, STARTED), (21.0, ready("0.0"), 1), (22.0, DONE))
    assert reader.read() == [(20.0, STARTED), (21.0, ready("0.0")), (22.0, DONE)]


@pytest.mark.parametrize("known", ["the same", "compared", "neither"])
def test_what_time_it_is_in_the_story_is_known_on_every_machine(tmp_path, write, known):
    """By the time of day, at worst."""
    began = time.time() - 50.0
    clock = this_clock() if known == "the same" else "first"
    started = JobStarted(name="j", workers=2, steps=3, samples_per_step=8, wall_time=began, clock=clock)
    write((100.0, started), *([(101.0, compared("first", this_clock(), 7.0))] if known == "compared" else []))
    reader = StoryReader(tmp_path)
    reader.read()
    expected = {"the same": time.monotonic(), "compared": time.monotonic() - 7.0, "neither": 150.0}[known]
    assert reader.now() == pytest.approx(expected, abs=5.0)
