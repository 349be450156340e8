import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from holdfast.core.tensorspec import TensorSpec
from holdfast.data.digits import Digits
from holdfast.data.rows import BreastCancer
from holdfast.data.text import MASK, MaskedText
from holdfast.errors import ConfigError
from holdfast.models import bert, convnet, gpt, nt3, resnet, vit
from holdfast.optim.factory import make_optimizer
from holdfast.runtime.engine.model import Model, Tie, find_ties, retie, tie_groups, untie
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
    retie(apart, ties)
    assert apart[1][0].weight is apart[1][1].weight is apart[0].weight


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
    small = {"layers": 1, "width": 16, "heads": 2}
    for build in (
        partial(gpt.build, **small),
        partial(bert.build, **small),
        convnet.build,
        resnet.build,
        partial(nt3.build, width=2, values=30),
        partial(vit.build, **small),
    ):
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


def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def train_for(layers: list[nn.Module], data: Callable[[], tuple], loss: Callable, steps: int, lr: float) -> list[float]:
    """The losses of so many steps."""
    parameters = {id(p): p for layer in layers for p in layer.parameters()}
    optimizer = torch.optim.Adam(parameters.values(), lr=lr)
    losses = []
    for _ in range(steps):
        inputs, targets = data()
        value = loss(run(layers, inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def test_bert_sees_both_sides_and_is_asked_for_what_is_masked_alone() -> None:
    layers = bert.build(layers=2, width=16, heads=2, context=8, dropout=0.0)
    tokens = torch.randint(256, (2, 8))
    out = run(layers, tokens)
    assert out.shape == (2, 8, 257)
    changed = tokens.clone()
    changed[:, -1] = MASK
    assert not torch.equal(run(layers, changed)[:, 0], out[:, 0]), "the first position sees the last"
    target = torch.full((2, 8), -100)
    target[0, 3] = 65
    expected = -torch.log_softmax(out[0, 3], dim=0)[65]
    assert torch.allclose(bert.loss(out, target), expected)
    assert [tie.places for tie in find_ties(layers)] == [((0, "token.weight"), (3, "weight"))]


def test_bert_learns_masked_bytes_of_real_text() -> None:
    torch.manual_seed(0)
    layers = bert.build(layers=2, width=32, heads=4, context=32, dropout=0.0)
    text = MaskedText(__file__, 32)
    places = itertools.count()

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        items = [text[next(places) % len(text)] for _ in range(16)]
        inputs, targets = zip(*items, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    losses = train_for(layers, data, bert.loss, steps=60, lr=3e-3)
    assert losses[0] == pytest.approx(math.log(257), abs=0.3)
    assert sum(losses[-10:]) / 10 < 3.6, "as how often each byte comes tells, at least"


def test_vit_learns_digits() -> None:
    torch.manual_seed(0)
    digits = Digits()
    images, labels = (torch.stack(each) for each in zip(*(digits[i] for i in range(600)), strict=True))
    layers = vit.build(layers=2, width=32, heads=4, patch=4, dropout=0.0)
    assert run(layers, images[:3]).shape == (3, 10)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.randint(500, (50,))
        return images[some], labels[some]

    train_for(layers, data, vit.loss, steps=300, lr=1e-3)  # with 5e-3 it depends on the processor
    right = run(layers, images[500:]).argmax(dim=1) == labels[500:]
    assert float(right.float().mean()) > 0.5, "of those that it has not seen; one in ten by chance"


def test_resnet_learns_digits() -> None:
    digits = Digits()
    images, labels = (torch.stack(each) for each in zip(*(digits[i] for i in range(600)), strict=True))
    layers = resnet.build(width=4)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.randint(500, (32,))
        return images[some], labels[some]

    torch.manual_seed(0)
    train_for(layers, data, resnet.loss, steps=60, lr=1e-2)
    right = run(layers, images[500:]).argmax(dim=1) == labels[500:]
    assert float(right.float().mean()) > 0.7, "of those that it has not seen"


def test_nt3_learns_what_tumours_are_malignant() -> None:
    tumours = BreastCancer()
    values, classes = (torch.stack(each) for each in zip(*(tumours[i] for i in range(569)), strict=True))
    assert values.shape == (569, 1, 30)
    assert torch.allclose(values.mean(0), torch.zeros(30), atol=1e-5)
    layers = nt3.build(width=8, values=30)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.randint(400, (20,))
        return values[some], classes[some]

    torch.manual_seed(0)
    train_for(layers, data, nt3.loss, steps=60, lr=1e-2)
    right = run(layers, values[400:]).argmax(dim=1) == classes[400:]
    assert float(right.float().mean()) > 0.85, "of those that it has not seen"


def test_nt3_as_published_pools_by_ten() -> None:
    layers = nt3.build(width=2, values=60483)
    assert [tuple(layer(torch.zeros(1, 1, 60483)).shape) for layer in layers[:1]] == [(1, 2, 60464)]
    assert layers[1](torch.zeros(1, 2, 60464)).shape == (1, 2 * 6045)
    assert sum(p.numel() for p in nt3.build().__getitem__(2).parameters()) == 128 * 6045 * 200 + 200


def test_resnet_50_has_the_parameters_that_it_is_known_for() -> None:
    with torch.device("meta"):
        layers = resnet.build_50(classes=1000)
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == 25_557_032


def test_patches_of_vit_are_squares() -> None:
    (patches, *_) = vit.build(layers=1, width=16, heads=2, patch=4, dropout=0.0)
    images = torch.zeros(4, 1, 8, 8)
    for number, (row, column) in enumerate(itertools.product((0, 4), (0, 4))):
        images[number, 0, row : row + 4, column : column + 4] = 1.0
    lit = (patches(images) - patches(torch.zeros(1, 1, 8, 8))).abs().sum(dim=2) > 0
    assert lit.tolist() == [[place == number + 1 for place in range(5)] for number in range(4)]


def test_convnet_has_enough_layers() -> None:
    assert len(convnet.build()) >= 6


@pytest.mark.parametrize(
    "build",
    [
        partial(gpt.build, heads=3),
        partial(gpt.build, dropout=1.0),
        partial(gpt.build, layers=0),
        partial(bert.build, heads=3),
        partial(bert.build, context=0),
        partial(vit.build, heads=3),
        partial(vit.build, patch=3),
        partial(convnet.build, blocks=1),
        partial(resnet.build, classes=1),
        partial(nt3.build, values=28),
    ],
)
def test_impossible_sizes_are_refused(build: object) -> None:
    with pytest.raises(ConfigError, match="is impossible"):
        build()  # type: ignore[operator]
