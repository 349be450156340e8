"""What operations took in a run."""

import pytest

from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.measured import measured_costs

PLAN = regular_plan(1, split_evenly(4, 2), 1)
FIRST = (("F", 0, 0, 10.0, 10.2), ("B", 0, 0, 10.9, 11.3))
LAST = (("F", 0, 0, 10.25, 10.5), ("B", 0, 0, 10.5, 10.9))


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
