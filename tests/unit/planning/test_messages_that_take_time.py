"""Messages that take a little time must not make a plan much longer than messages that take none."""

from __future__ import annotations

from math import inf

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.planner import Technique, make_plan


def planned(stages, pipelines, microbatches, failed, tries, **costs):
    grid = CostedGrid(
        pipelines=pipelines,
        stages=split_evenly(stages, stages),
        microbatches=microbatches,
        costs=parse_costs(stages, **costs),
    )
    return make_plan(grid, failed, Technique.STAGGERED, time_limit_s=inf, tries=tries)


def test_uneven_costs_with_messages_reach_the_bound():
    """240 was found in 30 s without looking at instant messages."""
    found = planned(4, 3, 6, (), 100, costs="10,11,8", comm="1", optimizer="5", memory="2,1,1,8")
    assert found.found.period == found.bound.period == 230


@pytest.mark.parametrize("lost", [(WorkerId(1, 2),), (WorkerId(1, 2), WorkerId(2, 3))])
def test_a_hundredth_more_is_not_worth_two_operations(lost):
    """On 4 x 6 a message of a hundredth of an operation lengthened the step by two or three of them."""
    instant, real = (planned(6, 4, 12, lost, 12, memory="2,1,1,12", comm=comm).found.period for comm in ("0", "0.01"))
    assert instant <= real < instant + 0.5
