"""A holder of state in a process of its own: serves made-up layers, and tells of every slice before it gives it.

Run with ``connection``, to the test, and ``given``: who it is, who reads, where that one listens and its process's
nonce, LIES, GATE, and (layer, size) of each layer. It tells where it listens itself, its nonce and its offer, then
None for each slice that it is asked for. At slice number GATE (0: at none) it waits until it is told something. LIES:
``no``, ``bits`` (one bit of every slice is wrong) or ``short`` (every slice lacks a byte).
"""

import random
import threading

from holdfast.control.messages import Here, Peer
from holdfast.control.token import pair_key
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.transfer import offer

SECRET = "a-token-of-a-test"


def layer_bytes(layer, size):
    """What a layer of that size holds, the same in every process."""
    return random.Random(layer).randbytes(size)


def contact(ours, worker, address, nonce, secret=SECRET):
    """What a worker and its nonce, ``ours``, are told of another one."""
    here = Here(address=address, nonce=nonce)
    return Peer(worker=worker, here=here, key=pair_key(secret, ours, (worker, nonce)))


class Telling:
    """Gives what real slices give, but tells of them, can be held, and can lie."""

    def __init__(self, connection, give, lies, gate):
        self._connection = connection
        self._give = give
        self._lies = lies
        self._gate = gate
        self._asked = 0

    def __call__(self, ask):
        self._asked += 1
        self._connection.send(None)
        if self._asked == self._gate:
            self._connection.recv()
        data = self._give(ask)
        if self._lies == "bits":
            return memoryview(bytes([data[0] ^ 1]) + data[1:])
        return data[:-1] if self._lies == "short" else data


def main(connection, worker, reader, address, nonce, lies, gate, layers):
    links = LinkTransport(worker)
    links.slices._slice = Telling(connection, links.slices._slice, lies, gate)
    links.meet([contact((worker, links.here.nonce), reader, address, nonce)])
    made = offer(links.slices, "state", {layer: layer_bytes(layer, size) for layer, size in layers})
    connection.send((links.here.address, links.here.nonce, made))
    threading.Event().wait()


if __name__ == "state_holder":
    main(connection, *given)  # noqa: F821 - whoever runs this gives them
