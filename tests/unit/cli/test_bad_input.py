"""Bad input to the command as people run it: exit code 2, one line, no traceback, nothing written."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from holdfast.cli.commands import run_command
from holdfast.config.profiles import save_profile
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.telemetry.events import (
    Agreed,
    Detected,
    EventLog,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Notice,
    Rebuilt,
    StepOps,
    Suspected,
    WorkerReady,
)

KINDS = "kill, hang, stall, slow, leave, suspend, wake, join, partition, kill-node, kill-coordinator"
JOB = """
name: tiny
model: {kind: convnet, width: 2}
data: {kind: digits}
grid: {pipelines: 1, stages: 1, microbatches: 1, microbatch_size: 2}
optimizer: {kind: sgd, lr: 1e-2}
train: {steps: 2}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    save_profile(uniform_profile(1), tmp_path / "one.json")
    return str(path)


@pytest.fixture
def command(tmp_path):
    """Runs the installed command in a folder of its own."""

    def run(*flags):
        line = [str(Path(sys.executable).with_name("holdfast")), *flags]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    return run


@pytest.fixture
def holdfast(tmp_path, monkeypatch, capfd):
    """Does in this process what the command does in its own, which would load PyTorch first."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        capfd.readouterr()
        try:
            code = run_command(flags)
        except SystemExit as ended:  # of the parser
            code = ended.code
        return subprocess.CompletedProcess(flags, code, *capfd.readouterr())

    return run


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def complaint(done):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *phases, line = done.stderr.splitlines()
    assert not [phase for phase in phases if phase.startswith("holdfast: ")], "what is wrong is said in one line"
    return line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["train", "none.yaml"], "holdfast: none.yaml: No such file or directory; expected a job file in YAML"),
        (
            ["train", "job.yaml", "--set", "grid.stagse=2"],
            "holdfast: job.yaml: grid.stagse: unknown key; did you mean stages?",
        ),
        (["train", "job.yaml", "--set", "grid"], "holdfast: --set grid: expected KEY=VALUE, such as grid.stages=2"),
        (
            ["train", "job.yaml", "--set", "resilience.spares=2", "--fault", "kill:1.2@0"],
            "holdfast: --fault kill:1.2@0:start: there is no worker 1.2; workers are 0.0 to 1.1",
        ),
        (
            ["train", "job.yaml", "--set", "resilience.spares=2", "--fault", "kill-node:3@0"],
            "holdfast: --fault kill-node:3@0:start: there is no node 3; nodes are 0 to 2",
        ),
        (
            ["train", "job.yaml", "--fault", "kill:1.0@0"],
            "holdfast: --fault kill:1.0@0:start: there is no worker 1.0; workers are 0.0 to 0.0",
        ),
        (["train", "job.yaml", "--fault", "kill:0.0@2"], "holdfast: --fault kill:0.0@2:start: the last step is 1"),
        (
            ["train", "job.yaml", "--fault", "kil:0.0@1"],
            f"holdfast: --fault kil:0.0@1: unknown kind 'kil'; known: {KINDS}",
        ),
        (
            ["train", "job.yaml", "--fault", "kill:0.0@1:lunch"],
            "holdfast: --fault kill:0.0@1:lunch: unknown point 'lunch'; known: start, forward, backward, reduce, "
            "gradients, verdict, update, commit, evaluate, checkpoint, detect, persist, broadcast, install, copy, "
            "replay",
        ),
        (["train"], "holdfast train: the following arguments are required: JOB.yaml (see holdfast train --help)"),
        (
            ["train", "job.yaml", "--emulate", "none.json"],
            "holdfast: none.json: No such file or directory; expected a profile, as `holdfast profile JOB.yaml --out "
            "FILE` writes it",
        ),
        (
            ["train", "job.yaml", "--emulate", "one.json", "--set", "grid.stages=2"],
            "holdfast: grid.stages: 2 stages for a profile of 1 layers; at most 1",
        ),
        (
            ["train", "job.yaml", "--set", "train.device=gpu"],
            "holdfast: job.yaml: train: expected device to be auto, cpu, cuda, cuda:N such as cuda:0, or "
            "path/to/file.py:name, got 'gpu'",
        ),
        (
            ["train", "job.yaml", "--set", "model.checkpoint_activations=3"],
            "holdfast: job.yaml: model.checkpoint_activations: expected `bool | array`, got 3",
        ),
        (
            ["train", "job.yaml", "--set", "model.checkpoint_activations=[6, 7]"],
            "holdfast: model.checkpoint_activations: there is no layer 7; layers are 0 to 6",
        ),
        (
            ["profile", "none.yaml", "--out", "p.json"],
            "holdfast: none.yaml: No such file or directory; expected a job file in YAML",
        ),
        (
            ["profile", "job.yaml", "--out", "job.yaml"],
            "holdfast: --out job.yaml: exists already, nothing was overwritten; choose another file or use --force",
        ),
        (
            ["profile", "job.yaml", "--out", "no/p.json"],
            "holdfast: --out no/p.json: there is no folder no; expected a file in one that exists",
        ),
        (["profile", "job.yaml", "--out", ".", "--force"], "holdfast: --out .: is a folder; expected a file"),
        (
            ["profile", "job.yaml", "--out", "p.json", "--iterations", "0"],
            "holdfast profile: argument --iterations: 0 is impossible: expected a whole number from 1 "
            "(see holdfast profile --help)",
        ),
        (
            ["profile", "job.yaml"],
            "holdfast profile: the following arguments are required: --out (see holdfast profile --help)",
        ),
        (
            ["profile", "job.yaml", "--out", "p.json", "--set", "data={kind: text, path: nothing.txt, context: 8}"],
            "holdfast: data.path: 'nothing.txt' names no file",
        ),
        (["inspect", "."], "holdfast: .: is no run directory, it has no events.jsonl"),
        (
            ["train", "job.yaml", "--set", "data={kind: python, target: 'builtins:dict', arguments: {x: 1, y: 2}}"],
            "holdfast: data: item 0 of 2 cannot be read: KeyError: 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_line_says_what_to_change(holdfast, job, tmp_path, flags, line):
    before = contents(tmp_path)
    assert complaint(holdfast(*flags)) == line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("flags", [["tarin"], [], ["train", "job.yaml", "--falut", "x"]])
def test_unknown_commands_and_flags(holdfast, job, tmp_path, flags):
    before = contents(tmp_path)
    assert complaint(holdfast(*flags)).startswith("holdfast")
    assert contents(tmp_path) == before


def test_missing_data_is_found_before_anything_is_written(holdfast, job, tmp_path):
    before = contents(tmp_path)
    overrides = ["--set", "data={kind: text, path: nothing/here.txt}", "--set", "model={kind: gpt}"]
    line = complaint(holdfast("train", "job.yaml", "--run-dir", "run", *overrides))
    assert line == "holdfast: data.path: 'nothing/here.txt' names no file"
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_undo_of_an_optimizer_without_inverse_is_found_before_workers_start(holdfast, job, tmp_path):
    before = contents(tmp_path)
    overrides = ["--set", "optimizer={kind: adam, amsgrad: true}", "--set", "resilience.commit=undo"]
    line = complaint(holdfast("train", "job.yaml", "--run-dir", "run", *overrides))
    assert line == (
        "holdfast: resilience.commit: undo is impossible: Adam cannot be undone: "
        "amsgrad takes an element-wise maximum, which has no inverse; use shadow"
    )
    assert contents(tmp_path) == before


def test_a_run_directory_is_used_once_and_the_story_of_the_run_can_be_read(command, job, tmp_path):
    first = command("train", job, "--run-dir", "run")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("done: 2 steps")
    before = contents(tmp_path)
    assert {"run/job.yaml", "run/events.jsonl", "run/summary.json"} <= set(before)
    line = complaint(command("train", job, "--run-dir", "run"))
    assert line == (
        "holdfast: --run-dir run: is not empty; choose a new directory, or go on with what is there by --resume auto; "
        "nothing was overwritten"
    )
    assert contents(tmp_path) == before
    story = command("inspect", "run")
    assert story.returncode == 0
    assert "2 steps committed" in story.stdout


def test_a_port_in_use(holdfast, job):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = complaint(holdfast("train", job, "--run-dir", "run", "--set", f"control.port={port}"))
    assert line.startswith(f"holdfast: control.port: cannot listen on 127.0.0.1:{port}")


def test_a_run_directory_that_cannot_be_written(holdfast, job):
    line = complaint(holdfast("train", job, "--run-dir", "job.yaml/run"))
    assert line == "holdfast: --run-dir job.yaml/run: cannot be written: Not a directory"


def test_run_as_a_module_it_says_no_more(job, tmp_path):
    line = [sys.executable, "-m", "holdfast", "train", job, "--run-dir", "job.yaml/run"]
    complaint(subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False))


PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"


def test_help_names_every_command(command):
    done = command("--help")
    assert done.returncode == 0
    for command in ("train", "plan", "profile", "inspect"):
        assert f"\n    {command} " in done.stdout


def test_help_lists_every_fault_that_can_strike_and_every_point_of_a_worker(holdfast):
    told = " ".join(holdfast("train", "--help").stdout.split()).replace("- ", "-")
    of_the_coordinator = {"kill-coordinator", "persist", "broadcast"}
    for word in {*FaultKind, *Point} - of_the_coordinator:
        assert re.search(rf"\b{word}\b", told), word


@pytest.mark.parametrize("place", ["help", "page"])
def test_the_points_of_the_coordinator_are_named_where_people_look(holdfast, place):
    if place == "help":
        text = " ".join(holdfast("train", "--help").stdout.split())
        told = text.replace("- ", "-").partition("Of the coordinator: kill-coordinator")[2].partition(" --")[0]
    else:
        text = " ".join(PAGE.read_text().split())
        told = text.partition("the coordinator has ")[2].partition(". ")[0]
    with pytest.raises(ConfigError) as refused:
        Fault.parse("kill-coordinator@1:replay")
    points = str(refused.value).partition("it has ")[2].split(", ")
    assert len(points) > 5
    assert [word for word in points if not re.search(rf"\b{word}\b", told)] == []


def write_log(folder):
    log = EventLog(folder / "events.jsonl")
    events = [
        JobStarted(name="tiny", workers=2, steps=2, samples_per_step=4, wall_time=0.0),
        WorkerReady(worker="0.0", pid=7),
        Notice(worker="0.0", text="no fast path here"),
        Installed(generation=1, workers=("0.0", "1.0"), strategy=""),
        Agreed(generation=1, step=0, recomputed_microbatches=0),
        Rebuilt(generation=1),
        StepOps(worker="1.0", generation=1, step=0, loss=0.5, omitted=False, ops=()),
        StepOps(worker="0.0", generation=1, step=0, loss=0.5, omitted=False, ops=()),
        FaultInjected(worker="1.0", kind="kill", step=1, point="forward", spec="kill:1.0@1:forward"),
        Suspected(worker="0.0", peer="1.0", generation=1, detail="reset"),
        Detected(worker="1.0", how="process ended: signal 9", generation=1),
        Installed(generation=2, workers=("0.0",), strategy="adaptive"),
        Agreed(generation=2, step=1, recomputed_microbatches=3),
        Rebuilt(generation=2),
        StepOps(worker="0.0", generation=2, step=1, loss=0.25, omitted=False, ops=()),
        JobEnded(outcome="done", step=2),
    ]
    for number, event in enumerate(events):
        log.write(100 + number / 10, event)
    log.close()


STORY = """\
job tiny: 2 workers, 2 steps of 4 samples
ended: done at step 2
2 steps committed, 1.43 steps/s, loss 0.5000 in step 0, 0.2500 in step 1
worker 1.0 lost in step 1 (kill at forward): detected 200 ms, agreed 400 ms, rebuilt 500 ms, next commit 600 ms after \
the kill; 3 (layer, micro-batch) pairs run again
worker 0.0: no fast path here

   seconds  |0           |0.2         |0.4          |0.6         |0.8         |1            |1.2         |1.4
