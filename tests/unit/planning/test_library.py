import dataclasses
import hashlib
import itertools
import os
import time
from types import SimpleNamespace

import pytest

from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.core.validate import validate
from holdfast.errors import InfeasiblePlan
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary, breakpoints, serve, straightened
from holdfast.planning.normalise import place
from holdfast.planning.planner import Technique
from holdfast.schedule.timing import Measure

GRID = CostedGrid(
    pipelines=4,
    stages=split_evenly(4, 4),
    microbatches=8,
    costs=parse_costs(4, costs="3,4,2", comm="1", optimizer="2", memory="2,1,1,8"),
)
STAGGERED = Technique.STAGGERED
SCHEDULES = 20
"""How many a search makes by the clock of ``counted``."""


@pytest.fixture
def counted(monkeypatch):
    """A clock that shows a second more after each schedule of a search: how fast the machine is decides nothing."""
    monkeypatch.setattr("holdfast.planning.search.time", SimpleNamespace(monotonic=itertools.count().__next__))


@pytest.fixture
def filled(tmp_path):
    library = PlanLibrary(tmp_path / "plans")
    return library, library.fill(GRID, 6, STAGGERED, time_limit_s=0.12)


def test_every_count_has_a_proved_plan_and_more_failures_are_never_faster(filled):
    library, summary = filled
    assert summary.plans == 6
    assert 1 <= summary.schedules <= len(set(breakpoints(GRID, 6, STAGGERED)[1:]))
    periods = []
    for count in range(1, 7):
        planned = library.find(GRID, count, STAGGERED)
        assert sum(planned.failures_per_stage) == count
        validate(planned.plan, costs=GRID.costs)
        assert len(planned.plan.workers) == 16 - count
        assert planned.found.period >= planned.bound.period
        periods.append(planned.found.period)
    assert periods == sorted(periods)
    assert summary.worst_gap == max(library.find(GRID, count, STAGGERED).gap for count in range(1, 7))


def test_a_library_is_read_back(filled, tmp_path):
    library, _ = filled
    again = PlanLibrary(tmp_path / "plans")
    for count in range(1, 7):
        assert again.find(GRID, count, STAGGERED).plan == library.find(GRID, count, STAGGERED).plan
    assert again.find(GRID, 7, STAGGERED) is None
    assert again.find(GRID, 1, Technique.DECOUPLED) is None


def test_a_plan_for_tied_layers_is_another(filled):
    library, _ = filled
    tied = dataclasses.replace(GRID, ties=((0, 3),))
    assert library.find(tied, 1, STAGGERED) is None
    made = library.get(tied, 1, STAGGERED)
    assert made.problem.ties == ((0, 3),)
    assert library.find(tied, 1, STAGGERED) is made


def test_a_lookup_takes_less_than_a_millisecond(filled):
    library, _ = filled
    library.find(GRID, 3, STAGGERED)
    started = time.process_time()
    for _ in range(100):
        library.find(GRID, 3, STAGGERED)
    assert (time.process_time() - started) / 100 < 1e-3


def test_a_missing_plan_is_made_at_once_and_kept(tmp_path):
    made = PlanLibrary(tmp_path).get(GRID, 2, STAGGERED)
    assert PlanLibrary(tmp_path).find(GRID, 2, STAGGERED).plan == made.plan
    with pytest.raises(InfeasiblePlan, match="at most 12"):
        PlanLibrary(tmp_path).get(GRID, 13, STAGGERED)


def test_in_memory_alone_it_has_the_same_plans_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library, written = PlanLibrary(None), PlanLibrary(tmp_path / "plans")
    assert library.find(GRID, 2, STAGGERED) is None
    assert library.stamp == written.stamp == 0
    plans = [each.get(GRID, 2, STAGGERED).plan for each in (library, written)]
    assert plans[0] == plans[1] == library.find(GRID, 2, STAGGERED).plan
    assert (library.stamp, written.stamp > 0) == (0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]
    library._schedules.clear()  # as it does where they are large
    library._answers.clear()
    assert library.find(GRID, 2, STAGGERED) is None
    assert library.get(GRID, 2, STAGGERED).plan == plans[0]


def test_steps_make_what_is_missing_first_then_improve_each_schedule_once(tmp_path, counted):
    library = PlanLibrary(tmp_path)
    tops = sorted(set(breakpoints(GRID, 6, STAGGERED)[1:]))
    made = [library.step(GRID, 6, STAGGERED, time_limit_s=SCHEDULES) for _ in tops]
    assert made == tops
    before = [library.find(GRID, count, STAGGERED).found.period for count in range(1, 7)]
    improved = []
    while (count := library.step(GRID, 6, STAGGERED, time_limit_s=SCHEDULES)) is not None:
        improved.append(count)
    assert improved == [top for top in tops if top in improved]
    after = [library.find(GRID, count, STAGGERED).found.period for count in range(1, 7)]
    assert after == sorted(after)
    assert all(new <= old for new, old in zip(after, before, strict=True))
    assert sum(after) < sum(before)


