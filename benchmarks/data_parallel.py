"""What a healthy data-parallel step costs: a script's own loop, next to DistributedDataParallel and torchft.

The same model, items and optimizer; the sides take turns within one invocation. ``--emulate`` replaces each item by a
sleep, so that what is measured is all that is not compute; without it the processor is the limit, and its time counts.
``--blocks`` computes a GPT, whose sums weigh more: 8 have 25 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import peers
from measure import Recorder, interval, print_table, progress, ratio_interval
from processes import PeerFailed, Processes

WORKER = Path(__file__).with_name("data_parallel_worker.py")
SIDES = ("ddp", "fast", "exact")
TARGETS: dict[str, dict[str, float | None]] = {
    "emulated": {"fast": 1.02, "exact": 1.05},
    "computed": {"fast": 1.00, "exact": None},
}
_WARM = 10
_USUAL_ITEM_S = 0.02


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns medians over the steps behind the first ones: seconds per step, and processor seconds of all workers."""
    common = [f"--workers={options.workers}", f"--steps={options.steps}", f"--microbatches={options.microbatches}"]
    common += [f"--{name}={getattr(options, name)}" for name in ("emulate", "side", "width", "blocks")]
    common += [f"--times={folder / 'times'}"]
    try:
        with Processes(options.limit_s, peers.environment()) as processes:
            if side == "ddp":
                _run_ddp(processes, options.workers, [*common, f"--store={folder / 'store'}"])
            elif side == "torchft":
                _run_torchft(processes, options.workers, common)
            else:
                _run_holdfast(processes, side, folder / "run", options.workers, common)
    except PeerFailed as error:
        return {"error": f"{side}: {error}"}
    return _read(folder, options)


def _run_holdfast(processes: Processes, numerics: str, run_dir: Path, workers: int, common: list[str]) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--quiet", f"--workers={workers}", f"--run-dir={run_dir}"]
    command += ["--set", f"train.numerics={numerics}", str(WORKER), "holdfast", *common]
    processes.wait([processes.start(command)], may_die=0)


def _run_ddp(processes: Processes, workers: int, common: list[str]) -> None:
    command = [sys.executable, str(WORKER), "ddp", *common]
    processes.wait([processes.start([*command, f"--rank={rank}"]) for rank in range(workers)], may_die=0)


def _run_torchft(processes: Processes, workers: int, common: list[str]) -> None:
    python = str(peers.PYTHON)
    lighthouse = processes.start([python, str(peers.WORKER), "lighthouse"], talks=True)
    store = f"--store=http://127.0.0.1:{processes.line(lighthouse)}"
    command = [python, str(WORKER), "torchft", *common, store]
    ranks = [processes.start([*command, f"--rank={rank}"], talks=True) for rank in range(workers)]
    processes.lines(ranks, "ready")  # their heartbeats have begun
    processes.release(ranks)
    processes.lines(ranks, "done")
    processes.release(ranks)
    processes.wait(ranks, may_die=0)


def _read(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    runs = [json.loads(path.read_text())["rows"] for path in folder.glob("times-*.json")]
    if [len(rows) for rows in runs] != [options.steps] * options.workers:
        return {"error": f"steps of each worker: {[len(rows) for rows in runs]}, expected {options.steps}"}
    walls = [
        after[0] - before[0] for rows in runs for before, after in zip(rows[_WARM:], rows[_WARM + 1 :], strict=False)
    ]
    cpu = sum((rows[-1][1] - rows[_WARM][1]) / (len(rows) - 1 - _WARM) for rows in runs)
    return {"step_s": statistics.median(walls), "cpu_s": cpu}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=6, help="of each worker in a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--emulate", type=float, default=_USUAL_ITEM_S, help="seconds of an item; 0 computes")
    parser.add_argument("--side", type=int, default=64, help="of the eight matrices of the model that is emulated")
    parser.add_argument("--width", type=int, default=32, help="of the model that is computed")
    parser.add_argument("--blocks", type=int, default=0, help="of a GPT that is computed instead, of width 512")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--torchft", action="store_true", help="with torchft, installed into an environment of its own")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.steps = 1, 15
    if options.blocks:
        options.emulate = 0.0
    return options


def main() -> int:
    """Measures, prints a table and writes the rows."""
    options = parse()
    sides = list(SIDES)
    if options.torchft:
        problem = peers.install()
        if problem is None:
            sides.append("torchft")
        else:
            progress(f"torchft: {problem}")
    kind = "emulated" if options.emulate else "computed"
    size = f"_gpt{options.blocks}" if options.blocks else str(options.side if options.emulate else options.width)
    if options.emulate and options.emulate != _USUAL_ITEM_S:
        size += f"_{round(options.emulate * 1e3)}ms"
    recorder = Recorder(f"data_parallel_{kind}{size}", vars(options))
    for repetition in range(options.repetitions):
        for side in sides:
            recorder.begin()
            with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
                found = run_side(side, options, Path(folder))
            row = recorder.add(side=side, repetition=repetition, **found)
            progress(f"{repetition + 1}/{options.repetitions} {side}: {row.get('error') or found}")
    summary, table = {}, []
    for side in sides:
        rows = [row for row in recorder.rows if row["side"] == side and "error" not in row]
        values: dict[str, Any] = {key: interval([row[key] for row in rows]) for key in ("step_s", "cpu_s")}
        for key in ("step_s", "cpu_s"):
            pairs = [
                (row[key], other[key])
                for row in rows
                for other in recorder.rows
                if other["side"] == "ddp" and other["repetition"] == row["repetition"] and "error" not in other
            ]
            values[f"{key}_ratio"] = ratio_interval(pairs)
        summary[side] = values
        target = TARGETS[kind].get(side)
        table.append(
            [
                side,
                values["step_s"].show(1e3),
                values["step_s_ratio"].show(1, 3),
                values["cpu_s"].show(1e3),
                values["cpu_s_ratio"].show(1, 3),
                "" if target is None else f"<= {target}",
            ]
        )
    print_table(
        f"data-parallel step, {kind}", ["side", "step, ms", "by DDP's", "processor, ms", "by DDP's", "target"], table
    )
    recorder.write(summary)
    return int(any("error" in row for row in recorder.rows))


if __name__ == "__main__":
    sys.exit(main())
