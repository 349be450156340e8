"""Modules cut at their blocks: the bits of the whole, names of its own, and what cannot be cut is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from holdfast.errors import ConfigError
from holdfast.runtime.engine.evaluated import beside_of, run_as_evaluated
from holdfast.runtime.engine.model import WithContext, find_ties
from holdfast.runtime.engine.slots.blocks import find_blocks
from holdfast.runtime.engine.slots.frames import Way
from holdfast.runtime.engine.slots.split import split
from holdfast.runtime.engine.slots.whole import Whole, check_equal

INPUTS, TARGETS = torch.randint(0, 32, (2, 6)), torch.randint(0, 32, (2, 6))


def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def call(module, inputs):
    return module(inputs)


class Block(nn.Module):
    """Is given the hidden state, a table of positions and a mask; draws random numbers."""

    kind = "self"

    def __init__(self, width, returns=lambda hidden: hidden):
        super().__init__()
        self.norm, self.inner, self.returns = nn.LayerNorm(width), nn.Linear(width, width), returns
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, hidden, mask, *, positions):
        mixed = mask @ self.norm(hidden + positions)
        return self.returns(hidden + self.scale * functional.dropout(self.inner(mixed).relu(), 0.2, self.training))


class Net(nn.Module):
    """Does something of its own before its blocks and behind them, and asks its blocks for an attribute."""

    def __init__(self, blocks=3, width=8, vocab=32, tied=False, returns=lambda hidden: hidden):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.drop = nn.Dropout(0.1)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(Block(width, returns) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.drop(self.words(tokens)) * 3
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().softmax(1)
        positions = torch.linspace(0, 1, tokens.shape[1])[:, None]
        for block in self.body.blocks:
            assert block.kind == "self"
            hidden = block(hidden, mask, positions=positions)
            hidden = hidden[0] if isinstance(hidden, tuple | list) else hidden
        return self.head(functional.dropout(self.norm(hidden), 0.1, self.training))


def cut(whole, inputs=INPUTS):
    found = find_blocks(whole, call, inputs)
    return found, split(whole, *found, call, inputs)


def made(**options):
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"returns": lambda hidden: (hidden, None)},
        {"returns": lambda hidden: [hidden]},
        {"blocks": 2},
    ],
)
def test_layers_have_the_bits_of_the_whole_and_its_names(options):
    whole = made(**options)
    (path, way), layers = cut(whole)
    assert (path, way.place) == ("body.blocks", 0)
    assert len(layers) == 2 + options.get("blocks", 3)
    check_equal(whole, layers, path, call, (INPUTS, TARGETS), loss)
    names = {name: each for layer in layers for name, each in layer.named_parameters()}
    assert names.keys() <= dict(whole.named_parameters(remove_duplicate=False)).keys()
    assert {id(each) for each in names.values()} == {id(each) for each in whole.parameters()}, "each is somewhere"
    assert {"body.blocks.1.inner.weight", "words.weight", "norm.weight", "unused"} <= names.keys()


class Padded(Net):
    """Takes tensors by the names of its arguments, one of which its blocks are given."""

    def forward(self, tokens, mask):
        hidden, wide = self.words(tokens), mask[:, None].float() / mask.sum(1)[:, None, None]
        for block in self.body.blocks:
            hidden = block(hidden, wide.expand(-1, tokens.shape[1], -1), positions=torch.zeros(1))
        return self.head(self.norm(hidden) * mask[..., None])


def test_several_inputs_go_to_the_arguments_of_their_names():
    torch.manual_seed(0)
    whole = Whole(module=Padded())
    inputs = {"mask": (torch.arange(6) < torch.tensor([[6], [4]])).long(), "tokens": INPUTS}
    whole.check((inputs, TARGETS), loss)
    front, *_ = whole.layers(inputs)
    assert front.context(inputs) is inputs
    with pytest.raises(
        ConfigError, match=r"Padded failed on a micro-batch: TypeError: .*unexpected keyword argument 'x'"
    ):
        whole.layers({"x": INPUTS})


class Normed(nn.Module):
    """Has batch-norm before its blocks, within them and behind them, and no parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.final, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        x = self.first(self.stem(x)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x)) * self.scale


