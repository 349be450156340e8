"""What a board costs: how soon a big run is on the page, what an update takes, and whether training notices.

The big run is a log made for it, of as many workers as you like, which grows by a step each second while it is watched.
Training is a small GPT with and without a board that a browser watches, by turns. Needs Debian's chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from holdfast.config.load import parse_job
from holdfast.errors import HoldfastError
from holdfast.runtime.train import train
from holdfast.telemetry.events import EventLog, Installed, JobStarted, StepOps, WorkerReady
from measure import (
    Interval,
    Recorder,
    cpu_seconds,
    interval,
    print_table,
    progress,
    ratio_interval,
    time_limit,
    verdict,
)

SIDES = ("without", "watched")
TARGETS = {"paint_s": 1.0, "shown_s": 1.0, "server_share": 0.05, "page_share": 0.05}
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
STAGES = 8


def main() -> int:
    """Runs the benchmark; returns 1 if a run failed, or training did not end in the same bits."""
    options = _options()
    recorder, order = Recorder("board", vars(options)), random.Random(0)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=list(QUIET))
        for repetition in range(options.repetitions):
            recorder.begin()
            recorder.add(side="big", repetition=repetition, **watch_big(browser, options))
            progress(f"big run {repetition + 1}/{options.repetitions}")
        for repetition in range(options.trainings):
            for side in order.sample(SIDES, k=len(SIDES)):
                recorder.begin()
                recorder.add(side=side, repetition=repetition, **measure(browser, side, options))
            progress(f"training {repetition + 1}/{options.trainings}")
        browser.close()
    summary = summarise(recorder.rows)
    print_table("A board", ["measure", "value [95 %]", "target", "verdict"], summary["lines"])
    recorder.write(summary)
    return int(bool(summary["problems"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000, help=f"of the big run, a multiple of {STAGES}")
    parser.add_argument("--steps", type=int, default=98, help="of the big run, before it is looked at")
    parser.add_argument("--watched-s", type=int, default=60, help="for so long the big run is watched")
    parser.add_argument("--repetitions", type=int, default=3, help="of the big run")
    parser.add_argument("--trainings", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="1 big run, watched for 10 s, and 1 training of each side")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.watched_s, options.repetitions, options.trainings = 10, 1, 1
    return options


class BigRun:
    """The log of a run of many workers."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._names = tuple(f"{number // STAGES}.{number % STAGES}" for number in range(workers))
        self._log, self._step = EventLog(folder / "events.jsonl"), 0
        now = time.monotonic()
        started = JobStarted(name="big", workers=workers, steps=10_000, samples_per_step=workers, wall_time=time.time())
        self._log.write(now, started)
        for name in self._names:
            self._log.write(now, WorkerReady(worker=name, pid=1, node=f"n{name.partition('.')[0]}"))
        installed = Installed(generation=1, workers=self._names, strategy="", owners=workers // STAGES)
        self._log.write(now, installed)

    def step(self) -> None:
        """All workers do a step of eight micro-batches."""
        now = time.monotonic()
        for name in self._names:
            pipeline, _, stage = name.partition(".")
            ops = tuple((kind, int(pipeline), n, now + n / 8, now + n / 8 + 0.05) for n in range(8) for kind in "FB")
            last = stage == str(STAGES - 1)
            known = {"loss": 5 - self._step / 1000 if last else None, "omitted": False, "knows_loss": last}
            self._log.write(now, StepOps(worker=name, generation=1, step=self._step, ops=ops, **known))
        self._step += 1


@contextlib.contextmanager
def board(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Serves the board of a run; gives its address, and its process."""
    line = [sys.executable, "-m", "holdfast", "board", str(run_dir), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"at (http\S+)", process.stdout.readline())
            assert found is not None
            yield found[1], process.pid
        finally:
            process.kill()


def watch_big(browser: Browser, options: argparse.Namespace) -> dict[str, Any]:
    """Watches the big run; returns the row."""
    with tempfile.TemporaryDirectory(prefix="holdfast-board-") as folder, contextlib.ExitStack() as stack:
        run = BigRun(Path(folder), options.workers)
        for _ in range(options.steps):
            run.step()
        size = os.path.getsize(Path(folder) / "events.jsonl")
        began = time.monotonic()
        address, pid = stack.enter_context(board(Path(folder)))
        page = stack.enter_context(contextlib.closing(browser.new_page()))
        read_s = _see(page, address, options.workers) - began
        again = time.monotonic()
        shown_s = _see(page, address, options.workers) - again
        paints = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(paint => paint.startTime)")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before, painted = cpu_seconds([pid]), _busy_s(session)
        until = time.monotonic() + options.watched_s
        while (left := until - time.monotonic()) > 0:
            run.step()
            page.wait_for_timeout(1000 * min(1.0, left))
        return {
            "error": None,
            "log_bytes": size,
            "events": options.workers * (options.steps + 1) + 2,
            "read_s": read_s,
            "shown_s": shown_s,
            "paint_s": paints[0] / 1000,
            "server_share": (cpu_seconds([pid]) - before) / options.watched_s,
            "page_share": (_busy_s(session) - painted) / options.watched_s,
        }


def _see(page: Page, address: str, workers: int) -> float:
    """Opens a page; returns when all workers are on it."""
    page.goto(address)
    page.locator("#workers button").nth(workers - 1).wait_for(state="attached")
    return time.monotonic()


def _busy_s(session: CDPSession) -> float:
    """Seconds for which the page's thread was busy so far."""
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def measure(browser: Browser, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains once; returns the row, with ``error`` set and no numbers if the run failed."""
    job = parse_job(
        {
            "name": "board",
            "model": {"kind": "gpt", "layers": 8, "width": 128, "heads": 4, "context": 128, "dropout": 0},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": 2, "stages": 2, "microbatches": 6, "microbatch_size": 4},
            "optimizer": {"kind": "adamw", "lr": 3e-4},
            "train": {"steps": 41},
        }
    )
    found: list[Any] = []

    def work(run_dir: Path) -> None:
        try:
            found.append(train(job, run_dir=run_dir))
        except HoldfastError as error:
            found.append(error)

    with tempfile.TemporaryDirectory(prefix="holdfast-board-") as folder, contextlib.ExitStack() as stack:
        run_dir = Path(folder) / "run"
        if side == "watched":
            page = stack.enter_context(contextlib.closing(browser.new_page()))
            page.goto(stack.enter_context(board(run_dir))[0])
        try:
            with time_limit(options.limit_s):
                thread = threading.Thread(target=work, args=(run_dir,))
                thread.start()
                while thread.is_alive():
                    if side == "watched":
                        page.wait_for_timeout(200)
                    else:
                        thread.join(0.2)
        except TimeoutError as error:
            return {"error": str(error)}
    if isinstance(found[0], HoldfastError):
        return {"error": f"{type(found[0]).__name__}: {found[0]}"}
    ends = [at for _, at in found[0].report.commits]
    steps = [after - before for before, after in pairwise(ends)]
    return {"error": None, "digest": found[0].weights_sha256, "step_s": statistics.median(steps[5:])}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians and what they are to be, and whatever went wrong."""
    problems = [f"{row['side']} {row['repetition']}: {row['error']}" for row in rows if row["error"]]
    good = [row for row in rows if not row["error"]]
    if len({row["digest"] for row in good if "digest" in row}) > 1:
        problems.append("the sides ended in different bits")
    big = [row for row in good if row["side"] == "big"]
    found = {name: interval([row[name] for row in big]) for name in ("read_s", *TARGETS)}
    sides = {side: {row["repetition"]: row["step_s"] for row in good if row["side"] == side} for side in SIDES}
    both = [(step_s, sides["without"][n]) for n, step_s in sides["watched"].items() if n in sides["without"]]
    found["step_ratio"] = ratio_interval(both)
    lines = [_line(name, each) for name, each in found.items()]
    return {"problems": problems, "found": {name: each.to_json() for name, each in found.items()}, "lines": lines}


def _line(name: str, found: Interval) -> list[str]:
    target = TARGETS.get(name)
    return [
        name,
        found.show(digits=3),
        "-" if target is None else f"{target}",
        "" if target is None else verdict(found, target),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
