"""Real processes that hang, leave, come and die in whole nodes: nobody can tell from the result."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import psutil
import pytest
from tests.soak import some
from tests.waiting import LIMIT_S

from holdfast.telemetry.events import Detected, Installed, Notice, Parted, StepOps, WorkerReady, read_events

pytestmark = pytest.mark.dist

POINTS = ["forward", "backward", "reduce", "verdict", "commit"]
MODELS = ["gpt", "convnet", "bert", "vit"]
KINDS = ["hang", "stall"]
STAGES = ["first", "middle", "last"]
PACE = "slow:2.0@3:6x"
"""From step 3 on most of each step is waiting, so that a new process is ready long before the last step."""
WORKERS = {"first": "2.0", "middle": "0.1", "last": "1.3"}


def events_of(run_dir, kind):
    return [event for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, kind)]


def works_at_the_end(summary, worker):
    """Whether a worker computed in the last step."""
    last = [e for e in events_of(summary.run_dir, StepOps) if e.step == summary.steps - 1]
    return any(event.worker == worker and event.ops for event in last)


def stuck_in(name, half):
    """Three workers, each of another stage and pipeline, that stop in three steps, in both ways."""
    turn = MODELS.index(name)
    points = POINTS[:3] if half == "first" else [*POINTS[3:], POINTS[turn % 3]]
    return [
        (KINDS[(turn // 2 + number + (half == "second")) % 2], point, STAGES[(turn + number) % 3])
        for number, point in enumerate(points)
    ]


HALVES = ["first", "second"]


def test_the_runs_below_cover_every_pair():
    runs = [(name, *fault) for name in MODELS for half in HALVES for fault in stuck_in(name, half)]
    for one, other in itertools.combinations(range(4), 2):
        wanted = list(itertools.product(*((MODELS, KINDS, POINTS, STAGES)[i] for i in (one, other))))
        assert {(run[one], run[other]) for run in runs} == set(wanted)


STUCK = list(itertools.product(MODELS, HALVES))


@pytest.mark.parametrize(("name", "half"), some(STUCK, [("gpt", "first"), ("convnet", "second")]))
def test_hangs_and_stalls_at_points_of_a_step(runs, name, half):
    stuck = stuck_in(name, half)
    faults = [f"{kind}:{WORKERS[stage]}@{step}:{point}" for step, (kind, point, stage) in enumerate(stuck, 1)]
    summary = runs.survives(name, *faults)
    how = {event.worker: event.how for event in events_of(summary.run_dir, Detected)}
    for kind, _, stage in stuck:
        assert ("no sign of life" if kind == "hang" else "stuck in step") in how[WORKERS[stage]]


@pytest.mark.parametrize("point", some(["detect", "install", "replay"], ["install"]))
def test_a_hang_and_a_stall_during_the_recovery_of_another(runs, point):
    faults = ["kill:1.2@1:forward", f"hang:0.1@1:{point}", "kill:2.0@3:backward", f"stall:2.3@3:{point}"]
    summary = runs.survives("gpt", *faults, overrides=("train.steps=5",))
    assert summary.generations == 5, "every failure is one more generation"


NODES = [(2, "forward"), (2, "update"), (4, "forward"), (4, "update")]


@pytest.mark.parametrize(("workers_per_node", "point"), some(NODES, [NODES[0], NODES[3]]))
def test_a_whole_node_dies(runs, workers_per_node, point):
    overrides = (f"grid.workers_per_node={workers_per_node}", "train.steps=5")
    runs.survives("gpt", f"kill-node:2@1:{point}", f"kill-node:0@3:{point}", overrides=overrides)


def test_two_leave_at_once_and_nothing_is_recomputed(runs):
    summary = runs.survives("small", "leave:0.0@3:forward", "leave:1.1@3:backward")
    assert sorted(event.worker for event in events_of(summary.run_dir, Parted)) == ["0.0", "1.1"]
    assert summary.report.failures == ()
    check_nothing_ran_twice(summary)


@pytest.mark.parametrize("point", some(["start", "reduce", "commit"], ["reduce"]))
def test_one_leaves_and_nothing_is_recomputed(runs, point):
    summary = runs.survives("gpt", f"leave:1.1@1:{point}", overrides=("train.steps=8",))
    (parted,) = events_of(summary.run_dir, Parted)
    assert parted.worker == "1.1"
    assert summary.generations == 2
    check_nothing_ran_twice(summary)


def check_nothing_ran_twice(summary):
    per_step = [(event.worker, event.step) for event in events_of(summary.run_dir, StepOps)]
    assert len(set(per_step)) == len(per_step)


@pytest.mark.parametrize("joiner", ["1.1", "new"])
def test_a_lost_worker_is_replaced_and_works_again(runs, joiner):
    summary = runs.survives("small", PACE, "kill:1.1@2:backward", f"join:{joiner}@4")
    assert works_at_the_end(summary, "1.1")
    assert len([e for e in events_of(summary.run_dir, WorkerReady) if e.worker == "1.1"]) == 2


def test_who_came_can_be_struck_again(runs):
    faults = [PACE, "kill:1.1@2:backward", "join:1.1@4", "kill:1.1@40:forward", "join:1.1@42"]
    summary = runs.survives("small", *faults, overrides=("train.steps=80",))
    assert works_at_the_end(summary, "1.1")


def test_one_comes_and_one_leaves_in_one_instant(runs):
    summary = runs.survives("small", PACE, "kill:1.1@1", "join:1.1@4", "leave:0.1@4:start")
    assert [event.worker for event in events_of(summary.run_dir, Parted)] == ["0.1"]
    assert works_at_the_end(summary, "1.1")
    assert not works_at_the_end(summary, "0.1")


OTHERS = ["kill:0.0@4:start", "kill:0.1@4:copy", "hang:2.1@4:copy", "kill:0.0@30:forward"]


@pytest.mark.parametrize("other", some(OTHERS, ["kill:0.1@4:copy", "hang:2.1@4:copy"]))
def test_another_is_lost_before_during_and_after_a_join(runs, other):
    """Both 0.1 and 2.1 hold what 1.1 needs; at ``copy`` they have been asked for it."""
    summary = runs.survives("small", PACE, "kill:1.1@2:forward", "join:1.1@4", other)
    assert works_at_the_end(summary, "1.1")


def test_a_stopped_process_that_wakes_is_told_and_ends_by_itself(runs):
    """It was held for lost while it was stopped, nobody ends it, and it can corrupt nothing."""
    woken = threading.Event()
    folder = runs.folder() / "run"

    def wake(progress):
        if progress.generation == 1 or woken.is_set():
            return
        woken.set()
        (pid,) = [event.pid for event in events_of(folder, WorkerReady) if event.worker == "1.1"]
        process = psutil.Process(pid)
        assert process.status() == psutil.STATUS_STOPPED
        os.kill(pid, signal.SIGCONT)
        ended.append(process.wait(timeout=LIMIT_S))

    ended: list = []
    summary = runs.survives(
        "small", "hang:1.1@3:forward", overrides=("control.fence_grace_s=60",), run_dir=folder, on_progress=wake
    )
    assert len(ended) == 1
    (notice,) = [event for event in events_of(folder, Notice) if event.worker == "1.1"]
    assert "ends itself: held for lost: no sign of life" in notice.text
    assert (folder / "stacks-1.1.txt").read_text()
    assert len([e for e in events_of(folder, Installed) if "1.1" in e.workers]) == 1
    assert summary.generations == 2


def test_a_worker_is_lost_and_comes_back_at_times(runs):
    """Whatever the others do then."""
    faults = ("slow:2.0@0:6x", "kill:1.1@+0s", "join:1.1@+0.1s")
    summary = runs.survives("small", *faults, overrides=("train.steps=80",))
    (failure,) = summary.report.failures
    assert (failure.kind, failure.point, failure.step > 0) == ("kill", "+0s", True)
    assert works_at_the_end(summary, "1.1")
