"""``make mutate``: draws mutants, runs the tests that cover each, and says which ones no test noticed.

What was found out is kept in ``build/mutate``. A run that was ended goes on where it was. A mutant that was killed is
tried again only if its function or the test that killed it is another one now; one that survived, if any file is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tools.mutate.mutants import Function, Mutant, apply, functions_of, mutants_of, sample
from tools.mutate.runs import Ended, Limits, Pool, collect, preload, record, try_mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
STATE = ROOT / "build" / "mutate"
EXPLAINED = Path(__file__).with_name("survivors.txt")

_DRIVEN = "driver checkpointing resume engine/votes"
_TRANSPORT = "copying exchange framing port transfer"
TARGETS = (
    "core/*.py",
    "planning/shrink.py",
    "planning/takeover.py",
    "schedule/bounds.py",
    "schedule/builders.py",
    "control/membership/*.py",
    "control/checkpoint_ledger.py",
    "control/detection.py",
    "control/plan_lookup.py",
    "control/reshaper.py",
    "planning/*.py",
    "planning/templates/*.py",
    "planning/groups/*.py",
    "recovery/*.py",
    "strategies/*.py",
    "settings/*.py",
    "optim/*.py",
    "storage/*.py",
    "protocol/*.py",
    *(f"runtime/{name}.py" for name in _DRIVEN.split()),
    *(f"runtime/transport/{name}.py" for name in _TRANSPORT.split()),
)
PROCESSES = (
    "tests/dist/test_coming_and_going.py::test_a_lost_worker_is_replaced_and_works_again[1.1]",
    "tests/dist/test_checkpoints.py::test_only_the_last_k_are_kept",
    "tests/dist/test_auditing.py::test_a_loss_in_a_step_that_is_audited",
    "tests/dist/test_loops.py::test_the_same_command_goes_on",
)
"""Jobs of real processes: a mutant of the runtime is tried with them at last, as shells run only there."""

CELL_S = 60.0
"""How many seconds of tests are run against one mutant at most, the quickest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one mutant.

    Attributes:
        key: of the mutant.
        verdict: killed, late (it ran for ever, or used all memory), or survived.
        by: the test that was red; empty if there is none, or it could not even be imported.
        seconds: what it took.
        valid: digests of what the verdict depends on.
    """

    key: str
    verdict: str
    by: str
    seconds: float
    valid: str


def main() -> int:
    """Returns 0 if enough mutants died, and what survived is explained."""
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many mutants are drawn (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default 2)")
    parser.add_argument("--only", default="", help="those whose name contains this, instead of drawing")
    parser.add_argument("--at-least", type=float, default=95.0, help="per cent that must die (default 95)")
    options = parser.parse_args()
    return Session(options.jobs).run(options.count, options.seed, options.only, options.at_least)


class Session:
    """One run of the command."""

    def __init__(self, jobs: int) -> None:
        STATE.mkdir(parents=True, exist_ok=True)
        self._pool = Pool(jobs)
        paths = sorted({path for pattern in TARGETS for path in PACKAGE.glob(pattern)})
        names = [path.relative_to(PACKAGE).as_posix() for path in paths]
        self._sources = {name: (PACKAGE / name).read_text() for name in names}
        self._functions = {name: functions_of(source) for name, source in self._sources.items()}
        self._tests = _Tests(self._functions)
        self._results = _read_results(STATE / "results.jsonl")
        self._all = _digest(ROOT.glob("src/**/*.py")) + _digest(ROOT.glob("tests/**/*.py"))
        self._began = self._tries_began = time.monotonic()

    def run(self, count: int, seed: int, only: str, at_least: float) -> int:
        """See :func:`main`."""
        mutants = [mutant for name, source in self._sources.items() for mutant in mutants_of(name, source)]
        chosen = [m for m in mutants if only in m.key] if only else sample(mutants, count, seed)
        _say(f"{len(chosen)} of {len(mutants)} mutants; state in {STATE.relative_to(ROOT)}")
        preload()
        try:
            self._tests.record(self._pool, list(self._sources))
            self._try_all(chosen)
        finally:
            self._pool.close()
        return self._report(chosen, at_least)

    def _try_all(self, chosen: Sequence[Mutant]) -> None:
        left = [mutant for mutant in chosen if not self._known(mutant)]
        _say(f"{len(chosen) - len(left)} are known, {len(left)} to try")
        self._tries_began = time.monotonic()
        for number, mutant in enumerate(left, 1):
            self._try(mutant, f"{number}/{len(left)}")
        self._pool.drain()

    def _known(self, mutant: Mutant) -> bool:
        found = self._results.get(mutant.key)
        return found is not None and found.valid == self._valid(mutant, found.verdict, found.by)

    def _valid(self, mutant: Mutant, verdict: str, by: str) -> str:
        if verdict == "survived" or not by:
            return self._all
        test = ROOT / by.split("::")[0]
        return f"{self._function(mutant).digest} {_digest([test]) if test.exists() else ''}"

    def _function(self, mutant: Mutant) -> Function:
        found = [each for each in self._functions[mutant.path] if each.name == mutant.function]
        whole = hashlib.sha256(self._sources[mutant.path].encode()).hexdigest()[:16]
        return found[-1] if found else Function(name="", first=1, last=1 << 30, digest=whole)

    def _try(self, mutant: Mutant, which: str) -> None:
        tests = self._tests.covering(mutant, self._function(mutant))
        if mutant.path.startswith(("protocol/", "runtime/")):
            tests += PROCESSES
        if not tests:
            self._note(mutant, which, "survived", "", 0.0)
            return
        work = STATE / "work" / hashlib.sha256(mutant.key.encode()).hexdigest()[:12]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(PACKAGE, work / "src" / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
        (work / "src" / "holdfast" / mutant.path).write_text(apply(mutant, self._sources[mutant.path]))
        answer = work / "killed-by.txt"
        run = partial(try_mutant, ROOT, work / "src", tests, work, answer)
        needed = self._tests.seconds(tests)
        limits = Limits(cpu_s=round(20 + 4 * needed), wall_s=120 + 8 * needed)
        self._pool.submit(run, limits, lambda ended: self._ended(mutant, which, work, ended))

    def _ended(self, mutant: Mutant, which: str, work: Path, ended: Ended) -> None:
        answer = work / "killed-by.txt"
        by = answer.read_text() if answer.exists() else ""
        if ended.status == 0:
            verdict = "survived"
        elif ended.out_of_time:
            verdict = "late"
        elif by or ended.status in (1, 2):  # 2: what was to be tested could not be imported
            verdict = "killed"
        else:
            shutil.copy(work / "output.txt", STATE / "broken.txt")
            raise SystemExit(f"the tests of {mutant.key} ended with {ended.status}: see {STATE / 'broken.txt'}")
        self._note(mutant, which, verdict, by, ended.seconds)
        shutil.rmtree(work, ignore_errors=True)

    def _note(self, mutant: Mutant, which: str, verdict: str, by: str, seconds: float) -> None:
        result = Result(key=mutant.key, verdict=verdict, by=by, seconds=seconds, valid=self._valid(mutant, verdict, by))
        self._results[mutant.key] = result
        with (STATE / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        number, total = map(int, which.split("/"))
        left_s = (time.monotonic() - self._tries_began) / number * (total - number)
        _say(f"{which} {verdict:8} {seconds:5.1f} s, {left_s / 60:3.0f} min left: {mutant.key}")

    def _report(self, chosen: Sequence[Mutant], at_least: float) -> int:
        results = [self._results[mutant.key] for mutant in chosen]
        explained = _explained()
        lines = _table(results)
        survivors = [(mutant, self._results[mutant.key]) for mutant in chosen]
        survivors = [(mutant, result) for mutant, result in survivors if result.verdict == "survived"]
        for mutant, _ in survivors:
            lines.append(f"survived, line {mutant.line}: {mutant.key}")
            lines.append(f"    {explained.get(mutant.key, 'NOT EXPLAINED')}")
        died = 100 * (1 - len(survivors) / len(results))
        unexplained = sum(mutant.key not in explained for mutant, _ in survivors)
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        lines.append(f"{died:.1f} % died, {len(survivors)} survived, {unexplained} of them unexplained")
        lines.append(f"{(time.monotonic() - self._began) / 60:.0f} min, load {load}")
        (STATE / "report.txt").write_text("\n".join(lines) + "\n")
        _say("\n".join(lines))
        return int(died < at_least or unexplained > 0)


class _Tests:
    """What every test covers: recorded once, and again for the files of tests that changed since.

    A line is kept as its function and its distance from where that begins, so a change elsewhere in the code moves
    nothing. Of a function that is another one by now, every line counts as run by all tests that ran any of it.
    """

    def __init__(self, functions: Mapping[str, Sequence[Function]]) -> None:
        self._functions = functions
        self._seconds: dict[str, float] = {}
        self._at: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        self._in: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._changed: set[tuple[str, str]] = set()

    def record(self, pool: Pool, targets: Sequence[str]) -> None:
        """Runs the tests that are not recorded, and loads all."""
        folder = STATE / "coverage"
        folder.mkdir(exist_ok=True)
        files = sorted(path for path in ROOT.glob("tests/**/test_*.py") if "dist" not in path.parts)
        answers = {path: folder / f"{path.stem}-{_digest([path, *_conftests(path)])}.json" for path in files}
        missing = [path for path in files if not answers[path].exists()]
        _say(f"recording what {len(missing)} of {len(files)} files of tests cover")
        for number, path in enumerate(missing, 1):
            work = STATE / "work" / path.stem
            work.mkdir(parents=True, exist_ok=True)
            part = work / "answer.json"
            run = partial(record, ROOT, str(path.relative_to(ROOT)), targets, work, part)
            told = f"{number}/{len(missing)} {path.relative_to(ROOT)}"
            pool.submit(run, Limits(cpu_s=1200, wall_s=3600), partial(self._recorded, told, part, answers[path]))
        pool.drain()
        there = self._collect(pool)
        for answer in answers.values():
            self._load(answer, there)
        if gone := set(PROCESSES) - there:
            raise SystemExit(f"no test any more: {', '.join(sorted(gone))}")

    def _collect(self, pool: Pool) -> set[str]:
        """The tests that there are without a mutant: what was recorded may be of others, which no mutant took away."""
        work = STATE / "work" / "names"
        work.mkdir(parents=True, exist_ok=True)
        found: list[Ended] = []
        pool.submit(partial(collect, ROOT, work, work / "names.json"), Limits(cpu_s=600, wall_s=1800), found.append)
        pool.drain()
        if found[0].status != 0:
            raise SystemExit(f"the tests cannot be collected: see {work / 'output.txt'}")
        return set(json.loads((work / "names.json").read_text()))

    def _recorded(self, told: str, part: Path, answer: Path, ended: Ended) -> None:
        if ended.status != 0:
            raise SystemExit(f"{told}: ended with {ended.status}; see {part.with_name('output.txt')}")
        found = json.loads(part.read_text())
        tests = {
            test: {
                "seconds": each["seconds"],
                "lines": {path: self._relative(path, n) for path, n in each["lines"].items()},
            }
            for test, each in found["tests"].items()
        }
        part.write_text(json.dumps({"tests": tests, "left_out": found["left_out"], "functions": self._digests()}))
        shutil.move(part, answer)
        _say(
            f"{told}: {len(tests)} tests, {ended.seconds:.0f} s"
            + "".join(f"; left out: {t}" for t in found["left_out"])
        )

    def _relative(self, path: str, lines: Iterable[int]) -> list[tuple[str, int]]:
        found = []
        for line in lines:
            inside = [each for each in self._functions[path] if each.first <= line <= each.last]
            found.append((inside[-1].name, line - inside[-1].first) if inside else ("", line))
        return found

    def _digests(self) -> dict[str, dict[str, str]]:
        return {path: {each.name: each.digest for each in found} for path, found in self._functions.items()}

    def _load(self, answer: Path, there: Container[str]) -> None:
        recorded, now = json.loads(answer.read_text()), self._digests()
        before = recorded["functions"]
        self._changed |= {
            (path, name) for path in now for name in now[path] if before.get(path, {}).get(name) != now[path][name]
        }
        for test, each in recorded["tests"].items():
            if test not in there:
                continue
            self._seconds[test] = each["seconds"]
            for path, lines in each["lines"].items():
                for name, line in lines:
                    self._at[path, name, line].add(test)
                    self._in[path, name].add(test)

    def covering(self, mutant: Mutant, function: Function) -> list[str]:
        """The tests that run a mutant's line, the quickest first.

        Of one outside of functions, those that run anything in its file, and those of the test file that is named after
        it: who only reads a value that was made at import runs no line of it.
        """
        tests = self._at[mutant.path, function.name, mutant.line - function.first]
        if (mutant.path, function.name) in self._changed:
            tests = set()
        if function.name in self._classes(mutant.path):
            tests = set().union(*(found for (path, _), found in self._in.items() if path == mutant.path))
            tests |= {
                test for test in self._seconds if Path(test.split("::")[0]).stem == f"test_{Path(mutant.path).stem}"
            }
        tests = tests or self._in[mutant.path, function.name]
        kept, spent = [], 0.0
        for test in sorted(tests, key=lambda test: (self._seconds[test], test)):
            spent += self._seconds[test]
            if spent > CELL_S:
                break
            kept.append(test)
        return kept

    def _classes(self, path: str) -> set[str]:
        """The module and what is run when it is imported."""
        names = {each.name for each in self._functions[path]}
        return {"", *(name.rpartition(".")[0] for name in names)}

    def seconds(self, tests: Iterable[str]) -> float:
        """What tests take without a mutant."""
        return sum(self._seconds.get(test, 10.0) for test in tests)


def _read_results(path: Path) -> dict[str, Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.key: result for result in (Result(**json.loads(line)) for line in lines)}


def _explained() -> dict[str, str]:
    """Why survivors are right to survive: ``key | reason``, one a line."""
    lines = [line for line in EXPLAINED.read_text().splitlines() if line and not line.startswith("#")]
    return {key.strip(): reason.strip() for key, _, reason in (line.rpartition(" | ") for line in lines)}


def _table(results: Iterable[Result]) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result.key.split("/")[0]][result.verdict] += 1
        counts["all"][result.verdict] += 1
    lines = ["package   mutants  killed  late  survived  died"]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        each = counts[name]
        died = 100 * (1 - each["survived"] / each.total())
        lines.append(
            f"{name:9} {each.total():7} {each['killed']:7} {each['late']:5} {each['survived']:9}  {died:.1f} %"
        )
    return lines


def _conftests(test_file: Path) -> list[Path]:
    folders = [folder for folder in test_file.parents if folder.is_relative_to(ROOT / "tests")]
    return [folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()]


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
