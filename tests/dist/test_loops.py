"""A script with its own loop, on several workers of which some die: the same bits, and every item once to one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.commands import holdfast
from tests.plain import plain
from tests.soak import some
from tests.waiting import LIMIT_S

from holdfast import Fault, train
from holdfast.control.chain.opening import plans_in
from holdfast.errors import ConfigError, HoldfastError, ProgramFailed, StateUnavailable
from holdfast.telemetry.events import Agreed, FaultInjected, Notice, StepOmitted, StepOps, WorkerReady, read_events

pytestmark = pytest.mark.dist

VARIANTS = ["norm", "scaled", "tied", "own"]
FAULTS = {
    "start": ["kill:1.0@3"],
    "forward": ["kill:1.0@3:forward"],
    "backward": ["kill:1.0@3:backward"],
    "reduce": ["kill:1.0@3:reduce"],
    "verdict": ["kill:1.0@3:verdict"],
    "update": ["kill:1.0@3:update"],
    "commit": ["kill:1.0@3:commit"],
    "two-at-once": ["kill:0.0@3:backward", "kill:2.0@3:forward"],
    "in-the-recovery": ["kill:1.0@3:backward", "kill:2.0@2:install"],
    "one-after-the-other": ["kill:3.0@2:commit", "kill:0.0@4:reduce", "kill:1.0@6:forward"],
    "coordinator": ["kill:1.0@3:backward", "kill-coordinator@3:persist"],
    "hang": ["hang:1.0@3:backward"],
    "leave": ["leave:1.0@3"],
    "comes-back": ["kill:1.0@2:backward", "join:1.0@3"],
    "dormant": ["suspend:1.0@2", "wake:1.0@8", "kill:2.0@14:backward"],
    "newcomer": ["kill:3.0@1:backward", "join:new@2", "kill:0.0@8:backward"],
}
EVERY_2 = ("checkpoint.every=2", "checkpoint.synchronous=true")
"""However slow the disk is, none is left out."""
COUNTS = ("recomputed_microbatches", "recomputed_at_most")
STEPS = {"dormant": 20, "newcomer": 60, "comes-back": 60}  # whoever comes has some left to run
EVERYTHING = {
    *[("norm", name) for name in FAULTS],
    *[("scaled", name) for name in ("backward", "commit", "comes-back")],
    *[("tied", name) for name in ("forward", "reduce", "newcomer", "dormant")],
    *[("own", name) for name in ("update", "leave", "comes-back", "one-after-the-other")],
}


def with_arguments(runs, variant, *arguments):
    """The override that gives the script more arguments."""
    known = list(runs.job(f"loop-{variant}").model.arguments)
    return f"model.arguments={json.dumps([*known, *map(str, arguments)])}"


def stored_plans(run_dir: Path) -> dict:
    return plans_in(run_dir / "control.db")


def told(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Per worker's process, the items that it was given, in order: not that of the probe, given the first one twice."""
    rows = {path.stem: path.read_text().splitlines() for path in folder.glob("*.jsonl")}
    given = {name: [tuple(json.loads(line)) for line in lines] for name, lines in rows.items()}
    return {name: items for name, items in given.items() if items != [(0, 0)] * 2}


def had_by_lost(run_dir: Path, given: dict[str, list[tuple[int, int]]]) -> set[tuple[int, int]]:
    """What the lost were given of the steps that their survivors had yet to commit: two, if one had gone ahead."""
    struck, had = [], set()
    for _, event in read_events(run_dir / "events.jsonl"):
        if isinstance(event, FaultInjected) and event.kind in ("kill", "hang"):
            struck.append(event.worker)
        if isinstance(event, Agreed):
            had |= {
                item
                for worker in struck
                for process, items in given.items()
                for item in items
                if process.startswith(f"{worker}-") and item[0] >= event.step
            }
            struck.clear()
    return had


