"""Micro-batches over unlike pipelines: the least variance, and the least time of the slowest, against all shares."""

import itertools
import random
from fractions import Fraction

import pytest

from holdfast.errors import ConfigError
from holdfast.planning.templates.batches import count_microbatches, even_shares, fastest_shares, nearest_batch
from holdfast.planning.templates.pace import Pace, pace_of


def every_share(pipelines, microbatches):
    for cuts in itertools.combinations(range(1, microbatches), pipelines - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, microbatches)))


def variance(times, shares):
    each = [Fraction(str(time)) * share for time, share in zip(times, shares, strict=True)]
    mean = sum(each) / len(each)
    return sum((value - mean) ** 2 for value in each)


@pytest.mark.parametrize("seed", range(150))
def test_no_shares_vary_less(seed):
    rng = random.Random(seed)
    pipelines = rng.randint(1, 4)
    microbatches = rng.randint(pipelines, 18)
    times = [rng.choice([rng.randint(1, 9), round(rng.uniform(0.1, 3), 3)]) for _ in range(pipelines)]
    shares = even_shares(times, microbatches)
    assert sum(shares) == microbatches
    assert min(shares) >= 1
    assert variance(times, shares) == min(variance(times, each) for each in every_share(pipelines, microbatches))


@pytest.mark.parametrize("seed", range(150))
def test_no_shares_are_done_sooner(seed):
    rng = random.Random(seed)
    paces = []
    for _ in range(rng.randint(1, 4)):
        stage_s = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
        paces.append(pace_of(stage_s, max(range(len(stage_s)), key=lambda k: (stage_s[k], k))))
    microbatches = rng.randint(len(paces), 15)

    def slowest(shares):
        return max(pace.seconds(share) for pace, share in zip(paces, shares, strict=True))

    shares = fastest_shares(paces, microbatches)
    assert sum(shares) == microbatches
    assert min(shares) >= 1
    assert slowest(shares) == min(slowest(each) for each in every_share(len(paces), microbatches))


def test_pipelines_of_two_and_four_stages_get_shares_by_their_steady_time():
    """By latency, which is the same, both would get as much."""
    assert even_shares([2, 1], 12) == (4, 8)


def test_a_pace_is_the_cost_or_what_bounds_it():
    early = pace_of([3, 1, 1, 1], 0)
    assert [early.seconds(count) for count in (4, 8)] == [12, 24]
    late = pace_of([1, 1, 3], 2)
    assert late.seconds(8) == 8 * 3 + 2, "the cost, and what bounds it, are one here"
    assert Pace(lines=((2.0, 1.0),)).most_within(7.0, 100) == 3
    assert Pace(lines=((0.0, 0.0),)).most_within(7.0, 100) == 100


def test_a_batch_that_cannot_be_split_is_answered_with_the_nearest_that_can():
    assert count_microbatches(96, 8, 3) == 12
    assert nearest_batch(101, 8, 3) == 104
    with pytest.raises(ConfigError, match="expected 104, the nearest that can"):
        count_microbatches(101, 8, 3)
    with pytest.raises(ConfigError, match=r"for 3 pipeline\(s\): expected 24"):
        count_microbatches(16, 8, 3)
