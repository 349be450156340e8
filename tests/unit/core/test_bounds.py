import pytest

from holdfast.core.bounds import Bound, BoundRules, bound, failures_per_stage
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement, split_evenly
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.errors import ConfigError, StateUnavailable

GRID = regular_placement(3, split_evenly(4, 4))


@pytest.mark.parametrize(
    ("failures", "period", "makespan"), [((0, 0, 0, 0), 19, 21), ((0, 0, 1, 0), 27, 29), ((1, 0, 0, 0), 27, 27)]
)
def test_the_running_example(failures, period, makespan):
    assert bound(GRID, failures, 6, unit_costs(4)) == Bound(period=period, makespan=makespan)


@pytest.mark.parametrize(("f", "b", "w", "o"), [(10, 11, 8, 5), (1, 4, 2, 0), (10, 11, 1, 3)])
@pytest.mark.parametrize("x", [0, 1, 2])
def test_equal_stages_without_messages_give_the_closed_form(f, b, w, o, x):
    n = -(-3 * 6 // (3 - x))
    found = bound(GRID, (0, 0, 0, x), 6, parse_costs(4, costs=f"{f},{b},{w}", optimizer=str(o)))
    idle = max(0, 4 * f + 3 * b - 6 * f)
    assert found.period == max(n * (f + b + w), (n + 3) * (f + b) + w, 9 * (f + b) + w, 6 * (f + b + w) + idle) + o


def test_unequal_stages_and_messages():
    costs = parse_costs(2, costs="10:20,11:21,8:18", comm="3", optimizer="2:9")
    found = bound(regular_placement(1, split_evenly(2, 2)), (0, 0), 1, costs)
    assert found == Bound(period=10 + 3 + 20 + 21 + 3 + 11 + 8 + 2, makespan=76)


def test_failures_are_counted_per_stage():
    assert failures_per_stage(GRID, [WorkerId(1, 2), WorkerId(0, 2), WorkerId(2, 0)]) == (1, 0, 2, 0)
    with pytest.raises(ConfigError, match=r"9\.9"):
        failures_per_stage(GRID, [WorkerId(9, 9)])


def test_impossible_questions_are_refused():
    with pytest.raises(ConfigError, match=r"\(0, 0\) name 2 stages"):
        bound(GRID, (0, 0), 6, unit_costs(4))
    with pytest.raises(StateUnavailable, match="2"):
        bound(GRID, (0, 0, 3, 0), 6, unit_costs(4))
    with pytest.raises(ConfigError, match="regular grid"):
        bound(GRID.without([WorkerId(0, 0)]), (0, 0, 0, 0), 6, unit_costs(4))
    overlapping = Placement(
        num_layers=3, ranges=((WorkerId(0, 0), LayerRange(0, 2)), (WorkerId(0, 1), LayerRange(1, 3)))
    )
    with pytest.raises(ConfigError, match="0:2, 1:3"):
        bound(overlapping, (0, 0), 1, unit_costs(3))


def test_memory_forces_idle_time_before_the_first_backward():
    costs = parse_costs(4, memory="2,1,1,4")
    assert bound(GRID, (0, 0, 0, 0), 6, costs).period == 6 * 3 + (4 + 3 - 2)


def test_coupled_and_synchronous_schedules_have_bounds_of_their_own():
    coupled = BoundRules(coupled=True, staggered=False)
    assert bound(GRID, (0, 0, 1, 0), 6, unit_costs(4), coupled) == Bound(period=33, makespan=33)
    classic = BoundRules(coupled=True, staggered=False, classic=True)
    assert bound(GRID, (0, 0, 0, 0), 6, parse_costs(4, optimizer="1:2:3:1"), classic) == Bound(period=30, makespan=27)
