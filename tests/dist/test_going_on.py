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
from tests.commands import holdfast
from tests.waiting import LIMIT_S, until

from holdfast.errors import InternalError, StateUnavailable
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import Checkpointed, FaultInjected, JobEnded, StepOps, read_events

pytestmark = pytest.mark.dist

JOB = {
    "name": "gpt",
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 60, "seed": 1},
    "checkpoint": {"every": 3, "synchronous": True},
    "control": {"hang_s": 15},
    "resume": "auto",
}


class Launcher:
    """Starts the same command again and again."""

    def __init__(self, folder: Path, tree: dict) -> None:
        self.run_dir = folder / "run"
        self._job = folder / "job.yaml"
        self._job.write_text(yaml.safe_dump(tree))
        self._started: list[subprocess.Popen] = []

    def end(self) -> None:
        """Leaves nothing behind, whatever a test came to."""
        for process in self._started:
            process.kill()
            process.communicate()

    def start(self, *more: str, group: bool = False) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "holdfast", *self._words(more)]
        self._log_before = self._log()
        self._started.append(subprocess.Popen(command, start_new_session=group, **pipes))
        return self._started[-1]

    def run(self, *more: str) -> tuple[int, str, str]:
        """To its end, in this process."""
        ended = holdfast(*self._words(more))
        return ended.returncode, ended.stdout, ended.stderr

    def _words(self, more: tuple[str, ...]) -> list[str]:
        return ["train", str(self._job), "--run-dir", str(self.run_dir), *more]

    def events(self, kind: type) -> list:
        path = self.run_dir / "events.jsonl"
        return [event for _, event in read_events(path) if isinstance(event, kind)] if path.exists() else []

    def _log(self) -> int | None:
        """Which file the log is."""
        path = self.run_dir / "events.jsonl"
        return path.stat().st_ino if path.exists() else None

    def when(self, process: subprocess.Popen, kind: type, step: int) -> None:
        """Waits until what was started last has an event of a step, or of a later one, in a log of its own."""

        def has_come() -> bool:
            return self._log() != self._log_before and any(event.step >= step for event in self.events(kind))

        until(has_come, f"step {step}", process)

    def when_it_trains(self, process: subprocess.Popen) -> None:
        """Waits until a process has the run directory for its own."""
        until(lambda: (self.run_dir / "lock").read_text().strip() == str(process.pid), "its claim", process)

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.fixture
def launch(tmp_path_factory):
    """Makes launchers, each in a folder of its own."""
    made = []

    def make(tree: dict) -> Launcher:
        made.append(Launcher(tmp_path_factory.mktemp("launcher"), tree))
        return made[-1]

    yield make
    for each in made:
        each.end()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What is in a folder, and since when; but for the lock, which says who looked last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_launcher_that_repeats_the_command(launch):
    """The agent gets SIGKILL, then two start at once; then it is done, and stays so."""
    launcher = launch(JOB)
    first = launcher.start()
    launcher.when(first, Checkpointed, 6)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = launcher.start()
    launcher.when_it_trains(second)
    code, _, errors = launcher.run()
    assert code == 2
    assert f"another holdfast (process {second.pid}) trains there" in errors
    _, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert "holdfast: goes on from the checkpoint of step " in errors
    told = launcher.summary()
    assert told["steps"] == 60
    killed, done = told["attempts"]
    assert (killed["outcome"], killed["resumed_from"]) == ("killed", None)
    assert killed["steps"] >= 6
    assert (done["outcome"], done["resumed_from"], done["steps"]) == ("done", told["resumed_from"], 60)
    assert told["resumed_from"] >= 6
    before = contents(launcher.run_dir)
    code, output, _ = launcher.run()
    assert code == 0
    assert output.startswith("done already, nothing was changed: 60 steps, loss ")
    assert told["weights_sha256"] in output
    assert contents(launcher.run_dir) == before
    inspected = holdfast("inspect", launcher.run_dir).stdout.splitlines()
    assert inspected[0].startswith("attempt 1 began ")
    assert inspected[0].endswith(f": killed: holdfast inspect {launcher.run_dir}/attempts/0001")
    assert inspected[1] == "attempt 2:"
    whole = launch({**JOB, "checkpoint": {}})
    assert whole.run()[0] == 0
    for key in ("weights_sha256", "state_sha256", "final_loss"):
        assert told[key] == whole.summary()[key]


