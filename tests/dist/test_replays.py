"""Pipelines without replicas, in real processes: lost layers are replayed from the others' logs, bit by bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.soak import some

from holdfast.core.tensorspec import TensorSpec
from holdfast.storage.blobs import RESERVED_BYTES, open_store
from holdfast.storage.tensorlog.records import Key, LogOf, What
from holdfast.storage.tensorlog.writer import LogWriter
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, Notice, Replaying, WorkerReady, read_events

pytestmark = pytest.mark.dist

STAGES, STEPS, EVERY = 4, 9, 5
LONG = 60
"""Steps of a run in which something is done to the logs early, so that it is done long before they are needed."""


def grid(*more, steps=STEPS, every=EVERY):
    base = ("grid.pipelines=1", f"grid.stages={STAGES}", "grid.microbatches=4", f"train.steps={steps}")
    return (*base, f"checkpoint.every={every}", "checkpoint.synchronous=true", *more)


LOGS = ("logging.use=on",)
PATIENT = "control.hang_s=15"


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


def ends_as_if_nothing_had_failed(runs, name, *faults, more=(), changes=(), steps=STEPS, every=EVERY, **options):
    """``more`` changes no bits; ``changes`` does, so the failure-free run has it, too."""
    summary = runs.train(name, *faults, overrides=grid(*LOGS, *changes, *more, steps=steps, every=every), **options)
    healthy = runs.healthy(name, grid(*changes, steps=steps, every=every))
    assert summary.unfired == ()
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert (summary.final_loss, summary.steps) == (healthy.final_loss, healthy.steps)
    return summary


def replayed(summary):
    """Nobody but the lost went back."""
    assert not [each.text for each in events_of(summary, Notice) if "cannot be replayed" in each.text]
    steps = [event.step for event in events_of(summary, Agreed)]
    assert steps == sorted(steps)
    return events_of(summary, Replaying)


CLIPPED, SCALED = "train.clip_norm=0.05", "train.loss_scale={}"


NEIGHBOURS = [
    ("gpt", "kill:0.0@7:start", (), ()),
    ("gpt", "kill:0.1@7:forward", (CLIPPED,), ("train.technique=staggered",)),
    ("gpt", "kill:0.2@7:backward", ("resilience.commit=shadow", SCALED), ()),
    ("gpt", "kill:0.3@7:reduce", (), ("train.technique=decoupled",)),
    ("bert", "kill:0.0@7:verdict", (CLIPPED,), ()),
    ("bert", "kill:0.3@7:forward", (), ("train.technique=staggered",)),
    ("vit", "kill:0.1@7:update", (), ("logging.helpers=2",)),
    ("vit", "kill:0.2@7:commit", (CLIPPED,), ("train.technique=staggered",)),
    ("convnet", "kill:0.2@7:backward", (), ()),
    ("convnet", "kill:0.1@8:start", (CLIPPED,), ("logging.when=before-sending",)),
]
KEPT = [NEIGHBOURS[at] for at in (1, 2, 3, 4, 6, 9)]


@pytest.mark.parametrize(("name", "fault", "changes", "more"), some(NEIGHBOURS, KEPT))
def test_neighbours_replay_what_was_lost(runs, name, fault, changes, more):
    summary = ends_as_if_nothing_had_failed(runs, name, fault, changes=changes, more=more)
    ((start, stop),) = [(event.start, event.stop) for event in replayed(summary)]
    assert (start in (0, EVERY), stop) == (True, events_of(summary, Agreed)[-1].step), "up to where the others go on"
    assert stop >= 6, "nobody goes back further: the lost one had begun step 7"
    assert len(events_of(summary, WorkerReady)) == STAGES, "no process was started again"


@pytest.mark.parametrize("point", ["forward", "commit"])
def test_a_spare_replays_and_shares_the_work_with_helpers(runs, point):
    more = ("resilience.spares=1", "logging.helpers=1")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", f"kill:0.2@7:{point}", more=more)
    assert [event.workers for event in replayed(summary)] == [("0.0", "1.0")]


def test_whoever_comes_replays(runs):
    more = ("resilience.wait_for_replacement=60",)
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@7:backward", "join:0.1@5", more=more)
    assert [event.workers for event in replayed(summary)] == [("0.1",)]


def test_a_whole_node_is_replayed_together(runs):
    more = ("grid.workers_per_node=2", "resilience.spares=2")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill-node:1@7:backward", more=more)
    assert [event.workers for event in replayed(summary)] == [("1.0", "1.1")]


def test_a_group_of_nodes_is_replayed_together_and_logs_nothing_within(runs):
    more = ("logging.groups=[[1, 2]]", "resilience.spares=1")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.2@7:backward", more=more)
    (event,) = replayed(summary)
    assert (event.workers, event.layers[0]) == (("1.0",), 2), "0.1's layers, too, up to where something was logged"


@pytest.mark.parametrize(
    "faults",
    [
        ("kill:0.0@7:forward", "kill:0.2@7:forward"),
        ("kill:0.1@7:backward", "kill:1.0@6:replay"),
        ("kill:0.1@7:backward", "kill:0.2@7:detect"),
        ("kill:0.1@7:backward", "kill-coordinator@7:detect"),
    ],
    ids=["two apart", "the replacement, too", "its neighbour meanwhile", "the coordinator meanwhile"],
)
def test_more_is_lost(runs, faults):
    summary = ends_as_if_nothing_had_failed(runs, "gpt", *faults, more=("resilience.spares=3",))
    assert events_of(summary, Replaying)


BOTH_ENDS = [((CLIPPED,), ()), ((), ("train.technique=staggered",))]


@pytest.mark.parametrize(("changes", "more"), some(BOTH_ENDS, BOTH_ENDS[:1]))
def test_where_both_ends_of_a_tied_weight_are_lost_their_replays_make_its_sums_together(runs, changes, more):
    faults = ("kill:0.0@7:forward", "kill:0.3@7:detect")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", *faults, changes=changes, more=more)
    events = replayed(summary)
    last = [event for event in events if event.generation == events[-1].generation]
    assert [event.workers for event in last] == [("0.1",), ("0.2",)]
    assert all(event.start < event.stop for event in last)


def test_neighbours_in_all_pipelines_replay_a_stage_that_these_have_lost(runs):
    """What is sent to the last one who holds its layers is logged from the first loss on."""
    wide = ("grid.pipelines=2", "grid.stages=3", "grid.microbatches=2")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:1.1@2", "kill:0.1@7:backward", changes=wide)
    assert [event.workers for event in replayed(summary)] == [("0.0", "0.2", "1.0", "1.2")]


def test_a_frozen_worker_is_replayed_and_comes_to_nothing(runs):
    """Stopped by its pid, from outside."""
    stopped = []

    def stop(progress):
        if progress.step >= 6 and not stopped:
            ready = [e for _, e in read_events(run_dir / "events.jsonl") if isinstance(e, WorkerReady)]
            stopped.append(next(event.pid for event in ready if event.worker == "0.2"))
            os.kill(stopped[0], signal.SIGSTOP)

    run_dir = runs.folder()
    more = ("control.hang_s=1", "resilience.spares=1")
    options = {"more": more, "steps": LONG, "every": 50, "on_progress": stop, "run_dir": run_dir}
    summary = ends_as_if_nothing_had_failed(runs, "gpt", **options)
    assert [event.worker for event in events_of(summary, Detected)] == ["0.2"]
    assert [event.workers for event in replayed(summary)] == [("1.0",)]


def _damage(run_dir, how):
    """Does something to the logs of 0.0, which whoever replays 0.1 needs."""
    (folder,) = run_dir.glob("logs/*/node-0")
    (path,) = folder.glob("0.0/*.log")
    if how == "flipped":
        size = path.stat().st_size
        with path.open("r+b") as file:
            for place in range(size // 9, size, size // 9):  # verdicts among these are in other logs, too
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1]))
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "missing":
        path.unlink()
    else:
        path.unlink()
        log = LogOf(job="another", job_id="0" * 32, worker="0.0")
        foreign = LogWriter(folder, log)
        foreign.append(Key(step=0, what=What.VOTE), TensorSpec(shape=(1,), dtype="uint8"), b"?")
        foreign.complete(0)
        foreign.finish()


@pytest.mark.parametrize("how", some(["flipped", "truncated", "missing", "of another job"], ["flipped", "missing"]))
def test_logs_that_cannot_be_used_cost_the_way_back_to_the_checkpoint(runs, how):
    run_dir, done = runs.folder(), []

    def damage(progress):
        if progress.step >= 3 and not done:
            done.append(progress.step)
            _damage(run_dir, how)

    options = {"steps": LONG, "every": 50, "on_progress": damage, "run_dir": run_dir}
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@45:backward", **options)
    assert done
    assert done[0] < 40, "long before it was needed"
    texts = [each.text for each in events_of(summary, Notice)]
    assert any("cannot be replayed" in text and "go back to the last checkpoint" in text for text in texts), texts
    assert events_of(summary, Agreed)[-1].step == 0


def test_the_lost_ones_own_disk_is_not_needed(runs):
    run_dir, done = runs.folder(), []

    def lose(progress):
        if progress.step >= 3 and not done:
            done.append(progress.step)
            (folder,) = run_dir.glob("logs/*/node-1")
            shutil.rmtree(folder)

    options = {"steps": LONG, "every": 50, "on_progress": lose, "run_dir": run_dir}
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@45:backward", **options)
    assert done[0] < 40
    assert [(event.start, event.stop) for event in replayed(summary)] == [(0, 45)]


def test_a_full_disk_is_told_stops_nobody_and_costs_the_way_back(runs, make_disk):
    disk = make_disk(str(RESERVED_BYTES + (1 << 16)))
    more = (f"logging.directory={disk / 'logs'}",)
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@7:backward", more=more)
    texts = [each.text for each in events_of(summary, Notice)]
    assert any("log failed" in text for text in texts), texts
    assert any("cannot be replayed" in text for text in texts), texts


def test_a_store_that_cannot_be_reached_is_told_and_costs_the_way_back(runs, tmp_path):
    (tmp_path / "file").write_text("no folder")
    more = (f"logging.url={tmp_path / 'file' / 'logs'}", "logging.upload=always")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@7:backward", more=more)
    texts = [each.text for each in events_of(summary, Notice)]
    assert any("cannot be replayed" in text for text in texts), texts


def test_logs_are_sent_to_a_store_that_all_reach(runs, tmp_path):
    more = (f"logging.url={tmp_path / 'store'}", f"logging.directory={tmp_path / 'own'}", "resilience.spares=1")
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@7:backward", more=more)
    assert [event.workers for event in replayed(summary)] == [("1.0",)]
    assert not list((tmp_path / "store").rglob("*.log")), "the job is over"


def test_logs_in_s3_are_enough_where_the_lost_ones_disk_is_lost_with_it(runs, tmp_path, bucket):
    """In a process of its own, as whoever has started workers before goes by the environment of then."""
    healthy, run_dir, fault = runs.healthy("gpt", grid(steps=LONG, every=50)), tmp_path / "run", "kill:0.1@45:backward"
    places = f"logging.url={bucket}", f"logging.directory={tmp_path / 'own'}"
    command = [sys.executable, "-m", "holdfast", "train", str(healthy.run_dir / "job.yaml"), "--run-dir", str(run_dir)]
    command += ["--fault", fault, *(f"--set={text}" for text in (*LOGS, *places, "resilience.spares=1", PATIENT))]
    deleted_at, seen = [], set()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            folders = list(tmp_path.glob("own/*/node-1")) if not deleted_at else []
            for folder in folders:
                shutil.rmtree(folder)
                deleted_at.append(time.monotonic())
            seen.update(name.split("/")[1] for name in open_store(bucket).list())
    summary = type(healthy)(run_dir)
    (struck,) = (
        at for at, e in read_events(run_dir / "events.jsonl") if isinstance(e, FaultInjected) and e.spec == fault
    )
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert deleted_at[0] < struck
    assert [(event.workers, event.start, event.stop) for event in replayed(summary)] == [(("1.0",), 0, 45)]
    assert {"0.0", "0.2"} <= seen, "what its neighbours had sent"
    assert "0.1" not in seen, "nothing of its own was"
    assert not open_store(bucket).list(), "the job is over"


def test_a_disk_that_is_too_slow_is_told_and_costs_the_way_back(runs):
    summary = ends_as_if_nothing_had_failed(runs, "gpt", "kill:0.1@7:backward", more=("logging.most_bytes=1",))
    texts = [each.text for each in events_of(summary, Notice)]
    assert any("log behind" in text for text in texts), texts
    assert any("cannot be replayed" in text for text in texts), texts


def test_what_does_not_repeat_is_told_by_worker_and_place_and_costs_the_way_back(runs):
    """The lost worker's own log is there, and tells what came out when its steps were first run."""
    summary = runs.train("unrepeatable", "kill:0.2@7:backward", overrides=("checkpoint.every=5", *LOGS))
    assert summary.unfired == ()
    assert summary.steps == STEPS
    texts = [each.text for each in events_of(summary, Notice)]
    told = [text for text in texts if "cannot be replayed" in text]
    assert told
    assert "gets other bits than were logged" in told[0]
    assert "boundary" in told[0]
    assert events_of(summary, Agreed)[-1].step in (0, 5)


