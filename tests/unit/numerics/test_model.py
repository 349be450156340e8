from functools import partial

import pytest
import torch
from torch import nn

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError
from holdfast.models import convnet, gpt
from holdfast.optim.factory import make_optimizer
from holdfast.runtime.engine.model import Model, Tie, find_ties, tie_groups, untie
from holdfast.runtime.engine.stage import Stage
from holdfast.runtime.engine.trial import try_model
from holdfast.runtime.tensors import num_bytes, torch_dtype


def test_ties_are_found_and_taken_apart() -> None:
    layers = gpt.build(layers=2, width=16, heads=2, context=8, vocab=32)
    ties = find_ties(layers)
    assert ties == (Tie(places=((0, "token.weight"), (3, "weight"))),)
    apart = untie(layers, ties)
    first, later = apart[0].get_parameter("token.weight"), apart[3].get_parameter("weight")
    assert first is not later
    assert torch.equal(first, later)
    assert later.is_leaf
    assert find_ties(apart) == ()


def test_a_weight_used_twice_within_one_layer_is_no_tie() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer[1].weight = layer[0].weight
    head = nn.Linear(4, 4)
    assert find_ties([layer, head]) == ()
    head.weight = layer[0].weight
    layers = [head, layer]
    ties = find_ties(layers)
    assert ties == (Tie(places=((0, "weight"), (1, "0.weight"))),)
    apart = untie(layers, ties)
    assert apart[1][0].weight is apart[1][1].weight
    assert apart[1][0].weight is not apart[0].weight


def test_a_whole_layer_used_twice() -> None:
    shared = nn.Linear(4, 4)
    layers = [shared, nn.ReLU(), shared]
    ties = find_ties(layers)
    assert [tie.layers for tie in ties] == [(0, 2), (0, 2)]
    assert tie_groups(ties) == ((0, 2),)
    apart = untie(layers, ties)
    assert apart[0] is not apart[2]
    assert find_ties(apart) == ()
    assert torch.equal(apart[0].weight, apart[2].weight)


def test_a_recurrent_layer_is_untied() -> None:
    first, second = nn.GRU(4, 4), nn.GRU(4, 4)
    second.weight_ih_l0 = first.weight_ih_l0
    layers = [first, second]
    apart = untie(layers, find_ties(layers))
    out, _ = apart[1](torch.randn(2, 1, 4))
    out.sum().backward()
    assert apart[1].weight_ih_l0.grad is not None
    assert apart[0].weight_ih_l0.grad is None


def test_ties_are_checked() -> None:
    for places in (((0, "a"),), ((1, "a"), (0, "b")), ((0, "a"), (0, "b"))):
        with pytest.raises(ConfigError, match="ascending"):
            Tie(places=places)


def boundaries(layers, batch, loss):
    """What the layers return, found by trying each of them."""
    model = Model.build(layers, loss)

    def stage_of(index: int) -> Stage:
        return Stage(
            layers=[model.layers[index]],
            owned=(index,),
            num_layers=len(model.layers) + 1,
            ties=(),
            loss=loss,
            optimizer=make_optimizer("adamw", lr=0.1),
            lr_scale=lambda step: 1.0,
            numerics="exact",
            seed=3,
            num_microbatches=1,
            load=lambda step, microbatch: batch,
        )

    trial = try_model(model, stage_of, batch, 3)
    assert trial.differences == ()
    return trial.boundaries


def test_a_trial_leaves_weights_and_buffers_as_they_were() -> None:
    layers = convnet.build(width=4, blocks=2)
    before = [value.clone() for layer in layers for value in layer.state_dict().values()]
    specs = boundaries(layers, (torch.rand(3, 1, 8, 8), torch.tensor([1, 2, 3])), convnet.loss)
    assert specs[0] == TensorSpec(shape=(3, 4, 8, 8), dtype="float32")
    assert specs[-1] == TensorSpec(shape=(3, 10), dtype="float32")
    assert len(specs) == len(layers)
    after = [value for layer in layers for value in layer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(p.grad is not None for layer in layers for p in layer.parameters())


def test_boundaries_of_gpt() -> None:
    layers = gpt.build(layers=2, width=16, heads=2, context=8, vocab=32)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    specs = boundaries(layers, (tokens, tokens), gpt.loss)
    assert [spec.shape for spec in specs] == [(2, 8, 16)] * 3 + [(2, 8, 32)]
    assert num_bytes(specs[0]) == 2 * 8 * 16 * 4
    assert torch_dtype(specs[0]) is torch.float32


def test_models_need_layers() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        Model.build([], gpt.loss)
    with pytest.raises(ConfigError, match="layer 0 is a str"):
        Model.build(["linear"], gpt.loss)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="not the name of a tensor type"):
        _ = torch_dtype(TensorSpec(shape=(1,), dtype="nn"))


def test_built_models_depend_on_their_seed_alone() -> None:
    state = torch.get_rng_state()
    for build in (partial(gpt.build, layers=1, width=16, heads=2), convnet.build):
        one, same, other = build(seed=1), build(seed=1), build(seed=2)
        pairs = [
            (a, b) for x, y in zip(one, same, strict=True) for a, b in zip(x.parameters(), y.parameters(), strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not torch.equal(next(one[0].parameters()), next(other[0].parameters()))
    assert torch.equal(state, torch.get_rng_state())


def test_gpt_starts_near_the_uniform_loss() -> None:
    layers = gpt.build(layers=2, width=32, heads=4, context=16, vocab=64, dropout=0.0)
    x = torch.randint(64, (4, 16))
    out = x
    for layer in layers:
        out = layer(out)
    assert float(gpt.loss(out, torch.randint(64, (4, 16))).detach()) == pytest.approx(4.16, abs=0.2)


def test_convnet_has_enough_layers() -> None:
    assert len(convnet.build()) >= 6


@pytest.mark.parametrize(
    "build",
    [
        partial(gpt.build, heads=3),
        partial(gpt.build, dropout=1.0),
        partial(gpt.build, layers=0),
        partial(convnet.build, blocks=1),
    ],
)
def test_impossible_sizes_are_refused(build: object) -> None:
    with pytest.raises(ConfigError, match="is impossible"):
        build()  # type: ignore[operator]
