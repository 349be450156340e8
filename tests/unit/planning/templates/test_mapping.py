"""The best mapping is the one that looking at all of them finds, with and without limits of memory and of stages."""

import itertools
import random

import pytest

from holdfast.core.placement import LayerRange
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.stages import StageTable
from holdfast.planning.templates.template import iteration_time


def shares(gpus):
    """Every way to give the GPUs of a node to stages."""
    if not gpus:
        yield ()
    for first in range(1, gpus + 1):
        for others in shares(gpus - first):
            yield (first, *others)


def every_mapping(table, nodes, microbatches):
    for by_node in itertools.product(list(shares(table.gpus_per_node)), repeat=nodes):
        gpus = sum(by_node, ())
        if len(gpus) > min(table.num_layers, microbatches):
            continue
        for inner in itertools.combinations(range(1, table.num_layers), len(gpus) - 1):
            cuts = (0, *inner, table.num_layers)
            yield tuple(zip(itertools.starmap(LayerRange, itertools.pairwise(cuts)), gpus, strict=True))


def fits(table, mapping, microbatches):
    return all(
        table.most_held(layers, gpus) >= min(microbatches, len(mapping) - place)
        for place, (layers, gpus) in enumerate(mapping)
    )


def value(table, mapping, microbatches):
    time = iteration_time([table.seconds(layers, gpus) for layers, gpus in mapping], microbatches)
    return time, len(mapping), tuple(layers.start for layers, _ in mapping)


def best_of_all(table, nodes, microbatches):
    return min(
        (
            value(table, mapping, microbatches)
            for mapping in every_mapping(table, nodes, microbatches)
            if fits(table, mapping, microbatches)
        ),
        default=None,
    )


def found(table, nodes, microbatches):
    template = best_templates(table, [nodes], microbatches).get(nodes)
    if template is None:
        return None
    mapping = [(stage.layers, stage.gpus) for stage in template.stages]
    assert tuple(mapping) in set(every_mapping(table, nodes, microbatches))
    assert fits(table, mapping, microbatches)
    assert template.stage_s == tuple(table.seconds(*stage) for stage in mapping)
    return template.iteration_s, len(template.stages), tuple(layers.start for layers, _ in mapping)


def any_table(rng, memory=True):
    """Small and uneven; times are small whole numbers, so that many mappings tie."""
    layers, gpus, most = rng.randint(1, 7), rng.randint(1, 3), rng.choice([2, 9, 100])
    rows = [[rng.randint(rng.random() > 0.2, most) for _ in range(layers)]]
    for count in range(2, gpus + 1):
        if rng.random() < 0.7:
            rows.append([round(time / count ** rng.choice([0.5, 1])) for time in rows[0]])
        else:
            rows.append([rng.randint(1, most) for _ in range(layers)])

    def sizes(most):
        return tuple(rng.randint(0, most) for _ in range(layers))

    return StageTable(
        layer_s=tuple(map(tuple, rows)),
        state_bytes=sizes(6),
        held_bytes=sizes(4),
        recomputed_bytes=sizes(3),
        memory_bytes=rng.choice([None, rng.randint(5, 60)]) if memory else None,
    )


def table_of(*rows, state=0, held=0, memory=None):
    layers = len(rows[0])
    return StageTable(
        layer_s=rows,
        state_bytes=(state,) * layers,
        held_bytes=(held,) * layers,
        recomputed_bytes=(0,) * layers,
        memory_bytes=memory,
    )


@pytest.mark.parametrize("seed", range(400))
def test_no_mapping_is_better(seed):
    rng = random.Random(seed)
    table = any_table(rng)
    nodes = rng.randint(1, min(3, table.num_layers))
    microbatches = rng.choice([nodes, rng.randint(nodes, 12)])
    assert found(table, nodes, microbatches) == best_of_all(table, nodes, microbatches)


