"""Groups of machines within a limit of logs, by each algorithm."""

import math
import random
from dataclasses import replace

import pytest

from holdfast.errors import ConfigError
from holdfast.planning.groups.chain import MachineChain
from holdfast.planning.groups.merging import authors_groups, greedy_groups
from holdfast.planning.groups.programme import best_groups
from holdfast.reproduce.facts import facts

FACTS = facts("swift_groups")
ONE_WAY = FACTS["vit_batch"] * FACTS["vit_tokens_of_the_code"] * FACTS["hidden"] * 4
LIMITS = sorted(map(float, FACTS["table7"]))


def vit(limit, boundary=ONE_WAY):
    return MachineChain(
        compute_s=tuple(FACTS["vit_compute_s"]),
        boundary_bytes=(boundary,) * 15,
        bandwidth=FACTS["bandwidth"],
        interval=FACTS["interval"],
        limit_bytes=limit,
    )


def starts(grouping):
    return [group[0] for group in grouping.groups]


PRINTED = {float(limit): row for limit, row in FACTS["table7"].items()}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_rule_of_the_authors_code_makes_12_of_13_rows_of_table_7(limit):
    as_printed = starts(authors_groups(vit(limit), ONE_WAY)) == PRINTED[limit]
    assert as_printed == (limit != 1e12)


def test_the_other_row_of_table_7_is_by_the_rule_of_section_5_3():
    """With the same entries: the one behind the last machine takes of the limit."""
    assert starts(greedy_groups(vit(1e12 - 100 * ONE_WAY))) == PRINTED[1e12]
    rows = [limit for limit in LIMITS if starts(greedy_groups(vit(limit - 100 * ONE_WAY))) == PRINTED[limit]]
    assert [limit for limit in rows if starts(authors_groups(vit(limit), ONE_WAY)) != PRINTED[limit]] == [1e12]


@pytest.mark.parametrize(
    ("boundary", "row"), [(ONE_WAY, 1.4e12), (2 * ONE_WAY, 1e11), (2 * FACTS["vit_batch"] * 49 * 1024 * 4, 1e11)]
)
def test_section_5_3_by_itself_makes_one_row_of_table_7_which_tells_nothing(boundary, row):
    """Where everything fits, or one group is all that does."""
    assert [limit for limit in LIMITS if starts(greedy_groups(vit(limit, boundary))) == PRINTED[limit]] == [row]


@pytest.mark.parametrize("limit", LIMITS)
def test_exact_groups_are_no_worse_than_those_that_were_printed(limit):
    best, theirs = best_groups(vit(limit)), authors_groups(vit(limit), ONE_WAY)
    assert best.recovery_s <= theirs.recovery_s
    assert best.storage_bytes <= limit


SMALL = MachineChain(compute_s=(1, 2, 3, 4), boundary_bytes=(10, 20, 30), bandwidth=10, interval=2, limit_bytes=80)


def test_what_groups_come_to():
    """Two machines are one group: (3 + 2 + 10 / 10) seconds twice, 3 and 4 once."""
    found = best_groups(replace(SMALL, limit_bytes=100))
    assert found.groups == ((0, 1), (2,), (3,))
    assert found.recovery_s == (2 * (1 + 2 + 1) + 3 + 4) / 4
    assert found.storage_bytes == 2 * (20 + 30)
    assert isinstance(found.storage_bytes, int)


def test_the_greedy_is_not_the_best():
    """It merges 2 and 3, 13 seconds for 60 bytes, although 9 seconds for 40 bytes are enough."""
    greedy, best = greedy_groups(SMALL), best_groups(SMALL)
    assert greedy.groups == ((0,), (1,), (2, 3))
    assert best.groups == ((0,), (1, 2), (3,))
    assert best.recovery_s < greedy.recovery_s
    assert best.storage_bytes == SMALL.limit_bytes


def test_parallel_groups_are_divided_by_the_copies_that_there_is_room_for():
    found = best_groups(replace(SMALL, parallel=True, limit_bytes=100))
    assert found.groups == ((0, 1), (2,), (3,))
    assert found.recovery_s == (2 * (1 + 2 + 1) / 2 + 3 / 4 + 4 / 4) / 4


