"""Scripts under blows from outside at random moments: the bits of the run that nobody struck, or a refusal before it.

HOLDFAST_SOAK_FAULTS sets about how many blows there are, over all scripts; HOLDFAST_SOAK_SEED which. ``make soak``
deals many.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.telemetry.events import Detected, FaultInjected, Notice, StepOps, Synced, WorkerReady, read_events

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "cnn_holdfast.py"
LOOP = HERE / "loop_script.py"
SCRIPTS = {
    "shuffled": (HERE / "loading_script.py", ["--data", "shuffled", "--loaders", "1", "--steps", "240"], 240),
    "norm": (LOOP, ["--variant", "norm", "--steps", "250"], 250),
    "scaled": (LOOP, ["--variant", "scaled", "--steps", "250"], 250),
    "tied": (LOOP, ["--variant", "tied", "--steps", "250"], 250),
    "own": (LOOP, ["--variant", "own", "--steps", "250"], 250),
    "stream": (HERE / "loading_script.py", ["--data", "stream", "--loaders", "1", "--steps", "240"], 240),
    "marked": (HERE / "loading_script.py", ["--data", "marked", "--loaders", "1", "--steps", "240"], 240),
    "stopped": (HERE / "stopping_script.py", ["--weights", "all", "--steps", "400", "--stop", "behind:299"], 300),
    "example": (EXAMPLE, ["--epochs", "4"], 120),
}
"""Per name: a script, its arguments, and how many steps it takes."""
WORKERS, BLOWS, JOINS = 4, 3, 1
COUNT = int(os.environ.get("HOLDFAST_SOAK_FAULTS", "4"))
SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1"))
LIMIT_S = 240.0
TAKEN_UP = 150
"""In so many steps whoever has come is taken up, however short they are: its state is copied meanwhile."""


def command(script, arguments, run_dir, *more):
    options = ["--workers", WORKERS, "--run-dir", run_dir, "--set", "control.hang_s=3", "--quiet", *more]
    return [sys.executable, "-m", "holdfast", "run", *map(str, (*options, script, *arguments))]


def environment(folder):
    """Its temporary folder has a name of which no path is short enough for a socket (107 bytes)."""
    temporary = folder / ("temporary" * 14)
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(temporary)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """What a script ends with if nobody strikes it."""
    known = {}

    def run(name):
        if name not in known:
            folder, (script, arguments, _) = tmp_path_factory.mktemp("healthy"), SCRIPTS[name]
            line = command(script, arguments, folder / "run")
            subprocess.run(line, check=True, timeout=LIMIT_S, cwd=folder, env=environment(folder))
            known[name] = json.loads((folder / "run" / "summary.json").read_text())
        return known[name]

    return run


class Striker:
    """Strikes workers of a job at random moments, knowing nothing but its log of events and process numbers."""

    def __init__(self, run_dir: Path, draw: random.Random, steps: int) -> None:
        self.log, self.draw, self.dealt = run_dir / "events.jsonl", draw, Counter()
        self.moments = sorted(draw.uniform(0.1, 0.7) * steps for _ in range(BLOWS))
        self.kinds = [draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)) for _ in range(BLOWS)]

    def watch(self, job: subprocess.Popen) -> None:
        until = time.monotonic() + LIMIT_S
        while job.poll() is None:
            assert time.monotonic() < until, f"{self.log} does not come to its end"
            if self.moments and self._newest_step() >= self.moments[0] and self._strike():
                self.moments.pop(0)
                self.kinds.pop(0)
            time.sleep(0.02)

    def events(self, kind):
        found = [event for _, event in read_events(self.log)] if self.log.exists() else []
        return [event for event in found if isinstance(event, kind)]

    def steps_with_newcomer(self) -> int:
        """How many steps were still run once the process that came was ready; 0 if it was struck itself."""
        events = list(read_events(self.log))
        came = [(time, event.worker) for time, event in events if isinstance(event, WorkerReady)][WORKERS:]
        if not came:
            return 0
        since, worker = came[0]
        behind = [event for time, event in events if time > since]
        struck = any(isinstance(event, Detected) and event.worker == worker for event in behind)
        return 0 if struck else len({event.step for event in behind if isinstance(event, StepOps)})

    def felt(self) -> Counter:
        """How often each worker was struck, as the log has it: as a loss, or a false start before it had attached."""
        early = [event for event in self.events(Notice) if "process ended: signal" in event.text]
        return Counter(event.worker for event in (*self.events(Detected), *early))

    def _newest_step(self) -> int:
        return max((event.step for event in self.events(StepOps)), default=-1)

    def _strike(self) -> bool:
        """Strikes one of those that live, if another one does and nobody lies struck that was not found yet."""
        found = self.felt()
        if found.total() < self.dealt.total():
            return False
        ready = self.events(WorkerReady)
        newest = {event.worker: event.pid for event in ready}
        times = Counter(event.worker for event in ready)
        alive = [worker for worker, pid in newest.items() if times[worker] > found[worker] and psutil.pid_exists(pid)]
        if len(alive) < 2:
            return False
        if self.kinds[0] == signal.SIGSTOP:  # whoever takes no part yet holds nobody up, and may never be missed
            ran = [(event.step, event.worker) for event in self.events(StepOps)]
            alive = [worker for worker in alive if (max(ran)[0], worker) in ran]
        if not alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(newest[self.draw.choice(alive)], self.kinds[0])
            self.dealt[self.kinds[0].name] += 1
        return True


def chosen():
    """Which scripts are struck, and by which seeds."""
    rounds = max(1, round(COUNT / (BLOWS + JOINS)))
    names = tuple(SCRIPTS)
    return [(names[number % len(names)], SEED + number) for number in range(rounds)]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(("name", "seed"), chosen())
def test_a_script_that_is_struck_ends_in_the_same_bits(healthy, tmp_path, name, seed):
    expected, draw, (script, arguments, steps) = healthy(name), random.Random(seed), SCRIPTS[name]
    join = f"join:new@{draw.randrange(steps // 10, steps // 3)}"
    run_dir = tmp_path / "run"
    with (tmp_path / "told").open("w") as told:
        line = command(script, arguments, run_dir, "--fault", join)
        job = subprocess.Popen(line, cwd=tmp_path, env=environment(tmp_path), stdout=told, stderr=told)
        striker = Striker(run_dir, draw, steps)
        try:
            striker.watch(job)
        finally:
            job.kill()
            job.wait()
    assert job.returncode == 0, (tmp_path / "told").read_text()[-2000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert striker.dealt.total() == BLOWS == striker.felt().total(), "every blow was felt"
    assert [str(event.spec) for event in striker.events(FaultInjected)] == [join]
    assert summary["steps"] == expected["steps"] == steps
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert summary["state_sha256"] == expected["state_sha256"]
    if striker.steps_with_newcomer() >= TAKEN_UP:
        assert striker.events(Synced), "whoever came took part"
