"""The state of a script's objects: what was on the device comes back there."""

import pytest
import torch
from torch import nn

pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

from tests.accelerator import NAME, running

from holdfast.runtime.loop.prepared import ToldState, prepare


class Kept:
    """Has a tensor of the host's and one of the device's, and takes what it is given as it is."""

    def __init__(self, device, value):
        self.state = {"here": torch.full((2,), value), "there": torch.full((3,), value).to(device)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def prepared(device, value):
    whole = nn.Linear(2, 2).to(device)
    made = prepare(whole, (torch.optim.SGD(whole.parameters(), lr=0.1),), device=torch.device(device))
    made.objects = [Kept(device, value)]
    return made


def taken(one, told):
    one.take(told)
    state = one.objects[0].state
    return {name: (value.device.type, value.tolist()) for name, value in state.items()}


@pytest.mark.parametrize("known", [True, False], ids=["as it was", "from a checkpoint of a CPU"])
def test_what_was_on_the_device_comes_back_there(known):
    with running(3):
        told = (prepared(f"{NAME}:0", 7.0) if known else prepared("cpu", 7.0)).tell()
        if not known:
            told = ToldState(told.text, told.tensors)
        tensors = tuple(tensor.cpu() for tensor in told.tensors)  # as they come from a file or another worker
        told = told._replace(tensors=tensors)
        found = taken(prepared(f"{NAME}:0", 0.0), told)
    assert found == {"here": ("cpu", [7.0] * 2), "there": (NAME, [7.0] * 3)}


def test_what_was_on_a_device_comes_to_the_host_where_there_is_none():
    with running(3):
        told = prepared(f"{NAME}:0", 7.0).tell()
        assert told.apart == (1,)
        told = told._replace(tensors=tuple(tensor.cpu() for tensor in told.tensors))
    found = taken(prepared("cpu", 0.0), told)
    assert found == {"here": ("cpu", [7.0] * 2), "there": ("cpu", [7.0] * 3)}
