import msgspec
import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.profile import (
    GpuProfile,
    LayerProfile,
    Link,
    Profile,
    costs_from_profile,
    parse_costs,
    uniform_profile,
    unit_costs,
)
from holdfast.core.schedule import OpKind
from holdfast.errors import ConfigError, InfeasiblePlan


def layer(name, **changes):
    values = {
        "forward_s": 1.0,
        "backward_input_s": 2.0,
        "backward_weight_s": 3.0,
        "held_after_forward_bytes": 10,
        "held_after_input_bytes": 4,
        "boundary_bytes": 100,
        "parameter_bytes": 7,
        "optimizer_bytes": 14,
        "optimizer_s": 0.5,
    }
    return LayerProfile(name=name, **(values | changes))


GPUS = GpuProfile(forward_s=0.6, backward_input_s=1.1, backward_weight_s=1.6)
PROFILE = Profile(
    layers=(layer("embed", forward_s=0.5), layer("block"), layer("head", by_gpus={"2": GPUS})),
    link=Link(latency_s=0.25, bytes_per_s=200.0),
    machine={"cpu": "eight cores", "threads": 8},
)


def test_profile_travels_as_json():
    assert msgspec.json.decode(msgspec.json.encode(PROFILE), type=Profile) == PROFILE


def test_costs_of_a_worker_are_sums_over_its_layers():
    costs = costs_from_profile(PROFILE, capacity_bytes=64)
    stage = costs.of(LayerRange(0, 2))
    assert (stage.forward, stage.input, stage.weight, stage.optimizer) == (1.5, 4.0, 6.0, 1.0)
    assert (stage.takes, stage.gives_input, stage.gives_weight, stage.capacity) == (20, 12, 8, 64)
    assert (stage.backward, stage.total) == (10.0, 11.5)
    assert costs.comm == (0.75, 0.75)
    assert costs.num_layers == 3


def test_a_layer_that_holds_more_after_its_i_takes_it_from_the_start():
    costs = costs_from_profile(Profile(layers=(layer("x", held_after_input_bytes=25),), link=PROFILE.link))
    assert (costs.takes, costs.gives_input, costs.gives_weight) == ((25,), (0,), (25,))


def test_a_fused_backward_pass_takes_what_was_measured_or_what_splitting_does_not_add():
    times = [layer("x", **changes).seconds_of(OpKind.B) for changes in ({}, {"split_s": 1.5}, {"backward_s": 4.0})]
    assert times == [5.0, 3.5, 4.0]
    assert [layer("x").seconds_of(kind) for kind in (OpKind.F, OpKind.I, OpKind.W)] == [1.0, 2.0, 3.0]
    assert PROFILE.seconds_of(OpKind.I, LayerRange(0, 2)) == 4.0


def test_a_message_takes_latency_and_what_its_bytes_take():
    assert PROFILE.link.seconds_of(100) == 0.75


def test_a_made_up_profile_has_layers_that_are_all_alike():
    made = uniform_profile(3, forward_s=0.1, optimizer_s=0.2, boundary_bytes=10, link=Link(latency_s=1, bytes_per_s=10))
    assert costs_from_profile(made).of(LayerRange(1, 3)).forward == pytest.approx(0.2)
    assert costs_from_profile(made).comm == (2.0, 2.0)
    assert costs_from_profile(uniform_profile(2)).comm == (0.0,)


def test_flags_give_one_layer_per_stage_and_integers_stay_integers():
    costs = parse_costs(4, costs="10,11:12:13:14,8", comm="1:2:3", optimizer="5", memory="2,1,1,8:7:6:5")
    assert costs.forward == (10, 10, 10, 10)
    assert costs.input == (11, 12, 13, 14)
    assert costs.comm == (1, 2, 3)
    assert costs.of(LayerRange(2, 3)).capacity == 6
    assert all(isinstance(value, int) for value in costs.input)
    assert parse_costs(2, costs="1.5,1,1").forward == (1.5, 1.5)


