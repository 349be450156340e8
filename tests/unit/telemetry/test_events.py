import multiprocessing
import os
import subprocess
import sys

import msgspec
import pytest

from holdfast.telemetry.events import (
    Agreed,
    Chosen,
    ClockCompared,
    Detected,
    Evaluated,
    EventLog,
    EventReader,
    EventsMissing,
    FaultInjected,
    HandingOver,
    Held,
    Installed,
    JobEnded,
    JobStarted,
    Judged,
    LibraryFilled,
    Loaded,
    Migrating,
    Notice,
    Parted,
    Pinned,
    PlanImproved,
    Predicted,
    Ran,
    Rebuilt,
    Scheduled,
    StepOmitted,
    StepOps,
    Suspected,
    Synced,
    WorkerReady,
    read_events,
)

EVENTS = [
    JobStarted(name="j", workers=12, steps=3, samples_per_step=72, wall_time=1.5),
    Scheduled(technique="staggered", in_flight=None, why="1 s a step by the profile"),
    Chosen(
        way="checkpoint",
        advised="log",
        why="logging.use: off",
        reasons=("none has a replica", "8 bytes cross nodes"),
        logging=False,
        alone=(0, 1),
        spares=0,
        crossing_bytes=8,
        state_bytes=9,
        copy_s=None,
        bubble_s=None,
        step_log=True,
        step_log_bytes=4,
    ),
    WorkerReady(worker="0.0", pid=3, node="n1"),
    ClockCompared(mine="a1", other="b2", ahead_s=-3600.25, within_s=0.0013),
    Notice(worker="0.0", text='"quoted" {"time":1} \u2028 line\nbreak\r\x85'),
    FaultInjected(worker="0.0", kind="kill", step=1, point="start", spec="kill:0.0@1:start"),
    EventsMissing(count=3, why="No space left on device"),
    Judged(worker="0.0", generation=1, step=3, norm=0.1, rate=None),
    StepOmitted(worker="0.0", generation=1, step=3),
    Evaluated(step=10, scores=(("loss", 0.1), ("accuracy", None)), microbatches=4, of=5),
    Ran(generation=1, first=3, stop=9, step_s=0.5, workers=("0.0", "1.0")),
    Detected(worker="0.0", how="signal 9", generation=1),
    Suspected(worker="0.1", peer="", generation=1, detail="reset"),
    Parted(worker="2.0", step=7),
    Synced(worker="2.0", entered=9, step=11, bytes=1000),
    Pinned(worker="2.0", step=10, seconds=0.25),
    Loaded(worker="2.0", step=10, layers=(0, 1), seconds=0.5),
    Installed(generation=2, workers=("0.1", "1.0"), strategy="adaptive"),
    Agreed(generation=2, step=1, recomputed_microbatches=4),
    Rebuilt(generation=2),
    PlanImproved(generation=3, before=30.0, period=27.0),
    LibraryFilled(failures=3),
    HandingOver(generation=3, takes=(("0.1", "2:4"),)),
    Predicted(chosen="load", steps=(("load", 9.5), ("wait", 3.0)), until_s=60.0),
    Held(chosen="load", seconds=50.0, expected=8.25, made=8),
    Migrating(generation=3, moves=(("2.3", "0.1"),), before=5.4, meanwhile=6.0, period=2.9),
    StepOps(worker="0.1", generation=2, step=1, loss=None, omitted=False, ops=(("F", 0, 1, 0.5, 1.0),)),
    StepOps(
        worker="0.1",
        generation=2,
        step=2,
        loss=2.0,
        omitted=False,
        ops=(),
        besides=(("reduce", (0, 3), 1.0, 1.5), ("update", (), 1.5, 2.0)),
        memory=1 << 30,
    ),
    JobEnded(outcome="done", step=3),
]

