"""Real runs that end early, in every way, and go on from a checkpoint to the bits of the run that did not."""

from __future__ import annotations

import copy
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
from tests.soak import some
from tests.waiting import LIMIT_S, until

from holdfast.config.load import parse_job
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.runtime.train import Summary, train
from holdfast.storage.blobs import RESERVED_BYTES, LocalStore, open_store
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CheckpointFailed,
    CheckpointRejected,
    Resumed,
    read_events,
)

pytestmark = pytest.mark.dist

MODELS = ["gpt", "convnet"]
STEPS = 6
GPT = {
    "name": "gpt",
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 1, "stages": 2, "microbatches": 4},
    "train": {"steps": STEPS, "seed": 1},
}


def grid(pipelines: int, stages: int, *more: str, steps: int = STEPS) -> tuple[str, ...]:
    """Overrides for a grid of a global batch of 12 micro-batches."""
    microbatches = f"grid.microbatches={12 // pipelines}"
    return (f"grid.pipelines={pipelines}", f"grid.stages={stages}", microbatches, f"train.steps={steps}", *more)


EVERY_2 = ("checkpoint.every=2", "checkpoint.synchronous=true")
"""However slow the disk is, none is left out."""


def events_of(summary: Summary, kind: type) -> list:
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(LocalStore(folder / "checkpoints"))


def same_end(one: Summary, other: Summary) -> bool:
    return (one.weights_sha256, one.state_sha256, one.final_loss, one.steps) == (
        other.weights_sha256,
        other.state_sha256,
        other.final_loss,
        other.steps,
    )


@pytest.mark.parametrize("name", some(MODELS, ["gpt", "convnet"]))
def test_three_by_four_goes_on_as_two_by_two_and_as_one_by_one(runs, name):
    """And in one chain: 3x4 to step 2, 2x2 from there to step 4, 1x1 to the end."""
    whole = runs.healthy(name, grid(3, 4, *EVERY_2))
    assert whole.report.checkpoints == (2, 4, 6)
    plain = runs.healthy(name, grid(3, 4))
    assert same_end(whole, plain), "making checkpoints changes nothing"
    second = runs.train(name, overrides=grid(2, 2, *EVERY_2, steps=4), resume=f"{whole.run_dir}@2")
    assert second.resumed_from == 2
    assert second.report.commits[0][0] == 2
    assert second.steps == 4
    third = runs.train(name, overrides=grid(1, 1), resume=second.run_dir)
    assert third.resumed_from == 4
    assert same_end(third, whole)


def test_every_checkpoint_of_a_run_leads_to_the_same_end(runs):
    whole = runs.healthy("gpt", grid(3, 4, *EVERY_2))
    for step in (2, 4):
        resumed = runs.train("gpt", overrides=grid(2, 3), resume=f"{whole.run_dir / 'checkpoints'}@{step}")
        assert resumed.resumed_from == step
        assert same_end(resumed, whole)


def test_faults_after_going_on_are_survived(runs):
    whole = runs.healthy("gpt", grid(3, 4, *EVERY_2))
    resumed = runs.train("gpt", "kill:1.2@3:backward", overrides=grid(3, 4), resume=f"{whole.run_dir}@2")
    assert resumed.report.fired == ("kill:1.2@3:backward",)
    assert resumed.generations == 2
    assert same_end(resumed, whole)


def test_clipping_and_schedules_go_on_where_they_were(runs):
    more = ("train.clip_norm=0.05", "optimizer.schedule=cosine", "optimizer.warmup_steps=3", *EVERY_2)
    whole = runs.healthy("gpt", grid(3, 4, *more))
    assert not same_end(whole, runs.healthy("gpt", grid(3, 4)))
    assert same_end(runs.train("gpt", overrides=grid(2, 2, *more), resume=f"{whole.run_dir}@2"), whole)


def test_only_the_last_k_are_kept(runs):
    summary = runs.healthy("gpt", grid(1, 1, "checkpoint.every=1", "checkpoint.synchronous=true", "checkpoint.keep=2"))
    made = summary.report.checkpoints
    assert made == tuple(range(1, STEPS + 1))
    assert checkpoints_in(summary.run_dir).steps() == made[-2:]
    folders = sorted(path.name for path in (summary.run_dir / "checkpoints").iterdir())
    assert folders == [f"step-{step:08}" for step in made[-2:]]


def test_a_writer_killed_while_it_writes(runs):
    """The others go on; the next checkpoint is whole; what the dead one left is gone."""
    healthy = runs.healthy("gpt", grid(3, 4))
    fault = "kill:2.1@4:checkpoint"
    summary = runs.train("gpt", fault, overrides=grid(3, 4, "checkpoint.every=2"))
    assert summary.report.fired == (fault,)
    assert same_end(summary, healthy)
    assert 6 in summary.report.checkpoints
    assert checkpoints_in(summary.run_dir).newest_sound().manifest.step == 6
    left = LocalStore(summary.run_dir / "checkpoints").list()
    assert not [name for name in left if ".tmp-" in name]