def test_statistics_of_batch_norm_belong_to_the_layer_in_which_it_runs():
    torch.manual_seed(0)
    module, inputs = Normed(), torch.rand(5, 4) + 3
    before = {name: each.clone() for name, each in module.named_buffers()}
    whole = Whole(module=module)
    layers = whole.layers(inputs)
    assert all(torch.equal(each, before[name]) for name, each in module.named_buffers()), "it was only looked at"
    names = [sorted(name for name, _ in layer.named_buffers() if "num" not in name) for layer in layers]
    assert names[0] == ["first.running_mean", "first.running_var", "scale"]
    assert names[1] == ["blocks.0.1.running_mean", "blocks.0.1.running_var"]
    assert names[3] == ["final.running_mean", "final.running_var"]
    whole.check((inputs, torch.tensor([0, 1, 2, 0, 1])), functional.cross_entropy)
    value = inputs
    for layer in layers:
        value = layer(value, layer.context(inputs))
    module(inputs)
    ours = {name: each for layer in layers for name, each in layer.named_buffers()}
    assert {name: each.tolist() for name, each in ours.items() if name.startswith("first")} == {
        name: each.tolist() for name, each in module.named_buffers() if name.startswith("first")
    }
    layers[0].double()
    layers[3].double()
    assert layers[3].frame.module.first.running_mean.dtype == torch.float64


class Skips(nn.Module):
    """Has, behind its blocks, what batch-norm before them has made."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = early = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x + early


def test_statistics_that_two_layers_need_are_refused():
    """Only one of them has what training makes of them."""
    with pytest.raises(ConfigError, match=r"^Skips cannot be cut: its layers give other bits than the whole of"):
        Whole(module=Skips()).check((torch.rand(5, 4), torch.zeros(5).long()), functional.cross_entropy)


class Draws(Net):
    """Draws in eval mode, too, and has a part that never trains."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("wide", torch.ones(1, 6).expand(6, 6))

    def forward(self, tokens):
        hidden, mask = self.words(tokens), self.frozen(self.wide.tril())
        for block in self.body.blocks:
            hidden = block(hidden, mask, positions=torch.zeros(1))
        return self.head(functional.dropout(hidden, 0.5))


def test_modes_stay_as_they_are_built():
    torch.manual_seed(0)
    whole = Whole(module=Draws())
    whole.check((INPUTS, TARGETS), loss)
    assert not whole.module.frozen.training
    assert whole.module.training
    whole.module.eval()
    front, block, *_ = whole.layers(INPUTS)
    for layer in (front, block):
        run_as_evaluated(0, layer, INPUTS if layer is front else torch.rand(2, 6, 8), layer.context(INPUTS))
        assert not layer.training
    assert not front.frame.module.training


class Counting(Normed):
    """Counts, before its blocks, how often it has run."""

    def forward(self, x):
        self.scale.add_(1)
        return super().forward(x)


def test_a_buffer_that_changes_is_told():
    with pytest.raises(
        ConfigError, match=r"^Counting changes its buffer 'scale' in the forward pass; expected that no"
    ):
        Whole(module=Counting()).check((torch.rand(5, 4), torch.zeros(5).long()), functional.cross_entropy)


class Bare(nn.Module):
    """Blocks with something before them, or behind them, or neither."""

    def __init__(self, *ends):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.before = nn.Linear(4, 4) if "before" in ends else nn.Identity()
        self.behind = nn.Linear(4, 4) if "behind" in ends else nn.Identity()

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.behind(x)


