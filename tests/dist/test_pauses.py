"""Pauses: of everybody (Ctrl-Z, a frozen container, a paused machine), which is nobody's fault, and of some.

HOLDFAST_SOAK_PAUSES sets how many random pauses there are beside the named ones, HOLDFAST_SOAK_SEED which; ``make
soak`` takes many.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import pytest
from tests.soak import some

from holdfast import parse_job, train
from holdfast.config.load import dump_job
from holdfast.config.profiles import save_profile
from holdfast.core.profile import uniform_profile
from holdfast.telemetry.events import CoordinatorReady, StepOps, WorkerReady, read_events

pytestmark = [pytest.mark.dist, pytest.mark.alone]

COUNT = int(os.environ.get("HOLDFAST_SOAK_PAUSES", "0"))
SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "1"))
LAYERS, GLOBAL_BATCH = 2, 6
MARGIN_S = 0.5
"""Who is stopped for as much less than hang_s is never held for lost; for as much more, always."""
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who is stopped, for how long, in a job whose forward and backward passes take how long.

    ``some``: pipelines of the first stage, for "some" alone; one of them is left.
    """

    who: str
    stopped_s: float
    op_s: float
    pipelines: int = 3
    stages: int = 2
    steps: int = 12
    hang_s: float = 4.0
    some: tuple[int, ...] = ()
    moment: float = 0.5
    loaded: bool = False

    @property
    def stopped(self) -> set[str]:
        """Who is held for lost if it is stopped for too long."""
        return {f"{pipeline}.0" for pipeline in self.some}

    @property
    def microbatches(self) -> int:
        return GLOBAL_BATCH // self.pipelines

    @property
    def step_s(self) -> float:
        return (self.microbatches + self.stages - 1) * 2 * self.op_s


def job_of(case):
    return parse_job(
        {
            "name": "paused",
            "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 8},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": case.pipelines, "stages": case.stages, "microbatches": case.microbatches},
            "train": {"steps": case.steps},
            "control": {"hang_s": case.hang_s},
        }
    )


def profile_of(case):
    """Every operation takes ``op_s``, whatever the number of layers of a stage."""
    each_s = case.op_s * case.stages / LAYERS
    return uniform_profile(LAYERS, forward_s=each_s, backward_input_s=each_s / 2, backward_weight_s=each_s / 2)


