"""What ``.ci/run`` does once all is installed: every stage, though one is red; and whatever failed once more, alone.

The last lines say how long each stage took, and name every failed test once, with the first line of its error. A test
that is red, and green when it is run again with nothing beside it, is called flaky, and does not make the run red: so a
run ends for a reason that lasts. Whoever sees such a line mends the test, or takes it out. ``make test`` is strict.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "ci"
AGAIN_AT_MOST = 5
"""If more tests than this have failed, something is broken, and running them again would say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the run.

    Attributes:
        name: what it is called in what is printed, and its report's.
        command: what runs it; ``{report}`` stands for the file that pytest writes what became of each test to.
    """

    name: str
    command: tuple[str, ...]


def _tests(target: str) -> Stage:
    return Stage(
        name=target, command=("make", target, "PYTEST_FLAGS=--continue-on-collection-errors --report-log={report}")
    )


STAGES = (
    *(Stage(name=target, command=("make", target)) for target in ("format", "lint", "types", "contracts")),
    *(_tests(target) for target in ("test-values", "test-processes", "test-alone")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What pytest wrote down of its tests.

    Attributes:
        failed: the first line of the error by the name of each failed test, in the order of their failing.
        passed: the names of those that were seen to pass.
        ended: the exit status with which the tests were over; None if they never were.
    """

    failed: Mapping[str, str] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()
    ended: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a stage.

    Attributes:
        stage: which.
        code: its exit status.
        seconds: that it took.
        report: of its tests; an empty one if it has none.
    """

    stage: Stage
    code: int
    seconds: float
    report: Report

    @property
    def is_broken(self) -> bool:
        """Whether it is red for something else than tests that it names."""
        return self.code != 0 and not (self.report.failed and self.report.ended == 1)


def main() -> int:
    """Returns 0 if all is well, or was when it was run once more."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    return run_all(STAGES, cwd=ROOT, reports=REPORTS, again=("--soak",))


def run_all(stages: Sequence[Stage], *, cwd: Path, reports: Path, again: Sequence[str] = ()) -> int:
    """Runs stages one after the other, then what failed; prints what became of them; returns the exit status.

    Args:
        stages: in their order.
        cwd: where they are run.
        reports: a folder for what pytest writes of their tests.
        again: flags of pytest with which each test that is named is run, whatever else is left out.
    """
    reports.mkdir(parents=True, exist_ok=True)
    outcomes = [_run(stage, cwd, reports) for stage in stages]
    first: dict[str, str] = {}
    for outcome in outcomes:
        for name, error in outcome.report.failed.items():
            first.setdefault(name, error)
    lasting = first
    if 0 < len(first) <= AGAIN_AT_MOST:
        command = (sys.executable, "-m", "pytest", "--report-log={report}", *again, *first)
        outcomes.append(_run(Stage(name="again, alone", command=command), cwd, reports))
        second = outcomes[-1].report
        lasting = {name: error for name, error in first.items() if name in second.failed or name not in second.passed}
    _tell(outcomes, first, lasting)
    return int(bool(lasting) or any(outcome.is_broken for outcome in outcomes))


def _run(stage: Stage, cwd: Path, reports: Path) -> Outcome:
    path = reports / f"{stage.name.replace(', ', '-')}.jsonl"
    print(f"== {stage.name}", flush=True)
    started = time.monotonic()
    command = [part.replace("{report}", str(path)) for part in stage.command]
    code = subprocess.run(command, cwd=cwd, check=False).returncode
    report = read_report(path.read_text()) if path.exists() else Report()
    return Outcome(stage=stage, code=code, seconds=time.monotonic() - started, report=report)


def read_report(text: str) -> Report:
    """Returns what a log of pytest's reports says; its last line may be torn, where pytest was killed."""
    failed: dict[str, str] = {}
    passed, ended = set(), None
    for row in (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")):
        ended = row.get("exitstatus", ended)
        if row.get("outcome") == "failed":
            failed.setdefault(row["nodeid"], _first_line(row.get("longrepr")))
        elif row.get("outcome") == "passed" and row.get("when") == "call":
            passed.add(row["nodeid"])
    return Report(failed=failed, passed=frozenset(passed), ended=ended)


def _first_line(error: Any) -> str:
    if isinstance(error, dict) and error.get("reprcrash"):
        text = error["reprcrash"]["message"]
    else:
        text = str(error)
        marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        text = "\n".join(marked) or text
    return next((line.strip() for line in text.splitlines() if line.strip()), "no error is told")


def _tell(outcomes: Sequence[Outcome], first: Mapping[str, str], lasting: Mapping[str, str]) -> None:
    print("== what became of it")
    for outcome in outcomes:
        failed = f", {len(outcome.report.failed)} failed" if outcome.report.failed else ""
        said = "green" if outcome.code == 0 else f"red{failed}"
        print(f"{outcome.stage.name:16} {outcome.seconds:7.0f} s  {said}")
    print(f"{'all':16} {sum(outcome.seconds for outcome in outcomes):7.0f} s")
    for outcome in outcomes:
        if outcome.is_broken:
            print(f"error: {outcome.stage.name} ended with {outcome.code}; its output is above")
    for name, error in first.items():
        print(f"{'FAILED' if name in lasting else 'flaky:'} {name} - {error}")
    if len(first) > AGAIN_AT_MOST:
        print(f"{len(first)} failed, more than {AGAIN_AT_MOST}: nothing was run again")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