@pytest.mark.parametrize("ends", [(), ("before",), ("behind",), ("before", "behind")], ids=str)
def test_ends_need_no_parameters(ends):
    torch.manual_seed(0)
    whole = Whole(module=Bare(*ends))
    whole.check((torch.rand(2, 4), torch.tensor([1, 2])), functional.cross_entropy)
    front, *_, head = whole.layers(torch.rand(2, 4))
    assert (len([*front.parameters()]), len([*head.parameters()])) == (2 * ("before" in ends), 2 * ("behind" in ends))


class Moody(Net):
    """Tells its blocks something else in eval mode."""

    def forward(self, tokens):
        hidden, mask = self.words(tokens), torch.eye(tokens.shape[1])
        for block in self.body.blocks:
            hidden = block(hidden, mask if self.training else mask * 2, positions=torch.zeros(1))
        return self.head(hidden)


def test_blocks_are_given_in_eval_mode_what_the_module_gives_them_then():
    torch.manual_seed(0)
    whole = Whole(module=Moody())
    whole.check((INPUTS, TARGETS), loss)
    _, block, *_ = layers = whole.layers(INPUTS)
    given = beside_of(block, lambda: INPUTS, evaluated=True)
    assert given.positional[1].max() == 2
    assert block.training
    assert block.context(INPUTS).positional[1].max() == 1
    value = whole.module.eval()(INPUTS)
    whole.module.train()
    found = INPUTS
    for index, layer in enumerate(layers):
        found = run_as_evaluated(index, layer, found, beside_of(layer, lambda: INPUTS, evaluated=True))
    assert torch.equal(found, value)


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, shift):
        x.sub_(shift.mul_(2)[:, None])
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("cut", [True, False])
def test_inputs_may_be_changed_in_place_and_stay_as_they_are(cut):
    torch.manual_seed(0)
    whole = Whole(module=InPlace())
    inputs = {"x": torch.rand(2, 4), "shift": torch.ones(2)}
    kept = {name: each.clone() for name, each in inputs.items()}
    layers = whole.layers(inputs) if cut else whole.one()
    whole.check((inputs, torch.tensor([1, 2])), functional.cross_entropy)
    for _ in range(2):
        value = inputs["x"].clone()
        for layer in layers:
            value = layer(value, layer.context(inputs))
        assert torch.equal(value, whole.module(**{name: each.clone() for name, each in kept.items()}))
    assert all(torch.equal(each, kept[name]) for name, each in inputs.items())


def test_a_module_that_returns_something_else_than_a_tensor_is_told():
    class Says(Net):
        def forward(self, tokens):
            return {"logits": super().forward(tokens)}

    with pytest.raises(ConfigError, match=r"^Says returned a dict; expected one tensor, which the loss is given$"):
        Whole(module=Says()).layers(INPUTS)


def test_a_module_as_the_only_layer_has_its_parts_and_its_modes():
    whole = made()
    (layer,) = Whole(module=whole).one()
    assert {name: id(each) for name, each in layer.named_parameters()} == {
        name: id(each) for name, each in whole.named_parameters()
    }
    layer.eval()
    assert not whole.body.blocks[0].training
    torch.testing.assert_close(layer(INPUTS, INPUTS), whole(INPUTS), rtol=0, atol=0)


def test_a_weight_of_both_ends_is_a_tie():
    (_, layers) = cut(made(tied=True))
    assert [tie.layers for tie in find_ties(layers)] == [(0, 4)]
    (_, layers) = cut(made())
    assert find_ties(layers) == ()


def test_what_a_layer_has_not_takes_no_memory():
    whole = made()
    _, (front, *_, head) = cut(whole)
    assert {name for name, _ in front.named_parameters()} == {"words.weight", "unused"}
    assert {name for name, _ in head.named_parameters()} == {"norm.weight", "norm.bias", "head.weight"}
    words = head.frame.module.words.weight
    assert (words.shape, words.untyped_storage().nbytes()) == (whole.words.weight.shape, 4)


