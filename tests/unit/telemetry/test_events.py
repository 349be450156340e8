import multiprocessing
import os
import subprocess
import sys

import msgspec
import pytest

from holdfast.telemetry.events import (
    Agreed,
    Detected,
    EventLog,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    LibraryFilled,
    Migrating,
    Notice,
    Parted,
    Pinned,
    PlanImproved,
    Rebuilt,
    StepOps,
    Suspected,
    Synced,
    WorkerReady,
    read_events,
)

EVENTS = [
    JobStarted(name="j", workers=12, steps=3, samples_per_step=72, wall_time=1.5),
    WorkerReady(worker="0.0", pid=3),
    Notice(worker="0.0", text='"quoted" {"time":1} \u2028 line\nbreak\r\x85'),
    FaultInjected(worker="0.0", kind="kill", step=1, point="start", spec="kill:0.0@1:start"),
    Detected(worker="0.0", how="signal 9", generation=1),
    Suspected(worker="0.1", peer="", generation=1, detail="reset"),
    Parted(worker="2.0", step=7),
    Synced(worker="2.0", entered=9, step=11, bytes=1000),
    Pinned(worker="2.0", step=10, seconds=0.25),
    Installed(generation=2, workers=("0.1", "1.0"), strategy="adaptive"),
    Agreed(generation=2, step=1, recomputed_microbatches=4),
    Rebuilt(generation=2),
    PlanImproved(generation=3, before=30.0, period=27.0),
    LibraryFilled(failures=3),
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


def test_a_full_disk_is_told():
    log = EventLog("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        log.write(0.0, EVENTS[0])
    log.close()


def test_a_write_in_part_is_told(path):
    reading, writing = multiprocessing.Pipe(duplex=False)
    log = EventLog(path)
    os.dup2(writing.fileno(), log._file)
    os.set_blocking(log._file, False)
    with pytest.raises(OSError, match="in part"):
        log.write(0.0, Notice(worker="0.0", text="x" * 200_000))
    log.close()
    reading.close()
    writing.close()
