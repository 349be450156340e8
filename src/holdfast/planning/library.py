"""A folder of plans for 1, 2, ... failures, so that the answer to a failure is looked up and not computed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.core.ids import WorkerId
from holdfast.errors import CorruptBlob, HoldfastError, InfeasiblePlan, StorageError
from holdfast.parsing import parsing
from holdfast.plain import one_line
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.normalise import bound_cost, load, min_max, normalised, per_stage
from holdfast.planning.planner import Planned, Solver, Technique, judge, make_plan, plan_bound
from holdfast.planning.search import reached
from holdfast.schedule.bounds import StageBounds
from holdfast.schedule.engine import Schedule
from holdfast.schedule.timing import Measure, sequence_of

__all__ = ["Filled", "PlanLibrary", "breakpoints", "serve", "straightened"]

_FORMAT = 2
_INDEX_BYTES, _PLAN_BYTES = 1 << 24, 1 << 30
_LARGE, _COARSE = 200_000, 0.003
"""Operations from which schedules are shared by counts whose bounds differ by up to this fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What filling a library took.

    Attributes:
        plans: failure counts with a plan.
        schedules: schedules that were made for them.
        wall_s: seconds by the clock.
        cpu_s: seconds of processor time.
        worst_gap: the greatest gap to the bound of any count, as a fraction.
    """

    plans: int
    schedules: int
    wall_s: float
    cpu_s: float
    worst_gap: float


def breakpoints(grid: CostedGrid, failures: int, technique: Technique, tolerance: float = 0.0) -> tuple[int, ...]:
    """Returns for 0, 1, ... failures the largest count, up to ``failures``, that has the same bound.

    Assignments are nested, so a plan for that count serves all counts between.

    Args:
        grid: the grid without failures.
        failures: the largest count.
        technique: what schedules may do.
        tolerance: by which fraction the bounds of counts with a common plan may differ.
    """
    values = _bounds(grid, failures, technique)
    last = failures
    found = [failures] * (failures + 1)
    for number in reversed(range(failures + 1)):
        last = last if values[last] <= values[number] * (1 + tolerance) else number
        found[number] = last
    return tuple(found)


def serve(planned: Planned, grid: CostedGrid, failed: Sequence[WorkerId]) -> Planned:
    """Returns a plan as the answer to fewer failures: workers that live after all are listeners.

    Nothing else changes, so neither does the proof. A listener keeps its layers up to date; when one of the others
    fails in its place, the plan goes on as it is.

    Args:
        planned: a plan.
        grid: the grid that it is of.
        failed: those of its failed workers that have really failed.

    Raises:
        InfeasiblePlan: a worker has failed that the plan needs.
    """
    unknown = set(failed) - planned.problem.failed
    if unknown:
        raise InfeasiblePlan(f"the plan needs worker {min(unknown)}, which has failed: expected a plan without it")
    technique = planned.technique
    lower = plan_bound(grid, per_stage(failed, len(grid.stages)), technique)
    return replace(
        planned,
        listeners=planned.problem.failed - set(failed),
        bound=lower,
        optimal=reached(technique.minimised(planned.found), technique.minimised(lower)),
    )


class PlanLibrary:
    """Plans in a folder, by the digest of (costs, grid, ties, technique) and the number of failures.

    One schedule serves all counts between two breakpoints of the bound. Files are written whole or not at all, and
    readers notice new ones: a library can be read while another process fills it, and filling it again improves it.

    It is advice: what cannot be read is as if it were not there, what cannot be written is kept in memory alone, and
    either is told once.
    """

    def __init__(self, folder: Path | None, note: Callable[[str], None] = lambda text: None) -> None:
        """Opens a library.

        Args:
            folder: where it is or will be; made with mode 0700. None: in memory alone.
            note: called with a line about a file that cannot be read or written, once for each.
        """
        self._folder = folder
        self._note = note
        self._noted: set[str] = set()
        self._indices: dict[str, tuple[tuple[int, int] | None, dict[int, int]]] = {}
        self._schedules: dict[tuple[str, int], Planned] = {}
        self._answers: dict[tuple[str, int], Planned] = {}
        self._measures: dict[tuple[str, int], Measure] = {}
        self._searched: set[tuple[str, int]] = set()

    @property
    def stamp(self) -> int:
        """What differs whenever a file was put into the folder; 0 if there is none."""
        try:
            return self._folder.stat().st_mtime_ns if self._folder is not None else 0
        except OSError:
            return 0

    def find(self, grid: CostedGrid, failures: int, technique: Technique) -> Planned | None:
        """Returns the plan for a number of failures, at their normalised places, or None if there is none yet.

        Cost: microseconds for a plan that this object has seen; else a file is read and the plan proved again.
        """
        digest = _digest(grid, technique)
        top = self._index(digest).get(failures)
        if top is None:
            return None
        if (digest, failures) not in self._answers and not self._look_up(digest, grid, failures, top, technique):
            self._index(digest).pop(failures, None)  # until the index is another one, or the plan is made anew
            return None
        return self._answers[digest, failures]

    def _look_up(self, digest: str, grid: CostedGrid, failures: int, top: int, technique: Technique) -> bool:
        """Whether there is a proved plan."""
        if self._folder is None and (digest, top) not in self._schedules:  # it was too large to be kept
            return False
        path = (self._folder or Path()) / f"{digest}-{top}.plan"
        try:
            with parsing(lambda text: StorageError(f"{path}: {text}"), OSError):
                base = self._schedules.get((digest, top)) or self._read(path, grid, technique)
                self._schedules[digest, top] = base
                self._answers[digest, failures] = (
                    base if top == failures else serve(base, grid, normalised(grid, failures, technique.rules))
                )
        except HoldfastError as error:
            self._tell(path.name, f"a plan is not used: {error}")
            return False
        return True

    def _tell(self, name: str, text: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            self._note(one_line(text))

    def get(self, grid: CostedGrid, failures: int, technique: Technique) -> Planned:
        """Returns the plan for a number of failures; a missing one is made at once by the list scheduler, and kept.

        Raises:
            InfeasiblePlan: the grid does not survive so many failures.
        """
        found = self.find(grid, failures, technique)
        return found or self._make(grid, failures, technique, (failures,), time_limit_s=0.0)

    def step(
        self,
        grid: CostedGrid,
        failures: int,
        technique: Technique,
        *,
        time_limit_s: float,
        engine: Solver = Solver.LIST,
    ) -> int | None:
        """Does the next piece of work in the background, and says for how many failures; None if none is left.

        What is missing comes first, made at once; then every schedule that is not known to be the best is searched for
        a better one, once by this object. Fewer failures come first in both.

        Args:
            grid: the grid without failures.
            failures: the largest count that is wanted.
            technique: what schedules may do.
            time_limit_s: seconds for the search of one schedule.
            engine: what searches.

        Raises:
            InfeasiblePlan: the grid does not survive so many failures.
        """
        digest, last = _digest(grid, technique), _tops(grid, failures, technique)
        missing = next((n for n in range(1, failures + 1) if n not in self._index(digest)), None)
        if missing is not None:
            self._improve(grid, last, last[missing], technique, 0.0, Solver.LIST)
            return last[missing]
        for top in sorted(set(last[1:])):
            if (digest, top) not in self._searched:
                self._searched.add((digest, top))
                found = self.find(grid, top, technique)
                if found is None or not found.optimal:
                    self._improve(grid, last, top, technique, time_limit_s, engine)
                    return top
        return None

    def _improve(
        self, grid: CostedGrid, last: Sequence[int], top: int, technique: Technique, time_limit_s: float, engine: Solver
    ) -> None:
        served = [number for number in range(1, len(last)) if last[number] == top]
        self._make(grid, top, technique, served, time_limit_s=time_limit_s, engine=engine)
        digest = _digest(grid, technique)
        found = {count: measure for (key, count), measure in self._measures.items() if key == digest}
        self._store_index(digest, straightened(self._index(digest), found))

    def fill(self, grid: CostedGrid, failures: int, technique: Technique, *, time_limit_s: float) -> Filled:
        """Makes the plans for 1 to ``failures`` failures, fewer failures first, and improves those that are there.

        More failures never have the shorter period: where a schedule is worse than one for more failures, that one
        takes its place.

        Args:
            grid: the grid without failures.
            failures: at least 1.
            technique: what schedules may do.
            time_limit_s: seconds for the search of all schedules; every schedule is made once, however long that takes.

        Raises:
            InfeasiblePlan: the grid does not survive so many failures.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        last = _tops(grid, failures, technique)
        tops = sorted(set(last[1:]))
        found: dict[int, Measure] = {}
        for nth, top in enumerate(tops):
            served = tuple(number for number in range(1, failures + 1) if last[number] == top)
            share = (time_limit_s - (time.perf_counter() - wall)) / (len(tops) - nth)
            found[top] = self._make(grid, top, technique, served, time_limit_s=max(0.0, share)).found
        digest = _digest(grid, technique)
        index = straightened(self._index(digest), found)
        self._store_index(digest, index)
        return Filled(
            plans=failures,
            schedules=len({index[number] for number in range(1, failures + 1)}),
            wall_s=time.perf_counter() - wall,
            cpu_s=time.process_time() - cpu,
            worst_gap=max(
                (technique.minimised(found[index[number]]) / lower - 1)
                for number, lower in enumerate(_bounds(grid, failures, technique))
                if number and lower
            ),
        )

    def _make(
        self,
        grid: CostedGrid,
        failures: int,
        technique: Technique,
        served: Sequence[int],
        *,
        time_limit_s: float,
        engine: Solver = Solver.LIST,
    ) -> Planned:
        digest, lost = _digest(grid, technique), normalised(grid, failures, technique.rules)
        planned = make_plan(grid, lost, technique, time_limit_s=time_limit_s, engine=engine)
        before = self.find(grid, failures, technique)
        if before is None or before.listeners or planned.found.period < before.found.period:
            body = _encode(planned)
            self._write(f"{digest}-{failures}.plan", hashlib.sha256(body).digest() + body)
            self._remember(digest, failures, planned)
        self._store_index(digest, self._index(digest) | dict.fromkeys(served, failures))
        return self._schedules[digest, failures]

    def _remember(self, digest: str, failures: int, planned: Planned) -> None:
        """Keeps a schedule in memory; of large ones only the last."""
        if planned.problem.num_operations > _LARGE:
            self._schedules.clear()
            self._answers.clear()
        self._schedules[digest, failures] = planned
        self._measures[digest, failures] = planned.found

    def _index(self, digest: str) -> dict[int, int]:
        """Which schedule serves which number of failures; read again whenever the file is another one."""
        stamp = self._stamp(digest)
        if digest not in self._indices or self._indices[digest][0] != stamp:
            self._indices[digest] = stamp, {} if stamp is None else self._read_index(digest)
            for known in (self._answers, self._schedules):
                for key in [key for key in known if key[0] == digest]:
                    del known[key]
        return self._indices[digest][1]

    def _read_index(self, digest: str) -> dict[int, int]:
        assert self._folder is not None, "it has a stamp"
        path = self._folder / f"{digest}.json"
        try:
            with parsing(lambda text: StorageError(f"{path}: {text}"), OSError):
                content = json.loads(_read_file(path, _INDEX_BYTES))
                return {int(number): int(top) for number, top in content.items()}
        except StorageError as error:
            self._tell(path.name, f"the plans that were made ahead are not found: {error}")
            return {}

    def _stamp(self, digest: str) -> tuple[int, int] | None:
        """What differs whenever the file of an index is another one; None if there is none."""
        if self._folder is None:
            return None
        try:
            found = (self._folder / f"{digest}.json").stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _store_index(self, digest: str, index: dict[int, int]) -> None:
        self._write(f"{digest}.json", json.dumps(index).encode())
        self._indices[digest] = self._stamp(digest), index
        self._answers = {key: found for key, found in self._answers.items() if key[0] != digest}

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                descriptor, part = tempfile.mkstemp(dir=self._folder)
                stack.callback(os.unlink, part)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.replace(part, self._folder / name)
                stack.pop_all()
        except OSError as error:
            self._tell(f"{name} written", f"{self._folder / name}: cannot be written: {error.strerror or error}")

    def _read(self, path: Path, grid: CostedGrid, technique: Technique) -> Planned:
        content = _read_file(path, _PLAN_BYTES)
        expected, body = content[:32], content[32:]
        actual = hashlib.sha256(body).digest()
        if actual != expected:
            raise CorruptBlob(f"plan {path}", expected.hex(), actual.hex())
        return _decode(body, grid, technique)


