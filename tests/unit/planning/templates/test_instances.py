"""The best pipelines, against every multiset with every distribution's best time."""

import itertools
import random

import pytest

from holdfast.errors import InfeasiblePlan
from holdfast.planning.templates.batches import fastest_shares
from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.pace import Pace, pace_of

ALIKE = {size: Pace(lines=((12 / size, size / 10),)) for size in (2, 3, 4)}


def any_paces(rng):
    first = rng.randint(1, 3)
    found = {}
    for size in range(first, first + rng.randint(1, 4)):
        stage_s = [rng.randint(1, 12) / size for _ in range(size)]
        found[size] = pace_of(stage_s, max(range(size), key=lambda k: (stage_s[k], k)))
    return found


def step(paces, sizes, microbatches):
    chosen = [paces[size] for size in sizes]
    return max(p.seconds(n) for p, n in zip(chosen, fastest_shares(chosen, microbatches), strict=True))


def every_instance(sizes, nodes, at_least):
    """Every multiset of sizes that uses all nodes with so many pipelines or more: Oobleck, equation 5."""
    if nodes == 0 and at_least <= 0:
        yield ()
    for place, size in enumerate(sizes):
        if size <= nodes:
            for others in every_instance(sizes[place:], nodes - size, at_least - 1):
                yield (size, *others)


@pytest.mark.parametrize("seed", range(150))
def test_no_other_pipelines_are_faster(seed):
    rng = random.Random(seed)
    paces, nodes, at_least = any_paces(rng), rng.randint(3, 14), rng.randint(1, 3)
    microbatches = rng.randint(at_least, 24)

    def times(used):
        return [
            step(paces, sizes, microbatches)
            for sizes in every_instance(tuple(paces), used, at_least)
            if len(sizes) <= microbatches
        ]

    used = next((count for count in range(nodes, 0, -1) if times(count)), None)
    if used is None:
        with pytest.raises(InfeasiblePlan, match="pipeline"):
            best_instance(paces, nodes, at_least, microbatches)
        return
    found = best_instance(paces, nodes, at_least, microbatches)
    assert step(paces, found.sizes, microbatches) == min(times(used))
    assert found.dormant == nodes - used
    assert sum(found.sizes) == used
    assert sum(found.microbatches) == microbatches
    assert min(found.microbatches) >= 1
    assert len(found.sizes) >= at_least
    assert found.microbatches == fastest_shares([paces[size] for size in found.sizes], microbatches)


def test_the_listing_has_every_multiset_once():
    listed = list(every_instance((2, 3, 4), 13, 2))
    every = {
        sizes
        for many in range(2, 8)
        for sizes in itertools.combinations_with_replacement((2, 3, 4), many)
        if sum(sizes) == 13
    }
    assert len(listed) == len(every) == len(set(listed))
    assert set(listed) == every


def test_nodes_that_no_pipelines_can_use_are_dormant():
    found = best_instance({3: ALIKE[3], 4: ALIKE[4]}, 5, 1, 8)
    assert (found.sizes, found.dormant) == ((4,), 1)


def test_there_are_no_more_pipelines_than_micro_batches():
    assert len(best_instance(ALIKE, 12, 2, 3).sizes) == 3


def test_too_few_nodes_or_micro_batches_are_told():
    with pytest.raises(InfeasiblePlan, match="5 nodes and 8 micro-batches do not make 3"):
        best_instance(ALIKE, 5, 3, 8)
    with pytest.raises(InfeasiblePlan, match="12 nodes and 2 micro-batches"):
        best_instance(ALIKE, 12, 3, 2)
