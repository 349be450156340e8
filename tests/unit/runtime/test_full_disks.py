"""What processes of a job write beside its log, on a disk that is full: it costs a line, and holds nobody up."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest

from holdfast import parse_job
from holdfast.config.load import dump_job, load_job
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.runtime.launch.directory import take_directory
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.main.worker import WorkerProcess, _write_stacks
from holdfast.runtime.rundir import RunDirLock

JOB = parse_job(
    {
        "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
    }
)


@pytest.fixture
def full(make_disk):
    """A disk without room for a byte."""
    disk = make_disk("64k")
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(b"x" * 70000)
    return disk


@pytest.mark.parametrize("again", [False, True])
def test_a_job_that_cannot_be_described_is_one_line_and_the_same_command_begins_once_there_is_room(full, again):
    run_dir = full / "run"
    with pytest.raises(ConfigError) as caught, RunDirLock(run_dir) as claim:
        take_directory(RunRequest(job=JOB, run_dir=run_dir, again=again), claim)
    assert str(caught.value) == f"--run-dir {run_dir}: cannot be written: No space left on device"
    (full / "filler").unlink()
    with RunDirLock(run_dir) as claim:
        take_directory(RunRequest(job=JOB, run_dir=run_dir, again=again), claim)
    assert dump_job(load_job(run_dir / "job.yaml")) == dump_job(JOB)


def test_a_profile_that_cannot_be_written_leaves_no_job_behind(full):
    run_dir = full / "run"
    room = len(dump_job(JOB)) + 4096
    os.truncate(full / "filler", (60 << 10) - room // 4096 * 4096)
    with (
        pytest.raises(ConfigError, match=r"^--run-dir .*: cannot be written: No space left on device$"),
        RunDirLock(run_dir) as claim,
    ):
        take_directory(RunRequest(job=JOB, run_dir=run_dir, emulate=uniform_profile(1000)), claim)
    assert [path.name for path in run_dir.iterdir()] == ["lock"]


def test_stacks_that_cannot_be_written_are_said_to_be_none(full, make_disk, tmp_path):
    assert _write_stacks(full / "stacks.txt") == "its stacks cannot be written"
    nothing_more = make_disk("64k,nr_inodes=1")
    assert _write_stacks(nothing_more / "stacks.txt") == "its stacks cannot be written: No space left on device"
    assert _write_stacks(tmp_path / "stacks.txt") == "its stacks are in stacks.txt"
    assert "test_full_disks.py" in (tmp_path / "stacks.txt").read_text()


@pytest.mark.parametrize("trouble", ["no place", "no log"])
def test_who_is_expelled_ends_whatever_it_can_write(tmp_path, trouble):
    """In a process of its own."""

    def note(text):
        (tmp_path / "noted").write_text(text)
        if trouble == "no log":
            raise OSError("no log")

    folder = tmp_path / "gone" if trouble == "no place" else tmp_path
    worker = SimpleNamespace(_spec=SimpleNamespace(events=str(folder / "events.jsonl"), worker="1.1"), _note=note)
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            WorkerProcess._expelled(worker, "it was late")
        os._exit(70)  # it went on
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert (tmp_path / "noted").read_text().startswith("ends itself: it was late; its stacks ")
