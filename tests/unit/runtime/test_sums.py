"""Sums over links, with nothing between the workers: whoever comes when, the bits are right and the memory goes."""

import gc
import weakref
from functools import partial

import pytest
import torch

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Reduction
from holdfast.core.summing import plain
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.inbox import Inbox
from holdfast.runtime.transport.links.parts import goes_whole
from holdfast.runtime.transport.links.sums import Summing
from holdfast.runtime.transport.links.wire import CHUNK_BYTES, Chunk
from holdfast.runtime.transport.port import SumKey

SMALL, LARGE = 5, 3 * CHUNK_BYTES


class Wires:
    """Takes every message to the inbox of whom it is for, chunk by chunk, at once or when told to."""

    def __init__(self, members):
        self.inboxes = {member: Inbox() for member in members}
        for inbox in self.inboxes.values():
            inbox.enter(1, Allowance())
        self.late = []

    def send(self, source, target, label, body, more=False):
        self.late.append((source, target, label, bytes(body)))

    def carry(self):
        while self.late:
            source, target, label, body = self.late.pop(0)
            inbox = self.inboxes[target]
            for offset in range(0, len(body), CHUNK_BYTES):
                part = memoryview(body)[offset : offset + CHUNK_BYTES]
                chunk = Chunk(label, len(body), offset, len(part), 0)
                incoming = inbox.begin(source, chunk)
                incoming.place(chunk)[:] = part
                inbox.add(incoming, chunk)


def contributions(members, size, dtype):
    generator = torch.Generator().manual_seed(size)
    return [torch.randint(-1000, 1000, (size,), generator=generator).to(dtype) / 8 for _ in range(members)]


@pytest.mark.parametrize("all_ask_first", [True, False])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_sum_is_right_and_leaves_nothing_behind(dtype, members, size, all_ask_first):
    workers = tuple(WorkerId(number, 0) for number in range(members))
    assert goes_whole(size * dtype.itemsize, members) == (size == SMALL or members == 2), "both ways are tried"
    wires, key = Wires(workers), SumKey(1, 0, Reduction((0,), workers))
    given = [each.to(dtype) for each in contributions(members, size, dtype)]
    gc.collect()
    gc.disable()
    try:
        sums = []
        for worker, own in zip(workers, given, strict=True):
            sums.append(Summing(key, worker, plain(own), wires.inboxes[worker], partial(wires.send, worker)))
            sums[-1].start()
            if not all_ask_first:
                wires.carry()  # so that the others have it parked
        wires.carry()
        totals = [each.wait().total for each in sums]
        gone = [weakref.ref(each) for each in sums]
        del sums
        assert [each() for each in gone] == [None] * members, (
            "what a sum holds goes with it, and not when it is looked for"
        )
    finally:
        gc.enable()
    expected = given[0].clone()
    for other in given[1:]:
        expected += other
    assert all(torch.equal(total, expected) for total in totals)


def test_a_sum_that_is_given_up_leaves_nothing_behind_either():
    workers = (WorkerId(0, 0), WorkerId(1, 0))
    wires, key = Wires(workers), SumKey(1, 0, Reduction((0,), workers))
    gc.collect()
    gc.disable()
    try:
        summing = Summing(
            key, workers[0], plain(torch.ones(3)), wires.inboxes[workers[0]], partial(wires.send, workers[0])
        )
        summing.start()
        gone = weakref.ref(summing)
        del summing
        wires.inboxes[workers[0]].abort(1)
        wires.inboxes[workers[0]].enter(2, Allowance())
        assert gone() is None
    finally:
        gc.enable()
