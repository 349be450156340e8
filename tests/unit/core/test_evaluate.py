import dataclasses

import pytest
from tests.plan_texts import op_of, orders_of

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import home_placement, split_evenly
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.routes import Routes
from holdfast.core.timeline import Span, activation_memory
from holdfast.core.timeline import timeline as timeline_of
from holdfast.core.work_costs import WorkCosts
from holdfast.errors import InvalidSchedule
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate

PAIR = regular_plan(1, split_evenly(2, 2), 1)


def with_orders(plan, text):
    return dataclasses.replace(plan, orders=orders_of(text, Batch((12, 12, 12))))


def times(timeline):
    return {f"{span.worker} {span.op}": (span.start, span.end) for span in timeline.spans}


def test_the_running_example_takes_27():
    timeline = evaluate(regular_plan(3, split_evenly(4, 4), 6), unit_costs(4))
    assert (timeline.makespan, timeline.period) == (27, 27)


def test_the_makespan_counts_from_the_first_operation():
    plan, costs = regular_plan(3, split_evenly(4, 4), 6), unit_costs(4)
    spans = evaluate(plan, costs).spans
    later = tuple(dataclasses.replace(span, start=span.start + 5, end=span.end + 5) for span in spans)
    assert timeline_of(plan, costs, later).makespan == 27


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (10, 11, 8), (3, 1, 7), (1.5, 2.25, 0.5)])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 6), (3, 2), (5, 12)])
def test_1f1b_takes_what_the_formula_says(f, b, w, p, m):
    costs = parse_costs(p, costs=f"{f},{b},{w}", optimizer="5")
    timeline = evaluate(regular_plan(2, split_evenly(p, p), m), costs)
    assert timeline.makespan == pytest.approx((m + p - 1) * (f + b + w))
    assert timeline.period == pytest.approx(timeline.makespan + 5)


def test_messages_take_their_time_and_occupy_nobody():
    costs = parse_costs(2, costs="10:20,11:21,8:18", comm="3", optimizer="2:9")
    timeline = evaluate(PAIR, costs)
    assert times(timeline) == {
        "0.0 F0.0": (0, 10),
        "0.1 F0.0": (13, 33),
        "0.1 B0.0": (33, 72),
        "0.0 B0.0": (75, 94),
    }
    assert (timeline.makespan, timeline.period) == (94, 103)
    assert all(isinstance(time, int) for span in timeline.spans for time in (span.start, span.end))


def test_a_split_backward_sends_before_it_computes_weights():
    costs = parse_costs(2, costs="10:20,11:21,8:18", comm="3")
    plan = with_orders(PAIR, "0.0: F0.0 I0.0 W0.0\n0.1: F0.0 I0.0 W0.0")
    assert times(evaluate(plan, costs)) == {
        "0.0 F0.0": (0, 10),
        "0.1 F0.0": (13, 33),
        "0.1 I0.0": (33, 54),
        "0.1 W0.0": (54, 72),
        "0.0 I0.0": (57, 68),
        "0.0 W0.0": (68, 76),
    }


def test_stages_of_several_layers_add_up_and_pay_their_own_cut():
    costs = parse_costs(3, costs="1:2:4,1,1", comm="5:7")
    timeline = evaluate(regular_plan(1, split_evenly(3, 2), 1), costs)
    assert times(timeline)["0.1 F0.0"] == (1 + 2 + 7, 1 + 2 + 7 + 4)


def test_memory_is_taken_at_the_start_of_f_and_given_back_at_the_ends():
    placement = home_placement([split_evenly(1, 1)])
    work = WorkCosts(placement, Routes(()), parse_costs(1, memory="5,2,3,99"))
    batch = Batch((3,))
    row = tuple(op_of(text, batch) for text in ["F0.0", "F0.1", "I0.0", "F0.2", "W0.0", "B0.1", "I0.2", "W0.2"])
    assert activation_memory(row, WorkerId(0, 0), work) == (5, 10, 10, 13, 13, 10, 5, 3)


def test_peak_memory_is_per_worker():
    timeline = evaluate(adaptive_plan(regular_plan(3, split_evenly(4, 4), 6), [WorkerId(1, 2)]), unit_costs(4))
    assert dict(timeline.peak_memory)[WorkerId(2, 2)] == 2
    assert len(timeline.peak_memory) == 11


def test_rows_are_found_by_worker():
    timeline = evaluate(PAIR, unit_costs(2))
    assert timeline.of(WorkerId(0, 1))[0] == Span(WorkerId(0, 1), op_of("F0.0", Batch((2,))), 1, 2)
    assert timeline.of(WorkerId(5, 5)) == ()


def test_a_deadlock_is_refused_with_its_place():
    plan = with_orders(regular_plan(1, split_evenly(2, 2), 2), "0.0: F0.0 B0.0 F0.1 B0.1\n0.1: F0.0 F0.1 B0.0 B0.1")
    with pytest.raises(InvalidSchedule, match=r"waits for ever") as caught:
        evaluate(plan, unit_costs(2))
    assert (caught.value.worker, caught.value.position) in {("0.0", 1), ("0.1", 1)}