def test_the_last_owner_killed_while_it_writes(runs):
    """Its checkpoint is unfinished; without logs whoever is left goes on from the one before, as a smaller grid."""
    fault = "kill:0.1@4:checkpoint"
    summary = runs.train("gpt", fault, overrides=grid(1, 2, *EVERY_2, "logging.use=off"))
    assert summary.report.fired == (fault,)
    agreed = [event.step for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, Agreed)]
    assert agreed == [0, 2]
    assert same_end(
        summary,
        runs.healthy("gpt", grid(1, 1, "checkpoint.every=1", "checkpoint.synchronous=true", "checkpoint.keep=2")),
    )


def test_a_full_disk_does_not_stop_training_and_leaves_the_last_good_one(runs, make_disk):
    disk = make_disk(str(RESERVED_BYTES + (1 << 20)))
    filler = disk / "filler"

    def fill(progress) -> None:
        if progress.checkpoint and not filler.exists():
            with filler.open("wb") as file:
                file.write(b"x" * ((1 << 20) - 4096 * (1 + _blocks(disk))))

    more = ("checkpoint.every=2", f"checkpoint.url={disk / 'checkpoints'}")
    summary = runs.train("gpt", overrides=grid(1, 1, *more, steps=30), on_progress=fill)
    assert filler.exists()
    assert same_end(summary, runs.healthy("gpt", grid(1, 1, steps=30)))
    failed = events_of(summary, CheckpointFailed)
    assert failed[-1].step == 30
    assert "must stay free" in failed[-1].detail
    newest = Checkpoints(LocalStore(disk / "checkpoints")).newest_sound()
    assert newest.rejected == ()
    assert 2 <= newest.manifest.step < 30
    assert newest.manifest.step in summary.report.checkpoints