def test_no_memory_flag_counts_microbatches_without_limit():
    stage = parse_costs(3).of(LayerRange(1, 2))
    assert (stage.takes, stage.gives_input, stage.gives_weight, stage.capacity) == (1, 0, 1, None)
    assert parse_costs(3) == unit_costs(3)
    assert parse_costs(1).comm == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"costs": "1,2"}, "--costs 1,2: expected F,I,W"),
        ({"costs": "1,x,1"}, "--costs: 'x'"),
        ({"costs": "1,-1,1"}, "--costs: -1"),
        ({"costs": "1,inf,1"}, "--costs: inf"),
        ({"costs": "1,nan,1"}, "--costs: nan"),
        ({"costs": "1,1:2,1"}, "--costs: 1:2 has 2 numbers.* or 3 joined"),
        ({"comm": "1:2:3"}, "--comm: 1:2:3 has 3 numbers.* or 2 joined"),
        ({"optimizer": ""}, "--optimizer-cost"),
        ({"memory": "1,0,1"}, "--memory 1,0,1: expected aF,aI,aW,cap"),
        ({"memory": "1,1,1,4"}, "gives back 2"),
    ],
)
def test_bad_flags_are_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_costs(3, **flags)


def test_impossible_measurements_are_refused():
    with pytest.raises(ConfigError, match=r"layer 'x': forward_s = -1"):
        layer("x", forward_s=-1.0)
    with pytest.raises(ConfigError, match=r"split_s = 5\.5 is more than I and W take together"):
        layer("x", split_s=5.5)
    with pytest.raises(ConfigError, match="bytes_per_s"):
        Link(latency_s=0, bytes_per_s=0)
    with pytest.raises(ConfigError, match="at least one layer"):
        Profile(layers=(), link=Link(latency_s=0, bytes_per_s=1))


def test_what_a_profile_says_of_a_split_is_taken_from_i():
    layer = LayerProfile(
        name="a",
        forward_s=1.0,
        backward_input_s=3.0,
        backward_weight_s=2.0,
        held_after_forward_bytes=4,
        held_after_input_bytes=1,
        boundary_bytes=0,
        parameter_bytes=0,
        optimizer_bytes=0,
        split_s=0.5,
    )
    profile = Profile(layers=(layer, layer), link=Link(latency_s=0.0, bytes_per_s=1.0))
    stage = costs_from_profile(profile).of(LayerRange(0, 2))
    assert (stage.input_apart, stage.weight, stage.backward) == (6.0, 4.0, 9.0)


def test_the_state_of_layers_takes_memory_all_the_time():
    costs = costs_from_profile(PROFILE, capacity_bytes=300)
    stage = costs.of(LayerRange(0, 2))
    assert PROFILE.layers[0].state_bytes == 7 + 14
    assert (stage.state, stage.room) == (2 * (2 * 21 + 2 * 7), 300 - 112)
    once = costs_from_profile(PROFILE, copies=1, sums=1).of(LayerRange(0, 2))
    assert (once.state, once.room) == (2 * (21 + 7), None)
    stage.check_memory("stage 0", 9)
    with pytest.raises(InfeasiblePlan, match=r"stage 0 has 120.*at least 132.*112 of it for the state"):
        costs_from_profile(PROFILE, capacity_bytes=120).of(LayerRange(0, 2)).check_memory("stage 0", 1)


def test_what_is_given_back_may_be_all_that_was_taken():
    """Also of nothing, and where the sum of two parts is rounded."""
    assert parse_costs(1, memory="0,0,0,4").takes == (0,)
    assert parse_costs(1, memory="0.3,0.1,0.2,4").gives_weight == (0.2,)


@pytest.mark.parametrize(("latency_s", "speed", "at_once"), [(0, 1e30, True), (1e-9, 1e30, False), (0, 1e9, False)])
def test_a_link_takes_no_time_only_without_latency_and_beyond_any_bandwidth(latency_s, speed, at_once):
    assert Link(latency_s=latency_s, bytes_per_s=speed).takes_no_time is at_once