WRITER = """
import sys
from holdfast.telemetry.events import EventLog, Notice
log = EventLog(sys.argv[1])
sys.stdin.read(1)
for number in range(200):
    log.write(float(number), Notice(worker=sys.argv[2], text=sys.argv[2] * 6000 + f":{number}"))
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def write(path, *timed):
    log = EventLog(path)
    for time, event in timed:
        log.write(time, event)
    log.close()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_round_trips(path, event):
    write(path, (0.25, event))
    assert read_events(path) == [(0.25, event)]
    assert path.read_bytes().count(b"\n") == 1


def test_lines_are_plain_json(path):
    write(path, (0.25, EVENTS[-1]))
    assert msgspec.json.decode(path.read_bytes()) == {
        "time": 0.25,
        "data": {"event": "job_ended", "outcome": "done", "step": 3},
    }


def test_events_come_in_the_order_of_time_and_equal_times_in_that_of_the_file(path):
    write(path, (3.0, EVENTS[0]), (1.0, EVENTS[1]), (3.0, EVENTS[2]), (2.0, EVENTS[3]))
    assert read_events(path) == [(1.0, EVENTS[1]), (2.0, EVENTS[3]), (3.0, EVENTS[0]), (3.0, EVENTS[2])]


def test_what_a_decision_records_is_read_once_however_often_it_is_written(path):
    """Each coordinator that takes over writes what the newest decision records; the others' lines may come later."""
    log, reader, other = EventLog(path), EventReader(path), EVENTS[0]
    log.write(1.0, other, 7)
    assert reader.read() == [(1.0, other)]
    log.write(2.0, other, 7)
    log.write(3.0, EVENTS[1], 7)
    log.write(4.0, other, 8)
    log.write(5.0, other, 7)
    assert reader.read() == [(3.0, EVENTS[1]), (4.0, other)]
    assert reader.read() == []
    assert read_events(path) == [(1.0, other), (3.0, EVENTS[1]), (4.0, other)]
    log.write(6.0, other)
    log.write(7.0, other)
    assert reader.read() == [(6.0, other), (7.0, other)], "what nobody decided can happen twice"
    assert msgspec.json.decode(path.read_bytes().splitlines()[0])["decision"] == 7


def test_a_log_that_has_become_shorter_is_another_one(path):
    reader = EventReader(path)
    write(path, (1.0, EVENTS[0]), (2.0, EVENTS[1]))
    assert len(reader.read()) == 2
    path.unlink()
    write(path, (3.0, EVENTS[0]))
    assert reader.read() == [(3.0, EVENTS[0])]


def test_an_empty_log_has_no_events(path):
    path.write_bytes(b"")
    assert read_events(path) == []


def test_a_log_is_continued_not_overwritten(path):
    write(path, (1.0, EVENTS[0]))
    write(path, (2.0, EVENTS[1]))
    assert len(read_events(path)) == 2


def test_nobody_else_may_read_it(path):
    write(path, (1.0, EVENTS[0]))
    assert path.stat().st_mode & 0o777 == 0o600


def test_any_cut_of_the_last_line_leaves_the_others(path):
    write(path, *enumerate(EVENTS))
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert [event for _, event in read_events(path)] == EVENTS[:-1]


@pytest.mark.parametrize("cut", [1, 8, 20, -1])
def test_a_line_cut_by_a_kill_leaves_what_others_append(path, cut):
    """The kernel may end a killed process between two pages of one write."""
    write(path, (1.0, EVENTS[2]), (2.0, EVENTS[2]))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.rstrip(b"\n")[:cut])
    write(path, (3.0, EVENTS[2]))
    assert read_events(path) == [(1.0, EVENTS[2]), (3.0, EVENTS[2])]


def test_processes_that_append_at_once_do_not_mix(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], stdin=subprocess.PIPE) for name in "abcd"]
    for writer in writers:
        writer.communicate(b"go")
    assert [writer.returncode for writer in writers] == [0, 0, 0, 0]
    check_unmixed(path, 200)


def check_unmixed(path, count):
    told = [(event.worker, event.text) for _, event in read_events(path)]
    assert len(told) == 4 * count
    for name in "abcd":
        assert [text for worker, text in told if worker == name] == [f"{name * 6000}:{n}" for n in range(count)]


class Complaints(list):
    """What a log says of itself: kinds and lines."""

    def __call__(self, kind, text):
        self.append((kind, text))


