"""Measures what a message costs: two processes send messages to and fro over links, as a job's workers do."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import msgspec
import torch

from holdfast.config.job import Job
from holdfast.control.messages import Here, Peer
from holdfast.control.token import pair_key
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.profile import Link
from holdfast.core.tensorspec import TensorSpec
from holdfast.profiling.samples import fit_link
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import MessageKey, Transport

__all__ = ["SIZES", "answer_messages", "measure_link"]

SIZES = (8, 4 * 2**20)
"""Bytes of a small and of a large message."""

_PAIR = (WorkerId(0, 0), WorkerId(0, 1))
_WARM_UP = 3
_ALL_THERE = b"all"


def measure_link(job: Job, pipe: Connection, rounds: int) -> Link:
    """Returns latency and bandwidth, half of what a message takes to and fro.

    Args:
        job: whose address, and certificates if it has any, are used.
        pipe: to the process that runs :func:`answer_messages`; the two find each other through it.
        rounds: how often each size is sent; at least 1.
    """
    transport = _connect(job, 0, pipe)
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for round_ in range(_WARM_UP + rounds):
        for index, size in enumerate(SIZES):
            start = time.perf_counter()
            _send(transport, 0, round_, index)
            _receive(transport, 0, round_, index)
            if round_ >= _WARM_UP:
                times[size].append((time.perf_counter() - start) / 2)
    pipe.send_bytes(_ALL_THERE)
    transport.close()
    return fit_link(times)


def answer_messages(job: Job, pipe: Connection, rounds: int) -> None:
    """Sends every message back that :func:`measure_link` sends; returns once all are there.

    A link that ends is one that breaks: what was sent on the other one may not have been read yet.
    """
    transport = _connect(job, 1, pipe)
    for round_ in range(_WARM_UP + rounds):
        for index in range(len(SIZES)):
            _receive(transport, 1, round_, index)
            _send(transport, 1, round_, index)
    transport.drain()
    pipe.recv_bytes()
    transport.close()


def _connect(job: Job, end: int, pipe: Connection) -> LinkTransport:
    """A link to the other end and one from it, by a key that is no secret: both end with the measurement."""
    ours, theirs = _PAIR[end], _PAIR[1 - end]
    transport = LinkTransport(ours, host=job.control.host, sealed=job.control.tls is not None)
    pipe.send_bytes(msgspec.msgpack.encode(transport.here))
    here = msgspec.msgpack.decode(pipe.recv_bytes(), type=Here)
    key = pair_key("", (ours, transport.here.nonce), (theirs, here.nonce))
    transport.meet([Peer(worker=theirs, here=here, key=key)])
    transport.build(1, (_PAIR,))
    return transport


def _key(sender: int, round_: int, index: int) -> MessageKey:
    payload = Payload.GRADIENT if sender else Payload.ACTIVATION
    return MessageKey(generation=1, step=round_, payload=payload, microbatch=index)


def _send(transport: Transport, end: int, round_: int, index: int) -> None:
    transport.send(_key(end, round_, index), _PAIR[1 - end], torch.zeros(SIZES[index], dtype=torch.uint8))


def _receive(transport: Transport, end: int, round_: int, index: int) -> None:
    spec = TensorSpec(shape=(SIZES[index],), dtype="uint8")
    transport.receive(_key(1 - end, round_, index), _PAIR[1 - end], spec).wait()
