from math import inf

import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.schedule import bounds
from holdfast.schedule.bounds import Bound, BoundRules, bound


def of(failures, costs, rules=None, pipelines=3, microbatches=6):
    """The bound of a grid in which every stage is one layer."""
    each = [costs.of(LayerRange(layer, layer + 1)) for layer in range(costs.num_layers)]
    return bound(each, costs.comm, [-(-pipelines * microbatches // (pipelines - x)) for x in failures], rules)


@pytest.mark.parametrize(
    ("failures", "period", "makespan"), [((0, 0, 0, 0), 19, 21), ((0, 0, 1, 0), 27, 29), ((1, 0, 0, 0), 27, 27)]
)
def test_the_running_example(failures, period, makespan):
    assert of(failures, unit_costs(4)) == Bound(period=period, makespan=makespan)


@pytest.mark.parametrize(("f", "b", "w", "o"), [(10, 11, 8, 5), (1, 4, 2, 0), (10, 11, 1, 3)])
@pytest.mark.parametrize("x", [0, 1, 2])
def test_equal_stages_without_messages_give_the_closed_form(f, b, w, o, x):
    n = -(-3 * 6 // (3 - x))
    found = of((0, 0, 0, x), parse_costs(4, costs=f"{f},{b},{w}", optimizer=str(o)))
    idle = max(0, 4 * f + 3 * b - 6 * f)
    assert found.period == max(n * (f + b + w), (n + 3) * (f + b) + w, 9 * (f + b) + w, 6 * (f + b + w) + idle) + o


def test_unequal_stages_and_messages():
    costs = parse_costs(2, costs="10:20,11:21,8:18", comm="3", optimizer="2:9")
    found = of((0, 0), costs, pipelines=1, microbatches=1)
    assert found == Bound(period=10 + 3 + 20 + 21 + 3 + 11 + 8 + 2, makespan=76)


def test_memory_forces_idle_time_before_the_first_backward_and_after_the_last_forward():
    before, after = 4 + 3 - 2, 3 + 3 - 2
    assert of((0, 0, 0, 0), parse_costs(4, memory="2,1,1,4")).period == 6 * 3 + before + after


def test_a_limit_that_nothing_counts_against_is_none():
    assert of((0, 0, 1, 0), parse_costs(4, memory="0,0,0,8")) == of((0, 0, 1, 0), unit_costs(4))


def test_memory_forces_w_before_the_last_forward():
    forced = 9 - 4
    assert of((0, 0, 1, 0), parse_costs(4, memory="1,0,1,4")).period == 2 + 9 * 2 + forced + 2 + 1
    assert of((0, 0, 1, 0), parse_costs(4, memory="1,0,1,5")).period == 27


def test_coupled_and_synchronous_schedules_have_bounds_of_their_own():
    coupled = BoundRules(coupled=True, staggered=False)
    assert of((0, 0, 1, 0), unit_costs(4), coupled) == Bound(period=33, makespan=33)
    classic = BoundRules(coupled=True, staggered=False, classic=True)
    assert of((0, 0, 0, 0), parse_costs(4, optimizer="1:2:3:1"), classic) == Bound(period=30, makespan=27)


def test_memory_for_more_microbatches_than_anybody_counts_is_bounded_at_once():
    assert of((0, 0, 1, 0), parse_costs(4, memory="2,1,1,1e15")) == of((0, 0, 1, 0), unit_costs(4))
    slow_way = "1e9:1:1:1,1e9:1:1:1,1e9:1e-9:1:1"
    least = of((0, 0, 0, 0), parse_costs(4, costs=slow_way)).period
    assert least <= of((0, 0, 0, 0), parse_costs(4, costs=slow_way, memory="2,1,1,1e15")).period < inf


@pytest.mark.parametrize("capacity", [4, 7, 12.5, 30])
@pytest.mark.parametrize("memory", ["2,1,1", "1,0,1", "3,1,2"])
def test_the_bound_for_many_held_is_lower_by_one_w_at_most(capacity, memory, monkeypatch):
    costs = parse_costs(4, costs="1:2:5:1,3:1:1:2,2:0.5:3:1", memory=f"{memory},{capacity}")
    exact = of((0, 0, 1, 0), costs)
    monkeypatch.setattr(bounds, "LOOKED_AT", 0)
    looser = of((0, 0, 1, 0), costs)
    assert exact.period - 3 <= looser.period <= exact.period
