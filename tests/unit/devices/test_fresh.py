"""Tensors whose memory goes back to the system with them."""

import torch

from holdfast.devices.fresh import fresh
from holdfast.protocol.span_recorder import resident_bytes

MIB = 1 << 20


def test_any_length_and_type() -> None:
    for length in (0, 1, 2 * MIB // 8 - 1, 2 * MIB // 8, 3 * MIB // 8 + 1):
        made = fresh(length, torch.int64)
        assert (made.shape, made.dtype, made.is_contiguous()) == ((length,), torch.int64, True)
        assert torch.equal(made.fill_(7), torch.full((length,), 7))


def test_large_ones_give_their_memory_back() -> None:
    """Also those that are freed while what was allocated after them stays."""
    kept, before = [], resident_bytes()
    for _ in range(8):
        large = fresh(16 * MIB, torch.uint8).fill_(1)
        kept.append(fresh(MIB // 16, torch.uint8).fill_(1))
        assert resident_bytes() - before > 15 * MIB, "it was there"
        del large
    assert resident_bytes() - before < 8 * MIB


def test_a_view_keeps_the_memory() -> None:
    view = fresh(4 * MIB, torch.uint8).fill_(3)[-5:]
    assert view.tolist() == [3] * 5
