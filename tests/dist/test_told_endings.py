"""What a run says of itself at its end is true, whatever became of its files meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import msgspec
import pytest
import yaml
from tests.commands import holdfast
from tests.decisions import newest_in, put_in
from tests.waiting import LIMIT_S, until

from holdfast.cli.inspect import narrate, sum_up
from holdfast.cli.main import main
from holdfast.cli.train import describe
from holdfast.errors import DecisionsLost, InternalError
from holdfast.optim.digest import digest_run
from holdfast.telemetry.events import (
    Checkpointed,
    CoordinatorReady,
    FaultInjected,
    JobStarted,
    Notice,
    WorkerReady,
    read_events,
)

SMALL = {
    "name": "small",
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 300},
    "checkpoint": {"every": 5, "synchronous": True},
    "control": {"hang_s": 15},
}

pytestmark = pytest.mark.dist


WAITS = "until it can be written"
TROUBLE = ("deleted or moved", "cannot be written", WAITS, "the job ends")


def told(events):
    """What was said of files; who was lost, and when all go on, is said as well."""
    texts = [event.text for event in events if isinstance(event, Notice)]
    return [text for text in texts if any(part in text for part in TROUBLE)]


def test_a_run_that_ends_on_losses_that_are_not_finite_does_not_look_healthy(runs):
    """The first step's update ruins the weights: all steps after it are omitted."""
    overrides = ("grid.pipelines=1", "grid.stages=2", "optimizer.lr=1e38")
    summary = runs.train("convnet", overrides=overrides)
    written = json.loads((summary.run_dir / "summary.json").read_text())
    assert written["steps"] == 4
    assert written["final_loss"] is None, "not that of the last step which counted"
    assert written["reasons"] == {"final_loss": "step 3, the last one, was omitted: its loss was not finite"}
    assert written["omitted_steps"] == 3
    said = "3 of 4 steps changed nothing: the loss or a gradient was not finite; the last 3 among them"
    first, second, *_ = describe(summary).splitlines()
    assert first.startswith("DONE, BUT NOT WELL: 4 steps, loss -, ")
    assert second == said
    events = read_events(summary.run_dir / "events.jsonl")
    assert f"OMITTED: {said}" in sum_up(events).splitlines()
    story = narrate(events)
    assert "step 3 done by 0.1, OMITTED: the loss was not finite" in story


