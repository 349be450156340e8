"""A run beside its plan."""

import json

import pytest

from holdfast.core.builders import regular_plan
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.telemetry.events import FaultInjected, Installed, StepOps
from holdfast.telemetry.trace import measured_costs, render_run_trace

PLAN = regular_plan(1, split_evenly(4, 2), 1)
FIRST = (("F", 0, 0, 10.0, 10.2), ("B", 0, 0, 10.9, 11.3))
LAST = (("F", 0, 0, 10.25, 10.5), ("B", 0, 0, 10.5, 10.9))


def step(worker, ops, number=3):
    return 11.5, StepOps(worker=worker, generation=1, step=number, loss=None, omitted=False, ops=ops)


TIMED = [
    (9.0, Installed(generation=1, workers=("0.0", "0.1"), strategy="")),
    (9.5, FaultInjected(worker="0.1", kind="slow", step=3, point="start", spec="slow:0.1@3:2x")),
    step("0.0", FIRST),
    step("0.1", LAST),
]


def spans(text, pid):
    events = json.loads(text)["traceEvents"]
    return [(e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X" and e["pid"] == pid]


def test_what_ran_is_shown_in_microseconds_from_the_first_event():
    text = render_run_trace(TIMED, {})
    assert spans(text, 0) == [("F0.0", 1_000_000, 200_000), ("B0.0", 1_900_000, 400_000)]
    assert spans(text, 1) == [("F0.0", 1_250_000, 250_000), ("B0.0", 1_500_000, 400_000)]
    assert spans(text, 1000) == []


def test_beside_it_stands_the_plan_from_the_start_of_the_same_step():
    text = render_run_trace(TIMED, {1: PLAN})
    assert spans(text, 1000) == [("F0.0", 1_000_000, 200_000), ("B0.0", 1_850_000, 400_000)]
    assert spans(text, 1001) == [("F0.0", 1_200_000, 250_000), ("B0.0", 1_450_000, 400_000)]


def test_a_profile_times_the_plan_instead():
    text = render_run_trace(TIMED, {1: PLAN}, unit_costs(4))
    assert spans(text, 1001) == [("F0.0", 3_000_000, 2_000_000), ("B0.0", 5_000_000, 4_000_000)]


def test_stages_are_named_and_sorted_with_their_plans_beside_them():
    events = json.loads(render_run_trace(TIMED, {1: PLAN}))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        0: "workers *.0, measured",
        1000: "workers *.0, planned",
        1: "workers *.1, measured",
        1001: "workers *.1, planned",
    }
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [0, 1000, 1, 1001]
    assert {e["name"] for e in events if e["ph"] == "i"} == {"generation 1", "slow 0.1"}


def test_medians_are_shared_by_the_layers_of_a_worker():
    ran = [dict(zip(PLAN.workers, (FIRST, LAST), strict=True))] * 3
    costs = measured_costs(PLAN, ran)
    assert costs.forward == pytest.approx((0.1, 0.1, 0.125, 0.125))
    assert costs.input == pytest.approx((0.2, 0.2, 0.2, 0.2))
    assert costs.weight == (0.0,) * 4


def test_halves_of_the_backward_pass_are_told_apart():
    ops = (("F", 0, 0, 0.0, 1.0), ("I", 0, 0, 1.0, 3.0), ("W", 0, 0, 3.0, 6.0))
    costs = measured_costs(PLAN, [dict.fromkeys(PLAN.workers, ops)])
    assert (costs.input, costs.weight) == ((1.0,) * 4, (1.5,) * 4)


def test_an_empty_run_is_an_empty_trace():
    assert json.loads(render_run_trace([], {}))["traceEvents"] == []
