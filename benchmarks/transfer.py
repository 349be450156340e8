"""State from its holders to a joiner over links: how fast, and what a message of training takes meanwhile.

One to three holders keep the same layers, and the joiner fetches them again and again. At the same time one of the
holders sends a message every 2 ms, which comes back: from another holder, or from the joiner. Beside it, what one
process reads from another over a bare socket.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from holdfast.control.messages import Here, Peer
from holdfast.control.token import pair_key
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import PeerLost
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import MessageKey
from holdfast.runtime.transport.transfer import fetch, offer
from measure import Recorder, interval, print_table, progress

_MIB = 1 << 20
_WRITE = 4 * _MIB
_MESSAGE = TensorSpec(shape=(64 << 10,), dtype="uint8")
_PAUSE_S = 0.002
METRICS = ("state_mib_s", "socket_mib_s", "joiner_cpu_s", "holders_cpu_s", "idle_ms", "busy_ms", "busy_p90_ms")


def main() -> int:
    """Runs the benchmark."""
    options = _options()
    recorder = Recorder("transfer", vars(options))
    for repetition in range(options.repetitions):
        for holders in options.holders:
            recorder.begin()
            for row in _measure(holders, options):
                recorder.add(holders=holders, repetition=repetition, **row)
            progress(f"run {repetition + 1}/{options.repetitions}, {holders} holders")
    measured = dict.fromkeys((row["holders"], row["to"]) for row in recorder.rows)
    summary = [_summary(holders, to, recorder.rows) for holders, to in measured]
    header = ["holders", "messages with a", "MiB/s", "of a socket", "CPU s/GiB", "of all holders"]
    header += ["message, ms", "while state goes", "its 90th percentile"]
    shown = [[str(row["holders"]), row["to"], *(row[name].show(1, 2) for name in METRICS)] for row in summary]
    print_table("state over links: median [95 % interval]", header, shown)
    recorder.write(summary)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each number of holders")
    parser.add_argument("--holders", type=int, nargs="+", default=[1, 3], help="who have the same layers")
    parser.add_argument("--layers", type=int, default=8, help="that each holder keeps")
    parser.add_argument("--layer-mib", type=int, default=16, help="size of a layer")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long messages are sent, with and without")
    return parser.parse_args()


def _measure(holders: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts holders and joiner, lets them measure, and returns a row for each end of the messages."""
    with _workers(holders + 1, options) as pipes:
        *held, joiner = pipes
        offers = {WorkerId(number, 0): pipe.recv() for number, pipe in enumerate(held)}
        total_mib = options.layers * options.layer_mib
        _ask(joiner, "fetch", offers)
        before = [_ask(pipe, "cpu") for pipe in pipes]
        took = [_ask(joiner, "fetch", offers) for _ in range(3)]
        *gave, got = [_ask(pipe, "cpu") - past for pipe, past in zip(pipes, before, strict=True)]
        per_gib = 1024 / (len(took) * total_mib)
        row = {
            "state_mib_s": total_mib / statistics.median(took),
            "socket_mib_s": _socket_rate(1024 * _MIB),
            "joiner_cpu_s": got * per_gib,
            "holders_cpu_s": sum(gave) * per_gib,
        }
        rows = []
        for to, number in (("joiner", holders), ("holder", 1))[: 1 if holders == 1 else 2]:
            idle = _ask(held[0], "ping", number, options.seconds)
            held[0].send(("ping", number, options.seconds))
            while not held[0].poll():
                _ask(joiner, "fetch", offers)
            busy = held[0].recv()
            times = {"idle_ms": statistics.median(idle), "busy_ms": statistics.median(busy)}
            times["busy_p90_ms"] = statistics.quantiles(busy, n=10)[-1]
            rows.append({"to": to, **row, **{name: 1000 * seconds for name, seconds in times.items()}})
        return rows


def _ask(pipe: Connection, *what: Any) -> Any:
    pipe.send(what)
    return pipe.recv()