def test_blocks_are_given_what_the_module_gives_them_in_each_micro_batch_and_nothing_is_drawn():
    _, (_, block, *_, head) = cut(made())
    assert isinstance(block, WithContext)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    given = block.context(INPUTS)
    assert torch.equal(torch.rand(3), expected)
    assert given.positional[0] is None
    assert given.positional[1].shape == (6, 6)
    assert block.context(INPUTS) is given
    assert block.context(INPUTS[:, :4]).positional[1].shape == (4, 4), "of another length"
    assert head.context(INPUTS) is INPUTS


def test_nothing_of_the_module_is_changed():
    whole = made()
    before = {name: each.clone() for name, each in whole.state_dict().items()}
    frozen = whole.words.weight.requires_grad_(False)
    cut(whole)
    assert all(torch.equal(each, before[name]) for name, each in whole.state_dict().items())
    assert not frozen.requires_grad
    assert all(each.grad is None for each in whole.parameters())
    assert isinstance(whole.body.blocks[0], Block)


class Changes(Net):
    """Does something between its blocks."""

    def forward(self, tokens):
        hidden, mask = self.words(tokens), torch.eye(tokens.shape[1])
        for block in self.body.blocks:
            hidden = block(hidden, mask, positions=torch.zeros(1)) * 2
        return self.head(hidden)


class Twice(Net):
    """Runs a block twice."""

    def forward(self, tokens):
        hidden, mask = self.words(tokens), torch.eye(tokens.shape[1])
        for number in (0, 1, 2, 1):
            hidden = self.body.blocks[number](hidden, mask, positions=torch.zeros(1))
        return self.head(hidden)


class Two(Net):
    """Has two lists of blocks."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


class Dropping(Net):
    """Leaves out a block now and then."""

    left_out = 0

    def forward(self, tokens):
        hidden, mask = self.words(tokens), torch.eye(tokens.shape[1])
        for number, block in enumerate(self.body.blocks):
            if number != self.left_out - 1:
                hidden = block(hidden, mask, positions=torch.zeros(1))
        return self.head(hidden)


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_block_that_is_left_out_later_is_seen(left_out):
    whole = Dropping()
    _, (_, block, *_, head) = cut(whole)
    for layer in (head, block):
        (getattr(layer, "frame", None) or layer.recorder._frame).module.left_out = left_out
    with pytest.raises(ConfigError, match=r"expected that all run"):
        head(torch.zeros(2, 6, 8), INPUTS)
    if left_out < 3:
        with pytest.raises(ConfigError, match=r"expected that all run"):
            block.context(INPUTS.clone())


REFUSED = [
    (Changes, "Changes: body.blocks: block 1 is not given what the one before returned"),
    (Twice, "Twice: body.blocks: block 1 runs more than once"),
    (Two, "Two has several lists of 3 blocks, body.blocks and others; expected one"),
    (lambda: nn.Sequential(nn.Embedding(32, 32)), "Sequential has no torch.nn.ModuleList of blocks, two or more"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=["changes", "twice", "two", "none"])
def test_what_cannot_be_cut_is_refused_by_name(make, said):
    with pytest.raises(ConfigError) as error:
        find_blocks(make(), call, INPUTS)
    assert str(error.value).startswith(said)


def test_layers_that_have_other_bits_are_found_by_the_parameter():
    """One whose seed comes after what it draws, one that computes something else."""
    whole = made()
    (path, way), layers = cut(whole)

    class Off(nn.Module):
        def __init__(self, inner, by):
            super().__init__()
            self.inner, self.by = inner, by

        def forward(self, value):
            return self.inner(value, INPUTS) * self.by

    wrong = (Off(layers[0], 1.5), *layers[1:])
    with pytest.raises(ConfigError, match="give other bits than the whole of it"):
        check_equal(whole, wrong, path, call, (INPUTS, TARGETS), loss)
    layers[0].words.weight.requires_grad_(False)
    with pytest.raises(AttributeError):
        _ = way.nothing
    assert Way(0) == way
