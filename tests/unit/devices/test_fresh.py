"""Large tensors: in memory that the next one of about their size is given, and that else goes back to the system."""

import gc
import threading

import pytest
import torch

from holdfast.devices import fresh as module
from holdfast.devices.fresh import fresh
from holdfast.protocol.span_recorder import resident_bytes

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    """The time, in seconds, which goes on as a test says; nothing is kept from before."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_mappings", module._Mappings())
    return now


def test_any_length_and_type() -> None:
    for length in (0, 1, 2 * MIB // 8 - 1, 2 * MIB // 8, 3 * MIB // 8 + 1):
        made = fresh(length, torch.int64)
        assert (made.shape, made.dtype, made.is_contiguous()) == ((length,), torch.int64, True)
        assert torch.equal(made.fill_(7), torch.full((length,), 7))


def test_what_is_freed_is_given_to_the_next_one_of_about_its_size(clock) -> None:
    first = fresh(4 * MIB, torch.uint8)
    place = first.data_ptr()
    assert fresh(4 * MIB, torch.uint8).data_ptr() != place, "it is in use"
    view = first[-5:].fill_(3)
    del first
    assert fresh(4 * MIB, torch.uint8).data_ptr() != place, "a view of it is"
    assert view.tolist() == [3] * 5
    del view
    assert fresh(8 * MIB, torch.uint8).data_ptr() != place, "that would be a waste"
    assert fresh(15 * MIB // 16, torch.float32).data_ptr() == place


def test_what_nobody_asks_for_goes_back_to_the_system(clock) -> None:
    """Also what is freed while what was allocated after it stays."""
    kept, before = [], resident_bytes()
    for size in range(16, 24):
        large = fresh(size * MIB, torch.uint8).fill_(1)
        kept.append(fresh(MIB // 16, torch.uint8).fill_(1))
        assert resident_bytes() - before > 15 * MIB, "it was there"
        del large
        clock[0] += module._KEPT_S + 1
    fresh(MIB, torch.uint8)
    gc.collect()
    assert resident_bytes() - before < 8 * MIB


def test_any_thread_may_be_the_last_to_use_one(clock) -> None:
    """Many at once, each of which finds only what it wrote."""
    wrong = []

    def work(number: int) -> None:
        for step in range(200):
            mine = [fresh(MIB // 4 + 1000 * step, torch.uint8).fill_(number) for _ in range(3)]
            wrong.extend(each for each in mine if not bool((each == number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
