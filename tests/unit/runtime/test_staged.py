"""What is sent from a device's memory: copied beside the computation, handed on in order, or dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.memory_transport import MemoryHub, MemoryTransport

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.core.summing import plain
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import Host, Outgoing
from holdfast.errors import PeerLost, StaleGeneration
from holdfast.runtime.transport.port import MessageKey, SumKey
from holdfast.runtime.transport.staged import StagedTransport

A, B = WorkerId(0, 0), WorkerId(0, 1)
KEY = MessageKey(generation=1, step=0, payload=Payload.ACTIVATION, microbatch=0, boundary=1)
SUM = SumKey(1, 0, Reduction((0,), (A, B)))
SPEC = TensorSpec(shape=(2,), dtype="float32")


class Copying:
    """A mark that passes when the test says so, or when it is waited for."""

    def __init__(self, tensor, into):
        self.tensor, self.into, self.passed, self.waited = tensor, into, False, False

    def done(self):
        self.into.copy_(self.tensor)
        self.passed = True

    def query(self):
        return self.passed

    def synchronize(self):
        self.waited = True
        self.done()


class Slow(Host):
    """A device whose copies are under way until somebody waits."""

    apart = True

    def __init__(self):
        super().__init__()
        self.copies, self.beside_it = [], []

    def outgoing(self, tensor):
        self.copies.append(Copying(tensor, torch.full_like(tensor, torch.nan)))
        return Outgoing(self.copies[-1].into, self.copies[-1])

    def computed(self, tensor):
        self.beside_it.append(Copying(tensor, tensor))
        return Outgoing(tensor, self.beside_it[-1])

    def joined(self, tensor):
        self.beside_it.append("joined")
        return tensor


class Noting(MemoryTransport):
    """Notes what it is given, in order; may have lost the other end."""

    def __init__(self, worker, hub):
        super().__init__(worker, hub)
        self.given, self.lost, self.takes = [], False, ()

    def straight(self, peers, size):
        return size >= 8 and {*peers} - {A} <= {*self.takes}

    def send(self, key, peer, tensor):
        self.given.append(key.microbatch)
        if self.lost:
            raise PeerLost(str(peer), key.generation)
        super().send(key, peer, tensor)

    def all_reduce(self, key, contribution):
        self.given.append("sum")
        return super().all_reduce(key, contribution)


@pytest.fixture
def device():
    return Slow()


@pytest.fixture
def inner():
    hub = MemoryHub()
    ours, theirs = Noting(A, hub), MemoryTransport(B, hub)
    hub.mail.join(1, ((A, B),), B)
    ours.build(1, ((A, B),))
    theirs.build(1, ((A, B),))
    ours.theirs = theirs
    return ours


@pytest.fixture
def staged(inner, device):
    return StagedTransport(inner, device)


def send(staged, number, value=1.0):
    staged.send(replace(KEY, microbatch=number), B, torch.full((2,), value))


def test_nobody_waits_for_the_device_to_send_and_all_is_handed_on_before_a_wait(staged, device, inner):
    send(staged, 0, 7.0)
    assert inner.given == []
    assert not device.copies[0].waited
    staged.hand_on()
    assert inner.given == [0]
    assert inner.theirs.receive(KEY, A, SPEC).wait().tolist() == [7.0, 7.0]


def test_what_is_copied_is_handed_on_when_the_host_is_here_again(staged, device, inner):
    send(staged, 0)
    device.copies[0].done()
    send(staged, 1)
    assert inner.given == [0]
    assert [copy.passed for copy in device.copies] == [True, False]


def test_messages_and_sums_stay_in_order_though_later_ones_are_copied_first(staged, device, inner):
    send(staged, 0)
    summing = staged.all_reduce(SUM, plain(torch.ones(2)))
    send(staged, 1)
    device.copies[1].done()
    device.copies[2].done()
    assert not summing.ready
    assert inner.given == [], "the first one is under way"
    device.copies[0].done()
    assert not summing.ready, "the other one has not contributed"
    assert inner.given == [0, "sum", 1]
    inner.theirs.all_reduce(SUM, plain(torch.ones(2)))
    assert summing.ready
    assert summing.wait().total.tolist() == [2.0, 2.0]


def test_who_waits_for_a_sum_has_contributed(staged, device, inner):
    summing = staged.all_reduce(SUM, plain(torch.ones(2)))
    inner.theirs.all_reduce(SUM, plain(torch.ones(2)))
    assert summing.wait().total.tolist() == [2.0, 2.0]


def test_the_sum_of_one_alone_stays_where_it_is(staged, device):
    given = torch.ones(2)
    alone = SumKey(1, 0, Reduction((0,), (A,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noting, "all_reduce", lambda self, key, contribution: contribution)
        assert staged.all_reduce(alone, plain(given)).parts[0].data_ptr() == given.data_ptr()
    assert device.copies == []


def test_what_goes_straight_from_the_device_is_handed_on_once_it_is_computed_and_not_copied(staged, device, inner):
    inner.takes = (B,)
    send(staged, 0, 7.0)
    summing = staged.all_reduce(SUM, plain(torch.ones(2)))
    assert (inner.given, device.copies) == ([], []), "it is not computed yet"
    staged.hand_on()
    assert inner.given == [0, "sum"]
    assert inner.theirs.receive(KEY, A, SPEC).wait().tolist() == [7.0, 7.0]
    inner.theirs.all_reduce(SUM, plain(torch.ones(2)))
    assert device.beside_it.count("joined") == 0
    assert summing.wait().total.tolist() == [2.0, 2.0]
    inner.theirs.send(replace(KEY, microbatch=3), A, torch.ones(2))
    receiving = staged.receive(replace(KEY, microbatch=3), B, SPEC)
    assert receiving.wait().tolist() == [1.0, 1.0]
    assert device.beside_it.count("joined") == 2, "what comes is joined with the computation"


def test_what_is_too_short_to_go_straight_is_copied(staged, device, inner):
    inner.takes = (B,)
    staged.send(KEY, B, torch.ones(1))
    assert len(device.copies) == 1
    assert device.beside_it == []


def test_what_is_of_a_generation_that_is_over_is_dropped_and_the_device_is_not_waited_for(staged, device, inner):
    send(staged, 0)
    summing = staged.all_reduce(SUM, plain(torch.ones(2)))
    staged.abort(1)
    staged.hand_on()
    assert inner.given == []
    assert not any(copy.waited for copy in device.copies)
    assert not summing.ready
    with pytest.raises(StaleGeneration, match=r"^generation 1 is over$"):
        summing.wait()


def test_behind_one_that_cannot_be_sent_nothing_of_its_generation_is(staged, device, inner):
    inner.lost = True
    send(staged, 0)
    send(staged, 1)
    with pytest.raises(PeerLost, match=r"^lost worker 0\.1 in generation 1"):
        staged.hand_on()
    staged.hand_on()
    assert inner.given == [0]