def test_a_reader_sees_what_another_process_improves(tmp_path, counted):
    writer, reader = PlanLibrary(tmp_path), PlanLibrary(tmp_path)
    assert reader.find(GRID, 1, STAGGERED) is None
    for _ in set(breakpoints(GRID, 6, STAGGERED)[1:]):
        writer.step(GRID, 6, STAGGERED, time_limit_s=SCHEDULES)
    first = [reader.find(GRID, count, STAGGERED).found.period for count in range(1, 7)]
    while writer.step(GRID, 6, STAGGERED, time_limit_s=SCHEDULES) is not None:
        pass
    assert sum(reader.find(GRID, count, STAGGERED).found.period for count in range(1, 7)) < sum(first)
    assert reader.find(GRID, 6, STAGGERED).plan == writer.find(GRID, 6, STAGGERED).plan


@pytest.mark.parametrize("technique", [Technique.ADAPTIVE, Technique.DECOUPLED, STAGGERED])
def test_a_missing_plan_of_a_job_is_made_within_a_tenth_of_a_second(tmp_path, technique):
    grid = CostedGrid(pipelines=4, stages=split_evenly(4, 4), microbatches=16, costs=GRID.costs)
    taken = []
    for nth in range(3):
        started = time.process_time()
        planned = PlanLibrary(tmp_path / str(nth)).get(grid, 2, technique)
        taken.append(time.process_time() - started)
        validate(planned.plan, costs=grid.costs)
    assert min(taken) < 0.1


def test_filling_again_never_makes_a_plan_worse(filled):
    library, _ = filled
    before = [library.find(GRID, count, STAGGERED).found.period for count in range(1, 7)]
    library.fill(GRID, 6, STAGGERED, time_limit_s=0.1)
    after = [library.find(GRID, count, STAGGERED).found.period for count in range(1, 7)]
    assert all(new <= old for new, old in zip(after, before, strict=True))


def test_a_schedule_that_is_worse_than_one_for_more_failures_is_not_used():
    """The search for two failures was unlucky; the schedule for four serves two as well, with two to spare."""
    periods = {1: 10.0, 2: 14.0, 4: 12.0, 6: 15.0}
    found = {count: Measure(period=period, makespan=period) for count, period in periods.items()}
    index = {1: 1, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6}
    assert straightened(index, found) == {1: 1, 2: 4, 3: 4, 4: 4, 5: 6, 6: 6}
    assert straightened(index, found | {2: found[4]}) == index, "as good is good enough"


def test_what_is_not_measured_yet_is_left_alone():
    found = {4: Measure(period=12.0, makespan=12.0)}
    assert straightened({1: 1, 2: 4, 6: 6}, found) == {1: 1, 2: 4, 6: 6}


def garbage(path):
    path.write_bytes(b"\x00garbage\xff")


def bracket(path):
    path.write_bytes(b"[")


def number(path):
    path.write_text("7")


def deep(path):
    path.write_text("[" * 100_000)


def long_number(path):
    path.write_text('{"1": ' + "9" * 5000 + "}")


def folder(path):
    path.unlink()
    path.mkdir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def dangling(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def forged(path):
    """With the right digest, and nonsense in it."""
    body = b'{"failed": ["0.0"], "optimal": true, "integral": true, "lengths": [9, 9, 9, 9]}' + bytes(200)
    path.write_bytes(hashlib.sha256(body).digest() + body)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("pattern", ["*.json", "*.plan"])
@pytest.mark.parametrize(
    "damage",
    [garbage, bracket, number, deep, long_number, folder, pipe, dangling, forged, flipped],
    ids=lambda d: d.__name__,
)
def test_whatever_is_wrong_in_a_library_costs_a_line_and_is_made_again(filled, tmp_path, pattern, damage):
    for path in (tmp_path / "plans").glob(pattern):
        damage(path)
    told = []
    library = PlanLibrary(tmp_path / "plans", told.append)
    if (pattern, damage) != ("*.json", flipped):
        assert [library.find(GRID, 1, STAGGERED) for _ in range(3)] == [None] * 3
        assert len(told) == (damage is not dangling or pattern != "*.json"), (
            "an index that is not there is nothing wrong"
        )
    made = library.get(GRID, 1, STAGGERED)
    assert library.find(GRID, 1, STAGGERED).plan == made.plan, "kept in memory if it cannot be written"
    assert all("\n" not in line for line in told)
    again = PlanLibrary(tmp_path / "plans", told.append)
    if damage is not folder:
        assert again.find(GRID, 1, STAGGERED).plan == made.plan
    assert not [path for path in (tmp_path / "plans").iterdir() if path.name.startswith("tmp")]


def test_a_folder_that_cannot_be_written_costs_a_line_for_each_file(tmp_path):
    (tmp_path / "plans").write_text("a file is in the way")
    told = []
    library = PlanLibrary(tmp_path / "plans", told.append)
    assert library.get(GRID, 1, STAGGERED).plan == library.get(GRID, 1, STAGGERED).plan
    assert len(told) == 2
    assert all("cannot be written" in line for line in told)


def test_a_plan_does_not_serve_failures_that_it_needs(filled):
    library, _ = filled
    planned = library.find(GRID, 1, STAGGERED)
    with pytest.raises(InfeasiblePlan, match=r"0\.0"):
        serve(planned, GRID, [*place((0, 0, 0, 0), 4), next(iter(planned.plan.workers))])