def test_a_run_in_which_no_step_changed_the_weights_is_no_success(runs, tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(msgspec.yaml.encode(runs.job("poisoned", ("model.arguments.one_in=1", "train.steps=3"))).decode())
    folder = runs.folder()
    command = ["train", str(job), "--run-dir", str(folder), "--resume", "auto", "--quiet"]
    for _ in range(2):  # the same command finds that it is done
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "no step has changed the weights: in each from 0 to 2 the loss or a gradient was not finite" in said
    written = json.loads((folder / "summary.json").read_text())
    assert (written["steps"], written["omitted_steps"]) == (3, 3)
    assert len(list((folder / "final").glob("layer-*"))) == 4


def test_a_script_in_which_no_step_changed_the_weights_is_no_success(runs, tmp_path, capfd):
    script = tmp_path / "nan.py"
    script.write_text(
        "import holdfast, torch\n"
        "hf = holdfast.session()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model, optimizer = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in hf.steps(torch.ones(8, 2), microbatches=4, size=1, steps=4):\n"
        "    for x in step:\n"
        "        step.backward(model(x).sum() * float('nan'))\n"
    )
    assert main(["run", "--workers", "2", "--run-dir", str(runs.folder() / "run"), str(script)]) == 2
    assert "no step has changed the weights: in each from 0 to 3" in capfd.readouterr().err


def test_events_are_deleted_and_the_summary_cannot_be_written(runs):
    """Before a worker dies: the warnings come once, and nothing else is lost."""
    folder, events = runs.folder(), []
    log = folder / "events.jsonl"

    def spoil(progress):
        if progress.step == 5:
            log.unlink()
            (folder / "summary.json").mkdir()

    summary = runs.survives("small", "kill:1.1@40:backward", run_dir=folder, on_progress=spoil, on_event=events.append)
    deleted, unwritten = told(events)
    assert deleted == f"{log}: was deleted or moved, and is made again; training goes on"
    assert unwritten.startswith(f"{folder / 'summary.json'}: cannot be written: Is a directory")
    assert summary.reasons == {}
    kinds = [type(event) for _, event in read_events(log)]
    assert kinds[0] is JobStarted
    assert kinds.count(FaultInjected) == 1
    assert [step for step, _ in summary.report.commits] == list(range(60))


def empty(store):
    for path in store.parent.glob("control.db*"):
        path.unlink()
    return "the store of decisions is empty, though some were made"


def exchange(store):
    foreign = msgspec.structs.replace(newest_in(store), job="another", revision=1)
    empty(store)
    put_in(store, foreign)
    return f"{store} is corrupt: expected the decisions of this job, found those of another"


def damage(store):
    empty(store)
    store.write_bytes(b"no database " * 1000)
    return f"{store} is corrupt: expected a database of decisions, found file is not a database"


@pytest.mark.parametrize("spoil", [empty, exchange, damage])
def test_a_coordinator_that_knows_nothing_of_the_job_any_more_saves_what_lives(runs, spoil):
    """One worker died before and is known to the agent alone; what the others hold is of one step, to the bit."""
    folder, events, why = runs.folder(), [], []

    def strike(progress):
        if progress.step >= 20 and progress.alive == 3 and not why:
            why.append(spoil(folder / "control.db"))
            told = [event for _, event in read_events(folder / "events.jsonl") if isinstance(event, CoordinatorReady)]
            os.kill(told[-1].pid, signal.SIGKILL)

    overrides = ("grid.pipelines=2", "train.steps=2000", "control.hang_s=15")
    with pytest.raises(DecisionsLost) as raised:
        runs.train(
            "small",
            "kill:1.1@5:backward",
            overrides=overrides,
            run_dir=folder,
            on_progress=strike,
            on_event=events.append,
        )
    assert told(events) == [f"{why[0]}: what lives is saved, and the job ends"]
    summary = json.loads((folder / "summary.json").read_text())
    step = summary["steps"]
    assert 20 < step < 2000
    assert str(raised.value) == f"{why[0]}; step {step} of what lives is saved in {folder / 'final'}"
    assert summary["weights_sha256"] is None
    if spoil is empty:
        whole = runs.healthy("small", ("grid.pipelines=2", f"train.steps={step}"))
        assert digest_run(folder / "final") == (whole.weights_sha256, whole.state_sha256)
    else:
        assert len(list((folder / "final").glob("layer-*"))) == 4


def test_final_layers_that_cannot_be_written_are_one_line_and_nothing_is_claimed(runs, make_disk):
    folder, disk = runs.folder(), make_disk("64k")
    with pytest.raises(OSError, match="No space left"):
        (disk / "filler").write_bytes(b"x" * 70000)

    def lead_astray(progress):
        if progress.step == 2:
            (folder / "final").symlink_to(disk)

    overrides = ("grid.pipelines=1", "train.steps=30")
    with pytest.raises(InternalError) as raised:
        runs.train("small", overrides=overrides, run_dir=folder, on_progress=lead_astray)
    said = f"NotSaved: the trained layers cannot be written to {folder / 'final'}: No space left on device"
    assert str(raised.value).split(": ", 1)[1] == said, "one line"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_sha256"] is None
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_all_workers_dead_is_exit_code_3_and_the_command_that_goes_on_is_told(tmp_path):
    job, folder = tmp_path / "job.yaml", tmp_path / "run"
    job.write_text(yaml.safe_dump(SMALL))
    begin = ["holdfast", "train", str(job), "--set", "grid.stages=1"]
    command = [sys.executable, "-m", *begin, "--run-dir", str(folder), "--fault", "kill:0.0@299"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def events(kind):
        path = folder / "events.jsonl"
        return [event for _, event in read_events(path) if isinstance(event, kind)] if path.exists() else []

    until(lambda: events(Checkpointed), "a checkpoint", first)
    for event in events(WorkerReady):
        os.kill(event.pid, signal.SIGKILL)
    errors = first.communicate(timeout=LIMIT_S)[1]
    assert first.returncode == 3, errors
    hint = errors.splitlines()[-1]
    assert hint == f"holdfast: go on with: {shlex.join([*begin, '--resume', str(folder)])}"
    words = shlex.split(hint.removeprefix("holdfast: go on with: holdfast "))
    again = holdfast(*words, "--run-dir", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["steps"] == 300
    assert summary["resumed_from"] >= 5


def test_a_full_disk_stops_nothing_but_decisions_and_those_only_while_it_is_full(runs, make_disk):
    """The whole run directory's: a worker dies meanwhile, and the answer to that waits for space."""
    disk, events = make_disk("24m"), []
    folder, filler, killed = disk / "run", disk / "filler", []

    def strike(progress):
        if progress.step == 5:
            fill(filler)
        if progress.step == 10 and not killed:  # it is told again where the recovery finds it open
            ready = [event for _, event in read_events(folder / "events.jsonl") if isinstance(event, WorkerReady)]
            killed.extend(event.pid for event in ready if event.worker == "1.1")
            os.kill(killed[0], signal.SIGKILL)

    def hear(event):
        events.append(event)
        if isinstance(event, Notice) and WAITS in event.text:
            filler.unlink()

    summary = runs.train("small", run_dir=folder, on_progress=strike, on_event=hear)
    assert len(killed) == 1
    healthy = runs.healthy("small")
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert (summary.final_loss, summary.steps) == (healthy.final_loss, healthy.steps)
    assert summary.generations == 2
    unlogged, waiting = sorted(told(events), key=lambda text: WAITS in text)
    full = "No space left on device"
    assert unlogged.startswith(f"{folder / 'events.jsonl'}: cannot be written: {full}")
    assert waiting.startswith(f"{folder / 'control.db'}: ")
    assert waiting.endswith(f"; the answer to the loss of 1.1 waits {WAITS}: training stands still")
    written = json.loads((folder / "summary.json").read_text())
    assert written["failures"] is None, "not known, as their events may be missing"
    assert full in written["reasons"]["failures"]
    assert "final_loss" not in written["reasons"]


def fill(path):
    """Fills the disk that a file is on, to the last page."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 65536):
            pass
    assert shutil.disk_usage(path).free == 0