def recursion(table, microbatches, start, stop, gpus, at):
    """Every division of layers and GPUs by the paper's equations 1 to 4, the second half beginning at k.

    The terms of both halves are put together as the equations say; all divisions are kept, as the best half need not be
    part of the best whole.
    """
    in_node = table.gpus_per_node - at % table.gpus_per_node
    if gpus <= in_node:
        time = table.seconds(LayerRange(start, stop), gpus)
        yield 1, 0, time, time, time
    for middle in range(start + 1, stop):
        for first in range(1, gpus):
            for left in recursion(table, microbatches, start, middle, first, at):
                if left[0] > 1:
                    continue  # the first half is one stage: every mapping comes about just once
                for right in recursion(table, microbatches, middle, stop, gpus - first, at + first):
                    stages, t1 = left[0] + right[0], left[2] + right[2]
                    if left[4] > right[4]:
                        yield stages, left[1], t1, left[3] + right[2], left[4]
                    else:
                        yield stages, left[0] + right[1], t1, right[3], right[4]


@pytest.mark.parametrize("seed", range(60))
def test_the_corrected_recursion_finds_the_same(seed):
    rng = random.Random(1000 + seed)
    table = any_table(rng, memory=False)
    nodes = rng.randint(1, min(3, table.num_layers))
    microbatches = rng.randint(nodes, 12)
    times = (
        max(t1 + (microbatches - stages + k - 1) * slowest + t3, microbatches * slowest)
        for stages, k, t1, t3, slowest in recursion(
            table, microbatches, 0, table.num_layers, nodes * table.gpus_per_node, 0
        )
        if stages <= microbatches
    )
    assert best_templates(table, [nodes], microbatches)[nodes].iteration_s == min(times)


def test_ties_go_to_the_fewest_stages_then_to_the_smallest_first_layers():
    one_gpu_is_enough = table_of((4, 4), (4, 4))
    assert [stage.gpus for stage in best_templates(one_gpu_is_enough, [1], 4)[1].stages] == [1, 1]
    no_time = table_of((0, 0, 0, 0), (0, 0, 0, 0))
    template = best_templates(no_time, [2], 4)[2]
    assert [(stage.layers.start, stage.gpus) for stage in template.stages] == [(0, 2), (1, 2)]


def test_a_stage_holds_as_many_micro_batches_as_stages_are_to_go():
    free = best_templates(table_of((1, 1, 1, 1)), [2], 8)[2]
    assert [str(stage.layers) for stage in free.stages] == ["0:2", "2:4"]
    tight = best_templates(table_of((1, 1, 1, 1), held=1, memory=3), [2], 8)[2]
    assert [str(stage.layers) for stage in tight.stages] == ["0:1", "1:4"], (
        "two layers would hold two micro-batches each"
    )
    assert not best_templates(table_of((1, 1, 1, 1), held=1, memory=2), [2], 8)


def test_there_are_no_more_stages_than_micro_batches_and_no_more_nodes_than_layers():
    table = table_of((1, 1, 1), (1, 1, 1))
    assert list(best_templates(table, [1, 2, 3, 4], 9)) == [1, 2, 3]
    assert list(best_templates(table, [1, 2, 3], 2)) == [1, 2]
    assert len(best_templates(table, [1], 1)[1].stages) == 1


def test_decimals_that_are_equal_tie():
    """0.1 + 0.2 is 0.3, whatever their sum is in floating point."""
    template = best_templates(table_of((0.1, 0.2, 0.3)), [2], 10)[2]
    assert [str(stage.layers) for stage in template.stages] == ["0:2", "2:3"]
    assert template.slowest == 1, "the last of the slowest stages"


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_binds_in_larger_models(seed):
    """Against all cuts of one GPU per node, where a dynamic programme over (layers, nodes, slowest) is small."""
    rng = random.Random(seed)
    layers, nodes, microbatches = 9, 4, 16
    table = StageTable(
        layer_s=(tuple(rng.uniform(1, 3) for _ in range(layers)),) * 2,
        state_bytes=(5,) * layers,
        held_bytes=tuple(rng.randint(1, 3) for _ in range(layers)),
        recomputed_bytes=(0,) * layers,
        memory_bytes=rng.randint(14, 22),
    )
    expected = best_of_all(table, nodes, microbatches)
    result = found(table, nodes, microbatches)
    assert (result is None) == (expected is None)
    if expected is not None:
        assert result[0] == pytest.approx(expected[0], rel=1e-12)
        assert result[1:] == expected[1:]
