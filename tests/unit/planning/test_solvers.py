"""Which problems are given to the solver, and what is said of others."""

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.errors import InternalError
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.planner import Solver, Technique, make_plan
from holdfast.planning.solvers.process import given_of, suits
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency


def grid_of(costs="1,1,1", memory="2,1,1,8", microbatches=4):
    stages = split_evenly(3, 3)
    costs = parse_costs(3, costs=costs, memory=memory)
    return CostedGrid(pipelines=2, stages=stages, microbatches=microbatches, costs=costs)


@pytest.mark.parametrize(
    ("given", "length", "suited"),
    [
        ({}, 20.0, True),
        ({"costs": "1.5,0.5,2"}, 20.0, True),
        ({"costs": "1000,2000,1000"}, 20_000.0, True),
        ({"costs": "1000,2000,1001"}, 20_000.0, False),
        ({"costs": "0.1234567,1,1"}, 20.0, False),
        ({"costs": "1,0,1"}, 20.0, False),
        ({"memory": "2,1,1,8.1234567"}, 20.0, True),
        ({"memory": "2,1.1234567,0.8765433,8"}, 20.0, False),
        ({}, 20_000.0, False),
    ],
    ids=["units", "halves", "one unit of 1000", "many moments", "no unit", "no time", "any room", "no byte", "long"],
)
def test_short_times_in_whole_numbers_are_counted(given, length, suited):
    assert suits(grid_problem(grid_of(**given), [], coupled=False), length) is suited


def test_what_is_not_counted_is_the_list_schedulers_and_that_is_said():
    pytest.importorskip("ortools", reason="CP-SAT is not installed: pip install holdfast[solver]")
    grid, staggered = grid_of(costs="0.1234567,0.2,0.1", microbatches=6), Technique.STAGGERED
    options = {"time_limit_s": 5.0, "tries": 5}
    made = {each: make_plan(grid, [WorkerId(0, 1)], staggered, engine=each, **options) for each in Solver}
    assert len({found.found for found in made.values()}) == 1
    assert not made[Solver.LIST].optimal
    assert "short times in whole numbers" in made[Solver.CP_SAT].note
    assert made[Solver.AUTO].note == made[Solver.LIST].note == ""


def test_what_is_no_whole_number_is_never_given():
    problem = grid_problem(grid_of(costs="0.1234567,1,1"), [], coupled=False)
    with pytest.raises(InternalError, match="whole numbers"):
        given_of(
            problem,
            staggered=True,
            hint=list_schedule(problem, plain_urgency(problem)),
            value=20.0,
            goal=10.0,
            time_limit_s=1.0,
        )