generation                     |1                                                    |2
       0.0        aaaaaaaaaaaaaa--------------------------xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-------------
       1.0                      --------------------xxxxxxxxxxxxxK..............................................
            # computing  + computing less than half of the time  - waiting  x step given up, recovering
            a there, not let in yet  e entering, computes nothing  . lost  (blank) absent
            K kill

    0.000 s  job tiny: 2 workers, 2 steps of 4 samples
    0.100 s  worker 0.0 ready (process 7)
    0.200 s  worker 0.0: no fast path here
    0.300 s  generation 1: 2 workers
    0.400 s  generation 1 runs from step 0
    0.500 s  generation 1 is connected
    0.600 s  step 0 done by 1.0, loss 0.5000
    0.700 s  step 0 done by 0.0, loss 0.5000
    0.800 s  FAULT kill strikes worker 1.0 in step 1 at forward
    0.900 s  worker 0.0 cannot reach 1.0: reset
    1.000 s  worker 1.0 is lost: process ended: signal 9
    1.100 s  generation 2: 1 workers, by adaptive
    1.200 s  generation 2 runs from step 1
    1.300 s  generation 2 is connected
    1.400 s  step 1 done by 0.0, loss 0.2500
    1.500 s  ended: done at step 2
"""
ROUTINE = (" ready (process", " done by ", " cannot reach ")


def test_inspect_tells_the_story(holdfast, tmp_path):
    write_log(tmp_path)
    done = holdfast("inspect", ".", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == STORY


def test_inspect_leaves_out_what_happens_in_every_run(holdfast, tmp_path):
    write_log(tmp_path)
    kept = [line for line in STORY.splitlines() if not any(text in line for text in ROUTINE)]
    told = holdfast("inspect", ".").stdout.splitlines()
    assert told == [*kept, "5 lines of every run are left out; --all tells them"]


def test_inspect_of_a_log_without_events_or_with_others(holdfast, tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text("")
    assert holdfast("inspect", ".").stdout == "nothing happened yet\n"
    log.write_text("hello\n")
    assert complaint(holdfast("inspect", ".")).startswith("holdfast: events.jsonl: is no log of events")


def test_a_reader_that_stops_early_is_no_error(job, tmp_path):
    write_log(tmp_path)
    command = f"{Path(sys.executable).with_name('holdfast')} inspect . | true"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
