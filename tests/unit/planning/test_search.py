from __future__ import annotations

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.planning.array_scheduler import suits
from holdfast.planning.search import search
from holdfast.planning.shop import Grid, open_shop
from holdfast.planning.timing import check

FAILED = [WorkerId(0, 1), WorkerId(1, 2)]
LIST_RULES, ARRAY_RULES = 33, 39
"""How many rules each engine begins with."""


def uneven():
    costs = parse_costs(4, costs="10,11,8", comm="1", optimizer="5", memory="2,1,1,8")
    return open_shop(Grid(pipelines=4, stages=split_evenly(4, 4), microbatches=16, costs=costs), FAILED, coupled=False)


def alike():
    """Large enough for the engine that moves all workers at once."""
    costs = parse_costs(8, memory="2,1,1,16")
    grid = Grid(pipelines=32, stages=split_evenly(8, 8), microbatches=32, costs=costs)
    return open_shop(grid, FAILED, coupled=False)


def found(shop, tries, seed=0):
    return search(shop, staggered=True, goal=0.0, time_limit_s=1e9, tries=tries, seed=seed)


def test_climbing_shortens_what_the_known_rules_find():
    shop = uneven()
    climbed = found(shop, LIST_RULES + 200)
    check(shop, climbed.schedule)
    assert climbed.value < found(shop, LIST_RULES).value


@pytest.mark.parametrize(("shop", "rules"), [(uneven(), LIST_RULES), (alike(), ARRAY_RULES)], ids=["list", "arrays"])
def test_equal_arguments_give_equal_schedules_and_more_tries_none_that_are_longer(shop, rules):
    known, climbed = found(shop, rules, seed=1), found(shop, rules + 6, seed=1)
    check(shop, climbed.schedule)
    assert climbed == found(shop, rules + 6, seed=1)
    assert climbed.value <= known.value <= found(shop, 1).value


def test_both_engines_are_searched():
    assert suits(alike())
    assert not suits(uneven())
