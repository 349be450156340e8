"""Any sizes, any pipelines, any losses: what templates guarantee."""

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planning.templates.reconfigure import Pipelines, reconfigured
from holdfast.planning.templates.sizes import usable_nodes

MANY = settings(max_examples=300)


@st.composite
def losses(draw):
    minimum = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(minimum, 3 * minimum + 2), min_size=1, max_size=6))
    nodes = draw(st.permutations(range(sum(sizes) + 3)))
    pipelines, rest = [], list(nodes)
    for size in sizes:
        pipelines.append(tuple(rest[:size]))
        rest = rest[size:]
    dormant = tuple(rest[: draw(st.integers(0, 3))])
    there = [*dormant, *(node for pipeline in pipelines for node in pipeline)]
    lost = draw(st.sets(st.sampled_from(there), max_size=len(there) - minimum))
    return Pipelines(pipelines=tuple(pipelines), dormant=dormant), lost, minimum


@MANY
@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 40))
def test_consecutive_sizes_use_any_number_of_nodes(minimum, tolerate, more):
    """p >= 1 + ceil((n0 - 1) / (f + 1)) sizes are enough for every number of nodes from (f + 1) n0 on."""
    enough = 1 + ceil((minimum - 1) / (tolerate + 1))
    fewest, sizes = (tolerate + 1) * minimum, range(minimum, minimum + enough)
    nodes = fewest + more
    assert set(range(fewest, nodes + 1)) <= set(usable_nodes(sizes, nodes, tolerate + 1))
    assert min(usable_nodes(sizes, nodes, tolerate + 1)) == fewest


@MANY
@given(st.integers(2, 8), st.integers(0, 3))
def test_one_size_fewer_is_not_enough(minimum, tolerate):
    few = ceil((minimum - 1) / (tolerate + 1))
    fewest = (tolerate + 1) * minimum
    usable = usable_nodes(range(minimum, minimum + few), fewest + minimum, tolerate + 1)
    assert not set(range(fewest, fewest + minimum + 1)) <= set(usable)


@MANY
@given(losses())
def test_whoever_is_left_is_used_once_in_pipelines_that_have_templates(given_losses):
    before, lost, minimum = given_losses
    after = reconfigured(before, lost, minimum)
    used = [node for pipeline in after.pipelines for node in pipeline]
    assert sorted([*used, *after.dormant]) == sorted(before.nodes - lost)
    assert set(after.dormant) <= set(before.dormant)
    assert all(len(pipeline) >= minimum for pipeline in after.pipelines)
    most = max(2 * minimum - 1, *(len(pipeline) for pipeline in before.pipelines))
    assert all(len(pipeline) <= most for pipeline in after.pipelines)
    keys = [(len(pipeline), pipeline[0]) for pipeline in after.pipelines]
    assert keys == sorted(keys)


@MANY
@given(losses())
def test_as_many_pipelines_stay_as_there_are_nodes_for(given_losses):
    """So f + 1 stay as long as there are (f + 1) n0 nodes, wherever those that are lost were."""
    before, lost, minimum = given_losses
    after = reconfigured(before, lost, minimum)
    enough = sum(map(len, after.pipelines)) // minimum
    assert len(after.pipelines) >= min(len(before.pipelines), enough)


@MANY
@given(losses())
def test_what_is_not_concerned_is_not_touched(given_losses):
    before, lost, minimum = given_losses
    after = reconfigured(before, lost, minimum)
    whole = [pipeline for pipeline in before.pipelines if not set(pipeline) & lost]
    short = [p for p in ({*pipeline} - lost for pipeline in before.pipelines) if len(p) < minimum]
    if not short:
        kept = {tuple(node for node in pipeline if node not in lost) for pipeline in before.pipelines}
        assert set(after.pipelines) == kept, "simple reinstantiation moves nobody"
    for pipeline in whole:
        now = next(each for each in after.pipelines if pipeline[0] in each)
        if len(now) < len(pipeline):
            assert now == pipeline[: len(now)], "nodes are borrowed from the end"
        elif len(now) > len(pipeline):
            assert now[-len(pipeline) :] == pipeline, "a merger comes before the first that has enough"


@MANY
@given(losses(), st.data())
def test_sizes_without_a_template_leave_nodes_dormant(given_losses, data):
    before, lost, minimum = given_losses
    sizes = {minimum, *data.draw(st.sets(st.integers(minimum, 3 * minimum)))}
    after = reconfigured(before, lost, minimum, sizes)
    assert {len(pipeline) for pipeline in after.pipelines} <= sizes
    assert sorted([*after.dormant, *(n for p in after.pipelines for n in p)]) == sorted(before.nodes - lost)
