"""Copies beside the computation: each mark and each hold of a device with streams is needed."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

from tests.accelerator import MACHINE, Late, LateTensor, Race, running
from tests.waiting import until
from tests.wrong_devices import WRONG, WRONG_BESIDE

from holdfast.errors import ConfigError

ORDERS = range(20)


def there_and_back(device):
    """A value that is brought, computed with and sent, while the next one is computed."""
    found = []
    sent = None
    for number in range(4):
        value = device.brought(torch.full((3,), float(number)))
        made = value * 2 + 1
        del value
        following = device.outgoing(made)
        del made
        device.keep_pace()
        if sent is not None:
            found.append(sent.wait().tolist())
        sent = following
    found.append(sent.wait().tolist())
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_sent_is_what_was_computed(order):
    with running(order):
        assert there_and_back(Late()) == [[2.0 * number + 1] * 3 for number in range(4)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", WRONG)
def test_no_mark_and_no_hold_is_there_for_nothing(device, order):
    """Each of these devices is right but for one; that shows in every order."""
    with pytest.raises(Race), running(order):
        there_and_back(device())


def summed_with_others(device):
    """Values that another thread adds to what others have brought, while the next ones are computed."""

    def add(part):
        with device.beside():
            return torch.full((3,), 10.0).to(device.torch, non_blocking=True) + part

    total, found = device.brought(torch.ones(3)), []
    with ThreadPoolExecutor(1) as others:
        for _ in range(4):
            part = total * 2
            computed = device.computed(part)
            del part
            given = computed.wait()
            del computed
            came = others.submit(add, given).result()
            del given
            total = device.joined(came) + 1
            del came
            found.append(device.outgoing(total))
    return [each.wait().tolist() for each in found]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_summed_beside_the_computation_is_what_was_computed(order):
    with running(order):
        assert summed_with_others(Late()) == [[value] * 3 for value in (13.0, 37.0, 85.0, 181.0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", WRONG_BESIDE)
def test_no_mark_and_no_hold_beside_the_computation_is_there_for_nothing(device, order):
    with pytest.raises(Race), running(order):
        summed_with_others(device())


def test_a_copy_is_not_there_before_its_mark_has_passed():
    device = Late()
    with running(1):
        copy = device.outgoing(device.brought(torch.ones(3)) + 1)
        assert copy.tensor.tolist() != [2.0] * 3, "what holds no numbers yet"
        until(lambda: copy.ready)
        assert copy.tensor.tolist() == copy.wait().tolist() == [2.0] * 3


def test_what_is_on_the_host_is_sent_as_it_is_and_what_is_not_is_brought_as_it_is():
    device = Late()
    with running(0):
        here = torch.ones(2)
        assert device.outgoing(here).wait() is here
        there = device.brought(here)
        assert isinstance(there, LateTensor)
        assert device.brought(there) is there
        assert device.computed(here).wait() is device.joined(here) is here


def test_the_host_is_no_more_than_two_operations_ahead():
    device = Late()
    with running(0):
        ran = []
        for number in range(8):
            MACHINE.queue("operation", lambda number=number: ran.append(number))
            device.keep_pace()
            assert len(ran) >= number - 1
        assert len(ran) < 8, "it waits for no more"


@pytest.mark.parametrize("order", ORDERS)
def test_stamps_tell_when_operations_ran_and_not_when_they_were_called(order):
    """By the host's clock: none is over before it was called, and what the host has waited for is."""
    device = Late()
    with running(order):
        called, stamps = [], []
        for _ in range(4):
            MACHINE.queue("operation", lambda: time.sleep(0.002))
            called.append(time.monotonic())
            stamps.append(device.stamp(called[-1]))
        told = device.seconds(stamps)
        now = time.monotonic()
    assert told == sorted(told)
    assert all(when >= call - 1e-9 for when, call in zip(told, called, strict=True))
    assert told[-1] <= now
    assert all(later - earlier >= 0.002 for earlier, later in itertools.pairwise(told))
    assert device.seconds([]) == []


def test_an_item_on_a_stream_of_the_scripts_own_is_refused():
    device = Late()
    with running(0):
        device.check_stream()
        with MACHINE.on(MACHINE.stream("own")), pytest.raises(ConfigError, match=r"^an item ended on a stream of the"):
            device.check_stream()
