"""The port behind one suite: links between processes, memory between threads."""

import contextlib
import importlib
import multiprocessing
import runpy
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from tests.memory_transport import MemoryHub, MemoryTransport
from tests.processes import process_of
from tests.waiting import LIMIT_S

import holdfast.errors
from holdfast.control.messages import Hello, Here
from holdfast.control.peer_directory import PeerDirectory
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Link
from holdfast.devices.device import HOST
from holdfast.runtime.node.forks import FORKS, ForkedProcess
from holdfast.runtime.transport.delayed import DelayedTransport
from holdfast.runtime.transport.staged import StagedTransport

WORKER = Path(__file__).with_name("transport_worker.py")
HOOK = "the hook for devices written in Python is of torch 2.13"


class Call:
    """A call under way in a worker."""

    def __init__(self, pid):
        self._pid = pid
        self._entered = Future()
        self._result = Future()

    def entered(self, thread):
        self._entered.set_result(thread)

    def done(self, result):
        self._result.set_result(result)

    def failed(self, kind, text):
        builtin = {"RuntimeError": RuntimeError}.get(kind, AssertionError)
        error_type = getattr(holdfast.errors, kind, builtin)
        error = error_type.__new__(error_type)
        Exception.__init__(error, text if error_type is not AssertionError else f"{kind}: {text}")
        self._result.set_exception(error)

    def result(self, limit_s=LIMIT_S):
        return self._result.result(limit_s)

    def error(self, limit_s=LIMIT_S):
        return self._result.exception(limit_s)

    def is_blocked(self):
        """Waits until the call's thread sleeps, though it has begun; False if the call ends instead."""
        thread = self._entered.result(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        asleep = 0
        while asleep < 15:
            assert time.monotonic() < deadline
            time.sleep(0.002)
            if self._result.done():
                return False
            state = Path(f"/proc/{self._pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
        return True


class Peer:
    """A test's end of one worker."""

    def __init__(self, worker, connection, pid, here=None):
        self.worker = worker
        self.pid = pid
        self._connection = connection
        self._here = here
        self._calls = []
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, *message):
        with self._sending:
            self._connection.send(message)

    def call(self, name, *arguments):
        call = Call(self.pid)
        self._calls.append(call)
        self.tell("call", len(self._calls) - 1, name, *arguments)
        return call

    def do(self, name, *arguments):
        return self.call(name, *arguments).result()

    def abort(self, generation):
        self.tell("abort", generation)

    def _read(self):
        while True:
            try:
                kind, *given = self._connection.recv()
            except (EOFError, OSError):
                return
            if kind == "here":
                self._here(self.worker, *given)
            else:
                number, *rest = given
                getattr(self._calls[number], kind)(*rest)

    def end(self):
        with contextlib.suppress(OSError):
            self.tell("quit")
        self._reader.join(LIMIT_S)
        self._connection.close()


class LinkCluster:
    """Over links, between workers in processes of their own."""

    sealed = carried = False
    device = "cpu"
    hello_bytes, answer_bytes = 64, 48

    def __init__(self):
        self._processes = {}
        self._killed = set()
        self.peers = {}
        self.here_now = {}
        self.processes = {}
        self.told = {}
        """worker -> what it was told of each of the others."""
        self.via = {}
        """(from, to) whose link goes through somebody else, and where that listens."""
        self._directory = PeerDirectory("secret")
        self._telling = threading.Lock()

    def start(self, worker):
        ours, theirs = FORKS.Pipe()
        given = {
            "init_globals": {
                "connection": theirs,
                "worker": worker,
                "device": self.device,
                "options": {"sealed": self.sealed, "carried": self.carried},
            },
            "run_name": "transport_worker",
        }
        process = ForkedProcess(target=runpy.run_path, args=(str(WORKER),), kwargs=given, daemon=True)
        process.start()
        theirs.close()
        with self._telling:  # what it says is heard once it has taken the place of one that was killed
            self._processes[worker] = process
            self.peers[worker] = Peer(worker, ours, process.pid, self._here)
        self.tell_all()
        return self.peers[worker]

    def kill(self, worker):
        self._killed.add(self._processes[worker].pid)
        self._processes[worker].kill()

    def died(self, worker):
        self._processes[worker].join(LIMIT_S)
        return not self._processes[worker].is_alive()

    def end(self):
        gone = {
            worker: process.exitcode
            for worker, process in self._processes.items()
            if process.pid not in self._killed and not process.is_alive()
        }
        for peer in self.peers.values():
            peer.end()
        for process in self._processes.values():
            process.join(LIMIT_S)
            process.close()
        assert not gone, f"ended by themselves, with these codes: {gone}"

    def _here(self, worker, pid, here):
        with self._telling:
            self._directory.heard(Hello(worker=worker, process=process_of(worker, pid), here=here))
            self.here_now[worker], self.processes[worker] = here, process_of(worker, pid)
        self.tell_all()

    def pretend(self, worker, nonce=bytes(16)):
        """The others are told of a worker that the test plays itself; returns what it is told of them."""
        self._here(worker, 0, Here(address="127.0.0.1:1", nonce=nonce))
        with self._telling:
            return {peer.worker: peer for peer in self._directory.news_for(worker, self.processes).peers}

    def tell_all(self):
        """Tells everybody what is new of the others, as the coordinator does."""
        with self._telling:
            for target in self.here_now.keys() & self.peers.keys():
                if (news := self._directory.news_for(target, self.processes)) is not None:
                    told = [self._rerouted(target, peer) for peer in news.peers]
                    self.told.setdefault(target, {}).update({peer.worker: peer for peer in told})
                    try:
                        self.peers[target].tell("meet", told)
                    except BrokenPipeError:
                        if self.peers[target].pid not in self._killed:
                            raise

    def _rerouted(self, source, peer):
        address = self.via.get((source, peer.worker), peer.here.address)
        return msgspec.structs.replace(peer, here=msgspec.structs.replace(peer.here, address=address))


class SealedCluster(LinkCluster):
    """Over links that nobody else can read."""

    sealed = True
    hello_bytes, answer_bytes = 96, 80


class CarriedCluster(LinkCluster):
    """The same with bodies that a process group carries, once it is built; before and behind it, links do."""

    carried = True


class DeviceCluster(CarriedCluster):
    """The same from one device's memory to another's, which the host's never sees."""

    device = f"{Path(__file__).parents[1] / 'accelerator.py'}:Late"

    def __init__(self):
        pytest.importorskip("torch", minversion="2.13", reason=HOOK)
        super().__init__()


class MemoryCluster:
    """Workers in threads of this process."""

    device = HOST

    def __init__(self):
        self._hub = MemoryHub()
        self._serve = runpy.run_path(str(WORKER))["serve"]
        self._threads = []
        self.peers = {}

    def start(self, worker):
        ours, theirs = multiprocessing.Pipe()

        def live():
            with theirs:
                self._serve(theirs, lambda say: self._transport(worker), self.device)

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        self._threads.append(thread)
        self.peers[worker] = Peer(worker, ours, "self")
        return self.peers[worker]

    def _transport(self, worker):
        return MemoryTransport(worker, self._hub)

    def kill(self, worker):
        self._hub.kill(worker)

    def end(self):
        for peer in self.peers.values():
            peer.abort(2**62)
            peer.end()
        for thread in self._threads:
            thread.join(LIMIT_S)


class DelayedCluster(MemoryCluster):
    """The same with messages that take 2 ms."""

    def _transport(self, worker):
        link = Link(latency_s=0.001, bytes_per_s=1e6)
        return DelayedTransport(super()._transport(worker), link, lambda payload: 1_000)


class StagedCluster(MemoryCluster):
    """The same with tensors in the memory of a device that computes late."""

    def __init__(self):
        super().__init__()
        pytest.importorskip("torch", minversion="2.13", reason=HOOK)
        accelerator = importlib.import_module("tests.accelerator")
        accelerator.MACHINE.reset(7)
        self.device = accelerator.Late()

    def _transport(self, worker):
        return StagedTransport(super()._transport(worker), self.device)


CLUSTERS = {
    "links": LinkCluster,
    "sealed": SealedCluster,
    "carried": CarriedCluster,
    "device": DeviceCluster,
    "memory": MemoryCluster,
    "delayed": DelayedCluster,
    "staged": StagedCluster,
}


@pytest.fixture(params=list(CLUSTERS))
def cluster(request):
    made = CLUSTERS[request.param]()
    yield made
    made.end()


@pytest.fixture
def links():
    made = LinkCluster()
    yield made
    made.end()


@pytest.fixture
def sealed():
    made = SealedCluster()
    yield made
    made.end()


@pytest.fixture(params=["links", "sealed"])
def either(request):
    """Links, in the clear and sealed."""
    made = CLUSTERS[request.param]()
    yield made
    made.end()


@pytest.fixture
def workers():
    return WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)
