"""What of a worker's messages is logged: what may be needed where a node is lost with all owners of a layer."""

from __future__ import annotations

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.lower import lower
from holdfast.core.placement import split_evenly
from holdfast.protocol.log_filter import LogFilter
from holdfast.schedule.builders import regular_plan

TIES = ((0, 5),)
"""As of embedding and head."""


def log_filter(worker, *, pipelines, node_of=None):
    plan = regular_plan(pipelines, split_evenly(6, 3), 2)
    found = LogFilter(node_of=node_of or {})
    found.follow(plan, next(each for each in lower(plan, TIES) if each.worker == worker), TIES)
    return found


def test_without_replicas_all_that_is_sent_is_logged_and_the_sum_of_tied_layers():
    found = log_filter(WorkerId(0, 0), pipelines=1)
    assert (found.ends, found.sums) == ({(Payload.ACTIVATION, 2)}, {(0, 5): 0})
    found = log_filter(WorkerId(0, 1), pipelines=1)
    assert (found.ends, found.sums) == ({(Payload.ACTIVATION, 4), (Payload.GRADIENT, 2)}, {})


@pytest.mark.parametrize("stage", range(3))
def test_where_all_layers_have_owners_on_several_nodes_nothing_is(stage):
    assert not log_filter(WorkerId(0, stage), pipelines=2).any


def test_replicas_on_one_node_are_lost_together():
    """Both middle stages are: who sends to them logs that, and nobody logs what goes to the others."""
    node_of = {
        WorkerId(pipeline, stage): 10 * (stage != 1) * (pipeline + 1) + stage
        for pipeline in (0, 1)
        for stage in range(3)
    }
    ends = [log_filter(WorkerId(0, stage), pipelines=2, node_of=node_of) for stage in range(3)]
    assert [each.ends for each in ends] == [{(Payload.ACTIVATION, 2)}, set(), {(Payload.GRADIENT, 4)}]
    assert [each.sums for each in ends] == [{}, {}, {}], "who has tied layers is not lonely"


def test_within_a_node_nothing_is_logged():
    node_of = {WorkerId(0, 0): 0, WorkerId(0, 1): 0, WorkerId(0, 2): 1}
    assert log_filter(WorkerId(0, 0), pipelines=1, node_of=node_of).ends == frozenset()
    assert log_filter(WorkerId(0, 1), pipelines=1, node_of=node_of).ends == {(Payload.ACTIVATION, 4)}
