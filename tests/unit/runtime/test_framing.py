from __future__ import annotations

import pytest
import torch

from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.transport.framing import framed, unframed

HEADER = b"eight by eight".ljust(64, b".")
TENSORS = {
    "rows": torch.randn(3, 5),
    "a column of rows": torch.randn(4, 3)[:, 1],
    "every other": torch.randn(8)[::2],
    "transposed": torch.randn(3, 5).t(),
    "expanded": torch.randn(1).expand(3),
    "one number": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "with a gradient": torch.randn(3, requires_grad=True),
    "bytes": torch.arange(10, dtype=torch.uint8)[::3],
    "yes and no": torch.tensor([True, False, True]),
    "brain": torch.randn(3, 5).bfloat16().t(),
    "brain with a gradient": torch.randn(3, dtype=torch.bfloat16, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_whatever_is_framed_comes_out_as_it_was(tensor):
    frame = framed(HEADER, tensor).numpy()
    spec = TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
    assert frame[:64].tobytes() == HEADER
    assert torch.equal(unframed(frame, 64, spec), tensor)


def test_a_frame_is_a_copy_that_can_be_filled_later():
    sent = torch.arange(4)
    frame = framed(HEADER, sent)
    there = torch.empty_like(frame)
    taken = unframed(there.numpy(), 64, TensorSpec(shape=(4,), dtype="int64"))
    sent += 10
    there.copy_(frame)
    assert taken.tolist() == [0, 1, 2, 3]
