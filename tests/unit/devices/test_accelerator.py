"""The device that computes late finds what a GPU would only show now and then."""

import pytest
import torch

pytest.importorskip("torch", minversion="2.13", reason="the hook for devices written in Python is of torch 2.13")

from tests.accelerator import MACHINE, NAME, LateTensor, Mark, Race, running
from torch.nn import functional

ORDERS = range(20)


@pytest.fixture(params=ORDERS)
def order(request):
    """One of several orders in which operations run."""
    with running(request.param):
        yield request.param


def made(values):
    return torch.tensor(values).to(NAME)


def test_what_is_called_runs_later_and_numbers_are_waited_for(order):
    doubled = made([1.0, 2.0]) * 2
    assert isinstance(doubled, LateTensor)
    assert doubled.raw.isnan().all(), "it has not run"
    assert doubled.tolist() == [2.0, 4.0]


def test_a_copy_to_the_host_that_is_not_waited_for_is_not_there(order):
    here = made([1.0]).to("cpu", non_blocking=True)
    assert here.isnan()
    MACHINE.finish()
    assert here.tolist() == [1.0]


def test_host_memory_that_is_used_again_before_it_is_copied_is_seen(order):
    here = torch.ones(3)
    there = here.to(NAME, non_blocking=True)
    here.fill_(5)
    assert there.tolist() == [5.0] * 3


def test_memory_holds_no_numbers_until_it_is_written(order):
    assert torch.empty(3, device=NAME).cpu().isnan().all()
    assert torch.empty(3, dtype=torch.int64, device=NAME).tolist() == [0x5A] * 3


@pytest.mark.parametrize("waits", [True, False], ids=["with its mark", "without"])
def test_streams_that_no_mark_orders_are_a_race_in_every_order(order, waits):
    other = MACHINE.stream("other")
    value = made([1.0]) * 1
    mark = MACHINE.mark()
    if waits:
        other.wait_event(mark)
        with MACHINE.on(other):
            assert (value + 1).tolist() == [2.0]
        return
    with (
        MACHINE.on(other),
        pytest.raises(Race, match=r"add.Tensor on other uses memory .* as mul.Tensor on compute$"),
    ):
        value + 1


def test_who_has_waited_on_the_host_needs_no_mark(order):
    other = MACHINE.stream("other")
    value = made([1.0]) + 1
    MACHINE.mark().synchronize()
    with MACHINE.on(other):
        assert (value + 1).tolist() == [3.0]


def test_who_writes_waits_for_those_who_read(order):
    other = MACHINE.stream("other")
    value = made([1.0])
    other.wait_event(MACHINE.mark())
    with MACHINE.on(other):
        read = value + 1
    with pytest.raises(Race, match=r"add_.Tensor on compute uses memory .* as add.Tensor on other$"):
        value.add_(1)
    MACHINE.current.wait_event(MACHINE.mark(other))
    value.add_(1)
    assert (value + read).tolist() == [4.0]


@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
def test_memory_that_is_freed_while_another_stream_is_to_use_it_is_a_race(held):
    with running(0):
        other = MACHINE.stream("other")
        value = made([1.0])
        other.wait_event(MACHINE.mark())
        with MACHINE.on(other):
            there = value + 1
        if held:
            MACHINE.hold(value, other)
        del value
        races = MACHINE.races[:]
        MACHINE.races.clear()
        MACHINE.finish()
        MACHINE.finish(other)
        assert there.raw.tolist() == [2.0] if held else there.raw.isnan().all() or there.raw.tolist() == [2.0]
    assert races == ([] if held else ["memory of compute was freed before add.Tensor on other has used it"])


def test_a_race_in_freed_memory_is_told_behind_all(order):

    def race():
        other = MACHINE.stream("other")
        value = made([1.0])
        other.wait_event(MACHINE.mark())
        with MACHINE.on(other):
            value + 1

    with pytest.raises(Race, match=r"^order 7: memory of compute was freed before"), running(7):
        race()


def test_streams_that_wait_for_each_other_are_told():
    never = Mark({})
    with running(0):
        one, other = MACHINE.stream("one"), MACHINE.stream("other")
        one.wait_event(never)
        other.wait_event(MACHINE.mark(one))
        with pytest.raises(AssertionError, match=r"^all streams wait for each other$"):
            MACHINE.mark(other).synchronize()
        never.passed = True


def test_random_numbers_are_those_of_the_host_in_whatever_order_they_are_made(order):
    def draw(device):
        torch.manual_seed(3)
        values = torch.ones(64).to(device)
        first, second = functional.dropout(values, 0.5), functional.dropout(values, 0.5)
        return torch.cat([second, first, torch.rand(4).to(device)]).tolist()

    assert draw(NAME) == draw("cpu")


def test_what_is_on_the_host_is_refused_beside_what_is_not():
    with running(0), pytest.raises(RuntimeError, match=r"^expected all tensors on late, but found one of \(2,\)"):
        made([1.0, 2.0]) + torch.ones(2)
