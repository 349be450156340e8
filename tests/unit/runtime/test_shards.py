"""Parts of tensors, what a leader tells, and one rank of a sharded stage that is all there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError, InternalError
from holdfast.runtime.engine.sharded import commands
from holdfast.runtime.engine.sharded.checks import check_layer, part_spec
from holdfast.runtime.engine.sharded.shards import message_length, part_of, scattered, taken_apart, together, whole

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), max_size=4)


@given(SHAPES, st.integers(1, 4))
def test_what_is_scattered_and_gathered_is_whole_again(shapes, ranks):
    tensors = [torch.randn(*shape) for shape in shapes]
    messages = scattered(tensors, ranks)
    assert {len(message) for message in messages} == {message_length(shapes, ranks)}
    parts = [taken_apart(message, shapes, rank, ranks) for rank, message in enumerate(messages)]
    for rank, own in enumerate(parts):
        assert all(map(torch.equal, own, [part_of(tensor, rank, ranks) for tensor in tensors]))
        chunks = [tensor.chunk(ranks) for tensor in tensors]
        assert all(rank >= len(each) or torch.equal(part, each[rank]) for part, each in zip(own, chunks, strict=True))
    told = [together(own, shapes, ranks) for own in parts]
    assert all(map(torch.equal, whole(told, shapes), tensors))


@pytest.mark.parametrize(
    "command",
    [
        commands.Forward(stage=1, step=2, microbatch=3, start=0, stop=4),
        commands.Backward(stage=1, kind="B", step=2, microbatch=3, layers=None),
        commands.Update(stage=2, layer=0, lr_scale=0.1, present=(True, False)),
        commands.GatherSums(stage=1, reduction=(0, 5)),
    ],
)
def test_a_command_comes_as_it_was_told(command):
    assert commands.decode(commands.encode(command)) == command


@pytest.mark.parametrize("data", [b"", b"\x80", commands.encode(commands.Skip(stage=1, layer=2))[:-1]])
def test_what_is_no_command_is_named(data):
    with pytest.raises(InternalError, match="what is no command"):
        commands.decode(data)


def test_samples_are_shared_evenly():
    assert part_spec(0, TensorSpec(shape=(4, 7), dtype="float32"), 2, 4).shape == (2, 7)
    for shape, samples in (((3, 7), 3), ((7, 4), 4), ((), 4)):
        with pytest.raises(ConfigError, match=f"layer 0 returns .* for {samples} samples, which the 2 GPUs"):
            part_spec(0, TensorSpec(shape=shape, dtype="float32"), 2, samples)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16)),
            "expected one type in",
        ),
        (
            torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(1.0))]),
            "parameter 0 is a single number; expected one",
        ),
        (torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1)), "batch-norm is over all samples"),
    ],
)
def test_a_layer_that_cannot_be_shared_is_named(module, text):
    with pytest.raises(ConfigError, match=text):
        check_layer(3, module)
    check_layer(3, torch.nn.Linear(2, 2, dtype=torch.bfloat16))
