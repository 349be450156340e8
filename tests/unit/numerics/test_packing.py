"""Batches between processes: bits, strides and alignment come out as they went in."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from holdfast.data.packing import receive, send

X = torch.randn(10, 7)
TENSORS = {
    "plain": X,
    "transposed": X.t(),
    "with gaps": X[:, ::2],
    "offset": X.view(-1)[1:9],
    "expanded": torch.ones(3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": torch.zeros(0, 3),
    "scalar": X[3, 4],
    "bool": torch.arange(5).bool(),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "large": torch.randn(300, 100),
    "large with gaps": torch.randn(300, 100)[:, 1::3],
    "sparse": torch.eye(3).to_sparse(),
    "leaf": torch.randn(3, requires_grad=True),
}


@pytest.fixture
def links():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_out_as_it_went_in(links, name):
    value = TENSORS[name]
    send(links[0], [b"moves what comes behind it", value])
    found = receive(links[1])[1]
    assert (found.dtype, found.shape, found.layout) == (value.dtype, value.shape, value.layout)
    assert found.requires_grad == value.requires_grad
    assert torch.equal(found.to_dense(), value.to_dense())
    if value.layout is torch.strided:
        assert found.stride() == value.stride()
        if value.numel() and not value.requires_grad:
            assert found.data_ptr() % 64 == value.data_ptr() % 64
            found[(0,) * found.ndim].fill_(1)


def test_other_values_come_out_as_they_went_in(links):
    value = {"a": [X, X], "b": np.arange(6).reshape(2, 3), "c": np.arange(6)[::2], "d": ("text", 5, None)}
    send(links[0], value)
    found = receive(links[1])
    assert found["a"][0] is found["a"][1]
    np.testing.assert_array_equal(found["b"], value["b"])
    np.testing.assert_array_equal(found["c"], value["c"])
    assert found["d"] == value["d"]


def test_what_cannot_be_sent_leaves_nothing_behind(links):
    with pytest.raises(AttributeError):
        send(links[0], lambda: None)
    send(links[0], 5)
    assert receive(links[1]) == 5


def test_an_end_is_told(links):
    links[0].close()
    with pytest.raises(EOFError):
        receive(links[1])
    with pytest.raises(OSError, match="Broken pipe"):
        send(links[1], 5)


def test_who_does_not_wait_for_room_is_told(links):
    def send_many():
        for _ in range(10_000):
            send(links[0], torch.zeros(1000), socket.MSG_DONTWAIT)

    with pytest.raises(BlockingIOError):
        send_many()
