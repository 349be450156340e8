"""Runs tests in processes forked from one that has torch loaded: once to see what they cover, then against mutants.

The code under test lies in a copy of the sources, of which each mutant has its own; so processes that a test starts run
the mutant, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "Limits", "Pool", "collect", "preload", "record", "try_mutant"]

_PRELOADED = (
    "torch",
    "numpy",
    "grpc",
    "msgspec",
    "yaml",
    "safetensors.torch",
    "hypothesis.stateful",
    "pytest",
    "boto3",
)
_ENVIRONMENT = {"HOLDFAST_SEEDS": "12", "PYTHONDONTWRITEBYTECODE": "1"}
_ALWAYS = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis is preloaded
_OF_ONE_TEST = 6
_MEMORY_BYTES = 24 << 30
_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run is given up: seconds of the processor, and seconds."""

    cpu_s: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a forked process ended: exit status (negative: by which signal), and whether it was ended for its time."""

    status: int
    out_of_time: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A process and what is told of its end."""

    since: float
    limits: Limits
    then: Callable[[Ended], None]


class Pool:
    """So many forked processes at once, each the leader of a session, so that all it started ends with it."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._running: dict[int, _Running] = {}

    def submit(self, run: Callable[[], int], limits: Limits, then: Callable[[Ended], None]) -> None:
        """Forks a process for ``run`` as soon as there is room; ``then`` is called here once it has ended."""
        while len(self._running) >= self._jobs:
            self._wait()
        if (pid := os.fork()) == 0:
            _become(run, limits)
        self._running[pid] = _Running(since=time.monotonic(), limits=limits, then=then)

    def drain(self) -> None:
        """Waits for all."""
        while self._running:
            self._wait()

    def close(self) -> None:
        """Ends all at once."""
        for pid in self._running:
            _end_session(pid)

    def _wait(self) -> None:
        for pid, running in list(self._running.items()):
            late = time.monotonic() - running.since > running.limits.wall_s
            if late:
                _end_session(pid)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                _end_session(pid)
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                seconds = time.monotonic() - running.since
                out_of_time = late or code in (-signal.SIGXCPU, -signal.SIGKILL)
                running.then(Ended(status=code, out_of_time=out_of_time, seconds=seconds))
        time.sleep(0.02)


def _end_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _become(run: Callable[[], int], limits: Limits) -> None:
    """The forked process."""
    status = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        status = run()
    except BaseException:  # noqa: BLE001  the end of a process: what went wrong is told there
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def preload() -> None:
    """Imports what takes long, and nothing of what is tested."""
    for name in _PRELOADED:
        importlib.import_module(name)
    assert "holdfast" not in sys.modules


def _enter(root: Path, sources: Path, output: Path) -> None:
    """Prepares a forked process: where the code and the tests are, and where what they print goes."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(_ENVIRONMENT, PYTHONPATH=str(sources))
    os.chdir(root)
    sys.path.insert(0, str(sources))
    hypothesis: Any = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("mutate", derandomize=True, database=None, deadline=None, max_examples=25)
    hypothesis.settings.load_profile("mutate")


def _pytest(arguments: Sequence[str], work: Path, plugin: object) -> int:
    pytest: Any = importlib.import_module("pytest")
    basetemp = work / "tmp"
    try:
        return int(pytest.main([*_ALWAYS, f"--basetemp={basetemp}", *arguments], plugins=[plugin]))
    finally:
        shutil.rmtree(basetemp, ignore_errors=True)


class _Recorder:
    """Notes for every test what it takes, whether it passes, and which lines it runs."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.cpu_s: dict[str, float] = {}
        self.failed: set[str] = set()

    def _runtest(self, item: Any) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        start = time.process_time()
        yield
        self.cpu_s[item.nodeid] = time.process_time() - start
        self._coverage.switch_context("")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Of a simulation with many seeds or places only a few are kept, evenly spread: the rest takes hours."""
        cases: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            cases[item.nodeid.split("[")[0] if "/sim/" in item.nodeid else item.nodeid].append(item)
        items[:] = [item for each in cases.values() for item in each[:: -(-len(each) // _OF_ONE_TEST)]]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that is red or left out without any mutant says nothing about one."""
        if not report.passed:
            self.failed.add(report.nodeid)


def record(root: Path, test_file: str, targets: Sequence[str], work: Path, answer: Path) -> int:
    """Runs a file of tests and writes what each of them covers as JSON.

    Args:
        root: of the repository.
        test_file: relative to it.
        targets: the files of ``src/holdfast`` that are looked at.
        work: for temporary files.
        answer: ``{test: {"seconds": float, "lines": {path: [line, ...]}}}``.
    """
    _enter(root, root / "src", work / "output.txt")
    pytest: Any = importlib.import_module("pytest")
    coverage: Any = importlib.import_module("coverage")
    package = root / "src" / "holdfast"
    measured = coverage.Coverage(
        data_file=None, include=[str(package / target) for target in targets], config_file=False
    )
    recorder = _Recorder(measured)
    _Recorder.pytest_runtest_protocol = pytest.hookimpl(hookwrapper=True)(_Recorder._runtest)  # type: ignore[attr-defined]
    measured.start()
    _pytest([test_file, "-m", "not dist", "-p", "no:xdist"], work, recorder)
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[str, list[int]]] = {test: {} for test in recorder.cpu_s if test not in recorder.failed}
    for file in data.measured_files():
        path = Path(file).relative_to(package).as_posix()
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                if test in lines:
                    lines[test].setdefault(path, []).append(line)
    found = {test: {"seconds": recorder.cpu_s[test], "lines": lines[test]} for test in lines}
    answer.write_text(json.dumps({"tests": found, "left_out": sorted(recorder.failed)}))
    return 0


class _Names:
    """Notes which tests there are."""

    def __init__(self, answer: Path) -> None:
        self._answer = answer

    def pytest_collection_finish(self, session: Any) -> None:
        """All are found."""
        self._answer.write_text(json.dumps([item.nodeid for item in session.items]))


def collect(root: Path, work: Path, answer: Path) -> int:
    """Writes the names of all tests that there are, of processes too, as JSON; returns pytest's exit status."""
    _enter(root, root / "src", work / "output.txt")
    return _pytest(["tests", "--collect-only", "-q", "-p", "no:xdist"], work, _Names(answer))


class _Chosen:
    """Keeps to the tests that were chosen, in their order, and notes the first that is red, or is not there any more.

    A mutant changes the names of tests if it changes what they are made of: somebody sees it.
    """

    def __init__(self, tests: Sequence[str], answer: Path) -> None:
        self._order: Mapping[str, int] = {test: index for index, test in enumerate(tests)}
        self._answer = answer

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Sorts and leaves out; without one of them, none is run."""
        gone = self._order.keys() - {item.nodeid for item in items}
        if gone:
            self._answer.write_text(min(gone, key=self._order.__getitem__))
            items.clear()
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The first red test ends the run."""
        if report.failed:
            self._answer.write_text(report.nodeid)


def try_mutant(root: Path, sources: Path, tests: Sequence[str], work: Path, answer: Path) -> int:
    """Runs tests against the code in ``sources``, up to the first that is red, whose name is written to ``answer``.

    Returns:
        pytest's exit status: 0 if the mutant survives; 5, no tests, if it has not all of them any more.
    """
    _enter(root, sources, work / "output.txt")
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    return _pytest([*files, "-x", "-p", "no:xdist", "--timeout=600"], work, _Chosen(tests, answer))