def test_a_full_disk_raises_nothing_and_is_told_once():
    told = Complaints()
    log = EventLog("/dev/full", complain=told)
    assert not log.write(0.0, EVENTS[0])
    assert not log.write(1.0, EVENTS[1])
    log.close()
    said = "/dev/full: cannot be written: No space left on device; events are missing from it; training goes on"
    assert told == [("events-write", said)]


def test_a_disk_that_was_full_is_written_again_and_says_how_many_are_missing(make_disk):
    disk = make_disk("64k")
    path, filler, told = disk / "events.jsonl", disk / "filler", Complaints()
    long = Notice(worker="0.0", text="x" * 5000)  # more than a page: what is left of one would hold a short event
    log = EventLog(path, complain=told)
    assert log.write(0.0, EVENTS[0])
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * 65536)
    assert not log.write(1.0, long)
    assert not log.write(2.0, long)
    filler.unlink()
    assert log.write(3.0, long)
    log.close()
    assert [kind for kind, _ in told] == ["events-write"]
    missing = EventsMissing(count=2, why=read_events(path)[1][1].why)
    assert read_events(path) == [(0.0, EVENTS[0]), (2.0, missing), (3.0, long)]


def test_a_log_that_is_closed_while_the_disk_is_full_says_it_at_last(make_disk):
    disk = make_disk("64k")
    path, filler = disk / "events.jsonl", disk / "filler"
    log = EventLog(path)
    assert log.write(0.0, EVENTS[0])
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * 65536)
    assert not log.write(1.0, Notice(worker="0.0", text="x" * 5000))
    filler.unlink()
    log.close()
    assert [type(event) for _, event in read_events(path)][1:] == [EventsMissing]


def test_a_write_in_part_counts_as_missing(path):
    reading, writing = multiprocessing.Pipe(duplex=False)
    log = EventLog(path)
    os.dup2(writing.fileno(), log._file)
    os.set_blocking(log._file, False)
    told = Complaints()
    log._complain = told
    assert not log.write(0.0, Notice(worker="0.0", text="x" * 200_000))
    assert "in part" in told[0][1]
    log.close()
    reading.close()
    writing.close()


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_log_that_is_gone_is_made_again_and_the_one_who_keeps_it_writes_all_of_it(path, how):
    told, others = Complaints(), Complaints()
    keeper, other = EventLog(path, complain=told, keeps=True), EventLog(path, complain=others)
    assert keeper.write(0.0, EVENTS[0])
    assert other.write(1.0, EVENTS[1])
    path.unlink() if how == "deleted" else path.rename(path.with_name("elsewhere"))
    assert other.write(2.0, EVENTS[2])
    assert read_events(path) == [(2.0, EVENTS[2])]
    keeper.check()
    assert other.write(3.0, EVENTS[3])
    assert [event for _, event in read_events(path)] == EVENTS[:4]
    keeper.check()
    assert len(read_events(path)) == 4, "once"
    assert [kind for kind, _ in told] == [kind for kind, _ in others] == ["events-gone"]
    keeper.close()
    other.close()


def test_what_was_deleted_is_written_again_once_there_is_space(make_disk):
    disk = make_disk("64k")
    path, filler = disk / "events.jsonl", disk / "filler"
    log = EventLog(path, keeps=True)
    events = [Notice(worker="0.0", text=f"{n}" * 3000) for n in range(6)]
    assert all(log.write(float(n), event) for n, event in enumerate(events[:5]))
    path.unlink()
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * 65536)
    log.check()
    filler.write_bytes(b"x" * 30000)  # some of it fits now
    log.check()
    filler.unlink()
    assert log.write(5.0, events[5])
    log.close()
    assert [event for _, event in read_events(path)] == events


def test_a_folder_that_is_gone_stops_nobody(tmp_path):
    told = Complaints()
    log = EventLog(tmp_path / "gone" / "events.jsonl", complain=told)
    assert not log.write(0.0, EVENTS[0])
    (tmp_path / "gone").mkdir()
    assert log.write(1.0, EVENTS[1])
    log.close()
    assert len(read_events(tmp_path / "gone" / "events.jsonl")) == 2