AUTO = {"resume": "auto"}
SMALL = ("train.steps=8", "checkpoint.every=4", "checkpoint.synchronous=true")
"""Each step waits for the shards that are due before it: the disk may be slower than the steps."""


def same_end(one, other) -> bool:
    keys = ("weights_sha256", "state_sha256", "final_loss", "steps")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def test_after_all_workers_died_the_same_call_goes_on(runs):
    """Every worker dies at once; the fault that struck once does not strike the next attempt."""
    run_dir, overrides = runs.folder(), (*SMALL, "checkpoint.every=2", "grid.workers_per_node=6")
    with pytest.raises((StateUnavailable, InternalError)):
        runs.train("small", "kill-node:0@6", overrides=overrides, run_dir=run_dir, **AUTO)
    newest = Checkpoints(LocalStore(run_dir / "checkpoints")).steps()[-1]
    assert 2 <= newest <= 6
    summary = runs.train("small", "kill-node:0@6", overrides=overrides, run_dir=run_dir, **AUTO)
    assert summary.unfired == ()
    assert summary.resumed_from == newest
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
    assert "no attempt before this one left a checkpoint: begins anew" in [getattr(event, "text", "") for event in told]
    assert again.resumed_from is None
    assert len(again.attempts) == 2


NOTICE = "holdfast: {}: a checkpoint is made first, within 30 s; SIGTERM after more than 1 s, or Ctrl-C, ends the job"


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, errors


def test_sigterm_makes_a_checkpoint_first_and_the_same_command_goes_on(launch):
    """To the agent, as ``timeout`` sends it: twice; then SIGUSR1 to its whole group, as a batch system may."""
    launcher = launch({**JOB, "checkpoint": {"every": 1000, "on_sigterm": 30}})
    first = launcher.start()
    launcher.when(first, StepOps, 4)
    for _ in range(2):
        first.terminate()
    code, errors = end_of(first)
    assert code == 143, errors
    (made,) = launcher.events(Checkpointed)
    assert made.step >= 4
    assert errors.count(NOTICE.format("SIGTERM")) == 1
    assert errors.splitlines()[-1] == (
        f"holdfast: SIGTERM: the checkpoint of step {made.step} is written; go on with --run-dir {launcher.run_dir} "
        "--resume auto; every process is ended"
    )
    assert [event.outcome for event in launcher.events(JobEnded)] == ["preempted"]
    second = launcher.start(group=True)
    launcher.when(second, StepOps, made.step + 4)
    os.killpg(second.pid, signal.SIGUSR1)
    code, errors = end_of(second)
    assert code == 128 + signal.SIGUSR1, errors
    assert errors.count(NOTICE.format("SIGUSR1")) == 1
    assert f"goes on from the checkpoint of step {made.step} in " in errors
    (later,) = launcher.events(Checkpointed)
    assert later.step >= made.step + 4
    third = launcher.run("--set", f"train.steps={later.step + 5}")
    assert third[0] == 0, third[2]
    told = launcher.summary()
    assert [each["outcome"] for each in told["attempts"]] == ["preempted", "preempted", "done"]
    assert told["resumed_from"] == later.step
    whole = launch({**JOB, "checkpoint": {}})
    assert whole.run("--set", f"train.steps={later.step + 5}")[0] == 0
    for key in ("weights_sha256", "state_sha256", "final_loss"):
        assert told[key] == whole.summary()[key]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_without_checkpoints_a_notice_ends_the_job_in_order(launch, number):
    launcher = launch({**JOB, "train": {"steps": 100000}, "checkpoint": {}})
    job = launcher.start()
    launcher.when(job, StepOps, 1)
    job.send_signal(number)
    code, errors = end_of(job)
    assert code == 128 + number
    assert errors.splitlines()[-1] == f"holdfast: {number.name}: every process is ended"