def _read_file(path: Path, longest: int) -> bytes:
    """Returns what is in a regular file of at most so many bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{path}: is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(longest + 1)
    finally:
        os.close(descriptor)
    if len(content) > longest:
        raise StorageError(f"{path}: has more than {longest} bytes")
    return content


def _tops(grid: CostedGrid, failures: int, technique: Technique) -> tuple[int, ...]:
    """Returns for 0, 1, ... failures the count whose schedule serves them."""
    return breakpoints(grid, failures, technique, _COARSE if grid.num_operations > _LARGE else 0.0)


def _bounds(grid: CostedGrid, failures: int, technique: Technique) -> list[float]:
    """Returns the bound on what is minimised for 0, 1, ... failures at their normalised places."""
    stages = StageBounds(grid.each, grid.comm, technique.rules)
    return [
        max(technique.minimised(stages.of(s, load(grid, x))) for s, x in enumerate(counts))
        for counts in min_max(len(grid.stages), failures, bound_cost(grid, technique.rules))
    ]


def straightened(index: Mapping[int, int], found: Mapping[int, Measure]) -> dict[int, int]:
    """Returns the index in which a schedule that is worse than one for more failures is not used any more."""
    straight = dict(index)
    best: int | None = None
    for number in sorted(index, reverse=True):
        top = straight[number]
        if top in found and best is not None and found[top].period > found[best].period:
            straight[number] = best
        elif top in found:
            best = top
    return straight


def _digest(grid: CostedGrid, technique: Technique) -> str:
    content = [
        _FORMAT,
        asdict(grid.costs),
        grid.pipelines,
        [str(layers) for layers in grid.stages],
        grid.microbatches,
        technique.value,
        *([grid.ties] if grid.ties else []),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _encode(planned: Planned) -> bytes:
    """A line of JSON, then the workers of all visits, the sequence, what is fused and the starts as arrays."""
    schedule = planned.schedule
    integral = all(isinstance(start, int) for start in schedule.starts)
    starts: array[float] = array("q" if integral else "d", schedule.starts)
    parts = [array("i", numbers) for numbers in (planned.problem.worker_of, schedule.sequence, sorted(schedule.fused))]
    head = {
        "failed": [str(worker) for worker in sorted(planned.problem.failed)],
        "optimal": planned.optimal,
        "integral": integral,
        "lengths": [*map(len, parts), len(starts)],
    }
    return json.dumps(head).encode() + b"\n" + b"".join(part.tobytes() for part in parts) + starts.tobytes()


def _decode(body: bytes, grid: CostedGrid, technique: Technique) -> Planned:
    started = time.perf_counter()
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    arrays = []
    for kind, length in zip(("i", "i", "i", "q" if head["integral"] else "d"), head["lengths"], strict=True):
        part: array[float] = array(kind)
        size = length * part.itemsize
        part.frombytes(rest[:size])
        rest = rest[size:]
        arrays.append(part.tolist())
    failed = tuple(WorkerId.parse(name) for name in head["failed"])
    worker_of = tuple(int(worker) for worker in arrays[0])
    problem = grid_problem(grid, failed, coupled=technique.rules.coupled, worker_of=worker_of)
    rows: list[list[int]] = [[] for _ in range(problem.num_workers)]
    for number in arrays[1]:
        rows[worker_of[int(number) % problem.num_visits]].append(int(number))
    fused = frozenset(map(int, arrays[2]))
    schedule = Schedule(starts=arrays[3], rows=rows, sequence=sequence_of(problem, rows), fused=fused)
    lower = plan_bound(grid, per_stage(failed, len(grid.stages)), technique)
    return judge(problem, technique, schedule, lower, started=started, proved=head["optimal"])
