from __future__ import annotations

import pytest

from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.list_scheduler import list_schedule, plain_urgency
from holdfast.planning.solvers.process import answer_of, given_of
from holdfast.planning.timing import check, measure

windows = pytest.importorskip(
    "holdfast.planning.solvers.windows", reason="CP-SAT is not installed: pip install holdfast[solver]"
)
UNEVEN = {"costs": "10,11,8", "comm": "1", "optimizer": "5"}


def poor(memory, *, coupled, ties=(), microbatches=20):
    """A given, and a schedule in which every worker holds one micro-batch at a time."""
    grid = CostedGrid(
        pipelines=1,
        stages=split_evenly(4, 4),
        microbatches=microbatches,
        costs=parse_costs(4, memory=memory, **UNEVEN),
        ties=ties,
    )
    problem = grid_problem(grid, [], coupled=coupled)
    return problem, list_schedule(problem, plain_urgency(problem), limits=[1] * 4)


def asked(problem, hint, *, staggered, time_limit_s):
    found = measure(problem, hint, staggered=staggered)
    value = found.period if staggered else found.makespan
    return given_of(problem, staggered=staggered, hint=hint, value=value, goal=value - 1, time_limit_s=time_limit_s)


@pytest.mark.parametrize(
    ("memory", "coupled", "staggered", "ties"),
    [
        ("2,1,1,8", False, True, ()),
        ("2,1,1,8", False, True, ((0, 3),)),
        ("2,1,1,8", False, False, ()),
        (None, True, False, ()),
        ("1,0,1,4:3:2:1", True, False, ()),
    ],
    ids=["staggered", "tied", "makespan", "no limit, coupled", "coupled"],
)
def test_windows_shorten_a_poor_schedule_and_keep_all_rules(memory, coupled, staggered, ties, monkeypatch):
    monkeypatch.setattr(windows, "_SMALL", 100)
    problem, hint = poor(memory, coupled=coupled, ties=ties)
    given, scale = asked(problem, hint, staggered=staggered, time_limit_s=100.0)
    assert windows.suits(given)
    solved = windows.solve(given)
    answer = answer_of(problem, solved, scale)
    assert not answer.proved
    check(problem, answer.schedule)
    found = measure(problem, answer.schedule, staggered=staggered)
    assert (found.period if staggered else found.makespan) <= solved["value"] < given["value"]


def test_small_problems_and_rounded_times_are_not_for_windows():
    problem, hint = poor("2,1,1,8", coupled=False, microbatches=55)
    given, _ = asked(problem, hint, staggered=True, time_limit_s=1.0)
    assert windows.suits(given)
    assert not windows.suits({**given, "exact": False})
    assert not windows.suits({**given, "worker_of": given["worker_of"][:100]})


@pytest.mark.parametrize("exact", [True, False])
def test_the_largest_problems_are_left_as_they_are(exact, monkeypatch):
    from holdfast.planning.solvers import cp_sat  # needs the solver, which may not be installed

    problem, hint = poor("2,1,1,8", coupled=False, microbatches=55)
    given, _ = asked(problem, hint, staggered=True, time_limit_s=1.0)
    monkeypatch.setattr(windows, "_LARGE", 3 * 4 * 55 - 1)
    answer = cp_sat.solve({**given, "exact": exact})
    assert answer == {"status": "UNKNOWN", "value": None, "bound": given["goal"], "starts": []}