def test_a_second_sigterm_ends_at_once_and_so_does_the_grace(launch):
    """A worker that is stopped, and would not be missed for long, keeps the boundary from being crossed."""
    tree = {**JOB, "grid": {"pipelines": 1, "stages": 2, "microbatches": 4}, "control": {"hang_s": 1000}}
    launcher = launch({**tree, "checkpoint": {**JOB["checkpoint"], "on_sigterm": 1000}})
    first = launcher.start("--fault", "hang:0.1@7")
    launcher.when(first, FaultInjected, 7)
    first.terminate()
    assert any("ends the job at once" in line for line in first.stderr), "the phases come before it"
    first.terminate()  # the same notice
    time.sleep(1.1)  # until it is no more
    assert first.poll() is None
    first.terminate()
    code, errors = end_of(first)
    assert code == 143
    assert errors.splitlines()[-1] == "holdfast: SIGTERM: every process is ended"
    second = launcher.start("--fault", "hang:0.1@8", "--set", "checkpoint.on_sigterm=0.5")
    launcher.when(second, FaultInjected, 8)
    second.terminate()
    code, errors = end_of(second)
    assert code == 143
    assert errors.splitlines()[-1] == (
        "holdfast: SIGTERM: no checkpoint of the last steps, it was not written within 0.5 s (checkpoint.on_sigterm); "
        f"the last is of step 6; go on with --run-dir {launcher.run_dir} --resume auto; every process is ended"
    )


def test_epochs_are_as_many_steps_and_are_gone_on_with(tmp_path):
    """Three epochs of a text of six steps; then four."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(n % 251 for n in range(6 * 4 * 8 + 1)))
    tree = JOB | {"data": {"kind": "text", "path": str(text)}, "grid": JOB["grid"] | {"microbatch_size": 1}}
    hashes = {}
    for name, length in (("epochs", {"epochs": 3}), ("steps", {"steps": 18}), ("longer", {"steps": 24})):
        (tmp_path / name).mkdir()
        launcher = Launcher(tmp_path / name, tree | {"train": {"seed": 1, **length}})
        assert launcher.run("--fault", "kill:1.1@17:backward")[0] == 0
        hashes[name] = json.loads((launcher.run_dir / "summary.json").read_text())["weights_sha256"]
        assert yaml.safe_load((launcher.run_dir / "job.yaml").read_text())["train"]["steps"] in (18, 24)
    assert hashes["epochs"] == hashes["steps"] != hashes["longer"]
    launcher = Launcher(tmp_path / "epochs", tree | {"train": {"seed": 1, "epochs": 3}})
    before = (launcher.run_dir / "events.jsonl").read_bytes()
    assert launcher.run()[0] == 0
    assert (launcher.run_dir / "events.jsonl").read_bytes() == before, "it is done already"
    launcher = Launcher(tmp_path / "epochs", tree | {"train": {"seed": 1, "epochs": 4}})
    assert launcher.run()[0] == 0
    summary = json.loads((launcher.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["weights_sha256"]) == (24, hashes["longer"])
    other = tree | {"optimizer": {"schedule": "cosine"}, "train": {"seed": 1, "epochs": 5}}
    launcher = Launcher(tmp_path / "epochs", other)
    code, _, told = launcher.run()
    assert (code, "optimizer.schedule: expected constant" in told) == (2, True)


def test_a_job_of_epochs_says_what_is_wrong_in_one_line(tmp_path):
    tree = JOB | {"train": {"epochs": 2, "steps": 5}}
    code, _, told = Launcher(tmp_path, tree).run()
    (line,) = [line for line in told.splitlines() if line.startswith("holdfast: ")]
    assert (code, "train.steps: 5, but train.epochs: 2 are" in line) == (2, True)
    late = JOB | {"train": {"epochs": 1}}
    (tmp_path / "late").mkdir()
    code, _, told = Launcher(tmp_path / "late", late).run("--fault", "kill:0.0@100000")
    assert code == 2
    assert "--fault kill:0.0@100000:start: the last step is" in told
