"""A holder of state in a process of its own: serves made-up layers, and tells of every slice before it gives it.

Run as ``state_holder.py TOKEN LIES GATE LAYER:SIZE...``. It prints its offer, then a line per slice that it is
asked for. At slice number GATE (0: at none) it waits for a line on its input. LIES: ``no``, ``bits`` (one bit of every
slice is wrong) or ``short`` (every slice lacks a byte).
"""

import random
import sys
import threading

import msgspec

from holdfast.runtime.transport.transfer import StateServer


def layer_bytes(layer, size):
    """What a layer of that size holds, the same in every process."""
    return random.Random(layer).randbytes(size)


class Telling(StateServer):
    """A real server that tells of slices, can be held, and can lie."""

    def __init__(self, token, lies, gate):
        super().__init__("127.0.0.1", token)
        self._lies = lies
        self._gate = gate
        self._asked = 0
        self._asking = threading.Lock()

    def _slice(self, wanted):
        with self._asking:
            self._asked += 1
            number = self._asked
            print(f"slice {number}", flush=True)
        if number == self._gate:
            sys.stdin.readline()
        data = super()._slice(wanted)
        if self._lies == "bits":
            return bytes([data[0] ^ 1]) + data[1:]
        return data[:-1] if self._lies == "short" else data


def main(token, lies, gate, *layers):
    pairs = [map(int, text.split(":")) for text in layers]
    server = Telling(token, lies, int(gate))
    offer = server.pin("state", {layer: layer_bytes(layer, size) for layer, size in pairs})
    print(msgspec.json.encode(offer).decode(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
