"""Before the first step: whoever does not come is found, and Ctrl-C works, from the first moment on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
from tests.waiting import LIMIT_S, until

from holdfast import load_profile, parse_job, train
from holdfast.errors import InternalError
from holdfast.runtime.node.forks import SERVER, is_gone
from holdfast.telemetry.events import Notice, StepOps, read_events

pytestmark = pytest.mark.dist

MODEL = Path(__file__).with_name("slow_starters.py")
PROFILE = Path(__file__).parents[2] / "profiles"
START_S = 20.0
"""For what ought to be started in a second."""


def job(*overrides, target="build", **arguments):
    raw = {
        "model": {"kind": "python", "target": f"{MODEL}:{target}", "loss": f"{MODEL}:loss", "arguments": arguments},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 2, "stages": 1, "microbatches": 1, "microbatch_size": 4},
        "train": {"steps": 5},
        "control": {"hang_s": 15},
    }
    return parse_job(raw, overrides)


def lost(folder, how, times):
    return {"folder": str(folder), "how": how, "times": times}


def notices(run_dir):
    return [event.text for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, Notice)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    return train(job(**lost(folder, "die", 0)), run_dir=folder / "run")


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_worker_that_is_lost_while_starting_is_started_again(tmp_path, healthy, how):
    """It is bitwise as if nothing had happened."""
    summary = train(job(f"control.start_s={START_S}", **lost(tmp_path, how, 1)), run_dir=tmp_path / "run")
    assert len(list(tmp_path.glob("lost-*"))) == 1
    why = "process ended: exit code 7" if how == "die" else f"it did not start within {START_S:g} s (control.start_s)"
    assert [text for text in notices(tmp_path / "run") if "starting" in text] == [
        f"was lost while starting ({why}); it is started again, once"
    ]
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert summary.generations == 1


def test_a_worker_that_dies_while_starting_twice_is_one_line(tmp_path):
    with pytest.raises(InternalError) as caught:
        train(job(**lost(tmp_path, "die", 2)), run_dir=tmp_path / "run")
    assert str(caught.value) == "worker 1.0 was lost while starting, twice (process ended: exit code 7)"
    assert len(list(tmp_path.glob("lost-*"))) == 2


def test_a_probe_that_hangs_is_one_line(tmp_path, healthy):
    with pytest.raises(InternalError) as caught:
        train(job("control.start_s=3", target="hanging_probe"), run_dir=tmp_path / "run")
    assert str(caught.value) == "the probe did not start within 3 s (control.start_s)"


class Stopper(threading.Thread):
    """Stops the next process that is forked, as soon as it is there."""

    def __init__(self):
        super().__init__(daemon=True)
        self.pid = None
        self._known = self.children()
        self.start()

    @staticmethod
    def children():
        return {child.pid for child in psutil.Process(SERVER.pid).children()}

    def run(self):
        while not (new := self.children() - self._known):
            time.sleep(0.001)
        self.pid = min(new)
        os.kill(self.pid, signal.SIGSTOP)


def test_a_coordinator_that_hangs_is_one_line(tmp_path, healthy):
    """Before or after it has said where it listens."""
    stopper = Stopper()
    limits = ("control.start_s=6", "control.reattach_s=6")
    with pytest.raises(InternalError) as caught:
        train(
            job(*limits, **lost(tmp_path, "die", 0)),
            emulate=load_profile(PROFILE / "gpt3-medium-350m.json"),
            run_dir=tmp_path / "run",
        )
    assert stopper.pid is not None
    assert not psutil.pid_exists(stopper.pid)
    assert "the coordinator" in str(caught.value)
    assert "\n" not in str(caught.value)


class Command:
    """A job of the command line, whose processes can all be found, and whose temporary folder is its own."""

    def __init__(self, folder, *arguments, ignored=()):
        self.run_dir, self.temporary, self.mark = folder / "run", folder / LONG, f"mark-{uuid.uuid4().hex}"
        self.temporary.mkdir()
        (folder / "job.yaml").write_text(JOB)
        command = [sys.executable, "-m", "holdfast", "train", str(folder / "job.yaml"), "--run-dir", str(self.run_dir)]
        dispositions = "".join(f"signal.signal({int(number)}, signal.SIG_IGN);" for number in ignored)
        program = f"import os, signal, sys; {dispositions} os.execv(sys.executable, sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *command, "--quiet", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.temporary), "HOLDFAST_TEST": self.mark},
        )

    def family(self):
        """All processes that live of it, itself and those that nobody watches any more included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOLDFAST_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def listens(self, *numbers):
        """Whether it has begun to answer signals."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(text.partition("SigCgt:\t")[2].split()[0], 16)
        return all(caught >> (number - 1) & 1 for number in numbers or (signal.SIGINT, signal.SIGTERM))

    def server(self):
        """The process that all others are forked from; None before it is there."""
        return next((child for child in psutil.Process(self.process.pid).children() if child.children()), None)

    def trains(self):
        path = self.run_dir / "events.jsonl"
        return path.exists() and any(isinstance(event, StepOps) for _, event in read_events(path))

    def wait_for(self, condition):
        until(condition, process=self.process)

    def end(self):
        """Its exit code and what it said, once nothing of it is left."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        until(lambda: not self.family(), "the end of all")
        assert [path.name for path in self.temporary.iterdir() if not path.name.startswith(TORCHS_OWN)] == []
        return self.process.returncode, errors