@contextlib.contextmanager
def _workers(count: int, options: argparse.Namespace) -> Iterator[list[Connection]]:
    """Processes of workers that know each other; the last one is the joiner."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        sizes = None if number == count - 1 else [options.layer_mib * _MIB] * options.layers
        processes.append(context.Process(target=_work, args=(number, count, sizes, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    here = {WorkerId(number, 0): pipe.recv() for number, pipe in enumerate(pipes)}
    for worker, pipe in zip(here, pipes, strict=True):
        pipe.send([_contact((worker, here[worker][1]), other, *here[other]) for other in here if other != worker])
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(("end",))
        process.join()


def _contact(ours: tuple[WorkerId, bytes], worker: WorkerId, address: str, nonce: bytes) -> Peer:
    here = Here(address=address, nonce=nonce)
    return Peer(worker=worker, here=here, key=pair_key("secret", ours, (worker, nonce)))


def _work(number: int, count: int, sizes: list[int] | None, pipe: Connection) -> None:
    """One worker; a holder, if it has layers."""
    import torch

    torch.set_num_threads(1)
    links = LinkTransport(WorkerId(number, 0))
    pipe.send((links.here.address, links.here.nonce))
    links.meet(pipe.recv())
    links.build(1, tuple((WorkerId(a, 0), WorkerId(b, 0)) for b in range(count) for a in range(b)))
    if sizes is not None:
        layers = {layer: random.Random(layer).randbytes(size) for layer, size in enumerate(sizes)}
        pipe.send(offer(links.slices, "state", layers))
    if number:
        threading.Thread(target=_send_back, args=(links, number), daemon=True).start()
    sent: dict[int, int] = {}
    while True:
        what, *given = pipe.recv()
        if what == "cpu":
            pipe.send(time.process_time())
        elif what == "fetch":
            pipe.send(_fetch(links, *given))
        elif what == "ping":
            other, seconds = given
            times = _ping(links, other, seconds, sent.get(other, 0))
            sent[other] = sent.get(other, 0) + len(times)
            pipe.send(times)
        else:
            os._exit(0)


def _fetch(links: LinkTransport, offers: dict[WorkerId, Any]) -> float:
    layers = [each.layer for each in next(iter(offers.values())).layers]
    began = time.perf_counter()
    fetch(links.slices, offers, layers, generation=1, stop=threading.Event())
    return time.perf_counter() - began


def _ping(links: LinkTransport, other: int, seconds: float, first: int) -> list[float]:
    """Sends messages that come back, for a while; returns how long each took there and back."""
    import torch

    value, times = torch.zeros(_MESSAGE.shape, dtype=torch.uint8), list[float]()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        there, back = (_key(other, payload, first + len(times)) for payload in (Payload.ACTIVATION, Payload.GRADIENT))
        began = time.perf_counter()
        links.send(there, WorkerId(other, 0), value)
        links.receive(back, WorkerId(other, 0), _MESSAGE).wait()
        times.append(time.perf_counter() - began)
        time.sleep(_PAUSE_S)
    return times


def _send_back(links: LinkTransport, number: int) -> None:
    with contextlib.suppress(PeerLost):  # the other one has ended
        for step in itertools.count():
            there, back = (_key(number, payload, step) for payload in (Payload.ACTIVATION, Payload.GRADIENT))
            links.send(back, WorkerId(0, 0), links.receive(there, WorkerId(0, 0), _MESSAGE).wait())


def _key(other: int, payload: Payload, step: int) -> MessageKey:
    return MessageKey(1, step, payload, other, 1)


def _socket_rate(size: int) -> float:
    """What one process reads from another, MiB/s, with large writes and nothing else to do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = (listener.getsockname(), size)
        process = multiprocessing.get_context("spawn").Process(target=_write_all, args=arguments, daemon=True)
        process.start()
        connection, _ = listener.accept()
        room, came, began = bytearray(_WRITE), 0, time.perf_counter()
        with connection:
            while read := connection.recv_into(room):
                came += read
        took = time.perf_counter() - began
        process.join()
    return came / took / _MIB


def _write_all(address: tuple[str, int], size: int) -> None:
    data = bytes(_WRITE)
    with socket.create_connection(address) as connection:
        for _ in range(size // _WRITE):
            connection.sendall(data)


def _summary(holders: int, to: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = [row for row in rows if (row["holders"], row["to"]) == (holders, to)]
    return {"holders": holders, "to": to, **{name: interval([row[name] for row in found]) for name in METRICS}}


if __name__ == "__main__":
    raise SystemExit(main())
