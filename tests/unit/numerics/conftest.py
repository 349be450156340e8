import os
import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_order() -> Iterator[None]:
    """On the device that computes late, if tests are told to: nothing is left of the test before, no race is found."""
    if os.environ.get("HOLDFAST_DEVICE") != "late":
        yield
        return
    from tests.accelerator import running

    with running(random.randrange(1 << 32)):
        yield
