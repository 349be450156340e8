"""What a step costs whose data are loaded ahead, next to one whose data are in memory, and to loading in place.

Items are emulated by a sleep, and so is the time that a sample takes to load: two loader processes per worker make a
batch faster than an item takes. Half-way a worker is killed, so that the others load what nobody has guessed. The sides
take turns within one invocation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, verdict
from processes import PeerFailed, Processes

WORKER = Path(__file__).with_name("loading_worker.py")
SIDES = ("memory", "ahead", "in place")
TARGET = 1.02
_WARM = 5


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the median step before the kill, and seconds from the first steps to the last one; or ``error``."""
    kill = options.steps // 2
    command = [sys.executable, "-m", "holdfast", "run", "--quiet", f"--workers={options.workers}"]
    command += [f"--run-dir={folder / 'run'}", f"--fault=kill:1.0@{kill}:backward", str(WORKER)]
    command += [f"--microbatches={options.workers * options.items}", f"--size={options.size}"]
    command += [f"--steps={options.steps}", f"--item-s={options.item_ms / 1e3}", f"--times={folder / 'times'}"]
    command += [f"--sample-s={0 if side == 'memory' else options.sample_ms / 1e3}"]
    command += [f"--loaders={options.loaders if side == 'ahead' else 0}"]
    try:
        with Processes(options.limit_s, peers.environment()) as processes:
            processes.wait([processes.start(command)], may_die=0)
    except PeerFailed as error:
        return {"error": f"{side}: {error}"}
    rows = [json.loads(path.read_text()) for path in folder.glob("times-*.json")]
    if [len(row) for row in rows] != [options.steps] * (options.workers - 1):
        return {"error": f"{side}: steps of each survivor: {[len(row) for row in rows]}, expected {options.steps}"}
    walls = [after - before for row in rows for before, after in pairwise(row[_WARM : kill - 1])]
    return {"step_s": statistics.median(walls), "run_s": statistics.median(row[-1] - row[_WARM] for row in rows)}


def main() -> int:
    """Measures, prints a table and writes the rows; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("loading", vars(options))
    for repetition in range(options.repetitions):
        for side in SIDES:
            recorder.begin()
            with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
                found = run_side(side, options, Path(folder))
            row = recorder.add(side=side, repetition=repetition, **found)
            progress(f"{repetition + 1}/{options.repetitions} {side}: {row.get('error') or found}")
    summary = {side: _summary(side, recorder.rows) for side in SIDES}
    recorder.write(summary)
    header = ("side", "step, ms", "/ memory", f"<= {TARGET}", "with a kill, s", "/ memory")
    print_table("Loading", header, [_line(side, values) for side, values in summary.items()])
    failed = [row["error"] for row in recorder.rows if "error" in row]
    for error in failed:
        print(f"PROBLEM {error}")
    return int(bool(failed))


def _summary(side: str, rows: list[dict[str, Any]]) -> dict[str, Interval]:
    good = {(row["side"], row["repetition"]): row for row in rows if "error" not in row}
    mine = [(row, good.get(("memory", at))) for (of, at), row in good.items() if of == side]
    found = {}
    for key in ("step_s", "run_s"):
        found[key] = interval([row[key] for row, _ in mine])
        found[f"{key}_ratio"] = ratio_interval([(row[key], other[key]) for row, other in mine if other is not None])
    return found


def _line(side: str, values: dict[str, Interval]) -> list[str]:
    ratio = values["step_s_ratio"]
    said = verdict(ratio, TARGET) if side == "ahead" else ""
    return [
        side,
        values["step_s"].show(1e3),
        ratio.show(1, 3),
        said,
        values["run_s"].show(1, 2),
        values["run_s_ratio"].show(1, 3),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--items", type=int, default=6, help="of each worker in a step")
    parser.add_argument("--item-ms", type=float, default=20.0, help="length of an item")
    parser.add_argument("--size", type=int, default=8, help="samples of an item")
    parser.add_argument("--sample-ms", type=float, default=2.0, help="how long a sample takes to load")
    parser.add_argument("--loaders", type=int, default=2, help="loader processes of each worker")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
