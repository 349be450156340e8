"""A holder of state in a process of its own: serves made-up layers, and tells of every slice before it gives it.

Run as ``state_holder.py WORKER READER ADDRESS NONCE LIES GATE LAYER:SIZE...``: who it is, who reads, where that one
listens and its process's nonce. It prints where it listens itself, its nonce and its offer, then a line per slice that
it is asked for. At slice number GATE (0: at none) it waits for a line on its input. LIES: ``no``, ``bits`` (one bit of
every slice is wrong) or ``short`` (every slice lacks a byte).
"""

import json
import random
import sys
import threading

import msgspec

from holdfast.control.messages import Here, Peer
from holdfast.control.token import pair_key
from holdfast.core.ids import WorkerId
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

    def __init__(self, give, lies, gate):
        self._give = give
        self._lies = lies
        self._gate = gate
        self._asked = 0

    def __call__(self, ask):
        self._asked += 1
        print(f"slice {self._asked}", flush=True)
        if self._asked == self._gate:
            sys.stdin.readline()
        data = self._give(ask)
        if self._lies == "bits":
            return memoryview(bytes([data[0] ^ 1]) + data[1:])
        return data[:-1] if self._lies == "short" else data


def main(worker, reader, address, nonce, lies, gate, *layers):
    worker, reader = WorkerId.parse(worker), WorkerId.parse(reader)
    links = LinkTransport(worker)
    links.slices._slice = Telling(links.slices._slice, lies, int(gate))
    links.meet([contact((worker, links.here.nonce), reader, address, bytes.fromhex(nonce))])
    pairs = [map(int, text.split(":")) for text in layers]
    made = offer(links.slices, "state", {layer: layer_bytes(layer, size) for layer, size in pairs})
    print(json.dumps([links.here.address, links.here.nonce.hex(), msgspec.to_builtins(made)]), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
