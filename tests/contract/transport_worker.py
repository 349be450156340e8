"""One worker of the transport contract: does over a pipe what a test tells it, in a process or in a thread.

Calls run one after another in a thread of their own; ``abort`` and what is told of others are taken at once, as in a
real worker, where they come from the control thread. Run by path, so that a forkserver can start it from any test.
"""

import os
import queue
import resource
import threading

import torch

from holdfast.core.instructions import Reduction
from holdfast.core.summing import Total, plain
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import HOST
from holdfast.optim.accumulate import Accumulator, Layout
from holdfast.runtime.engine.device_of import device_of
from holdfast.runtime.transport.links.carrier import Carrying
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import SumKey
from holdfast.runtime.transport.staged import StagedTransport

BROKEN = threading.Event()


class Breakable:
    """A group of two that can be broken, while the link of the two is well."""

    def __init__(self, inner):
        self._inner = inner

    def send(self, tensor):
        return BreakableWork(self._inner.send(tensor))

    def recv(self, tensor):
        return BreakableWork(self._inner.recv(tensor))

    def abort(self):
        self._inner.abort()


class BreakableWork:
    """Fails if the group is broken by the time that somebody waits."""

    def __init__(self, inner):
        self._inner = inner

    def wait(self):
        if BROKEN.is_set():
            raise RuntimeError("told to fail")
        self._inner.wait()


class Calls:
    """What a test may call."""

    def __init__(self, transport, device):
        self._transport, self._device = transport, device
        self._handles = {}
        self._arguments = {}

    def build(self, generation, groups, step=None, expected=None):
        self._handles.clear()
        self._transport.build(generation, groups, step=step, expected=expected)

    def send(self, key, peer, dtype, values):
        """Overwrites a tensor of the host's as soon as ``send`` has returned; waits for something else behind it."""
        tensor = torch.tensor(values, dtype=getattr(torch, dtype))
        self._transport.send(key, peer, self._device.brought(tensor))
        if not self._device.apart:
            tensor.fill_(99)
        self._transport.hand_on()

    def post(self, name, key, peer, dtype, shape):
        self._handles[name] = self._transport.receive(key, peer, TensorSpec(shape=shape, dtype=dtype))

    def reduce(self, name, members, dtype, values, layer=0, generation=1, step=0):
        self._arguments[name] = self._device.brought(torch.tensor(values, dtype=getattr(torch, dtype)))
        key = SumKey(generation, step, Reduction((layer,), members))
        self._handles[name] = self._transport.all_reduce(key, plain(self._arguments[name]))
        self._transport.hand_on()

    def reduce_gradients(self, name, members, size, of, microbatches, layer=0, left_out=()):
        """Contributes gradients of some of the micro-batches of a step, of so many numbers each."""
        layout = Layout(layers=(layer,), shapes=((size,),), num_microbatches=of, record_width=0)
        sums = Accumulator(layout, self._device.torch)
        for number in microbatches:
            gradient = torch.randn(size, generator=torch.Generator().manual_seed(number))
            sums.add(layer, number, [self._device.brought(gradient)])
        sums.leave_out(left_out)
        key = SumKey(1, 0, Reduction((layer,), members))
        self._handles[name] = self._transport.all_reduce(key, sums.message())
        self._transport.hand_on()

    def wait(self, name):
        found = self._handles.pop(name).wait()
        found = found.total if isinstance(found, Total) else found
        return str(found.dtype).removeprefix("torch."), found.tolist()

    def kept(self, name):
        found = self._handles[name].kept()
        return None if found is None else found.tolist()

    def ready(self, name):
        return self._handles[name].ready

    def receive(self, key, peer, dtype, shape):
        self.post(key, key, peer, dtype, shape)
        return self.wait(key)

    def sum(self, members, dtype, values, layer, generation):
        name = ("sum", layer, generation)
        self.reduce(name, members, dtype, values, layer, generation)
        return self.wait(name)

    def argument(self, name):
        return self._arguments[name].tolist()

    def sent(self):
        return self._transport.sent.messages, self._transport.sent.sums

    def carried(self):
        return self._transport.sent.carried

    def fail_groups(self):
        """From now on nothing that a group is asked for comes to its end."""
        BROKEN.set()

    def drain(self):
        self._transport.drain()

    def close(self):
        self._transport.close()

    def open_files(self):
        return len(os.listdir("/proc/self/fd"))

    def limit_files(self, limit):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def threads(self):
        return len(os.listdir("/proc/self/task"))


def serve(connection, transport_of, device=HOST):
    """Serves one test until it says quit, or its end of the pipe is closed.

    ``transport_of`` makes the transport; it is given what tells a test something. What is sent is on the device.
    """
    sending = threading.Lock()

    def say(*message):
        with sending:
            connection.send(message)

    transport = transport_of(say)
    calls = queue.SimpleQueue()
    threading.Thread(target=_work, args=(calls, Calls(transport, device), say), daemon=True).start()
    while True:
        kind, *given = connection.recv()
        if kind == "call":
            calls.put(given)
        elif kind == "meet":
            transport.meet(*given)
        elif kind == "abort":
            transport.abort(*given)
        else:
            calls.put(None)
            return


def _work(calls, target, say):
    while (call := calls.get()) is not None:
        number, name, *arguments = call
        say("entered", number, threading.get_native_id())
        try:
            result = getattr(target, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test asks for it
            say("failed", number, type(error).__name__, str(error))
        else:
            say("done", number, result)


def links_of(worker, device, *, sealed, carried):
    """Makes the links of a worker, and what is between them and its device."""

    def make(say):
        pair = device.pair("127.0.0.1")
        breakable = lambda *given: Breakable(pair(*given))  # noqa: E731
        carrying = Carrying(make=breakable, device=device, least_bytes=1, after=1) if carried else None
        transport = LinkTransport(worker, sealed=sealed, carrying=carrying)
        say("here", os.getpid(), transport.here)
        return _Told(transport, device) if device.apart else transport

    return make


class _Told(StagedTransport):
    """Can be told of others."""

    def meet(self, peers):
        self._inner.meet(peers)


def main(connection, worker, device, options):
    """Entry point of a process; it ends without waiting for threads that a test left behind."""
    try:
        torch.set_num_threads(1)
        made = device_of(device, exact=True)
        serve(connection, links_of(worker, made, **options), made)
    finally:
        os._exit(0)


if __name__ == "transport_worker":
    main(connection, worker, device, options)  # noqa: F821 - given by who runs this file
