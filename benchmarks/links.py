"""Messages and sums between processes: links, in the clear and sealed, next to torch's own process group (Gloo), by
turns: latency and processor time.

One worker sends a message to another, which sends it back: half of that is the latency of a message. Then 2 to 8
workers sum float32 numbers, one part each, one sum after another. Processor time is that of all together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from holdfast.control.messages import Hello
from holdfast.control.peer_directory import PeerDirectory
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.core.nodes import NodeId, Process
from holdfast.core.summing import Contribution, Total, plain
from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.port import MessageKey, SumKey
from measure import Recorder, print_table, progress, ratio_interval

CARRIERS = ("links", "sealed", "gloo")
_AGAINST = {"links": ("gloo", 0.6), "sealed": ("links", 1.4)}
"""What the time of a carrier is divided by, and what the geometric mean is to be at most."""
_SIZES = tuple(1024 << shift for shift in range(0, 13, 2))
_OWNERS = (2, 3, 4, 6, 8)
TARGET_CELL = 1.15
"""Of links next to Gloo; the targets of all cells together are in `_AGAINST`."""


def main() -> int:
    """Runs the benchmark."""
    options = _options()
    recorder = Recorder("links", vars(options))
    with tempfile.TemporaryDirectory(prefix="holdfast-links-") as folder:
        for repetition in range(options.repetitions):
            for owners in options.owners:
                for carrier in CARRIERS[:: 1 if repetition % 2 else -1]:
                    recorder.begin()
                    meeting = f"{folder}/{carrier}-{owners}-{repetition}"
                    for row in _measure(carrier, owners, meeting, options):
                        recorder.add(carrier=carrier, owners=owners, repetition=repetition, **row)
                progress(f"run {repetition + 1}/{options.repetitions}, {owners} workers")
    summary = _summary(recorder.rows)
    _show(summary)
    recorder.write(summary)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each carrier")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each size is measured in a run")
    parser.add_argument("--owners", type=int, nargs="+", default=list(_OWNERS), help="workers that sum")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="bytes")
    return parser.parse_args()


def _measure(carrier: str, owners: int, meeting: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the workers, lets them measure, and returns what they found for every size."""
    workers = tuple(WorkerId(number, 0) for number in range(owners))
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, []
    for worker in workers:
        pipes[worker], theirs = context.Pipe()
        arguments = (carrier, worker, workers, meeting, options.sizes, options.seconds, theirs)
        processes.append(context.Process(target=_work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
    found: queue.SimpleQueue[tuple[WorkerId, Any]] = queue.SimpleQueue()
    directory, telling = PeerDirectory("secret"), threading.Lock()
    for worker in pipes:
        threading.Thread(target=_relay, args=(worker, pipes, directory, telling, found), daemon=True).start()
    rows = [found.get(timeout=300) for _ in workers]
    for process in processes:
        process.join()
    first = dict(rows)[workers[0]]
    return [
        {
            "what": what,
            "bytes": size,
            "wall_s": wall,
            "cpu_s": sum(row[what, size][1] for _, row in rows if (what, size) in row),
        }
        for (what, size), (wall, _) in first.items()
    ]


def _relay(
    worker: WorkerId,
    pipes: dict[WorkerId, Connection],
    directory: PeerDirectory,
    telling: threading.Lock,
    found: queue.SimpleQueue[tuple[WorkerId, Any]],
) -> None:
    """Passes addresses on, as the coordinator does."""
    node = NodeId(name="here", nonce=16 * "0")
    processes = {each: Process(node, 0, f"{number:016x}") for number, each in enumerate(sorted(pipes))}
    while True:
        kind, *given = pipes[worker].recv()
        if kind == "here":
            with telling:
                directory.heard(Hello(worker=worker, process=processes[worker], here=given[0]))
                for target, its in pipes.items():
                    if (news := directory.news_for(target, processes)) is not None:
                        its.send(news.peers)
        else:
            found.put((worker, given[0]))
            return


def _work(
    carrier: str,
    worker: WorkerId,
    workers: tuple[WorkerId, ...],
    meeting: str,
    sizes: list[int],
    seconds: float,
    pipe: Connection,
) -> None:
    """One worker."""
    import torch

    torch.set_num_threads(1)

    def listen() -> None:
        while True:
            transport.meet(pipe.recv())

    transport: Any
    if carrier == "gloo":
        transport = _ProcessGroup(worker, len(workers), meeting)
    else:
        transport = LinkTransport(worker, sealed=carrier == "sealed")
        pipe.send(("here", transport.here))
        threading.Thread(target=listen, daemon=True).start()
    pairs = {(a, b) for a in workers for b in workers if a < b}
    transport.build(1, tuple(sorted(pairs | {workers})))
    found = {}
    for size in sizes:
        if len(workers) == 2:
            found["message", size] = _messages(transport, worker, workers, size, seconds)
        found["sum", size] = _sums(transport, workers, size, seconds)
    pipe.send(("found", found))
    transport.drain()
    time.sleep(0.2)  # so that nobody is cut off by our end


class _ProcessGroup:
    """torch's own process group, behind as much of the port as is measured."""

    def __init__(self, worker: WorkerId, size: int, meeting: str) -> None:
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=worker.pipeline, world_size=size)

    def build(self, generation: int, groups: tuple[tuple[WorkerId, ...], ...]) -> None:
        """It is built already."""

    def send(self, key: MessageKey, peer: WorkerId, tensor: Any) -> None:
        self._sent = self._dist.isend(tensor, peer.pipeline), tensor  # the next one goes when this one was answered

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Work:
        import torch

        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        return _Work(self._dist.irecv(tensor, peer.pipeline), tensor)

    def all_reduce(self, key: SumKey, contribution: Contribution) -> _Sum:
        (part,) = contribution.parts
        total = part.clone()
        return _Sum(self._dist.all_reduce(total, async_op=True), total)

    def drain(self) -> None:
        """What was sent last was answered."""


class _Work:
    """A receive or a sum of torch's, and where it goes to."""

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Any:
        self._work.wait()
        return self._tensor


class _Sum(_Work):
    """A sum of torch's, as links have it."""

    def wait(self) -> Any:
        return Total(super().wait(), ())


def _messages(
    transport: Any, worker: WorkerId, workers: tuple[WorkerId, ...], size: int, seconds: float
) -> tuple[float, float]:
    """Returns the seconds that a message takes, and the processor time."""
    import torch

    value, spec = torch.zeros(size, dtype=torch.uint8), TensorSpec(shape=(size,), dtype="uint8")
    other = workers[1] if worker == workers[0] else workers[0]
    times, began, step = [], time.process_time(), 1000
    deadline = time.perf_counter() + seconds
    more = True
    while more:
        start = time.perf_counter()
        there, back = (MessageKey(1, step, payload, 0, 1) for payload in (Payload.ACTIVATION, Payload.GRADIENT))
        if worker == workers[0]:
            value[0] = more = start < deadline
            transport.send(there, other, value)
            transport.receive(back, other, spec).wait()
            times.append((time.perf_counter() - start) / 2)
        else:
            came = transport.receive(there, other, spec).wait()
            transport.send(back, other, came)
            times.append(0.0)
            more = bool(came[0])
        step += 1
    return statistics.median(times), (time.process_time() - began) / len(times) / 2


def _sums(transport: Any, workers: tuple[WorkerId, ...], size: int, seconds: float) -> tuple[float, float]:
    """Returns the seconds that a sum takes, and the processor time; the first number says whether to go on."""
    import torch

    reduction, times, began, step = Reduction((0,), workers), [], time.process_time(), 1000
    deadline = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        value = torch.zeros(size // 4)
        value[0] = int(start < deadline)
        total = transport.all_reduce(SumKey(1, size << 24 | step, reduction), plain(value)).wait().total
        times.append(time.perf_counter() - start)
        step += 1
        if int(total[0]) < len(workers):
            return statistics.median(times), (time.process_time() - began) / len(times)


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cells: dict[tuple[str, int, int], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        cell = cells.setdefault((row["what"], row["owners"], row["bytes"]), {carrier: [] for carrier in CARRIERS})
        cell[row["carrier"]].append(row)
    found = []
    for (what, owners, size), by in cells.items():
        entry: dict[str, Any] = {"what": what, "owners": owners, "bytes": size}
        for measure in ("wall_s", "cpu_s"):
            values = {carrier: [row[measure] for row in by[carrier]] for carrier in CARRIERS}
            for carrier, measured in values.items():
                entry[f"{carrier}_{measure}"] = statistics.median(measured)
            for carrier, (other, _) in _AGAINST.items():
                pairs = list(zip(values[carrier], values[other], strict=True))
                entry[f"{carrier}_ratio_{measure}"] = ratio_interval(pairs).to_json()
        found.append(entry)
    return found


def _show(summary: list[dict[str, Any]]) -> None:
    header = ["what", "workers", "KiB", "links ms", "sealed", "Gloo", "links / Gloo [95 %]", "sealed / links", "CPU"]
    table = []
    for row in summary:
        ratio = row["links_ratio_wall_s"]
        table.append(
            [
                row["what"],
                str(row["owners"]),
                str(row["bytes"] // 1024),
                *(f"{1000 * row[f'{carrier}_wall_s']:.3f}" for carrier in CARRIERS),
                f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                *(f"{row[f'sealed_ratio_{measure}']['median']:.2f}" for measure in ("wall_s", "cpu_s")),
            ]
        )
    print_table("Links, and sealed links, next to Gloo", header, table)
    for carrier, (other, target) in _AGAINST.items():
        for measure in ("wall_s", "cpu_s"):
            ratios = [row[f"{carrier}_ratio_{measure}"]["median"] for row in summary]
            mean, worst = statistics.geometric_mean(ratios), max(ratios)
            print(f"{carrier} / {other}, {measure}: geometric mean {mean:.2f} (target {target}), worst {worst:.2f}")
    worst = max(row["links_ratio_wall_s"]["median"] for row in summary)
    print(f"target of each cell of links / gloo: {TARGET_CELL}, {'missed' if worst > TARGET_CELL else 'met'}")


if __name__ == "__main__":
    raise SystemExit(main())
