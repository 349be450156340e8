"""Who goes where some nodes cannot reach each other: as few as can be, found by trying all."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.core.reach import cover
from holdfast.schedule.builders import regular_plan

NODES = [NodeId(f"node-{number}", f"{number:016x}") for number in range(6)]


@st.composite
def broken(draw):
    """A placement on nodes, and pairs of these that cannot reach each other."""
    pipelines, stages = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = regular_plan(pipelines, split_evenly(stages, stages), 1).placement
    gone = draw(st.sets(st.sampled_from(placement.workers), max_size=len(placement.workers) - 1))
    placement = placement.without(gone)
    where = {worker: draw(st.sampled_from(NODES)) for worker in placement.workers}
    where |= {WorkerId(9, spare): draw(st.sampled_from(NODES)) for spare in range(draw(st.integers(0, 2)))}
    pairs = draw(st.sets(st.sampled_from(list(itertools.permutations(NODES, 2))), max_size=8))
    return pairs, where, placement


def cost(nodes, where):
    return sum(node in nodes for node in where.values()), len(nodes)


@given(broken())
def test_as_few_go_as_can_be_and_no_layer_is_lost(given_):
    pairs, where, placement = given_
    owners = [{where[owner] for owner in each} for each in placement.owners_by_layer if each]
    choices = [frozenset(some) for size in range(len(NODES) + 1) for some in itertools.combinations(NODES, size)]
    covers = [
        nodes
        for nodes in choices
        if all(nodes & set(pair) for pair in pairs) and not any(them <= nodes for them in owners)
    ]
    found = cover(pairs, where, placement)
    if not covers or not pairs:
        assert found == frozenset()
    else:
        assert found in covers
        assert cost(found, where) == min(cost(nodes, where) for nodes in covers)


def test_one_node_that_nobody_reaches_goes_not_all_that_cannot_reach_it():
    placement = regular_plan(40, split_evenly(1, 1), 1).placement
    nodes = [NodeId(f"node-{worker.pipeline}", f"{worker.pipeline:016x}") for worker in placement.workers]
    where = dict(zip(placement.workers, nodes, strict=True))
    assert cover([(nodes[7], other) for other in nodes if other != nodes[7]], where, placement) == {nodes[7]}
    halves = [(one, other) for one in nodes[:15] for other in nodes[15:]]
    assert cover(halves, where, placement) == frozenset(nodes[:15]), "in a moment, too"
