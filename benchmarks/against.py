"""This commit next to another one: a healthy step, and a recovery, run by turns.

Each side runs its own benchmarks from its own working tree, one repetition at a time, so that the noise of the machine
hits both. Tells nothing that ``healthy_step.py`` and ``recovery.py`` would not tell, but for the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, Recorder, print_table, progress, ratio_interval

_BENCHMARKS = {"recovery": ("recovery", "grid"), "healthy_step": ("healthy_step_2x2", "side")}
_MEASURES = {
    "recovery": ("detected_s", "agreed_s", "rebuilt_s", "overhead_s", "healthy_excess_s", "rerouted_excess_s"),
    "healthy_step": ("step_s", "cpu_s"),
}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--repetitions", type=int, default=8, help="runs of each side")
    options = parser.parse_args()
    recorder, order = Recorder("against", vars(options)), random.Random(0)
    with tempfile.TemporaryDirectory(prefix="holdfast-against-") as folder:
        trees = {"before": Path(folder) / "before", "now": Path(folder) / "now"}
        for tree, commit in ((trees["before"], options.commit), (trees["now"], "HEAD")):
            subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, tree], check=True)
            subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=tree, check=True)
        for repetition in range(options.repetitions):
            for benchmark in _BENCHMARKS:
                for side in order.sample(list(trees), k=2):
                    recorder.begin()
                    for row in _run(trees[side], benchmark):
                        recorder.add(compared=side, benchmark=benchmark, **row)
            progress(f"run {repetition + 1}/{options.repetitions}")
    summary = _summary(recorder.rows)
    header = ["benchmark", "case", "measure", "before ms", "now ms", "ratio [95 %]"]
    print_table(f"Against {options.commit}", header, [_line(row) for row in summary])
    recorder.write(summary)
    return 0


def _run(tree: Path, benchmark: str) -> list[dict[str, Any]]:
    """One repetition of a benchmark in one working tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, f"benchmarks/{benchmark}.py", "--repetitions", "1"]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    name, _ = _BENCHMARKS[benchmark]
    rows = json.loads((tree / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    kept = {*_MEASURES[benchmark], _BENCHMARKS[benchmark][1], "error"}
    return [{name: value for name, value in row.items() if name in kept} for row in rows]


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for benchmark, (_, case) in _BENCHMARKS.items():
        mine = [row for row in rows if row["benchmark"] == benchmark]
        for name in dict.fromkeys(row[case] for row in mine):
            sides = [
                [row for row in mine if row[case] == name and row["compared"] == side] for side in ("now", "before")
            ]
            both = [(now, before) for now, before in zip(*sides, strict=True) if not (now["error"] or before["error"])]
            for measure in _MEASURES[benchmark]:
                pairs = [(now[measure], before[measure]) for now, before in both]
                found.append({"benchmark": benchmark, "case": name, "measure": measure, **_compared(pairs)})
    return found


def _compared(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    now, before = (sorted(side)[len(side) // 2] for side in zip(*pairs, strict=True))
    return {"now": now, "before": before, "ratio": ratio_interval(pairs).to_json(), "runs": len(pairs)}


def _line(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    times = [f"{1000 * row[side]:.1f}" for side in ("before", "now")]
    interval = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return [row["benchmark"], row["case"], row["measure"].removesuffix("_s"), *times, interval]


if __name__ == "__main__":
    raise SystemExit(main())
