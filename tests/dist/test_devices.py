"""What jobs compute on: the GPUs that are asked for or there; on a GPU as on a CPU, the same bits whatever dies."""

import pytest
import torch

from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError

GPU = ("train.device=cuda:0", "control.hang_s=15")
"""Which twelve workers share: what loads and starts takes longer."""


def test_auto_without_enough_gpus_is_the_cpu(runs):
    summary = runs.train("convnet", overrides=("train.device=auto",))
    assert summary.weights_sha256 == runs.healthy("convnet").weights_sha256


def test_what_is_emulated_needs_no_gpu(runs):
    profile = uniform_profile(8, forward_s=0.001)
    summary = runs.train("gpt", overrides=("train.device=cuda",), emulate=profile)
    assert summary.steps == runs.job("gpt").train.steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(runs, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^train\.device: there is no GPU cuda:0: .*(sees 0 GPUs|is built without CUDA).*; expected cpu",
    ):
        runs.train("convnet", overrides=("train.device=cuda",), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "convnet"])
@pytest.mark.parametrize("point", ["backward", "gradients:50", "update", "commit"])
def test_a_kill_on_a_gpu(runs, name, point):
    runs.survives(name, f"kill:1.2@2:{point}", overrides=GPU)


@pytest.mark.gpu
def test_a_stop_on_a_gpu(runs):
    runs.survives("gpt", "hang:1.2@2:backward", overrides=("train.device=cuda:0", "control.hang_s=5"))


@pytest.mark.gpu
def test_a_worker_comes_back_to_a_gpu(runs):
    runs.survives("gpt", "kill:1.2@1:backward", "join:1.2@2", overrides=(*GPU, "train.steps=8"))


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [(1, 4, 9), (1, 1, 9), (3, 2, 3)])
def test_the_same_hash_from_every_grid_on_a_gpu(runs, grid):
    pipelines, stages, microbatches = grid
    other = (f"grid.pipelines={pipelines}", f"grid.stages={stages}", f"grid.microbatches={microbatches}")
    assert runs.healthy("gpt", (*other, *GPU)).weights_sha256 == runs.healthy("gpt", GPU).weights_sha256


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["norm", "scaled", "tied", "own"])
def test_a_loop_survives_a_kill_on_a_gpu(runs, variant):
    runs.survives(f"loop-{variant}", "kill:1.0@3:backward", overrides=GPU)


@pytest.mark.gpu
def test_more_workers_than_gpus_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"^train\.device: cuda is a GPU for each worker, and there are 12 workers"):
        runs.train("gpt", overrides=("train.device=cuda",), run_dir=tmp_path / "run")
