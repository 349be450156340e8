"""What a failure costs a user's own loop under ``holdfast run``, in four parts; each item is emulated by a sleep.

``kill``: the step in which a worker is killed, half-way through its items or at a moment that nobody chose, next to
those before it. ``strategies``: the same with lossy strategies, where some of the step's sums are there already.
``epoch``: against going back to a checkpoint at the end of the last epoch, for which the whole run is killed and the
same command is started again at once; what was lost is really run again. ``sums``: what workers send for the sums of a
step behind the loss, by what they sent before; bytes, which are the same each time, of 2 MB of weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from holdfast import Fault, Job, Summary
from holdfast.cli.run import job_of
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Agreed, Detected, Rebuilt, StepOps, Timed, read_events
from holdfast.telemetry.report import RunReport, report
from measure import ROOT, Countdown, Interval, Recorder, interval, print_table, ratio_interval, time_limit, verdict
from measured_run import measured_run
from remainder import Killer, struck

SCRIPT = Path(__file__).with_name("data_parallel_worker.py")
PARTS = ("kill", "strategies", "epoch", "sums")
POINTS = ("backward", "any moment")
LOSSY = ("lossy-forward", "rollback", "skip")
PERCENTS = (25, 50, 75)
SIZES = ((3, 6), (4, 6), (4, 8), (5, 8), (8, 6))  # workers, items of each
RESTART, EXACT, LOSSY_FORWARD = "checkpoint-restart", "exact", "lossy-forward"
KILL_TARGET_S, LOSSY_TARGET_S, SHARE_TARGET, SUMS_TARGET = 0.150, 0.100, 0.01, 1.5
_MOMENTS = (0.05, 0.95)
_LOOK_S = 0.005
_RUN_S = 5.0


def main() -> int:
    """Runs the parts; returns 1 if any run failed."""
    options = _options()
    by = {"kill": run_kills, "strategies": run_strategies, "epoch": run_epochs, "sums": run_sums}
    failed = [row for part in options.parts for row in by[part](options) if row["error"]]
    for row in failed:
        print(f"PROBLEM {row['error']}")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="each has a file of results")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--items", type=int, default=6, help="of each worker in a step")
    parser.add_argument("--item-ms", type=float, default=20.0, help="length of an item")
    parser.add_argument("--side", type=int, default=64, help="of the model's eight square matrices")
    parser.add_argument("--kill-step", type=int, default=8, help="the step in which a worker is killed")
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each cell of kill and strategies")
    parser.add_argument("--epoch", type=int, default=390, help="mini-batches of an epoch; a kill is behind 1.5 of them")
    parser.add_argument("--epoch-items", type=int, default=10, help="of each worker in a step of epoch")
    parser.add_argument("--epoch-after", type=int, default=60, help="steps behind the kill of epoch")
    parser.add_argument("--epoch-repetitions", type=int, default=3, help="runs of each side of epoch")
    parser.add_argument("--quick", action="store_true", help="1 repetition, an epoch of 20, and 20 steps behind it")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.epoch_repetitions, options.epoch, options.epoch_after = 1, 1, 20, 20
    return options


def _arguments(options: argparse.Namespace, items: int, steps: int) -> list[str]:
    given = {"workers": options.workers, "microbatches": items, "steps": steps, "side": options.side}
    return ["holdfast", *(f"--{name}={value}" for name, value in given.items()), f"--emulate={options.item_ms / 1000}"]


def _job(options: argparse.Namespace, *overrides: str) -> Job:
    arguments = _arguments(options, options.items, options.kill_step + 3)
    return job_of(str(SCRIPT), arguments, options.workers, list(overrides))


def _usual_s(commits: dict[int, float], before: int) -> float:
    """The median length of the steps before one; that of the first step is not known."""
    return statistics.median(commits[b] - commits[a] for a, b in pairwise(range(before)))


def _only(told: RunReport, unfired: tuple[str, ...]) -> str | None:
    """What is wrong with a run in which one worker was to be lost."""
    if unfired or len(told.failures) != 1:
        return f"{len(told.failures)} failures instead of one; not fired: {unfired}"
    return None


# --- kill -------------------------------------------------------------------------------------------------------------


def run_kills(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A worker is killed in the middle of a step; returns the rows."""
    recorder = Recorder("loop_recovery_kill", vars(options))
    countdown = Countdown(len(POINTS) * options.repetitions, _RUN_S)
    countdown.announce()
    for repetition in range(options.repetitions):
        for point in POINTS:
            chosen = random.Random(f"{point} {repetition}")
            recorder.begin()
            found = measure_kill(point, WorkerId(chosen.randrange(options.workers), 0), chosen, options)
            row = recorder.add(point=point, repetition=repetition, **found)
            countdown.next(f"{point}: {_brief(row, 'extra_s', 'beyond_s')}")
    summary = {point: _kill_summary([row for row in recorder.rows if row["point"] == point]) for point in POINTS}
    _show_kills(summary)
    recorder.write(summary)
    return recorder.rows