@contextmanager
def while_outside(run_dir, go, *, until, strike=""):
    """While the first worker is outside of its loop, behind step 2: one is struck; ``until`` is then waited for."""
    over = threading.Event()

    def events():
        return [event for _, event in read_events(run_dir / "events.jsonl")]

    def beside() -> None:
        while not go.with_suffix(".there").exists():
            if over.wait(0.01):
                return
        if strike:
            os.kill(next(event.pid for event in events() if getattr(event, "worker", "") == strike), signal.SIGKILL)
        while not until(events()):
            if over.wait(0.01):
                return
        go.touch()

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def has_recovered(events) -> bool:
    return any(isinstance(event, Agreed) and event.generation > 1 for event in events)


def has_come(events, workers: int = 4) -> bool:
    """Whether another one is there, and all that live have told the coordinator: it is what they connect to first."""
    pids = [event.pid for event in events if isinstance(event, WorkerReady)]
    return len(pids) > workers and all(map(is_gone_or_connected, pids))


def is_gone_or_connected(pid: int) -> bool:
    try:
        return any(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process(pid).net_connections("tcp"))
    except psutil.NoSuchProcess:
        return True


BESIDE_NORM = [("scaled", "commit"), ("tied", "newcomer"), ("own", "update"), ("own", "leave")]
KEPT = {*(case for case in EVERYTHING if case[0] == "norm"), *BESIDE_NORM}


@pytest.mark.parametrize(("variant", "fault"), some(sorted(EVERYTHING), KEPT))
def test_a_fault(runs, tmp_path, variant, fault):
    comes = any(spec.startswith("join:") for spec in FAULTS[fault])
    go, run_dir = tmp_path / "go", runs.folder()
    outside = ("--outside", go) if comes else ()
    steps = ("--steps", STEPS.get(fault, 8))
    arguments = with_arguments(runs, variant, *steps, *outside, "--told", tmp_path)
    overrides = (arguments, "train.compare_every=0")  # else a second worker is given an item now and then, too
    healthy = runs.healthy(f"loop-{variant}", (with_arguments(runs, variant, *steps),))
    with while_outside(run_dir, go, until=has_come):
        runs.survives(f"loop-{variant}", *FAULTS[fault], overrides=overrides, healthy=healthy, run_dir=run_dir)
    given = told(tmp_path)
    agreed = [event for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, Agreed)]
    buckets = stored_plans(run_dir)[1].placement.num_layers
    dropped = sum(event.dropped for event in agreed)  # by who was in the next step already, while others lacked sums
    dropped += sum(
        event.recomputed_microbatches // buckets for event in agreed if not event.goes_on
    )  # or weights of it
    for process, items in given.items():
        twice = [item for item, times in Counter(items).items() if times > 1]
        assert len(twice) <= dropped, f"{process} was given {twice} twice"
    everything = Counter(item for items in given.values() for item in items)
    assert set(everything) == {(step, item) for step in range(STEPS.get(fault, 8)) for item in range(8)}
    had = had_by_lost(run_dir, given)
    again = [item for item, times in everything.items() if times > 1 and item not in had]
    assert len(again) <= dropped, "only what the lost had of what was not committed"
    assert len(given) == (5 if comes else 4), "whoever comes takes part"
    twice = buckets * sum(times - 1 for times in everything.values())
    known, at_most = (sum(getattr(event, name) for event in agreed) for name in COUNTS)
    assert known <= twice <= at_most, "what is told to be run again is"
    if fault == "dormant":
        (items,) = (items for process, items in given.items() if process.startswith("1.0-"))
        idle = sorted(set(range(20)) - {step for step, _ in items})
        assert idle, "it rested"
        assert idle == list(range(idle[0], idle[-1] + 1)), "once"
        assert 2 < idle[0] <= idle[-1] < 19, "from the step behind the notice on, and not to the end"


