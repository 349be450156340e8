"""Who has a run directory, and what becomes of what an earlier attempt left there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.runtime.rundir import Claim, attempts, job_files

HOLDER = """
import sys, time
from pathlib import Path
from holdfast.runtime.rundir import Claim
Claim(Path(sys.argv[1])).take()
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
    with Claim(run_dir) as claim, pytest.raises(ConfigError) as caught:
        claim.take()
    assert str(caught.value) == (
        f"--run-dir {run_dir}: another holdfast (process {holder.pid}) trains there; wait until it has ended, or "
        "choose another directory"
    )
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with Claim(run_dir) as claim:
        claim.take()
        claim.take()
        with Claim(run_dir) as other, pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            other.take()
    with Claim(run_dir) as other:
        other.take()
        other.check_empty()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Claim(tmp_path / "file" / "a") as claim,
        pytest.raises(ConfigError, match="cannot be written: Not a directory"),
    ):
        claim.take()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "elsewhere")
    with Claim(tmp_path / "link") as claim, pytest.raises(ConfigError, match="cannot be written"):
        claim.take()
    assert not (tmp_path / "elsewhere").exists()


def test_each_attempt_is_set_aside_whole_and_checkpoints_stay(tmp_path):
    claim = Claim(tmp_path)
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
                Claim(run_dir).set_aside()
            except OSError:
                pass
            else:
                assert moves == 7, "every file and folder of an attempt was moved by then"
        Claim(run_dir).set_aside()
        (folder,) = attempts(run_dir)
        assert names(run_dir) == {"attempts", "checkpoints"}
        assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"first"}


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        Claim(tmp_path).set_aside()
    with pytest.raises(ConfigError, match=r"is not empty; choose a new directory, or go on .* by --resume auto"):
        Claim(tmp_path).check_empty()
    assert names(tmp_path) == {"thesis.tex"}
