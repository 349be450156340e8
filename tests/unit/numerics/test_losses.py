"""The loss of whoever says none: the mean over what is asked for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from holdfast.core.tensorspec import NO_TARGET
from holdfast.models.losses import cross_entropy


@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_it_is_the_mean_of_what_is_not_left_out(shape):
    torch.manual_seed(0)
    logits, classes = torch.randn(*shape, 7), torch.randint(0, 7, shape)
    classes[0] = NO_TARGET
    expected = functional.cross_entropy(logits.reshape(-1, 7), classes.reshape(-1))
    torch.testing.assert_close(cross_entropy(logits, classes), expected)


def test_numbers_of_half_the_bits_do_not_overflow():
    logits = torch.randn(4096, 256, dtype=torch.float16) * 8
    classes = torch.randint(0, 256, (4096,))
    torch.testing.assert_close(cross_entropy(logits, classes), functional.cross_entropy(logits.float(), classes))


def test_where_nothing_is_asked_for_there_is_nothing_to_learn():
    logits = torch.randn(4, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.full((4,), NO_TARGET))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.abs().sum().item() == 0
