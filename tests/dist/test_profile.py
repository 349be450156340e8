"""Profiles of real jobs, measured by real processes, and runs that emulate them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from tests.commands import holdfast
from tests.waiting import LIMIT_S

from holdfast import Job
from holdfast.config.load import dump_job
from holdfast.config.profiles import load_profile
from holdfast.core.profile import Link, costs_from_profile, uniform_profile

pytestmark = pytest.mark.dist

CONTRACT = {
    "name",
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "held_after_forward_bytes",
    "held_after_input_bytes",
    "boundary_bytes",
    "parameter_bytes",
    "optimizer_bytes",
}
LAYERS = {"gpt": 5, "convnet": 7}


def command(folder: Path, job: Job, *arguments: str) -> list[str]:
    name = job.name
    path = folder / f"{name}.yaml"
    path.write_text(dump_job(job))
    return ["profile", str(path), "--out", str(folder / f"{name}.json"), *arguments]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, runs):
    """The command's result and its file, for each model once."""
    folder = tmp_path_factory.mktemp("profiles")
    return {
        name: (holdfast(*command(folder, runs.job(name), "--iterations", "5")), folder / f"{name}.json")
        for name in LAYERS
    }


@pytest.mark.parametrize("name", LAYERS)
def test_the_file_has_what_the_contract_says(profiled, name):
    done, path = profiled[name]
    assert done.returncode == 0, done.stderr
    tree = json.loads(path.read_text())
    assert len(tree["layers"]) == LAYERS[name]
    assert all(set(layer) >= CONTRACT for layer in tree["layers"])
    assert tree["link"]["latency_s"] > 0
    assert tree["link"]["bytes_per_s"] > 1e6
    assert tree["machine"]["threads"] == 1
    assert {"processor", "torch", "load", "device"} <= set(tree["machine"])
    assert tree["iterations"] == 5
    assert tree["estimated"] is False


@pytest.mark.parametrize("name", LAYERS)
def test_progress_and_a_table_are_for_people(profiled, name):
    done, path = profiled[name]
    assert "iteration 5/5  left 0:00" in done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["layer", "F", "ms"]
    assert [row.split()[0] for row in rows[: LAYERS[name]]] == [layer.name for layer in load_profile(path).layers]
    assert rows[-1] == f"written to {path}"


@pytest.mark.parametrize("name", LAYERS)
def test_plans_can_be_made_of_it(profiled, name):
    costs = costs_from_profile(load_profile(profiled[name][1]))
    assert costs.num_layers == LAYERS[name]
    assert all(seconds > 0 for seconds in (*costs.forward, *costs.comm))