@dataclass(slots=True, kw_only=True)
class QuietKiller(Killer):
    """Reads nothing of the log twice, so that the steps before the kill are not held up more than those behind it."""

    def run(self) -> None:
        """Waits, and kills."""
        pids: dict[str, int] = {}
        ended: list[float] = []
        for line in _followed(self.run_dir / "events.jsonl", self.over.is_set):
            told = json.loads(line)
            event = told["data"]
            if event["event"] == "worker_ready":
                pids[event["worker"]] = event["pid"]
            if event["event"] == "step" and event["step"] == self.step:
                ended.append(told["time"])
            if len(ended) == self.workers:
                self.begun_at = max(ended)
                time.sleep(max(0.0, self.begun_at + self.delay_s - time.monotonic()))
                self.killed_at = time.monotonic()
                os.kill(pids[str(self.worker)], signal.SIGKILL)
                return


def _followed(path: Path, over: Callable[[], bool]) -> Iterator[str]:
    """The lines of a file that grows, until it is over."""
    while not path.exists() and not over():
        time.sleep(_LOOK_S)
    if not path.exists():
        return
    with path.open() as file:
        part = ""
        while True:
            ends, part = over(), part + file.readline()
            if part.endswith("\n"):
                yield part
                part = ""
            elif ends:
                return
            else:
                time.sleep(_LOOK_S)


