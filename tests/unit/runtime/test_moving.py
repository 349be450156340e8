"""Batches in pinned memory, or on the device, the next ones ahead: the same numbers, wherever they are."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

from tests.accelerator import NAME, Late, running
from tests.waiting import until
from torch.utils.data import DataLoader

from holdfast.data.feeds import Feed, Indexed
from holdfast.data.orders import shuffled
from holdfast.data.wanted import Wanted, feed_of
from holdfast.devices.device import HOST
from holdfast.runtime.loop.feeding import Feeding
from holdfast.runtime.loop.moving import mover


class Images:
    """Samples whose numbers say which they are."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"image": torch.full((2, 3), float(index)), "label": index}


class Counting(Late):
    """Notes what is brought to it and what is pinned for it."""

    def __init__(self):
        super().__init__()
        self.brought_in, self.pinned = [], 0

    def brought(self, tensor):
        self.brought_in.append(tensor.shape)
        return super().brought(tensor)

    def memory(self, size):
        self.pinned += 1
        return super().memory(size)


def feeding(device, loaders=0, **options):
    feed = Feed(source=Indexed(Images(), shuffled(3, 24, 2)), num_samples=2, loaders=loaders, **options)
    loop = SimpleNamespace(feed=feed, seed=3, microbatches=4, steps=3)
    return closing(Feeding(loop, "0.0", device))


def numbers(batch):
    return {name: each.cpu().tolist() for name, each in batch.items()}


EVERY = [(step, number) for step in range(3) for number in range(4)]


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize(("options", "place"), [({"to_device": True}, NAME), ({"pin_memory": True}, "cpu")])
def test_batches_are_the_same_wherever_they_are(loaders, options, place):
    with feeding(HOST) as host:
        expected = [numbers(host.load(*item)) for item in EVERY]
    with running(3), feeding(Late(), loaders, **options) as fed:
        found = [fed.load(*item) for item in EVERY]
        assert {each.device.type for batch in found for each in batch.values()} == {place}
        assert [numbers(batch) for batch in found] == expected


def test_the_next_batch_is_copied_while_one_is_computed():
    device = Counting()
    with running(3), feeding(device, 1, to_device=True, prefetch=4) as fed:
        fed.load(0, 0)
        until(lambda: fed._loaders.collect() or fed._loaders.made((0, 2)) is not None)
        fed.load(0, 1)
        assert device.brought_in == [(2, 2, 3), (2,)] * 3, "the third one is on its way, and none was copied twice"
        assert device.pinned == 6


def test_a_device_that_shares_the_hosts_memory_moves_nothing():
    feed = Feed(source=Indexed(Images(), shuffled(3, 24, 2)), num_samples=2, to_device=True, pin_memory=True)
    assert mover(feed, HOST) is None


def test_a_batch_that_nobody_wants_moved_is_as_it_is():
    assert mover(Feed(source=Indexed(Images(), shuffled(3, 24, 2)), num_samples=2), Late()) is None


class Pair(NamedTuple):
    x: torch.Tensor
    rest: list


class Whole:
    """As a tokenizer's result: moves by itself."""

    def __init__(self, where="cpu"):
        self.where = where

    def to(self, device):
        return Whole(device.type)


def test_what_holds_tensors_keeps_its_form():
    feed = Feed(source=Indexed(Images(), shuffled(3, 24, 2)), num_samples=2, to_device=True)
    rows = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    given = Pair(rows, [torch.tensor(True), "text", 7, torch.empty(0), Whole()])
    with running(1):
        moved = mover(feed, Late())(given)
        assert isinstance(moved, Pair)
        assert moved.x.stride() == rows.stride()
        assert moved.x.tolist() == rows.tolist()
        flag, text, number, nothing, whole = moved.rest
        assert (flag.tolist(), text, number, nothing.shape, whole.where) == (True, "text", 7, (0,), NAME)


@pytest.mark.parametrize("said", [None, False])
def test_a_data_loader_says_whether_memory_is_pinned(said):
    loader = DataLoader(Images(), batch_size=2, pin_memory=True)
    feed = feed_of(Wanted(dataset=loader, pin_memory=said), print)
    assert feed.pin_memory is (said is None)