def test_a_script_by_itself_is_one_worker_with_the_same_bits(runs, tmp_path):
    for variant in VARIANTS:
        ends = []
        chunks = ("--sum-chunks", 2) if variant == "tied" else ()
        script = [runs.job(f"loop-{variant}").model.path, "--variant", variant, *map(str, chunks), "--digest"]
        for name in ("alone", "shared"):
            ends.append(tmp_path / f"{variant}-{name}")
        if variant == VARIANTS[0]:  # as people start it, once
            subprocess.run([sys.executable, *script, ends[0]], check=True, timeout=LIMIT_S)
        else:
            plain(*script, ends[0])
        arguments = with_arguments(runs, variant, *chunks, "--digest", ends[1])
        runs.train(f"loop-{variant}", "kill:0.0@2:backward", overrides=(arguments,))
        assert ends[0].read_text() == ends[1].read_text()


def test_what_is_logged_of_an_item_counts_once(runs, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    plain(runs.job("loop-norm").model.path, "--logged", alone)
    faults = ("kill:1.0@3:backward", "kill:2.0@5:reduce")
    overrides = (with_arguments(runs, "norm", "--logged", shared),)
    runs.survives("loop-norm", *faults, overrides=overrides, healthy=runs.healthy("loop-norm"))
    (known,) = logged(alone)
    assert [step for step, _ in known] == list(range(8))
    assert all(0 <= means["right"] <= 1 and 1 <= means["odd"] <= 9 for _, means in known)
    lines = logged(shared)
    assert sorted(map(len, lines)) == [3, 5, 8, 8], "two died"
    assert all(each == known[: len(each)] for each in lines), "whoever ran an item, it was counted, and once"


@pytest.mark.parametrize("who", ["spare", "newcomer"])
def test_whoever_comes_knows_what_was_logged(runs, tmp_path, who):
    """It is given the whole model while the others train, by an engine that it did not begin with."""
    told, go, run_dir = tmp_path / "told", tmp_path / "go", runs.folder()
    told.mkdir()
    faults = ["kill:3.0@1:backward", *(["join:new@2"] if who == "newcomer" else [])]
    arguments = ("--steps", 60, "--logged", told, "--outside", go)
    overrides = (with_arguments(runs, "norm", *arguments), *(["resilience.spares=1"] if who == "spare" else []))
    healthy = runs.healthy("loop-norm", (with_arguments(runs, "norm", "--steps", 60),))
    with while_outside(run_dir, go, until=has_come):
        runs.survives("loop-norm", *faults, overrides=overrides, healthy=healthy, run_dir=run_dir)
    whole, *others = sorted(logged(told), key=len, reverse=True)
    assert len(others) == 4
    assert len(whole) == 60
    known = dict(whole)
    assert all(known[step] == means for lines in others for step, means in lines)
    assert max(lines[-1][0] for lines in others if lines[0][0]) == 59, "also whoever has come"


def test_where_a_whole_step_is_left_out_nothing_was_logged_of_it(runs, tmp_path):
    """A step that others had not begun, as they lacked sums of the one before, is run without the lost instead."""
    overrides = (with_arguments(runs, "norm", "--logged", tmp_path), "resilience.strategy=skip")
    summary = runs.train("loop-norm", "kill:1.0@3:forward", "kill:2.0@5:forward", overrides=overrides)
    assert [failure.worker for failure in summary.report.failures] == ["1.0", "2.0"]
    agreed = [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, Agreed)]
    left_out = {event.step for event in agreed if event.left_out}
    assert left_out
    assert left_out <= {3, 5}
    for lines in logged(tmp_path):
        assert all((means["right"] != means["right"]) == (step in left_out) for step, means in lines)