def measure_kill(point: str, victim: WorkerId, chosen: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the script once with one kill; returns the row, with ``error`` set and no numbers if the run failed."""
    job, step = _job(options), options.kill_step
    if point == "backward":
        faults = [Fault.parse(f"kill:{victim}@{step}:{point}")]
        return measured_run(job, partial(_kill_row, options), limit_s=options.limit_s, faults=faults)
    share = chosen.uniform(*_MOMENTS)
    delay_s = share * options.items * options.item_ms / 1000
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        run_dir = Path(folder) / "run"
        killer = QuietKiller(run_dir=run_dir, worker=victim, step=step - 1, delay_s=delay_s, workers=options.workers)
        summary = struck(job, None, killer, options.limit_s)
        if isinstance(summary, str) or killer.killed_at is None:
            return {"error": summary if isinstance(summary, str) else "nobody was killed"}
        row = {**_kill_row(options, summary), "elapsed_s": killer.killed_at - killer.begun_at}
        return row if row["error"] else {**row, "detected_s": row["detected_at"] - killer.killed_at}


def _kill_row(options: argparse.Namespace, summary: Summary) -> dict[str, Any]:
    problem = _only(summary.report, summary.unfired)
    if problem is not None:
        return {"error": problem}
    step, commits = options.kill_step, dict(summary.report.commits)
    usual_s = _usual_s(commits, step)
    events = list(read_events(summary.run_dir / "events.jsonl"))
    agreed = _agreed(events)
    lost = _taken_over(events, step, WorkerId.parse(summary.report.failures[0].worker))
    extra_s = commits[step] - commits[step - 1] - usual_s
    again_s = _again_s(lost, options.workers - 1, options.item_ms / 1000)
    return {
        "error": None,
        "usual_step_s": usual_s,
        "extra_s": extra_s,
        "lost": lost,
        "goes_on": agreed.goes_on,
        "in_step": agreed.step,
        "beyond_s": extra_s - again_s,
        "detected_at": _detected_at(events),
        "detected_s": summary.report.failures[0].detected_s,
        "failure": summary.report.failures_json()[0],
    }


def _detected_at(events: list[Timed]) -> float:
    return next(at for at, event in events if isinstance(event, Detected))


def _taken_over(events: list[Timed], step: int, victim: WorkerId) -> int:
    """How many items of a worker the others have run in a step."""
    ran = [event for _, event in events if isinstance(event, StepOps) and event.step == step]
    others = [op for event in ran if event.worker != str(victim) for op in event.ops]
    return len({index for _, pipeline, index, *_ in others if pipeline == victim.pipeline})


def _again_s(lost: int, survivors: int, item_s: float) -> float:
    """How long the survivors run again what was lost, at least."""
    return -(-lost // survivors) * item_s


def _agreed(events: list[Timed]) -> Agreed:
    """What was agreed upon after the loss."""
    return next(event for _, event in events if isinstance(event, Agreed) and event.generation > 1)


def _kill_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if not row["error"]]
    found: dict[str, Any] = {
        name: interval([row[name] for row in good])
        for name in ("usual_step_s", "detected_s", "extra_s", "lost", "beyond_s")
    }
    return {"runs": len(rows), "failed": len(rows) - len(good), "target_s": KILL_TARGET_S, **found}


def _show_kills(summary: dict[str, Any]) -> None:
    header = ["killed at", "runs (failed)", "usual step", "detected", "extra", "items taken over", "beyond these"]
    rows = [
        [
            point,
            f"{found['runs']} ({found['failed']})",
            *(found[name].show(1000, 0) for name in ("usual_step_s", "detected_s", "extra_s")),
            found["lost"].show(1, 0),
            found["beyond_s"].show(1000, 0),
            f"<= {KILL_TARGET_S * 1000:.0f}",
            verdict(found["beyond_s"], KILL_TARGET_S),
        ]
        for point, found in summary.items()
    ]
    title = "a step in which a worker is killed, and by how much it takes longer, in ms: median [95 % interval]"
    print_table(title, [*header, "target", "verdict"], rows)


# --- sums -------------------------------------------------------------------------------------------------------------


def run_sums(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Jobs of several sizes lose a worker; returns the rows."""
    recorder = Recorder("loop_recovery_sums", vars(options))
    countdown = Countdown(len(SIZES), _RUN_S)
    countdown.announce()
    for workers, items in SIZES:
        own = argparse.Namespace(**{**vars(options), "workers": workers, "items": items, "side": 256, "kill_step": 2})
        recorder.begin()
        faults = [Fault.parse(f"kill:1.0@{own.kill_step}:backward")]
        found = measured_run(_job(own), partial(_sums_row, own), limit_s=options.limit_s, faults=faults)
        row = recorder.add(workers=workers, items=items, **found)
        countdown.next(f"{workers} workers, {items} items: {row['error'] or format(row['mean'], '.2f')}")
    good = [row for row in recorder.rows if not row["error"]]
    cells = [
        [f"{row['workers']}", f"{row['items']}", f"{row['mean']:.2f}", f"{row['most']:.2f}", f"<= {SUMS_TARGET}"]
        for row in good
    ]
    title = "bytes of a worker for the sums of a step behind a loss, by those before it"
    print_table(title, ["workers", "items of each", "mean", "most of any", "target"], cells)
    recorder.write({f"{row['workers']}x{row['items']}": {"mean": row["mean"], "most": row["most"]} for row in good})
    return recorder.rows


def _sums_row(options: argparse.Namespace, summary: Summary) -> dict[str, Any]:
    problem = _only(summary.report, summary.unfired)
    if problem is not None:
        return {"error": problem}
    sent: dict[int, list[int]] = {}
    for _, event in read_events(summary.run_dir / "events.jsonl"):
        if isinstance(event, StepOps) and event.whole:
            sent.setdefault(event.step, []).append(event.sent_sums)
    before, after = sent[options.kill_step - 1], sent[options.kill_step + 2]
    usual = statistics.mean(before)
    return {
        "error": None,
        "sent_before": before,
        "sent_after": after,
        "mean": statistics.mean(after) / usual,
        "most": max(after) / usual,
    }


# --- strategies -------------------------------------------------------------------------------------------------------


def run_strategies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A worker is killed in the middle of a step's sums, with each lossy strategy; returns the rows."""
    recorder = Recorder("loop_recovery_strategies", vars(options))
    cells = [(strategy, percent) for percent in PERCENTS for strategy in LOSSY]
    countdown = Countdown(len(cells) * options.repetitions, _RUN_S)
    countdown.announce()
    for repetition in range(options.repetitions):
        for strategy, percent in cells:
            fault = Fault.parse(f"kill:{options.workers // 2}.0@{options.kill_step}:gradients:{percent}")
            row_of = partial(_lossy_row, options.kill_step, strategy)
            recorder.begin()
            job = _job(options, f"resilience.strategy={strategy}")
            found = measured_run(job, row_of, limit_s=options.limit_s, faults=[fault])
            row = recorder.add(strategy=strategy, percent=percent, repetition=repetition, **found)
            countdown.next(f"{strategy} at {percent} %: {_brief(row, 'beyond_s', 'repeated_s')}")
    summary = [_lossy_summary(strategy, percent, recorder.rows) for strategy, percent in cells]
    _show_strategies(summary)
    recorder.write(summary)
    return recorder.rows


def _lossy_row(step: int, strategy: str, summary: Summary) -> dict[str, Any]:
    problem = _only(summary.report, summary.unfired)
    if problem is not None:
        return {"error": problem}
    commits, events = dict(summary.report.commits), list(read_events(summary.run_dir / "events.jsonl"))
    detected_at = _detected_at(events)
    rebuilt_at = [at for at, event in events if isinstance(event, Rebuilt)][-1]
    usual_s = _usual_s(commits, step)
    left_s = _left_s(commits[step - 1], usual_s, detected_at)
    return {
        "error": None,
        "usual_step_s": usual_s,
        "left_s": left_s,
        "beyond_s": commits[step] - detected_at - left_s,
        "rebuilt_s": rebuilt_at - detected_at,
        "repeated_s": commits[step + 1] - commits[step] if strategy == "rollback" else None,
        "left_out": len(_agreed(events).left_out),
        "failure": summary.report.failures_json()[0],
    }


def _left_s(began: float, usual_s: float, now: float) -> float:
    """What is left of a step of the usual length."""
    return max(0.0, began + usual_s - now)


def _lossy_summary(strategy: str, percent: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if (row["strategy"], row["percent"]) == (strategy, percent)]
    good = [row for row in mine if not row["error"]]
    names = ("usual_step_s", "left_s", "beyond_s", "rebuilt_s")
    return {
        "strategy": strategy,
        "percent": percent,
        "runs": len(mine),
        "failed": len(mine) - len(good),
        "target_s": None if strategy == "skip" else LOSSY_TARGET_S,
        **{name: interval([row[name] for row in good]) for name in names},
        "repeated_s": interval([row["repeated_s"] for row in good if row["repeated_s"] is not None]),
    }


def _show_strategies(summary: list[dict[str, Any]]) -> None:
    header = ["strategy", "sums there", "runs (failed)", "usual step", "left of it", "beyond that", "target", "verdict"]
    rows = [
        [
            found["strategy"],
            f"{found['percent']} %",
            f"{found['runs']} ({found['failed']})",
            *(found[name].show(1000, 0) for name in ("usual_step_s", "left_s", "beyond_s")),
            "-" if found["target_s"] is None else f"<= {found['target_s'] * 1000:.0f}",
            "-" if found["target_s"] is None else verdict(found["beyond_s"], found["target_s"]),
            found["repeated_s"].show(1000, 0) if found["strategy"] == "rollback" else "-",
        ]
        for found in summary
    ]
    title = "from the loss known to the end of the step, in ms: median [95 % interval]"
    print_table(title, [*header, "the mini-batch once more"], rows)


# --- epoch ------------------------------------------------------------------------------------------------------------


def run_epochs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A kill in the middle of the second epoch, answered in three ways; returns the rows."""
    recorder = Recorder("loop_recovery_epoch", vars(options))
    step, item_s = options.epoch + options.epoch // 2, options.item_ms / 1000
    sides: dict[str, Callable[[Path, int, argparse.Namespace], dict[str, Any]]] = {
        RESTART: restarted,
        EXACT: partial(survived, "auto"),
        LOSSY_FORWARD: partial(survived, LOSSY_FORWARD),
    }
    each_s = 2 * _RUN_S + (step + options.epoch_after + options.epoch / 6) * options.epoch_items * item_s * 1.1
    countdown = Countdown(len(sides) * options.epoch_repetitions, each_s)
    countdown.announce()
    for repetition in range(options.epoch_repetitions):
        for side in random.Random(repetition).sample(list(sides), k=len(sides)):
            recorder.begin()
            with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
                row = recorder.add(side=side, repetition=repetition, **_tried(sides[side], Path(folder), step, options))
            countdown.next(f"{side}: {_brief(row, 'lost_s', 'to_end_s')}")
    summary = _epoch_summary(list(sides), recorder.rows)
    _show_epochs(summary)
    recorder.write(summary)
    return recorder.rows


def _tried(
    side: Callable[[Path, int, argparse.Namespace], dict[str, Any]],
    folder: Path,
    step: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    try:
        with time_limit(options.limit_s):
            return {"error": None, **side(folder, step, options)}
    except (RuntimeError, TimeoutError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def restarted(folder: Path, step: int, options: argparse.Namespace) -> dict[str, Any]:
    """All processes are killed half-way through a step, and the same command is started again at once."""
    events, half_s = folder / "run" / "events.jsonl", options.epoch_items * options.item_ms / 2000
    with _started(folder, step, options) as process:
        _wait_for(events, step - 1, options.workers, process)
        time.sleep(half_s)
        killed_at = time.monotonic()
        _kill_all(process)
    with _started(folder, step, options) as process:
        _finish(process, folder)
    before = report(read_events(folder / "run" / "attempts" / "0001" / "events.jsonl"))
    after = report(read_events(events))
    first = options.epoch
    if after.resumed_from != first or step in dict(before.commits):
        raise RuntimeError(f"went on from step {after.resumed_from} instead of {first}, or was killed too late")
    commits, again = dict(before.commits), dict(after.commits)
    usual_s = _usual_s(commits, step)
    return {
        **_lost({**commits, **again}, commits[step - 1], step, usual_s),
        "restart_s": again[first] - usual_s - killed_at,
        "replayed": step - first,
        "replay_s": again[step - 1] - again[first] + usual_s,
        "checkpoint_s": commits[first] - commits[first - 1] - usual_s,
    }


def survived(strategy: str, folder: Path, step: int, options: argparse.Namespace) -> dict[str, Any]:
    """One worker is killed in mid-step, the others go on, and another process is started in its place."""
    victim = f"{options.workers // 2}.0"
    more = ["--set", f"resilience.strategy={strategy}", "--fault", f"kill:{victim}@{step}:backward"]
    with _started(folder, step, options, *more, "--fault", f"join:{victim}@{step + 1}") as process:
        _finish(process, folder)
    told = report(read_events(folder / "run" / "events.jsonl"))
    problem = _only(told, ())
    if problem is not None:
        raise RuntimeError(problem)
    commits = dict(told.commits)
    return {
        **_lost(commits, commits[step - 1], step, _usual_s(commits, step)),
        "replaced_s": told.failures[0].replaced_s,
        "failure": told.failures_json()[0],
    }


def _lost(commits: dict[int, float], before: float, step: int, usual_s: float) -> dict[str, float]:
    """How much later a step ended than without a failure, and the last step."""
    last = max(commits)
    return {
        "usual_step_s": usual_s,
        "lost_s": commits[step] - before - usual_s,
        "to_end_s": commits[last] - before - usual_s * (last - step + 1),
    }


@contextlib.contextmanager
def _started(folder: Path, step: int, options: argparse.Namespace, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is over behind this, whatever becomes of us."""
    command = [sys.executable, "-m", "holdfast", "run", "--quiet", f"--workers={options.workers}"]
    command += ["--run-dir", str(folder / "run"), "--resume", "auto", "--set", f"checkpoint.every={options.epoch}"]
    command += [*more, str(SCRIPT), *_arguments(options, options.epoch_items, step + 1 + options.epoch_after)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        _kill_all(process)


def _finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    if code := process.wait():
        raise RuntimeError(f"holdfast run: exit code {code}: {(folder / 'output').read_text()[-300:]}")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """As a batch system does with a job of which one process has died: nobody has time for anything."""
    if process.poll() is not None:
        return
    agent = psutil.Process(process.pid)
    everybody = [agent, *agent.children(recursive=True)]
    for each in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(everybody, timeout=30)


def _wait_for(events: Path, step: int, workers: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until all workers have ended a step."""
    ended = 0
    for line in _followed(events, lambda: process.poll() is not None):
        event = json.loads(line)["data"]
        ended += event["event"] == "step" and event["step"] == step
        if ended == workers:
            return
    raise RuntimeError(f"holdfast run ended before it was killed: exit code {process.returncode}")


def _epoch_summary(sides: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = {(row["side"], row["repetition"]): row for row in rows if not row["error"]}
    names = ("usual_step_s", "lost_s", "to_end_s", "restart_s", "replay_s", "checkpoint_s", "replaced_s")
    found: dict[str, Any] = {}
    for side in sides:
        mine = [row for (name, _), row in good.items() if name == side]
        both = [n for name, n in good if name == side and (RESTART, n) in good]
        found[side] = {
            "runs": sum(row["side"] == side for row in rows),
            **{name: interval([row[name] for row in mine if row.get(name) is not None]) for name in names},
            "share": {
                name: ratio_interval([(good[side, n][name], good[RESTART, n][name]) for n in both])
                for name in ("lost_s", "to_end_s")
            },
        }
    return found


def _show_epochs(summary: dict[str, Any]) -> None:
    header = ["way", "runs", "usual step, ms", "lost in the step", "of that: restart", "run again"]
    names = ("lost_s", "restart_s", "replay_s", "replaced_s", "to_end_s", "checkpoint_s")
    rows = [
        [
            side,
            str(found["runs"]),
            found["usual_step_s"].show(1000, 0),
            *(found[name].show(1, 3) if found[name].count else "-" for name in names),
        ]
        for side, found in summary.items()
    ]
    title = "a kill in the middle of the second epoch, in s: median [95 % interval]"
    print_table(title, [*header, "replaced after", "lost at the end", "checkpoint"], rows)
    rows = [
        [side, *(cell for name in ("lost_s", "to_end_s") for cell in _compared(summary[side]["share"][name]))]
        for side in summary
        if side != RESTART
    ]
    target = f"<= {100 * SHARE_TARGET:.0f} %"
    header = ["way", "in the step, %", target, "at the end, %", target]
    print_table("share of what going back to the checkpoint loses", header, rows)


def _compared(found: Interval) -> tuple[str, str]:
    return found.show(100, 2), verdict(found, SHARE_TARGET)


def _brief(row: dict[str, Any], *names: str) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    told = [f"{name.removesuffix('_s')} {row[name] * 1000:.0f} ms" for name in names if row[name] is not None]
    return ", ".join(told)


if __name__ == "__main__":
    raise SystemExit(main())
