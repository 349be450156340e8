"""Schedules as text: a change shows here as a difference that a person can read."""

from pathlib import Path

import pytest
from tests.plan_texts import orders_of

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.schedule import format_orders
from holdfast.core.validate import validate
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.planner import Technique, make_plan
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate

FOLDER = Path(__file__).parent / "schedules"
EXAMPLE = regular_plan(3, split_evenly(4, 4), 6)
PLANNED = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory="1,0,1,6"))


def planned(failed, technique):
    """The search stops at the bound, which all of these reach, so the time limit does not matter."""
    return make_plan(PLANNED, failed, technique, time_limit_s=60).plan


CASES = {
    "decoupled-3x4x6-without-1.2": (planned([WorkerId(1, 2)], Technique.DECOUPLED), 29),
    "staggered-3x4x6": (planned([], Technique.STAGGERED), 21),
    "1f1b-3x4x6": (EXAMPLE, 27),
    "adaptive-3x4x6-without-1.2": (adaptive_plan(EXAMPLE, [WorkerId(1, 2)]), 36),
    "gpipe-2x2x2": (regular_plan(2, split_evenly(2, 2), 2, "gpipe"), 9),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_as_recorded(name):
    plan, makespan = CASES[name]
    text = (FOLDER / f"{name}.txt").read_text()
    assert format_orders(plan.orders) == "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert orders_of(text, plan.routes.batch) == plan.orders
    validate(plan)
    assert evaluate(plan, unit_costs(plan.placement.num_layers)).makespan == makespan


def test_every_recorded_schedule_is_checked():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