def logged(folder: Path) -> list[list[tuple[int, dict[str, float]]]]:
    """Per process, what was logged of each step."""
    return [
        [tuple(json.loads(line)) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.logged"))
    ]


def test_torchrun_starts_it_and_does_not_see_what_dies(runs, tmp_path):
    go, run_dir = tmp_path / "go", runs.folder()
    faults = ["kill:3.0@1:backward", "join:new@2", "hang:1.0@7:backward", "leave:2.0@9"]
    told = ["--run-dir", run_dir, "--set", "control.hang_s=2", *(f"--fault={fault}" for fault in faults)]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = [runs.job("loop-norm").model.path, "--steps", "12", "--outside", go]
    environment = {**os.environ, "HOLDFAST_RUN": shlex.join(map(str, told))}
    with while_outside(run_dir, go, until=has_come):
        subprocess.run(
            [sys.executable, "-m", *map(str, (*torchrun, *script))], check=True, env=environment, timeout=LIMIT_S
        )
    summary = json.loads((run_dir / "summary.json").read_text())
    healthy = runs.healthy("loop-norm", (with_arguments(runs, "norm", "--steps", 12),))
    assert summary["weights_sha256"] == healthy.weights_sha256
    assert {failure["worker"] for failure in summary["failures"]} == {"3.0", "1.0"}
    assert {str(e.spec) for _, e in read_events(run_dir / "events.jsonl") if isinstance(e, FaultInjected)} == {
        str(Fault.parse(fault)) for fault in faults
    }


def test_a_compiled_model_has_the_same_bits_in_all_processes(runs):
    compiled = (with_arguments(runs, "norm", "--compiled"),)
    summary = runs.survives("loop-norm", "kill:1.0@3:backward", overrides=compiled)
    assert "other bits" not in (summary.run_dir / "events.jsonl").read_text()


def test_a_compiled_model_with_other_bits_in_each_process_is_told(runs):
    overrides = (with_arguments(runs, "norm", "--compiled", "--fault", "own-bits"),)
    summary = runs.train("loop-norm", overrides=overrides)
    told = [e.text for _, e in read_events(summary.run_dir / "events.jsonl") if isinstance(e, Notice)]
    expected = "the first item has other bits in another process: weights may differ from a run without failures"
    assert f"{expected}; the model is compiled" in told


def test_a_scaled_loss_omits_steps_for_all(runs):
    events = [event for _, event in read_events(runs.healthy("loop-scaled").run_dir / "events.jsonl")]
    omitted = {
        event.step for event in events if isinstance(event, StepOmitted | StepOps) and getattr(event, "omitted", True)
    }
    assert omitted, "the first scale is far too large"
    assert len(omitted) < 8


def test_a_worker_outside_of_its_loop_keeps_nobody_from_recovering(runs, tmp_path):
    go, run_dir = tmp_path / "go", runs.folder()
    with while_outside(run_dir, go, until=has_recovered, strike="3.0"):
        summary = runs.train("loop-norm", overrides=(with_arguments(runs, "norm", "--outside", go),), run_dir=run_dir)
    assert go.exists(), "the recovery was over before the first worker came back"
    assert [failure.worker for failure in summary.report.failures] == ["3.0"]
    assert summary.weights_sha256 == runs.healthy("loop-norm").weights_sha256


def test_what_takes_long_in_the_body_of_a_step_is_no_hang(runs):
    overrides = (with_arguments(runs, "norm", "--fault", "slow-body:1.0"), "control.hang_s=2")
    summary = train(runs.job("loop-norm", overrides), run_dir=runs.folder())
    assert summary.report.failures == ()
    assert summary.weights_sha256 == runs.healthy("loop-norm").weights_sha256


def test_whoever_leaves_does_not_run_what_comes_behind_the_loop(runs, tmp_path):
    steps = ("--steps", 60)  # whoever leaves is there for some more after it was told to
    healthy = runs.healthy("loop-norm", (with_arguments(runs, "norm", *steps),))
    overrides = (with_arguments(runs, "norm", *steps, "--told", tmp_path),)
    runs.survives("loop-norm", "leave:1.0@3", overrides=overrides, healthy=healthy)
    assert {path.name.partition("-")[0] for path in tmp_path.glob("*.behind")} == {"0.0", "2.0", "3.0"}


@pytest.mark.parametrize("strategy", ["lossy-forward", "skip", "rollback"])
def test_a_step_that_ends_without_items_of_ours_is_a_step_of_the_loop(runs, tmp_path, strategy):
    """One worker is away while another dies: the step ends for the others, and its turn in the loop comes all the same.

    Each counts its steps in the state; at the end all owners' states are compared. All show the same steps.
    """
    go, run_dir = tmp_path / "go", runs.folder()
    overrides = (
        with_arguments(runs, "own", "--outside", go, "--logged", tmp_path),
        f"resilience.strategy={strategy}",
    )
    with while_outside(run_dir, go, until=has_recovered, strike="3.0"):
        summary = runs.train("loop-own", overrides=overrides, run_dir=run_dir)
    assert [failure.worker for failure in summary.report.failures] == ["3.0"]
    assert summary.steps in (8, 9)
    *survivors, _ = sorted(([step for step, _ in lines] for lines in logged(tmp_path)), key=len, reverse=True)
    assert survivors[0] == survivors[1] == survivors[2]


def test_a_run_goes_on_from_a_checkpoint(runs):
    healthy = runs.healthy("loop-own")
    first = runs.folder()
    everybody = [f"kill:{worker}.0@6" for worker in range(4)]
    with pytest.raises(StateUnavailable):
        runs.train("loop-own", *everybody, overrides=EVERY_2, run_dir=first)
    summary = runs.train("loop-own", overrides=("grid.pipelines=3",), resume=first)
    assert summary.resumed_from is not None
    assert 2 <= summary.resumed_from < 8
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)


