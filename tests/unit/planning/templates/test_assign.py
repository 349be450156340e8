"""Nodes at their places: the fewest bytes, against all orders."""

import itertools
import random

import pytest

from holdfast.core.placement import LayerRange
from holdfast.planning.templates.assign import cheapest_assignment, seat
from holdfast.planning.templates.template import Template, TemplateStage

TEMPLATE = Template(
    nodes=3,
    stages=(
        TemplateStage(layers=LayerRange(0, 2), gpus=1),
        TemplateStage(layers=LayerRange(2, 3), gpus=1),
        TemplateStage(layers=LayerRange(3, 5), gpus=2),
        TemplateStage(layers=LayerRange(5, 6), gpus=2),
    ),
    stage_s=(1.0, 1.0, 1.0, 1.0),
    slowest=3,
    iteration_s=1.0,
)


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_is_cheaper(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 6)
    costs = [[rng.choice([0, rng.randint(0, 9), 1 << 50]) for _ in range(size)] for _ in range(size)]
    found = cheapest_assignment(costs)
    assert sorted(found) == list(range(size))

    def cost(columns):
        return sum(costs[row][column] for row, column in enumerate(columns))

    assert cost(found) == min(cost(columns) for columns in itertools.permutations(range(size)))


def test_layers_of_a_node_are_those_of_all_its_stages():
    assert [str(layers) for layers in TEMPLATE.layers_by_node] == ["0:3", "3:5", "5:6"]
    assert TEMPLATE.node_of_stage == (0, 0, 1, 2)


def test_nodes_stay_where_they_lack_the_least():
    held = {7: {3, 4}, 8: {0, 1}, 9: {5}}
    found = seat(TEMPLATE.layers_by_node, (7, 8, 9), held, (10, 20, 30, 40, 50, 60))
    assert found.nodes == (8, 7, 9)
    assert found.copied_bytes == 30, "layer 2 alone is copied"
    assert seat(TEMPLATE.layers_by_node, (7, 8, 9), {}, (1,) * 6).copied_bytes == 6


@pytest.mark.parametrize("seed", range(20))
def test_no_seating_at_the_places_of_several_pipelines_copies_less(seed):
    rng = random.Random(seed)
    places = (*TEMPLATE.layers_by_node, LayerRange(0, 4), LayerRange(4, 6))
    held = {name: set(rng.sample(range(6), rng.randint(0, 4))) for name in "abcd"}
    sizes = [rng.choice([1, rng.randint(1, 9), 1 << 40]) for _ in range(6)]
    found = seat(places, "abcde", held, sizes)

    def lacking(nodes):
        return sum(
            sizes[layer]
            for node, place in zip(nodes, places, strict=True)
            for layer in set(place.indices) - held.get(node, set())
        )

    assert found.copied_bytes == lacking(found.nodes) == min(map(lacking, itertools.permutations("abcde")))
