"""What goes wrong while a state is fetched is raised where the worker trains."""

from __future__ import annotations

import threading

import msgspec
import pytest

from holdfast.core.ids import WorkerId
from holdfast.errors import PeerLost, ReplicaDiverged
from holdfast.runtime.transport import copying
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.transfer import OfferedLayer, StateOffer, StateServer

A, B, C = WorkerId(0, 0), WorkerId(1, 0), WorkerId(2, 0)
LIMIT_S = 20.0


@pytest.fixture
def copier():
    exchange = RelayExchange(C, lambda message: None)
    return StateCopier(worker=C, exchange=exchange, server=StateServer("127.0.0.1", "t"), token="t")


def fetched(copier, *offers):
    """What a fetch of layer 0 comes to, given the offers of A and B."""
    for source, layers in zip((A, B), offers, strict=True):
        offer = StateOffer(address="127.0.0.1:1", key="k", layers=layers)
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