def test_lower_precision_is_told_to_be_inexact(runs):
    more = (*LOGS, "logging.precision=bfloat16")
    summary = runs.train("gpt", "kill:0.1@7:backward", overrides=grid(*more))
    assert summary.unfired == ()
    assert summary.steps == STEPS
    assert replayed(summary)
    assert any("lower precision" in each.text for each in events_of(summary, Notice))


@pytest.mark.parametrize("point", some(["forward", "commit"], ["commit"]))
def test_a_node_that_is_cut_off_is_replayed(runs, point):
    """Every node has a network of its own, and a folder of its own."""
    fault = f"partition:0.2@7:{point}"
    summary = ends_as_if_nothing_had_failed(runs, "gpt", fault, more=("resilience.spares=1",))
    assert [event.workers for event in replayed(summary)] == [("1.0",)]


def test_the_example_of_two_nodes_logs_what_its_documents_say(tmp_path):
    """In a process of its own, as a job file is told to be run; the lost stage is replayed by whoever is left."""
    job, run_dir = Path(__file__).parents[2] / "examples" / "two-nodes.yaml", tmp_path / "run"
    more = ("train.steps=4", "checkpoint.every=2", "checkpoint.synchronous=true", "grid.microbatches=2")
    command = [sys.executable, "-m", "holdfast", "train", str(job), "--fault", "kill:0.1@3:backward"]
    command += ["--run-dir", str(run_dir), *(f"--set={text}" for text in more)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "for the loss of a node: log (1.049 MB cross nodes in a step, " in ended.stderr
    events = [event for _, event in read_events(run_dir / "events.jsonl")]
    assert [event.layers for event in events if isinstance(event, Replaying)] == [(4, 8)]