@pytest.mark.parametrize("make", [best_groups, greedy_groups])
def test_ties_go_to_the_lowest_index(make):
    alike = MachineChain(compute_s=(1.0,) * 6, boundary_bytes=(1,) * 5, bandwidth=1, interval=1, limit_bytes=3)
    assert make(alike).groups == ((0, 1), (2, 3), (4,), (5,))


def test_what_is_equal_in_decimals_is_equal():
    chain = MachineChain(
        compute_s=(0.3, 0.0, 0.1, 0.2), boundary_bytes=(1, 0, 1), bandwidth=1, interval=1, limit_bytes=1
    )
    assert best_groups(chain).groups == greedy_groups(chain).groups == ((0, 1), (2,), (3,))


@pytest.mark.parametrize("make", [best_groups, greedy_groups, lambda chain: authors_groups(chain, 7)])
def test_boundaries_of_no_bytes_do_not_merge(make):
    chain = MachineChain(compute_s=(0, 0, 0, 0), boundary_bytes=(5, 0, 5), bandwidth=1, interval=1, limit_bytes=0)
    assert make(chain).groups == ((0, 1), (2, 3))
    assert make(chain).storage_bytes == 0


@pytest.mark.parametrize("make", [best_groups, greedy_groups, lambda chain: authors_groups(chain, 7)])
def test_one_machine_is_one_group(make):
    chain = MachineChain(compute_s=(2.5,), boundary_bytes=(), bandwidth=1, interval=1, limit_bytes=0)
    found = make(chain)
    assert (found.groups, found.recovery_s, found.storage_bytes) == (((0,),), 2.5, 0)


def test_the_authors_rule_counts_an_entry_behind_the_last_machine():
    chain = MachineChain(compute_s=(1, 1, 1), boundary_bytes=(2, 2), bandwidth=1, interval=1, limit_bytes=4)
    assert authors_groups(chain, 0).groups == ((0,), (1,), (2,))
    assert authors_groups(chain, 1).groups == ((0, 1), (2,))
    assert authors_groups(chain, 5).groups == ((0, 1, 2),)


def test_256_machines_take_no_time_to_speak_of():
    rng = random.Random(1)
    many = [rng.randint(10**8, 10**9) for _ in range(255)]
    compute = tuple(rng.uniform(1, 3) for _ in range(256))
    chain = MachineChain(
        compute_s=compute, boundary_bytes=tuple(many), bandwidth=1e9, interval=7, limit_bytes=7 * sum(many) // 3
    )
    best, greedy = best_groups(chain), greedy_groups(chain)
    assert best.storage_bytes <= chain.limit_bytes
    assert best.recovery_s < greedy.recovery_s


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compute_s": ()}, "0 machines are impossible: expected 1 to 1024"),
        ({"boundary_bytes": (1, 2)}, "2 boundaries between 4 machine(s): expected 3"),
        ({"compute_s": (1, -1, 1, 1)}, "compute of machine 1 is -1: expected seconds, 0 or more"),
        ({"boundary_bytes": (1, 2, math.nan)}, "boundary 2 is nan: expected bytes, 0 or more"),
        ({"limit_bytes": math.inf}, "limit is inf: expected bytes, 0 or more"),
        ({"bandwidth": 0}, "a bandwidth of 0 is impossible"),
        ({"bandwidth": math.nan}, "a bandwidth of nan is impossible"),
        ({"interval": 0}, "an interval of 0 is impossible: expected 1 step or more"),
        ({"bandwidth": 1e-300}, "compute and boundaries are too large"),
    ],
)
def test_impossible_chains_are_refused(changed, message):
    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **changed)
    assert message in str(caught.value)


def test_a_sum_of_bytes_that_nobody_can_find_is_given_up():
    """Recovery grows by the same time per byte wherever two machines merge, so any of 2^39 ways may be the best."""
    rng = random.Random(3)
    sizes = tuple(rng.randint(10**8, 10**9) for _ in range(39))
    hard = MachineChain(
        compute_s=(0,) * 40, boundary_bytes=sizes, bandwidth=1e9, interval=1, limit_bytes=int(0.8 * sum(sizes))
    )
    with pytest.raises(ConfigError, match=r"ways to group the machines before .* may be the best"):
        best_groups(hard)