def _blocks(folder: Path) -> int:
    """Pages that the files in a small file system take."""
    return sum(-(-path.stat().st_size // 4096) for path in folder.rglob("*") if path.is_file())


def test_emulated_runs_go_on_too(tmp_path):
    job = parse_job({**GPT, "checkpoint": {"every": 2}})
    profile = uniform_profile(4)
    whole = train(job, run_dir=tmp_path / "a", emulate=profile)
    resumed = train(job, run_dir=tmp_path / "b", emulate=profile, resume=f"{tmp_path / 'a'}@2")
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.report.commits[0][0] == 2


def test_a_fault_before_the_step_to_go_on_from_is_refused(runs):
    whole = runs.healthy("gpt", grid(3, 4, *EVERY_2))
    with pytest.raises(ConfigError, match=r"--fault kill:0\.0@1:start: the run goes on from step 2"):
        runs.train("gpt", "kill:0.0@1", overrides=grid(3, 4), resume=f"{whole.run_dir}@2")


class Command:
    """``holdfast train``; in this process, unless it is started in its own."""

    def __init__(self, folder: Path, tree: dict, *arguments: str) -> None:
        self.run_dir = folder / f"run-{time.monotonic_ns()}"
        job = folder / f"job-{time.monotonic_ns()}.yaml"
        job.write_text(yaml.safe_dump({"control": {"hang_s": 15}, **tree}))
        self._words = ["train", str(job), "--run-dir", str(self.run_dir), *arguments]

    def start(self, environment: dict | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast", *self._words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def end(self, environment: dict | None = None) -> tuple[int, str]:
        if environment is None:
            ended = holdfast(*self._words)
            return ended.returncode, ended.stderr
        process = self.start(environment)
        _, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, errors

    def done(self, environment: dict | None = None) -> dict:
        code, errors = self.end(environment)
        assert code == 0, errors
        return {**json.loads((self.run_dir / "summary.json").read_text()), "errors": errors}

    def events(self) -> list:
        path = self.run_dir / "events.jsonl"
        return [event for _, event in read_events(path)] if path.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small run with checkpoints, that nothing happened to: its folder and its summary."""
    command = Command(tmp_path_factory.mktemp("whole"), {**GPT, "checkpoint": {"every": 2, "synchronous": True}})
    return command.run_dir, command.done()


def test_everything_killed_at_once_and_the_run_goes_on(tmp_path):
    """The agent gets SIGKILL, and with it every process, in the midst of writing checkpoints."""
    tree = {**GPT, "train": {"steps": 400, "seed": 1}, "checkpoint": {"every": 1, "keep": 2}}
    first = Command(tmp_path, tree)
    with first.start() as process:
        until(
            lambda: any(isinstance(event, Checkpointed) and event.step >= 5 for event in first.events()),
            "a checkpoint of step 5",
            process,
        )
        process.send_signal(signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    steps = max(event.step for event in first.events() if isinstance(event, Checkpointed)) + 30
    shorter = {**tree, "train": {"steps": steps, "seed": 1}}
    resumed = Command(tmp_path, shorter, "--resume", str(first.run_dir), "--set", "grid.stages=1").done()
    assert 5 <= resumed["resumed_from"] < steps
    assert resumed["steps"] == steps
    uninterrupted = Command(tmp_path, {**shorter, "checkpoint": {}}).done()
    assert resumed["state_sha256"] == uninterrupted["state_sha256"]
    assert resumed["final_loss"] == uninterrupted["final_loss"]


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(whole, tmp_path):
    run_dir, summary = whole
    copied = tmp_path / "checkpoints"
    store = open_store(copied)
    for name in LocalStore(run_dir / "checkpoints").list():
        if "step-00000006" not in name:
            store.put(name, LocalStore(run_dir / "checkpoints").get(name))
    (shard,) = (copied / "step-00000004").glob("layer-0002-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    command = Command(tmp_path, GPT, "--resume", str(copied))
    resumed = command.done()
    assert f"holdfast: checkpoint of step 4 is not used: step-00000004/{shard.name} is corrupt" in resumed["errors"]
    assert "holdfast: goes on from the checkpoint of step 2" in resumed["errors"]
    told = [event for event in command.events() if isinstance(event, CheckpointRejected | Resumed)]
    assert [(type(event), event.step) for event in told] == [(CheckpointRejected, 4), (Resumed, 2)]
    assert resumed["state_sha256"] == summary["state_sha256"]
    code, errors = Command(tmp_path, GPT, "--resume", f"{copied}@4").end()
    assert code == 2
    assert "is corrupt" in errors


@pytest.mark.parametrize(
    ("section", "change", "complaint"),
    [
        ("train", {"seed": 2}, "train.seed: expected 1, as in the checkpoint, got 2"),
        ("grid", {"microbatches": 3}, "grid.pipelines x grid.microbatches: expected 4, as in the checkpoint, got 3"),
        (
            "model",
            {"dropout": 0.3},
            "model.dropout: expected 0.1, as in the checkpoint, got 0.3; to go on all the same",
        ),
        ("model", {"width": 16}, "model: other names, shapes or types of parameters than the checkpoint's"),
        ("data", {"path": copy.__file__}, "data: other samples than the checkpoint's"),
    ],
)
def test_a_foreign_checkpoint_is_refused(whole, tmp_path, section, change, complaint):
    run_dir, _ = whole
    tree = {**GPT, section: {**GPT[section], **change}}
    command = Command(tmp_path, tree, "--resume", f"{run_dir}@4")
    code, errors = command.end()
    assert code == 2
    assert complaint in errors
    assert "Traceback" not in errors
    assert not command.run_dir.exists(), "nothing was begun"


def test_differences_that_are_meant_are_accepted_and_take_effect(whole, tmp_path):
    run_dir, summary = whole
    tree = {**GPT, "optimizer": {"betas": [0.5, 0.9]}}
    command = Command(tmp_path, tree, "--resume", f"{run_dir}@4", "--accept", "model.dropout,optimizer.betas")
    resumed = command.done()
    changed = "optimizer.betas: expected [0.9,0.999], as in the checkpoint, got [0.5,0.9]: accepted"
    assert f"goes on from the checkpoint of step 4 in {run_dir / 'checkpoints'}; {changed}" in resumed["errors"]
    assert [event.notes for event in command.events() if isinstance(event, Resumed)] == [(changed,)]
    assert resumed["steps"] == summary["steps"]
    assert resumed["state_sha256"] != summary["state_sha256"]


def test_s3(whole, tmp_path, bucket, s3_environment):
    """Checkpoints in a bucket, over HTTP; another grid goes on from there."""
    _, summary = whole
    tree = {**GPT, "checkpoint": {"every": 3, "keep": 2, "url": bucket, "synchronous": True}}
    first = Command(tmp_path, tree).done(s3_environment)
    assert first["checkpoints"] == [3, 6]
    assert first["state_sha256"] == summary["state_sha256"]
    assert Checkpoints(open_store(bucket)).steps() == (3, 6)
    tree["checkpoint"] = {}
    second = Command(tmp_path, tree, "--resume", f"{bucket}@3", "--set", "grid.stages=1").done(s3_environment)
    assert second["state_sha256"] == summary["state_sha256"]
    again = {**tree, "checkpoint": {"every": 2, "url": bucket}}
    code, errors = Command(tmp_path, again).end(s3_environment)
    assert code == 2
    assert "holds checkpoints of step 3, 6 already" in errors
