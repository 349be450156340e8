"""What a step costs whose data are loaded ahead, next to one whose data are in memory, and to loading in place.

Items are emulated by a sleep, and so is the time that a sample takes to load: two loader processes per worker make a
batch faster than an item takes. Half-way a worker is killed, so that the others load what nobody has guessed. One side
has its data in memory, and compares its workers' bits in every step. The sides take turns within one invocation.

Besides, how soon the death of a worker is seen that had loader processes, and how long a script's own DataLoader takes
for a pass between two steps, in a process of plain Python and in all workers at once.
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

import yaml

import peers
from holdfast.telemetry.events import Detected, FaultInjected, read_events
from measure import Interval, Recorder, interval, print_table, progress, ratio_interval, verdict
from processes import PeerFailed, Processes

WORKER = Path(__file__).with_name("loading_worker.py")
SIDES = ("memory", "ahead", "in place", "compared")
TARGET, SEEN_TARGET_S, COMPARING_TARGET = 1.02, 0.05, 0.005
PASSES = ("plain Python", "in each worker")
_WARM = 5


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the median step before the kill, and seconds from the first steps to the last one; or ``error``."""
    kill = options.steps // 2
    command = [sys.executable, "-m", "holdfast", "run", "--quiet", f"--workers={options.workers}"]
    command += ["--set=train.compare_every=1"] if side == "compared" else []
    command += [f"--run-dir={folder / 'run'}", f"--fault=kill:1.0@{kill}:backward", str(WORKER)]
    command += [f"--microbatches={options.workers * options.items}", f"--size={options.size}"]
    command += [f"--steps={options.steps}", f"--item-s={options.item_ms / 1e3}", f"--times={folder / 'times'}"]
    command += [f"--sample-s={options.sample_ms / 1e3 if side in ('ahead', 'in place') else 0}"]
    command += [f"--loaders={options.loaders if side == 'ahead' else 0}"]
    rows = _times(command, options, folder)
    if [len(row) for row in rows] != [options.steps] * (options.workers - 1):
        return {"error": f"steps of each survivor: {[len(row) for row in rows]}, expected {options.steps}"}
    walls = [after - before for row in rows for before, after in pairwise(row[_WARM : kill - 1])]
    events = list(read_events(folder / "run" / "events.jsonl"))
    died, seen = (next(time for time, each in events if isinstance(each, kind)) for kind in (FaultInjected, Detected))
    return {
        "step_s": statistics.median(walls),
        "run_s": statistics.median(row[-1] - row[_WARM] for row in rows),
        "seen_s": seen - died,
        "compares_every": yaml.safe_load((folder / "run" / "job.yaml").read_text())["train"]["compare_every"],
    }


def run_passes(where: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the median time of a pass over a DataLoader of the script's own, in seconds."""
    script = [str(WORKER), f"--passes={options.passes}", f"--times={folder / 'times'}"]
    command = [sys.executable, *script, "--plain"]
    if where != PASSES[0]:
        command = [sys.executable, "-m", "holdfast", "run", "--quiet", f"--workers={options.workers}"]
        command += [f"--run-dir={folder / 'run'}", *script]
    return {"pass_s": statistics.median(each for row in _times(command, options, folder) for each in row)}


def _times(command: list[str], options: argparse.Namespace, folder: Path) -> list[list[float]]:
    """Runs a command to its end; returns what each process of the script has handed over."""
    with Processes(options.limit_s, peers.environment()) as processes:
        processes.wait([processes.start(command)], may_die=0)
    return [json.loads(path.read_text()) for path in folder.glob("times-*.json")]


def main() -> int:
    """Measures, prints a table and writes the rows; returns 1 if any run failed."""
    options = _options()
    recorder = Recorder("loading", vars(options))
    kinds = [*(("side", side, run_side) for side in SIDES), *(("where", where, run_passes) for where in PASSES)]
    for repetition in range(options.repetitions):
        for key, name, run in kinds:
            recorder.begin()
            with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
                try:
                    found = run(name, options, Path(folder))
                except PeerFailed as problem:
                    found = {"error": str(problem)}
            row = recorder.add(**{key: name}, repetition=repetition, **found)
            progress(f"{repetition + 1}/{options.repetitions} {name}: {row.get('error') or found}")
    good = [row for row in recorder.rows if "error" not in row]
    passes = {where: interval([row["pass_s"] for row in good if row.get("where") == where]) for where in PASSES}
    summary = {side: _summary(side, [row for row in good if "side" in row]) for side in SIDES}
    recorder.write({"sides": summary, "passes": passes})
    header = (
        "side",
        "step, ms",
        "/ memory",
        "",
        "with a kill, s",
        "/ memory",
        "death seen, ms",
        f"<= {SEEN_TARGET_S:g} s",
    )
    print_table("Loading", header, [_line(side, values) for side, values in summary.items()])
    print_table("A DataLoader of the script's own", ("", "a pass, ms"), [[k, v.show(1e3)] for k, v in passes.items()])
    failed = [f"{row.get('side') or row['where']}: {row['error']}" for row in recorder.rows if "error" in row]
    for error in failed:
        print(f"PROBLEM {error}")
    return int(bool(failed))


def _summary(side: str, rows: list[dict[str, Any]]) -> dict[str, Interval]:
    good = {(row["side"], row["repetition"]): row for row in rows}
    mine = [(row, good.get(("memory", at))) for (of, at), row in good.items() if of == side]
    found = {"seen_s": interval([row["seen_s"] for row, _ in mine])}
    if side == "compared":  # in every step; here as often as it is done where nobody says how often
        pairs = [(row["step_s"] - other["step_s"], other) for row, other in mine if other is not None]
        found["part"] = interval([more / (other["step_s"] * other["compares_every"]) for more, other in pairs])
    for key in ("step_s", "run_s"):
        found[key] = interval([row[key] for row, _ in mine])
        found[f"{key}_ratio"] = ratio_interval([(row[key], other[key]) for row, other in mine if other is not None])
    return found


def _line(side: str, values: dict[str, Interval]) -> list[str]:
    ratio = values["step_s_ratio"]
    said = verdict(ratio, TARGET) if side == "ahead" else ""
    if (part := values.get("part")) is not None:
        said = f"{part.show(100, 2)} % as often as it is done: {verdict(part, COMPARING_TARGET)}"
    return [
        side,
        values["step_s"].show(1e3),
        ratio.show(1, 3),
        said,
        values["run_s"].show(1, 2),
        values["run_s_ratio"].show(1, 3),
        values["seen_s"].show(1e3),
        verdict(values["seen_s"], SEEN_TARGET_S),
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
    parser.add_argument("--passes", type=int, default=5, help="over a DataLoader of the script's own, in a run")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
