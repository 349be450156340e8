"""A launcher that repeats one command after any exit: each attempt goes on, and the end has the bits of one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from holdfast.errors import InternalError, StateUnavailable
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import Checkpointed, StepOps, read_events

pytestmark = pytest.mark.dist

JOB = {
    "name": "gpt",
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 200, "seed": 1},
    "checkpoint": {"every": 3},
    "control": {"hang_s": 15},
    "resume": "auto",
}
LIMIT_S = 60.0


class Launcher:
    """Starts the same command again and again."""

    def __init__(self, folder: Path, tree: dict) -> None:
        self.run_dir = folder / "run"
        self._job = folder / "job.yaml"
        self._job.write_text(yaml.safe_dump(tree))

    def start(self, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "holdfast", "train", str(self._job), "--run-dir", str(self.run_dir), *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *more: str) -> tuple[int, str, str]:
        process = self.start(*more)
        output, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, output, errors

    def events(self, kind: type) -> list:
        path = self.run_dir / "events.jsonl"
        return [event for _, event in read_events(path) if isinstance(event, kind)] if path.exists() else []

    def when(self, process: subprocess.Popen, kind: type, step: int) -> None:
        """Waits until the attempt that runs has an event of a step, or of a later one."""
        until = time.monotonic() + LIMIT_S
        while not any(event.step >= step for event in self.events(kind)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What is in a folder, and since when; but for the lock, which says who looked last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_launcher_that_repeats_the_command(tmp_path):
    """The agent gets SIGKILL, then two start at once; then it is done, and stays so."""
    launcher = Launcher(tmp_path, JOB)
    first = launcher.start()
    launcher.when(first, Checkpointed, 6)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = launcher.start()
    launcher.when(second, StepOps, 7)
    code, _, errors = launcher.run()
    assert code == 2
    assert f"another holdfast (process {second.pid}) trains there" in errors
    _, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert "holdfast: goes on from the checkpoint of step " in errors
    told = launcher.summary()
    assert told["steps"] == 200
    killed, done = told["attempts"]
    assert (killed["outcome"], killed["resumed_from"]) == ("killed", None)
    assert killed["steps"] >= 6
    assert (done["outcome"], done["resumed_from"], done["steps"]) == ("done", told["resumed_from"], 200)
    assert told["resumed_from"] >= 6
    before = contents(launcher.run_dir)
    code, output, _ = launcher.run()
    assert code == 0
    assert output.startswith("done already, nothing was changed: 200 steps, loss ")
    assert told["weights_sha256"] in output
    assert contents(launcher.run_dir) == before
    inspected = subprocess.run(
        [sys.executable, "-m", "holdfast", "inspect", str(launcher.run_dir)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert inspected[0].startswith("attempt 1 began ")
    assert inspected[0].endswith(f": killed: holdfast inspect {launcher.run_dir}/attempts/0001")
    assert inspected[1] == "attempt 2:"
    (tmp_path / "whole").mkdir()
    whole = Launcher(tmp_path / "whole", {**JOB, "checkpoint": {}})
    assert whole.run()[0] == 0
    for key in ("weights_sha256", "state_sha256", "final_loss"):
        assert told[key] == whole.summary()[key]


AUTO = {"resume": "auto"}
SMALL = ("train.steps=8", "checkpoint.every=4")


def same_end(one, other) -> bool:
    keys = ("weights_sha256", "state_sha256", "final_loss", "steps")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def test_after_all_workers_died_the_same_call_goes_on(runs):
    """Every worker dies at once; the fault that struck once does not strike the next attempt."""
    run_dir, overrides = runs.folder(), (*SMALL, "grid.workers_per_node=6")
    with pytest.raises((StateUnavailable, InternalError)):
        runs.train("small", "kill-node:0@6", overrides=overrides, run_dir=run_dir, **AUTO)
    summary = runs.train("small", "kill-node:0@6", overrides=overrides, run_dir=run_dir, **AUTO)
    assert summary.unfired == ()
    assert summary.resumed_from == 4
    died, done = summary.attempts
    assert 4 <= died.steps <= 6
    assert (done.steps, done.outcome) == (8, "done")
    assert same_end(summary, runs.healthy("small", SMALL))


def test_more_steps_go_on_and_so_does_a_run_whose_checkpoints_moved(runs, tmp_path):
    """And one whose run directory is lost, but not its checkpoints."""
    run_dir, elsewhere = runs.folder(), f"checkpoint.url={tmp_path}"
    first = runs.train("small", overrides=SMALL, run_dir=run_dir, **AUTO)
    assert first.resumed_from is None
    more = (*SMALL, "train.steps=13", elsewhere)
    second = runs.train("small", overrides=more, run_dir=run_dir, **AUTO)
    assert second.resumed_from == 8
    assert [each.steps for each in second.attempts] == [8, 13]
    assert Checkpoints(LocalStore(tmp_path)).steps() == (8, 12)
    third = runs.train("small", overrides=(*more, "train.steps=16"), run_dir=runs.folder(), **AUTO)
    assert third.resumed_from == 12
    whole = runs.healthy("small", ("train.steps=16", "checkpoint.every=4"))
    assert same_end(third, whole)


def test_an_attempt_that_was_cut_off_behind_its_last_step_writes_what_is_left(runs):
    run_dir = runs.folder()
    whole = runs.train("small", overrides=SMALL, run_dir=run_dir, **AUTO)
    (run_dir / "summary.json").unlink()
    again = runs.train_only("small", overrides=SMALL, run_dir=run_dir, **AUTO)
    assert again.resumed_from == 8
    assert again.report.commits == ()
    assert same_end(again, whole)


def test_without_any_checkpoint_it_begins_anew_and_says_so(runs):
    run_dir, told = runs.folder(), []
    without = ("train.steps=8",)
    runs.train("small", overrides=without, run_dir=run_dir, **AUTO)
    (run_dir / "summary.json").unlink()
    again = runs.train("small", overrides=without, run_dir=run_dir, on_event=told.append, **AUTO)
    assert [event.text for event in told] == ["no attempt before this one left a checkpoint: begins anew"]
    assert again.resumed_from is None
    assert len(again.attempts) == 2
