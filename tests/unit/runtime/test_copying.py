"""What goes wrong while a state is fetched is raised where the worker trains."""

from __future__ import annotations

import threading

import msgspec
import pytest
from tests.waiting import LIMIT_S

from holdfast.core.ids import WorkerId
from holdfast.errors import PeerLost, ReplicaDiverged
from holdfast.protocol.effects import Serve
from holdfast.runtime.transport import copying
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.transfer import OfferedLayer, StateOffer

A, B, C = WorkerId(0, 0), WorkerId(1, 0), WorkerId(2, 0)


@pytest.fixture
def copier():
    exchange = RelayExchange(C, lambda message: None)
    return StateCopier(worker=C, exchange=exchange, slices=Slices(lambda *said: None))


def fetched(copier, *offers):
    """What a fetch of layer 0 comes to, given the offers of A and B."""
    for source, layers in zip((A, B), offers, strict=True):
        offer = StateOffer(key="k", layers=layers)
        copier.exchange.deliver(1, copying._name(source, C), msgspec.msgpack.encode(offer))
    copier.fetch(1, {0: (A, B)})
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join(LIMIT_S)
    return copier.fetched(1)


def layer(text):
    return (OfferedLayer(layer=0, size=4, sha256=text * 64),)


def test_holders_of_other_bits_are_told_of(copier):
    with pytest.raises(ReplicaDiverged):
        fetched(copier, layer("a"), layer("b"))


def test_nobody_who_could_give_it_is_a_lost_peer(copier):
    with pytest.raises(PeerLost):
        fetched(copier, (), ())


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # as it is told of in a real process
def test_who_cannot_give_what_it_is_to_give_says_so():
    """Else whoever waits for its offer would do so for ever."""
    said = []
    giver = StateCopier(worker=A, exchange=RelayExchange(A, said.append), slices=Slices(lambda *said: None))

    def encode():
        raise MemoryError

    giver.serve(Serve(1, 5, C, {0: encode}))
    for thread in threading.enumerate():
        if thread.name == f"serve-{C}":
            thread.join(LIMIT_S)
    (blob,) = said
    assert (blob.to, msgspec.msgpack.decode(blob.value, type=StateOffer).layers) == ((C,), ())


def test_nothing_is_waited_for_any_longer_than_said(copier):
    copier.fetch(1, {0: (A,)})
    assert copier.fetched(1, 0.01) is None, "nobody has offered anything"
    copier.exchange.deliver(1, copying._name(A, C), msgspec.msgpack.encode(StateOffer(key="k", layers=())))
    with pytest.raises(PeerLost):
        copier.fetched(1, LIMIT_S)


def test_what_goes_beside_a_state_may_differ_by_holder_and_is_learned_once(copier, monkeypatch):
    learned = []
    copier.learn = learned.append
    monkeypatch.setattr(copying, "fetch", lambda slices, offers, holders, **_: dict.fromkeys(holders, b"state"))
    for source in (A, B):
        offer = StateOffer(key="k", layers=layer("a"), beside=f"of {source}".encode())
        copier.exchange.deliver(1, copying._name(source, C), msgspec.msgpack.encode(offer))
    copier.fetch(1, {0: (A, B)})
    assert copier.fetched(1, LIMIT_S) == {0: b"state"}
    assert learned == [b"of 0.0"]
