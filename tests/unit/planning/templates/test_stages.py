"""What stages take, by a profile: times on several GPUs, memory, activation checkpointing."""

from dataclasses import replace

import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.profile import GpuProfile, LayerProfile, Link, Profile
from holdfast.errors import ConfigError
from holdfast.planning.templates.stages import stage_table, with_recomputation

LAYER = LayerProfile(
    name="block",
    forward_s=1.0,
    backward_input_s=2.0,
    backward_weight_s=3.0,
    held_after_forward_bytes=50,
    held_after_input_bytes=20,
    boundary_bytes=4,
    parameter_bytes=100,
    optimizer_bytes=200,
    by_gpus={"2": GpuProfile(forward_s=0.5, backward_input_s=1.0, backward_weight_s=1.5)},
)
PROFILE = Profile(layers=(LAYER, LAYER, LAYER), link=Link(latency_s=0.0, bytes_per_s=1.0))


def test_times_are_f_and_b_on_so_many_gpus():
    assert stage_table(PROFILE, 2).layer_s == ((6.0,) * 3, (3.0,) * 3)
    fused = replace(PROFILE, layers=(replace(LAYER, backward_s=4.5),) * 3)
    assert stage_table(fused, 1).layer_s == ((5.5,) * 3,)


def test_missing_times_are_refused():
    with pytest.raises(ConfigError, match=r"layer 'block' has no times on 3 GPUs: expected by_gpus.3"):
        stage_table(PROFILE, 3)


def test_memory_is_for_state_and_micro_batches_and_shared_by_gpus():
    table = stage_table(PROFILE, 2, memory_bytes=450)
    assert table.state_bytes == (400,) * 3, "parameters, gradients, optimizer state"
    assert table.most_held(LayerRange(0, 1), 1) == 1
    assert table.most_held(LayerRange(0, 2), 2) == 1
    assert table.most_held(LayerRange(0, 2), 1) == 0
    assert table.most_held(LayerRange(0, 1), 2) == 10
    assert stage_table(PROFILE, 1, copies=2, sums=2).state_bytes == (800,) * 3


def test_layers_that_are_run_again_hold_their_input_and_one_of_them_the_rest():
    layers = with_recomputation(PROFILE).layers
    assert [layer.held_after_forward_bytes for layer in layers] == [0, 4, 4]
    assert [layer.held_after_input_bytes for layer in layers] == [50, 50, 50]
    assert stage_table(with_recomputation(PROFILE), 2).layer_s == ((7.0,) * 3, (3.5,) * 3)
    table = stage_table(with_recomputation(PROFILE), 1, memory_bytes=1264)
    assert table.recomputed_bytes == (50, 46, 46)
    assert table.most_held(LayerRange(1, 3), 1) == (1264 - 800 - 46) // 8
