"""Any machines, any limit: what groups guarantee."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.planning.groups.chain import MachineChain
from holdfast.planning.groups.costs import GroupCosts
from holdfast.planning.groups.merging import authors_groups, greedy_groups
from holdfast.planning.groups.programme import best_groups

MANY = settings(max_examples=300, deadline=None)


@st.composite
def chains(draw, most):
    """Few different numbers, so that there are ties, or any."""
    count = draw(st.integers(1, most))
    few = draw(st.booleans())
    seconds = st.integers(0, 3) if few else st.floats(0, 9, allow_nan=False, allow_subnormal=False)
    sizes = st.integers(0, 3) if few else st.integers(0, 10**9)
    boundaries = draw(st.lists(sizes, min_size=count - 1, max_size=count - 1))
    interval = draw(st.integers(1, 3))
    return MachineChain(
        compute_s=tuple(draw(st.lists(seconds, min_size=count, max_size=count))),
        boundary_bytes=tuple(boundaries),
        bandwidth=draw(st.sampled_from([0.7, 1, 1.5e9])),
        interval=interval,
        limit_bytes=draw(st.integers(0, interval * sum(boundaries))),
        parallel=draw(st.booleans()),
    )


def brute_force(chain):
    """The best of all contiguous groups within the limit; the first one in the order of their merged boundaries."""
    costs, count = GroupCosts(chain), chain.num_machines
    found = []
    for many in range(count):
        for merged in combinations(range(count - 1), many):
            starts = [0, *(place + 1 for place in range(count - 1) if place not in merged)]
            stored = sum(costs.stored[first - 1] for first in starts[1:])
            if stored > costs.room or any(not costs.stored[place] for place in merged):
                continue
            total = sum(costs.weighted(*each) for each in zip(starts, [*starts[1:], count], strict=True))
            found.append((total, [place not in merged for place in range(count - 1)], starts))
    return costs.rated(min(found)[2])


@MANY
@given(chains(9))
def test_exact_is_the_best_of_all_ties_included(chain):
    assert best_groups(chain) == brute_force(chain)


@settings(max_examples=25, deadline=None)
@given(chains(12))
def test_exact_is_the_best_of_all_of_twelve_machines(chain):
    assert best_groups(chain) == brute_force(chain)


@MANY
@given(chains(40))
def test_every_algorithm_keeps_the_limit_and_none_is_better_than_exact(chain):
    """The exact one says so where too many ways may be the best, as of machines that take no time at all."""
    try:
        best = best_groups(chain)
    except ConfigError as error:
        if "expected boundaries that are rounded" not in str(error):
            raise
        best = None
    for found in filter(None, (best, greedy_groups(chain), authors_groups(chain, 1))):
        assert [machine for group in found.groups for machine in group] == list(range(chain.num_machines))
        assert found.storage_bytes <= chain.limit_bytes
        assert best is None or best.recovery_s <= found.recovery_s
        logged = sum(chain.boundary_bytes[group[0] - 1] for group in found.groups[1:])
        assert found.storage_bytes == chain.interval * logged


@MANY
@given(chains(12))
def test_recovery_is_as_defined(chain):
    count, total = chain.num_machines, 0.0
    found = best_groups(chain)
    for group in found.groups:
        inner = sum(chain.boundary_bytes[machine] for machine in group[:-1]) / chain.bandwidth
        seconds = sum(chain.compute_s[machine] for machine in group) + inner
        total += seconds / (count // len(group) if chain.parallel else 1) * len(group) / count
    assert found.recovery_s == pytest.approx(total)