class Paused:
    """A job in a process group of its own, and those of its processes that are stopped and go on."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case, self.folder, self.run_dir = case, folder, folder / "run"
        (folder / "job.yaml").write_text(dump_job(job_of(case)))
        save_profile(profile_of(case), folder / "profile.json")
        command = [sys.executable, "-m", "holdfast", "train", folder / "job.yaml", "--run-dir", self.run_dir]
        with (folder / "errors.txt").open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "--emulate", folder / "profile.json"], start_new_session=True, stderr=errors
            )

    def events(self) -> list:
        path = self.run_dir / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def errors(self) -> str:
        return (self.folder / "errors.txt").read_text()

    def wait_until_warm(self) -> None:
        """Everyone has done two steps, and is somewhere in the third."""
        workers, until = self.case.pipelines * self.case.stages, time.monotonic() + LIMIT_S
        while len({e.worker for _, e in self.events() if isinstance(e, StepOps) and e.step == 1}) < workers:
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(self.case.moment * self.case.step_s)

    def victims(self) -> list[psutil.Process]:
        """The processes to stop, found while they all run."""
        workers = {e.worker: e.pid for _, e in self.events() if isinstance(e, WorkerReady)}
        coordinators = [e.pid for _, e in self.events() if isinstance(e, CoordinatorReady)]
        family = psutil.Process(self.process.pid).children(recursive=True)
        pids = {
            "everything": [self.process.pid, *(each.pid for each in family)],
            "workers": list(workers.values()),
            "workers and coordinator": [*workers.values(), *coordinators],
            "coordinator": coordinators,
            "some": [workers[f"{pipeline}.0"] for pipeline in self.case.some],
        }[self.case.who]
        return [psutil.Process(pid) for pid in pids]

    def pause(self) -> None:
        """Stops them, lets the time pass, and lets them go on; each was seen to be stopped, and nothing moved."""
        victims, sent_at = self.victims(), time.monotonic()
        self._signal(victims, signal.SIGSTOP)
        while not all(each.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for each in victims):
            assert time.monotonic() - sent_at < LIMIT_S, "a process could not be stopped"
        stopped_at = time.monotonic()
        time.sleep(max(0.0, sent_at + self.case.stopped_s - time.monotonic()))
        going_at = time.monotonic()
        self._signal(victims, signal.SIGCONT)
        self.least_s, self.most_s = going_at - stopped_at, time.monotonic() - sent_at
        if self.case.who == "everything":
            moved = [at for at, _ in self.events() if stopped_at < at < going_at]
            assert moved == [], "it was not stopped"

    def _signal(self, victims: list[psutil.Process], number: int) -> None:
        for each in victims:
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                each.send_signal(number)

    def check(self, digest: str) -> None:
        """Exactly those are lost that were stopped for too long, as it was measured, and the bits are right."""
        code = self.process.wait(LIMIT_S)
        assert code == 0, self.errors()
        summary = json.loads((self.run_dir / "summary.json").read_text())
        lost = [failure["worker"] for failure in summary["failures"]]
        assert len(lost) == len(set(lost))
        must = self.case.stopped if self.least_s > self.case.hang_s + MARGIN_S else set()
        may = self.case.stopped if self.most_s > self.case.hang_s - MARGIN_S else set()
        assert must <= set(lost) <= may, f"stopped for {self.least_s} to {self.most_s} s"
        assert summary["steps"] == self.case.steps
        assert summary["weights_sha256"] == digest
        after = [e for _, e in self.events() if isinstance(e, StepOps) and e.step == self.case.steps - 1]
        assert len(after) == self.case.pipelines * self.case.stages - len(lost)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def digest_of(tmp_path_factory):
    """What a job of so many steps ends in when nothing is stopped, on one worker that needs no time."""

    @cache
    def digest(steps):
        case = Case(who="some", stopped_s=0.0, op_s=0.0, pipelines=1, stages=1, steps=steps)
        return train(job_of(case), run_dir=tmp_path_factory.mktemp("run"), emulate=profile_of(case)).weights_sha256

    return digest


@pytest.fixture
def suffer(tmp_path_factory, digest_of):
    """Runs some cases at a time: mostly they do nothing."""

    def run(case, digest):
        paused = Paused(tmp_path_factory.mktemp("paused"), case)
        try:
            paused.wait_until_warm()
            paused.pause()
            paused.check(digest)
        except BaseException as error:
            error.add_note(f"{case} in {paused.run_dir}")
            raise
        finally:
            paused.end()

    def run_all(*cases):
        digests = [digest_of(case.steps) for case in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            for each in [pool.submit(run, case, digest) for case, digest in zip(cases, digests, strict=True)]:
                each.result()

    return run_all


NAMED = {
    "nobody, if all are stopped": (
        Case(who="everything", stopped_s=5.5, op_s=0.02, loaded=True),
        Case(who="workers", stopped_s=6.0, op_s=0.06),
    ),
    "nobody with the coordinator, and some if they are stopped for too long": (
        Case(who="workers and coordinator", stopped_s=5.5, op_s=1.5, pipelines=6, stages=1, steps=4),
        Case(who="coordinator", stopped_s=8.5, op_s=0.1),
        Case(who="some", some=(0, 1), stopped_s=3.3, op_s=0.1),
        Case(who="some", some=(0, 2), stopped_s=6.0, op_s=0.1),
    ),
}


@pytest.mark.parametrize("named", some(NAMED, list(NAMED)[1:]))
def test_who_is_held_for_lost(suffer, load, named):
    cases = NAMED[named]
    if any(case.loaded for case in cases):
        load()
    suffer(*cases)


def random_case(number):
    """One of many: jobs of all shapes, operations of 0.02 to 2 s, pauses of 2 to 15 s, half of them under load."""
    source = random.Random(f"{SEED}/{number}")
    who = source.choice(["everything", "workers", "workers and coordinator", "coordinator", "some", "some"])
    pipelines, stages = source.choice([(3, 1), (3, 2), (2, 2), (6, 1)])
    hang_s, op_s = source.choice([2.0, 3.0]), math.exp(source.uniform(math.log(0.02), math.log(2.0)))
    short, long = source.uniform(0.2, hang_s - MARGIN_S), source.uniform(hang_s + 1.0, 15.0)
    case = Case(
        who=who,
        stopped_s=source.choice([short, long]) if who == "some" else source.uniform(2.0, 15.0),
        op_s=op_s,
        pipelines=pipelines,
        stages=stages,
        hang_s=hang_s,
        some=tuple(sorted(source.sample(range(pipelines), source.randint(1, pipelines - 1)))) if who == "some" else (),
        moment=source.random(),
        loaded=source.random() < 0.5,
    )
    return replace(case, steps=2 + max(3, math.ceil(4.0 / case.step_s)))


@pytest.fixture
def load():
    """As many processes that never rest as there are processors."""
    with contextlib.ExitStack() as stack:

        def spin():
            for _ in range(os.cpu_count() or 1):
                each = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                stack.callback(each.kill)

        yield spin


if COUNT:

    @pytest.mark.timeout(2 * LIMIT_S)
    @pytest.mark.parametrize("number", range(COUNT))
    def test_random_pauses(suffer, load, number):
        case = random_case(number)
        if case.loaded:
            load()
        try:
            suffer(case)
        except BaseException as error:
            repeat = f"HOLDFAST_SOAK_SEED={SEED} HOLDFAST_SOAK_PAUSES={number + 1}"
            error.add_note(
                f"repeat: {repeat} python -m pytest 'tests/dist/test_pauses.py::test_random_pauses[{number}]'"
            )
            raise