def test_the_same_command_goes_on(runs):
    healthy = runs.healthy("loop-norm")
    folder = runs.folder()
    everybody = [f"kill:{worker}.0@6" for worker in range(4)]
    overrides = EVERY_2
    with pytest.raises(StateUnavailable):
        runs.train("loop-norm", *everybody, overrides=overrides, run_dir=folder, resume="auto")
    summary = runs.train("loop-norm", *everybody, overrides=overrides, run_dir=folder, resume="auto")
    assert summary.resumed_from is not None
    assert summary.weights_sha256 == healthy.weights_sha256
    again = runs.train_only("loop-norm", *everybody, overrides=overrides, run_dir=folder, resume="auto")
    assert again.done_before


def test_an_exception_in_one_worker_loses_that_worker(runs):
    overrides = (with_arguments(runs, "norm", "--fault", "raise:2.0"),)
    summary = runs.train("loop-norm", overrides=overrides)
    assert [failure.worker for failure in summary.report.failures] == ["2.0"]
    assert "not to my taste" in (summary.run_dir / "events.jsonl").read_text()
    assert summary.weights_sha256 == runs.healthy("loop-norm").weights_sha256


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "ValueError: the third step is not to my taste"),
        ("exit", "SystemExit: 7"),
        ("exit-well", "left its loop before the last step was over"),
        ("break", "left its loop before the last step was over"),
        ("step", "SGD.step: Holdfast makes the step"),
        ("no-backward", "step 0, item"),
    ],
)
def test_what_goes_wrong_in_every_worker_ends_the_job(runs, fault, text):
    with pytest.raises((ConfigError, ProgramFailed), match=text):
        runs.train_only("loop-norm", overrides=(with_arguments(runs, "norm", "--fault", fault),))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("grid.pipelines=9", "microbatches: 8 are too few for 9 workers"),
        ("train.clip_norm=1", "train.clip_norm: a script has its own"),
        ("resilience.step_log=false", "resilience.step_log: a script has its own"),
        ("resilience.strategy=templates", "never goes back"),
        ("model.path=nowhere.py", "there is no such script"),
    ],
)
def test_what_a_script_cannot_have_is_refused(runs, override, text):
    with pytest.raises(ConfigError, match=text):
        runs.train_only("loop-norm", overrides=(override,))


