import itertools
import random

import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.profile import parse_costs
from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.partition import balanced_stages


def costs_of(forward, memory=None):
    return parse_costs(len(forward), costs=f"{':'.join(map(str, forward))},1,2", memory=memory)


def every_cut(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(LayerRange(a, b) for a, b in itertools.pairwise((0, *inner, layers)))


def value(costs, cut):
    times = [costs.of(stage).total for stage in cut]
    return max(times), sum(time * time for time in times)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed):
    rng = random.Random(seed)
    layers = rng.randint(1, 8)
    stages = rng.randint(1, layers)
    costs = costs_of([rng.randint(0, 9) for _ in range(layers)])
    found = balanced_stages(costs, stages)
    assert found in list(every_cut(layers, stages))
    assert value(costs, found) == min(value(costs, cut) for cut in every_cut(layers, stages))


def test_times_are_balanced_not_counts():
    assert [str(stage) for stage in balanced_stages(costs_of([1, 1, 1, 1, 20]), 2)] == ["0:4", "4:5"]


def test_memory_is_a_hard_limit():
    costs = costs_of([1, 1, 1, 1, 20], memory="1,0,1,6")
    assert [str(stage) for stage in balanced_stages(costs, 2, in_flight=2)] == ["0:3", "3:5"]
    with pytest.raises(InfeasiblePlan, match="3 micro-batch"):
        balanced_stages(costs, 2, in_flight=3)
    with pytest.raises(ConfigError, match="expected 1 to 5"):
        balanced_stages(costs, 6)
