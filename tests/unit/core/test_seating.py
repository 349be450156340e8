"""Which node each worker begins on."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import regular_placement, split_evenly
from holdfast.core.seating import seat, survives

A, B, C, D = (NodeId(name=name, nonce=16 * name) for name in "abcd")


def grid(pipelines, stages):
    return regular_placement(pipelines, split_evenly(stages, stages))


def test_a_pipeline_goes_onto_one_node_where_it_fits():
    placement = grid(3, 4)
    where = seat(placement, {A: 4, B: 4, C: 4})
    by_pipeline = {pipeline: {where[WorkerId(pipeline, stage)] for stage in range(4)} for pipeline in range(3)}
    assert by_pipeline == {0: {A}, 1: {B}, 2: {C}}
    assert survives(placement, where) == 2


def test_room_is_filled_where_a_pipeline_fits():
    where = seat(grid(2, 2), {A: 1, B: 3})
    assert sorted(node for worker, node in where.items() if worker.pipeline == 0) == [B, B]


def test_where_one_node_has_room_for_all_the_others_are_used_as_well():
    placement = grid(4, 2)
    where = seat(placement, {A: 4, B: 16})
    assert Counter(where.values()) == {A: 4, B: 4}
    assert survives(placement, where) == 1


def test_workers_change_places_where_a_layer_would_be_lost_with_a_node():
    """Filled in order, c would have all that hold the last layer but one, or both of another."""
    placement = grid(2, 3)
    where = seat(placement, {A: 2, B: 2, C: 2})
    assert survives(placement, where) == 1
    assert Counter(where.values()) == {A: 2, B: 2, C: 2}


def test_who_has_a_node_stays():
    placement = grid(2, 2)
    stay = {WorkerId(0, 0): A, WorkerId(0, 1): A}
    where = seat(placement, {A: 1, B: 2}, stay)
    assert where == {WorkerId(1, 0): B, WorkerId(1, 1): B}
    assert survives(placement, {**stay, **where}) == 1


def test_one_node_survives_nothing():
    placement = grid(3, 2)
    assert survives(placement, seat(placement, {A: 6})) == 0


@pytest.mark.parametrize("nodes", [[A, B], [A, B, C, D]])
@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 5)), extra=st.integers(0, 3), data=st.data())
def test_nobody_is_left_out_and_no_node_has_more_than_it_has_room_for(nodes, shape, extra, data):
    placement = grid(*shape)
    cuts = sorted(data.draw(st.integers(0, shape[0] * shape[1])) for _ in nodes[1:])
    ends = [0, *cuts, shape[0] * shape[1]]
    free = {node: after - before for node, before, after in zip(nodes, ends, ends[1:], strict=False)}
    free[nodes[0]] += extra
    where = seat(placement, free)
    assert sorted(where) == sorted(placement.workers)
    assert all(count <= free[node] for node, count in Counter(where.values()).items())
    assert 0 <= survives(placement, where) < min(shape[0], len(set(where.values()))) + 1