def test_a_script_without_a_loop_is_refused(runs, tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('done')\n")
    with pytest.raises(ConfigError, match="came to its end without a loop"):
        train(runs.job("loop-norm", (f"model.path={script}", "model.arguments=[]")), run_dir=runs.folder())


def test_a_model_that_is_another_one_in_each_process_is_refused(runs, tmp_path):
    script = tmp_path / "unseeded.py"
    script.write_text(
        "import os, holdfast, torch\n"
        "hf = holdfast.session()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "torch.nn.init.constant_(model.bias, os.getpid())\n"
        "model, optimizer = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in hf.steps(torch.zeros(8, 2), microbatches=4, size=1):\n"
        "    for x in step:\n"
        "        step.backward(model(x).sum())\n"
    )
    with pytest.raises(ConfigError, match="begins with other weights"):
        train(runs.job("loop-norm", (f"model.path={script}", "model.arguments=[]")), run_dir=runs.folder())


def test_an_engine_that_cannot_be_made_ends_the_job_at_once(runs, tmp_path):
    """Nobody drives then; the script's thread waited for the end of a drive that had never begun."""
    script = tmp_path / "unmade.py"
    script.write_text(
        "import pathlib, holdfast, torch\n"
        "import holdfast.runtime.loop.stage as stages\n"
        "tried = pathlib.Path(__file__ + '.tried')\n"
        "if tried.exists():\n"
        "    stages.own = None\n"
        "tried.touch()\n"
        "hf = holdfast.session()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model, optimizer = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in hf.steps(torch.zeros(8, 2), microbatches=4, size=1):\n"
        "    for x in step:\n"
        "        step.backward(model(x).sum())\n"
    )
    told = []
    with pytest.raises(HoldfastError, match="'NoneType' object is not callable"):
        train(
            runs.job("loop-norm", (f"model.path={script}", "model.arguments=[]")),
            run_dir=runs.folder(),
            on_event=told.append,
        )
    assert not any("behind its loop" in getattr(event, "text", "") for event in told)


def test_a_script_may_load_data_in_processes_of_its_own(runs):
    summary = runs.train("loop-norm", overrides=(with_arguments(runs, "norm", "--fault", "load:1.0"),))
    assert summary.weights_sha256 == runs.healthy("loop-norm").weights_sha256
    assert summary.report.failures == ()


def test_what_comes_behind_the_loop_may_fail_without_losing_anything(runs):
    summary = runs.train("loop-norm", overrides=(with_arguments(runs, "norm", "--fault", "behind"),))
    assert summary.weights_sha256 == runs.healthy("loop-norm").weights_sha256
    assert summary.scripts_failed == ("0.0", "1.0", "2.0", "3.0"), "though all is saved"
    assert json.loads((summary.run_dir / "summary.json").read_text())["scripts_failed"] == [*summary.scripts_failed]


def test_a_loop_for_each_epoch_is_no_success(tmp_path):
    """The first loop is the job's; the second one is an error, and the command does not end with 0."""
    (script := tmp_path / "epochs.py").write_text(
        "import holdfast, torch\n"
        "hf = holdfast.session()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model, optimizer = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for epoch in range(2):\n"
        "    for step in hf.steps(torch.zeros(8, 2), microbatches=4, size=1):\n"
        "        for x in step:\n"
        "            step.backward(model(x).sum())\n"
    )
    ended = holdfast("run", "--workers", 2, "--run-dir", tmp_path / "run", script)
    assert ended.returncode == 1, ended.stderr
    assert "all steps are done and saved, but the script failed behind its loop (worker 0.0, 1.0" in ended.stderr
    assert "done: 2 steps" in ended.stdout
