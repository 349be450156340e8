"""What logging costs the worker that sends: by a thread, by a thread in bubbles, before sending, and not at all.

One process is a middle stage of a pipeline: real transformer blocks run forward and backward for each micro-batch, and
what crosses both its boundaries is logged, on the disk of ``--folder``. Then it waits, as a stage of 1F1B does. The
sides take turns, in an order drawn anew for every round. Processor time is that of the whole process, until all is
written; the busy time of a step is what the thread that trains takes without its wait.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from holdfast.models.transformer import Block
from holdfast.runtime.background_log import BackgroundLog, LogCondition, When
from holdfast.storage.tensorlog.records import Key, LogOf, What
from holdfast.storage.tensorlog.writer import LogWriter
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, verdict

SIDES: dict[str, When | None] = {
    "none": None,
    "thread": When.AT_ONCE,
    "bubbles": When.IDLE,
    "before sending": When.BEFORE_SENDING,
}
TARGET = 1.01
LIMIT_S = 60.0
TABLE_3 = {  # SWIFT, table 3: samples x tokens x hidden, groups, GB
    "ViT-128/32": ((4096, 49, 1024), {16: 24.66, 8: 11.51}),
    "BERT-128": ((512, 128, 1024), {16: 8.05, 8: 3.76}),
}


def main() -> int:
    """Runs the benchmark; returns 1 if a step was left out of a log."""
    options = _options()
    torch.set_num_threads(1)
    recorder = Recorder("tensor_logging", {**vars(options), "folder": str(options.folder)})
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-", dir=options.folder) as folder:
        stages = {side: _Stage(options, partial(_log_of, side, Path(folder), options)) for side in SIDES}
        for stage in stages.values():
            stage.step()
        for repetition in range(options.repetitions):
            recorder.begin()
            measured = {side: stages[side].round() for side in order.sample(tuple(SIDES), k=len(SIDES))}
            for side in SIDES:
                recorder.add(side=side, repetition=repetition, **measured[side])
            progress(f"round {repetition + 1}/{options.repetitions}: {_brief(measured)}")
        sizes = {side: _size_on_disk(Path(folder) / side.replace(" ", "-")) for side in SIDES}
        summary = summarise(recorder.rows, stages, sizes)
        for stage in stages.values():
            stage.close()
    _show(summary)
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="of the pipeline: how long a step waits")
    parser.add_argument("--microbatches", type=int, default=6, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--width", type=int, default=256, help="of the residual stream")
    parser.add_argument("--blocks", type=int, default=8, help="of the stage")
    parser.add_argument("--steps", type=int, default=2, help="of each side in a round")
    parser.add_argument("--repetitions", type=int, default=10, help="rounds")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where logs go")
    parser.add_argument("--quick", action="store_true", help="3 rounds of a smaller stage")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.width, options.blocks = 3, 64, 2
    return options


def _log_of(side: str, folder: Path, options: argparse.Namespace) -> BackgroundLog | None:
    when = SIDES[side]
    if when is None:
        return None
    log = LogOf(job="logging", job_id=side.replace(" ", "-"), worker="0.1")
    most_bytes = 4 * options.microbatches * options.samples * options.tokens * options.width * 4
    return BackgroundLog(LogWriter(folder / log.job_id, log), most_bytes=most_bytes, when=when)


class _Stage:
    """A stage that trains, and logs what it sends; the numbers of all sides' weights and data are the same."""

    def __init__(self, options: argparse.Namespace, begin_log: Callable[[], BackgroundLog | None]) -> None:
        before = set(threading.enumerate())
        self._options, self.log, self._steps = options, begin_log(), 0
        self._threads = {thread.native_id for thread in set(threading.enumerate()) - before}
        torch.manual_seed(0)
        self._blocks = torch.nn.Sequential(*(Block(options.width, 4, 0.0, causal=True) for _ in range(options.blocks)))
        self._optimizer = torch.optim.AdamW(self._blocks.parameters())
        self._shape = (options.samples, options.tokens, options.width)

    def round(self) -> dict[str, Any]:
        """Seconds per step of some steps: of the thread that trains, of all that goes on, and of the processor."""
        count, began, used = self._options.steps, time.perf_counter(), time.process_time()
        busy = [self.step() for _ in range(count)]
        wall = time.perf_counter() - began
        self._await_written()
        cpu = time.process_time() - used
        return {"busy_s": statistics.mean(busy), "wall_s": wall / count, "cpu_s": cpu / count}

    def _await_written(self) -> None:
        """Without finishing the chunk, which happens once in 64 MiB."""
        if self.log is not None:
            with self.log.idle():
                while self.log.report().queued_bytes:
                    time.sleep(0.001)

    def step(self) -> float:
        """One step; returns for how long it was busy, in seconds."""
        began = time.perf_counter()
        for microbatch in range(self._options.microbatches):
            torch.manual_seed(microbatch)
            x = torch.randn(self._shape, requires_grad=True)
            output = self._blocks(x)
            self._hand_over(What.ACTIVATION, 2, microbatch, output)
            output.backward(torch.ones_like(output))
            assert x.grad is not None
            self._hand_over(What.GRADIENT, 1, microbatch, x.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.log is not None:
            self.log.end_step(self._steps)
        self._steps += 1
        busy = time.perf_counter() - began
        others = self._options.stages - 1
        share = others / (self._options.microbatches + others)  # that a worker waits in: SWIFT, section 2.1
        with contextlib.nullcontext() if self.log is None else self.log.idle():
            time.sleep(busy * share / (1 - share))
        return busy

    def _hand_over(self, what: What, place: int, microbatch: int, tensor: torch.Tensor) -> None:
        if self.log is not None:
            self.log.hand_over(Key(step=self._steps, what=what, place=place, microbatch=microbatch), tensor)

    @property
    def thread_s(self) -> float:
        """Processor time of the threads that write, so far, in 10 ms."""
        found = [each for each in psutil.Process().threads() if each.id in self._threads]
        return float(sum(each.user_time + each.system_time for each in found))

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return self._steps

    @property
    def sent_bytes(self) -> int:
        """What crosses the boundaries in a step."""
        samples, tokens, width = self._shape
        return int(2 * self._options.microbatches * samples * tokens * width * 4)

    def close(self) -> None:
        """Ends the thread."""
        if self.log is not None:
            self.log.close(LIMIT_S)


def _size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.log"))


def summarise(rows: list[dict[str, Any]], stages: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Returns medians and ratios with intervals, sizes, and whatever went wrong."""
    by_side: dict[str, list[dict[str, Any]]] = {side: [row for row in rows if row["side"] == side] for side in SIDES}
    logs = {side: stage.log.report() for side, stage in stages.items() if stage.log is not None}
    return {
        "problems": [
            f"{side}: {report}"
            for side, report in logs.items()
            if report.left_out_steps or report.condition is not LogCondition.LOGGING
        ],
        "seconds": {
            side: {name: interval([row[name] for row in found]) for name in ("busy_s", "wall_s", "cpu_s")}
            for side, found in by_side.items()
        },
        "ratios": {
            side: {name: _against_none(by_side, side, name) for name in ("busy_s", "wall_s", "cpu_s")}
            for side in SIDES
            if side != "none"
        },
        "logged": {
            side: {
                "sent_bytes_per_step": stages[side].sent_bytes,
                "disk_bytes_per_step": sizes[side] / stages[side].steps,
                "bytes_per_s": report.bytes_per_s,
                "thread_s_per_step": stages[side].thread_s / stages[side].steps,
            }
            for side, report in logs.items()
        },
        "table_3_gb": {
            f"{model}, {groups} groups": {"computed": _crossing_gb(size, groups), "printed": printed}
            for model, (size, rows_) in TABLE_3.items()
            for groups, printed in rows_.items()
        },
    }


def _against_none(by_side: dict[str, list[dict[str, Any]]], side: str, name: str) -> Interval:
    pairs = zip(by_side[side], by_side["none"], strict=True)
    return ratio_interval([(one[name], other[name]) for one, other in pairs])


def _crossing_gb(size: tuple[int, int, int], groups: int) -> float:
    samples, tokens, hidden = size
    return 2 * 4 * samples * tokens * hidden * (groups - 1) / 1e9


def _brief(measured: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{side} {1000 * row['busy_s']:.0f} ms" for side, row in measured.items())


def _show(summary: dict[str, Any]) -> None:
    show: Callable[[Interval], str] = lambda found: found.show(1000, 1)  # noqa: E731 - the table reads better so
    rows = [[side, *map(show, found.values())] for side, found in summary["seconds"].items()]
    print_table("ms per step: median [95 % interval]", ["logged", "busy", "with its wait", "processor"], rows)
    ratios = [
        [side, *(found.show(1, 4) for found in each.values()), verdict(each["cpu_s"], TARGET)]
        for side, each in summary["ratios"].items()
    ]
    header = ["logged", "busy", "with its wait", "processor", f"processor <= {TARGET}"]
    print_table("Ratios to the same without a log", header, ratios)
    sizes = [
        [
            side,
            f"{each['sent_bytes_per_step']}",
            f"{each['disk_bytes_per_step']:.0f}",
            f"{each['bytes_per_s'] / 1e6:.0f}",
            f"{1000 * each['thread_s_per_step']:.1f}" if SIDES[side] is not When.BEFORE_SENDING else "-",
        ]
        for side, each in summary["logged"].items()
    ]
    header = ["logged", "bytes sent in a step", "on the disk", "MB/s while writing", "thread's processor ms per step"]
    print_table("What is written", header, sizes)
    table = [
        [name, f"{each['computed']:.2f}", f"{each['printed']:.2f}"] for name, each in summary["table_3_gb"].items()
    ]
    print_table("SWIFT, table 3: GB per step", ["model", "computed", "printed"], table)
    for problem in summary["problems"]:
        print(f"PROBLEM {problem}")


if __name__ == "__main__":
    raise SystemExit(main())