LONG = "temporary" * 14
"""The name of a folder of which no path is short enough for a socket (107 bytes)."""
TORCHS_OWN = "torchinductor_"
"""A cache, one for each user of the machine, that torch makes when it is imported."""
JOB = """
model: {kind: gpt, layers: 2, width: 8, heads: 2, context: 8}
data: {kind: text, path: stdlib}
grid: {pipelines: 2, stages: 2, microbatches: 2}
train: {steps: 100000}
control: {hang_s: 15}
"""


@pytest.fixture
def start(tmp_path):
    commands = []

    def make(*arguments, **options):
        folder = tmp_path / f"job-{len(commands)}"
        folder.mkdir()
        commands.append(Command(folder, *arguments, **options))
        return commands[-1]

    yield make
    for command in commands:
        command.process.kill()
        command.process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_any_moment_of_the_start_is_one_line_and_nothing_is_left(start, number, code):
    """Moments at random, from the first in which the command can answer; to it alone, and to its whole group."""
    moments = random.Random(int(number))
    delays = [0.0, *sorted(moments.uniform(0.0, 6.0) for _ in range(3))]
    commands = [start() for _ in delays]
    for command in commands:
        command.wait_for(command.listens)
    begin = time.monotonic()
    for index, (command, delay) in enumerate(zip(commands, delays, strict=True)):
        time.sleep(max(0.0, begin + delay - time.monotonic()))  # whatever it does then
        (os.killpg if index % 2 else os.kill)(command.process.pid, number)
    for command, delay in zip(commands, delays, strict=True):
        assert command.end() == (code, f"holdfast: {number.name}: every process is ended\n"), f"after {delay} s"


def test_an_ignored_signal_stays_so_and_a_stopped_fork_server_delays_no_end(start):
    """SIGINT is ignored in what a shell starts in the background."""
    command = start(ignored=[signal.SIGINT])
    command.wait_for(lambda: command.listens(signal.SIGTERM))
    command.process.send_signal(signal.SIGINT)
    command.wait_for(command.trains)
    os.killpg(command.process.pid, signal.SIGINT)
    command.server().suspend()
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == (143, "holdfast: SIGTERM: every process is ended\n")


def test_a_killed_agent_leaves_nothing_and_the_end_of_the_fork_server_is_one_line(start):
    early, late = start(), start()
    early.wait_for(lambda: len(early.family()) > 1)
    early.process.kill()
    assert early.end() == (-signal.SIGKILL, "")
    late.wait_for(late.trains)
    late.server().kill()
    code, errors = late.end()
    *deaths, line = errors.splitlines()  # of workers, if they are heard of sooner
    assert (code, line) == (1, "holdfast: the fork server ended (signal 9), and with it every process of the job")
    assert all(" is lost: process ended: " in death for death in deaths)


def test_a_fork_server_that_is_stopped_is_named_when_it_is_needed(tmp_path, healthy):
    """Here: to compute the hashes at the end."""
    server = SERVER.pid
    limited = job(f"control.start_s={START_S}", **lost(tmp_path, "die", 0))
    told = []
    strike = {"on_progress": lambda progress: os.kill(server, signal.SIGSTOP)}
    summary = train(limited, run_dir=tmp_path / "run", on_event=told.append, **strike)
    assert summary.weights_sha256 == healthy.weights_sha256, "by a process of the next one"
    limit = f"no process could be started within {START_S:g} s (control.start_s)"
    why = f"the fork server, process {server}, is stopped: {limit}"
    text = f"the hashes of what was trained: {why}; they are computed once more"
    assert text in [event.text for event in told if isinstance(event, Notice)]
    until(lambda: is_gone(server))
