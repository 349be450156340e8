from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.timeline import Timeline
from holdfast.drawing.schedule_text import schedule_to_text
from holdfast.schedule.builders import regular_plan
from holdfast.schedule.evaluate import evaluate

PAIR = regular_plan(1, split_evenly(2, 2), 2)


def test_integer_times_give_a_table_of_slots():
    assert schedule_to_text(evaluate(PAIR, unit_costs(2))) == (
        "     0    1    2    3    4    5    6    7    8\n"
        "0.0  F0.0 F0.1 .    .    B0.0 =    .    B0.1 =\n"
        "0.1  .    F0.0 B0.0 =    F0.1 B0.1 =    .    .\n"
        "\n"
        "period    9\n"
        "makespan  9\n"
        "idle      33.3%\n"
        "memory    0.0:2 0.1:1\n"
    )


def test_other_times_give_strips_in_proportion():
    text = schedule_to_text(evaluate(PAIR, parse_costs(2, costs="0.5,0.5,0.5", comm="0.25")), width=40)
    rows = text.splitlines()[:2]
    assert all(len(row) == 45 for row in rows)
    assert rows[0].startswith("0.0  FFFF")
    assert set(rows[0][5:]) == set("FB.")


def test_wide_tables_become_strips():
    assert "=" not in schedule_to_text(evaluate(PAIR, unit_costs(2)), width=44)


def test_times_of_zero_and_empty_timelines_are_drawn():
    assert "idle      0.0%" in schedule_to_text(evaluate(PAIR, parse_costs(2, costs="0,0,0")))
    assert "period    0" in schedule_to_text(Timeline(spans=(), makespan=0, period=0, peak_memory=()))
