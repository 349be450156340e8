"""The profile of a job is made of what training runs: same bits, all layers, memory as it can be reckoned."""

import os

import pytest

from holdfast.config.load import parse_job
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.devices.cuda import Cuda
from holdfast.devices.device import Host
from holdfast.errors import ConfigError
from holdfast.profiling.layers import LayerBench, measure_layers
from holdfast.runtime.engine.datasets import build_dataset, microbatch_loader
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.optimizing import build_optimizer
from holdfast.runtime.engine.stage import Stage

CPU = Host()
WIDTH, CONTEXT, BATCH, LAYERS = 16, 8, 2, 3
GPT = {
    "model": {"kind": "gpt", "layers": LAYERS - 2, "width": WIDTH, "heads": 2, "context": CONTEXT, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2, "microbatch_size": BATCH},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "train": {"steps": 4, "seed": 1},
}
CONVNET = {
    **GPT,
    "model": {"kind": "convnet", "width": 4},
    "data": {"kind": "digits"},
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
}
BOUNDARY = BATCH * CONTEXT * WIDTH * 4


def measured(tree, *overrides, iterations=2):
    seen = []
    job = parse_job(tree, overrides)
    profiles = measure_layers(job, iterations=iterations, device=CPU, on_iteration=seen.append)
    assert seen == list(range(1, iterations + 1))
    return profiles


def test_every_layer_of_a_gpt_is_measured():
    embedding, block, head = measured(GPT)
    assert [layer.name for layer in (embedding, block, head)] == ["0.Embedding", "1.Block", "2.Head"]
    for layer in (embedding, block, head):
        assert min(layer.forward_s, layer.backward_weight_s, layer.backward_s, layer.optimizer_s) > 0
        assert set(layer.spread) == {
            "forward_s",
            "backward_input_s",
            "backward_weight_s",
            "backward_s",
            "optimizer_s",
        }
        assert layer.optimizer_bytes >= 2 * layer.parameter_bytes, "two moments"
    assert embedding.boundary_bytes == block.boundary_bytes == BOUNDARY
    assert head.boundary_bytes == BATCH * CONTEXT * 256 * 4
    assert head.parameter_bytes == (2 * WIDTH + 256 * WIDTH) * 4, "a tied weight is held at both ends"


def test_a_convnet_with_batch_norm_is_measured():
    layers = measured(CONVNET)
    assert len(layers) == 7
    assert layers[0].name == "0.ConvBlock"
    assert layers[5].parameter_bytes == layers[5].optimizer_bytes == 0, "pooling"


def test_split_s_is_what_i_and_w_take_longer_than_b():
    for layer in measured(GPT, iterations=5):
        longer = layer.backward_input_s + layer.backward_weight_s - layer.backward_s
        assert layer.split_s == max(0.0, longer)


def test_a_checkpointed_layer_holds_its_input_and_its_output_after_f_and_its_graph_after_i():
    _, kept, _ = measured(GPT)
    _, again, _ = measured(GPT, "model.checkpoint_activations=[1]")
    assert again.held_after_forward_bytes == 2 * BOUNDARY
    assert kept.held_after_forward_bytes > 8 * BOUNDARY
    assert again.held_after_input_bytes == kept.held_after_input_bytes


def test_nothing_is_held_once_w_or_b_ran():
    bench = LayerBench(parse_job(GPT), CPU)
    bench.iterate()
    first, second = bench.held_bytes(), bench.held_bytes()
    assert first == second, "what one left behind would be counted by the next"
    for stage in bench._stages:
        assert not stage._contexts
        assert not stage._halves


@pytest.mark.parametrize("tree", [GPT, CONVNET], ids=["gpt", "convnet"])
def test_what_is_measured_is_what_training_computes(tree):
    """The same two steps as one stage that holds all layers end in the same bits."""
    job = parse_job(tree)
    bench = LayerBench(job, CPU)
    bench.iterate()
    bench.held_bytes()  # leaves no trace
    bench.iterate()
    model = build_model(job)
    dataset = build_dataset(job)
    load, number = microbatch_loader(job, lambda: dataset), len(model.layers)
    whole = Stage(
        layers=model.layers,
        owned=range(number),
        ties=model.ties,
        loss=model.loss,
        optimizer=build_optimizer(job),
        lr_scale=lambda step: 1.0,
        seed=job.train.seed,
        num_microbatches=2,
        load=lambda step, microbatch: load(*divmod(2 * step + microbatch, job.global_microbatches)),
    )
    for step in range(2):
        for microbatch in range(2):
            whole.forward(step, microbatch, None)
            whole.backward(OpKind.B, step, microbatch, None)
        for reduction in whole.reductions:
            whole.accept(reduction, add_up([whole.message(reduction)]))
        whole.conclude(whole.vote())
        for index in range(number):
            whole.update(index)
            whole.swap(index)
    found = [stage.layer_digest(index) for index, stage in enumerate(bench._stages)]
    assert found == [whole.layer_digest(index) for index in range(number)]


def test_a_gradient_that_is_not_finite_is_the_users_to_know():
    with pytest.raises(ConfigError, match=r"not finite in iteration \d: there is no optimizer step to time"):
        measured(GPT, "optimizer={kind: sgd, lr: 1.0e+38}")


def test_a_layer_to_checkpoint_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"model\.checkpoint_activations: there is no layer 3; layers are 0 to 2"):
        measured(GPT, "model.checkpoint_activations=[1, 3]")


@pytest.mark.gpu
def test_layers_are_measured_on_a_gpu():
    layers = measure_layers(parse_job(GPT), iterations=3, device=Cuda(), on_iteration=lambda done: None)
    assert len(layers) == LAYERS
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in layers)
