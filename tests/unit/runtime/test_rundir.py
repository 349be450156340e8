"""Who has a run directory, and what becomes of what an earlier attempt left there."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import parse_job
from holdfast.config.load import load_job
from holdfast.config.profiles import load_profile
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.runtime.launch.directory import take_directory
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.rundir import RunDirLock, attempts, job_files

HOLDER = """
import sys, time
from pathlib import Path
from holdfast.runtime.rundir import RunDirLock
RunDirLock(Path(sys.argv[1])).take()
print("taken", flush=True)
time.sleep(100)
"""


def leave(run_dir: Path, name: str, *more: str) -> None:
    """What an attempt leaves."""
    run_dir.mkdir(exist_ok=True)
    for file in ("job.yaml", "events.jsonl", "control.db", "control.db-wal", "stacks-0.1.txt", *more):
        (run_dir / file).write_text(name)
    for folder in ("final", "plans", "checkpoints"):
        (run_dir / folder).mkdir(exist_ok=True)
        (run_dir / folder / name).write_text(name)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_one_process_has_a_directory_until_it_dies(tmp_path):
    run_dir = tmp_path / "a" / "b"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "taken\n"
    assert run_dir.stat().st_mode & 0o777 == 0o700
    with RunDirLock(run_dir) as claim, pytest.raises(ConfigError) as caught:
        claim.take()
    assert str(caught.value) == (
        f"--run-dir {run_dir}: another holdfast (process {holder.pid}) trains there; wait until it has ended, or "
        "choose another directory"
    )
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with RunDirLock(run_dir) as claim:
        claim.take()
        claim.take()
        with RunDirLock(run_dir) as other, pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            other.take()
    with RunDirLock(run_dir) as other:
        other.take()
        other.check_empty()


def test_a_file_system_that_locks_no_files_is_named(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with RunDirLock(tmp_path) as claim, pytest.raises(ConfigError, match=r"locks no files \(No locks available\)"):
        claim.take()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        RunDirLock(tmp_path / "file" / "a") as claim,
        pytest.raises(ConfigError, match="cannot be written: Not a directory"),
    ):
        claim.take()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "elsewhere")
    with RunDirLock(tmp_path / "link") as claim, pytest.raises(ConfigError, match="cannot be written"):
        claim.take()
    assert not (tmp_path / "elsewhere").exists()


def test_each_attempt_is_set_aside_whole_and_checkpoints_stay(tmp_path):
    claim = RunDirLock(tmp_path)
    claim.set_aside()
    assert attempts(tmp_path) == ()
    assert job_files(tmp_path) == ()
    leave(tmp_path, "first", "summary.json", "profile.json")
    claim.set_aside()
    leave(tmp_path, "second")
    claim.set_aside()
    leave(tmp_path, "third")
    one, two = attempts(tmp_path)
    assert names(one) - names(two) == {"summary.json", "profile.json"}
    assert {path.read_text() for path in one.rglob("*") if path.is_file()} == {"first"}
    assert {path.read_text() for path in two.rglob("*") if path.is_file()} == {"second"}
    assert names(tmp_path / "checkpoints") == {"first", "second", "third"}
    assert [path.read_text() for path in job_files(tmp_path)] == ["third", "second", "first"]


def test_setting_aside_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    """After each single move that was made, the next attempt finds all of it in one folder."""
    for moves in range(8):
        run_dir = tmp_path / str(moves)
        run_dir.mkdir()
        leave(run_dir, "first")
        left = [moves]

        def rename(path, target, really=os.rename, left=left):
            if not left[0]:
                raise OSError("killed")
            left[0] -= 1
            really(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", rename)
            try:
                RunDirLock(run_dir).set_aside()
            except OSError:
                pass
            else:
                assert moves == 7, "every file and folder of an attempt was moved by then"
        RunDirLock(run_dir).set_aside()
        (folder,) = attempts(run_dir)
        assert names(run_dir) == {"attempts", "checkpoints"}
        assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"first"}


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        RunDirLock(tmp_path).set_aside()
    with pytest.raises(ConfigError, match=r"is not empty; choose a new directory, or go on .* by --resume auto"):
        RunDirLock(tmp_path).check_empty()
    assert names(tmp_path) == {"thesis.tex"}


JOB = parse_job(
    {
        "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 2},
        "train": {"steps": 20},
    }
)
PROFILE = uniform_profile(2, forward_s=0.1)


def begin(run_dir: Path, *, again: bool = False) -> None:
    """Takes a directory, as a job does, and gives it up."""
    with RunDirLock(run_dir) as claim:
        take_directory(RunRequest(job=JOB, run_dir=run_dir, emulate=PROFILE, again=again), claim)


def test_what_describes_an_attempt_is_whole_and_private(tmp_path):
    before = os.umask(0o022)
    try:
        begin(tmp_path / "run")
    finally:
        os.umask(before)
    assert load_job(tmp_path / "run" / "job.yaml") == JOB
    assert load_profile(tmp_path / "run" / "profile.json") == PROFILE
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == dict.fromkeys(
        ("lock", "job.yaml", "profile.json"), 0o600
    )


def test_on_a_full_disk_no_job_file_is_left_half_written(tmp_path):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunDirLock(tmp_path) as claim:
        claim.take()
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            with pytest.raises(ConfigError, match="cannot be written: File too large"):
                take_directory(RunRequest(job=JOB, run_dir=tmp_path), claim)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == {"lock"}, "whatever comes next finds nothing that it cannot read"
    begin(tmp_path)


@pytest.mark.parametrize("again", [False, True])
def test_a_job_file_that_was_being_written_at_a_kill_is_in_nobodys_way(tmp_path, again):
    (tmp_path / ".job.yaml.part").write_text("mod")
    begin(tmp_path, again=again)
    assert names(tmp_path) == {"lock", "job.yaml", "profile.json"}
    assert attempts(tmp_path) == ()