def test_a_file_that_exists_is_replaced_only_if_told_to(runs, tmp_path):
    (tmp_path / "gpt.json").write_text("mine")
    refused = holdfast(*command(tmp_path, runs.job("gpt")))
    assert refused.returncode == 2
    assert (tmp_path / "gpt.json").read_text() == "mine"
    forced = command(tmp_path, runs.job("gpt"), "--iterations", "1", "--force", "--quiet")
    done = holdfast(*forced)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_profile(tmp_path / "gpt.json").iterations == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process_and_nothing_is_written(runs, tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *command(tmp_path, runs.job("gpt"), "--iterations", "1000000")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr.readline().startswith("iteration 1/")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "fork server and the process that measures"
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    assert not list(tmp_path.glob("*.json"))


def grid(pipelines: int, stages: int, *more: str) -> tuple[str, ...]:
    """Overrides for a grid of a global batch of 4 micro-batches."""
    microbatches = f"grid.microbatches={4 // pipelines}"
    return (f"grid.pipelines={pipelines}", f"grid.stages={stages}", microbatches, *more)


@pytest.mark.parametrize("name", LAYERS)
def test_an_emulated_run_ends_in_the_same_bits_on_every_grid_and_through_a_kill(runs, profiled, name):
    profile = load_profile(profiled[name][1])
    healthy = runs.train(name, overrides=grid(2, 2), emulate=profile)
    alone = runs.train(name, overrides=grid(1, 1), emulate=profile)
    runs.survives(name, "kill:1.1@2:backward", overrides=grid(2, 2), emulate=profile, healthy=healthy)
    assert healthy.weights_sha256 == alone.weights_sha256
    assert healthy.final_loss == alone.final_loss
    assert load_profile(healthy.run_dir / "profile.json") == profile


def test_the_command_emulates_and_the_model_need_not_exist(runs, profiled, tmp_path):
    nowhere = ("model={kind: python, target: 'nowhere:build'}", "data={kind: text, path: nowhere.txt}")
    job = tmp_path / "job.yaml"
    job.write_text(dump_job(runs.job("gpt", grid(2, 2, *nowhere))))
    arguments = ["--emulate", str(profiled["gpt"][1]), "--run-dir", str(tmp_path / "run")]
    done = holdfast("train", job, *arguments)
    assert done.returncode == 0, done.stderr
    same = runs.train("gpt", overrides=grid(2, 2), emulate=load_profile(profiled["gpt"][1]))
    assert f"weights_sha256 {same.weights_sha256}" in done.stdout


@pytest.mark.alone
def test_operations_optimizer_and_links_take_their_time(runs):
    """One micro-batch through two stages: F and B of both, two messages, the optimizer; none waits for the verdict."""
    profile = uniform_profile(
        2,
        forward_s=0.03,
        backward_input_s=0.02,
        backward_weight_s=0.01,
        optimizer_s=0.04,
        boundary_bytes=50_000,
        link=Link(latency_s=1.0, bytes_per_s=1e6),
    )
    one = ("grid.pipelines=1", "grid.stages=2", "grid.microbatches=1", "train.steps=3")
    commits = runs.train("gpt", overrides=one, emulate=profile).report.commits
    steps = sorted(after - before for (_, before), (_, after) in pairwise(commits))
    whole = 2 * 0.06 + 2 * 1.05 + 0.04
    assert sum(steps) >= len(steps) * whole * 0.98
    assert steps[0] < whole + 1.9, "the fastest, as the machine may be busy; the verdict's trip takes 2 s more"


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_run_again_end_in_the_same_bits(runs, name):
    again = runs.healthy(name, ("model.checkpoint_activations=true",))
    assert again.weights_sha256 == runs.healthy(name).weights_sha256
    assert again.state_sha256 == runs.healthy(name).state_sha256
    assert again.final_loss == runs.healthy(name).final_loss


def test_layers_that_are_run_again_survive_a_kill(runs):
    runs.survives("gpt", "kill:1.2@2:backward", overrides=("model.checkpoint_activations=[1, 3]",))


SHARED = ("train.numerics=fast", "grid.layout=[]", "grid.pipelines=1", "grid.stages=2", "grid.microbatches=8")
ON_TWO = (*SHARED, "grid.gpus_per_stage=2")


def test_layers_are_measured_on_as_many_gpus_as_stages_have_and_training_plans_with_that(runs, tmp_path):
    job = runs.job("unlike", (*ON_TWO, "train.technique=decoupled"))
    done = holdfast(*command(tmp_path, job, "--iterations", "3"))
    assert done.returncode == 0, done.stderr
    assert "iteration 6/6" in done.stderr
    path = tmp_path / "unlike.json"
    assert [set(layer.by_gpus) for layer in load_profile(path).layers] == [{"2"}] * 6
    times = [layer.by_gpus["2"] for layer in load_profile(path).layers]
    assert all(min(each.forward_s, each.backward_input_s, each.backward_weight_s) > 0 for each in times)
    planned = (*ON_TWO, "train.technique=decoupled", f"train.profile={path}")
    assert runs.train("unlike", overrides=planned).steps == 4


LIVES_S = 0.5
"""Longer than what somebody's command takes that looks for a library or a compiler."""


def test_a_process_of_several_that_measure_is_lost(runs, tmp_path):
    """The others would wait for it forever."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *command(tmp_path, runs.job("unlike", ON_TWO), "--iterations", "150")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        family = struck = []
        while process.poll() is None and not struck:
            with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
                family = psutil.Process(process.pid).children(recursive=True)
                parents = {each.pid: each.ppid() for each in family}
                servers = {pid for pid, parent in parents.items() if parent == process.pid}
                below = [each for each in family if parents.get(parents[each.pid]) in servers]
                struck = [each for each in below if time.time() - each.create_time() > LIVES_S]
            time.sleep(0.01)
        assert len(struck) == 1, "the second process of two"
        struck[0].kill()
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode not in (0, 2)
    assert f"the process of GPU 1 of its stage, {struck[0].pid}, has ended" in errors
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("overrides", "arguments", "complaint"),
    [
        (SHARED, ("--gpus", "3"), "layer 0 returns float32 [2, 16, 16] for 2 samples, which the 3 GPUs of a stage"),
        ((), ("--gpus", "2"), "with numerics exact a stage of several GPUs is so many workers"),
        (SHARED, ("--gpus", "2,1"), "1 is impossible: expected a whole number from 2"),
    ],
)
def test_gpus_that_layers_cannot_be_measured_on(runs, tmp_path, overrides, arguments, complaint):
    job = runs.job("unlike", overrides)
    done = holdfast(*command(tmp_path, job, "--iterations", "1", *arguments))
    assert (done.returncode, list(tmp_path.glob("*.json"))) == (2, [])
    assert complaint in done.stderr
