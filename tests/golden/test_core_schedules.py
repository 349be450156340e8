"""Schedules as text: a change shows here as a difference that a person can read."""

from pathlib import Path

import pytest

from holdfast.core.builders import adaptive_plan, regular_plan
from holdfast.core.evaluate import evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.core.schedule import format_orders, parse_orders
from holdfast.core.validate import validate

FOLDER = Path(__file__).parent / "schedules"
EXAMPLE = regular_plan(3, split_evenly(4, 4), 6)
CASES = {
    "1f1b-3x4x6": (EXAMPLE, 27),
    "adaptive-3x4x6-without-1.2": (adaptive_plan(EXAMPLE, [WorkerId(1, 2)]), 36),
    "gpipe-2x2x2": (regular_plan(2, split_evenly(2, 2), 2, "gpipe"), 9),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_as_recorded(name):
    plan, makespan = CASES[name]
    text = (FOLDER / f"{name}.txt").read_text()
    assert format_orders(plan.orders) == "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert parse_orders(text) == plan.orders
    validate(plan)
    assert evaluate(plan, unit_costs(plan.placement.num_layers)).makespan == makespan


def test_every_recorded_schedule_is_checked():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
