"""Orders of an epoch: each number once, held or computed place by place."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.permutations import HELD, Walk, permutation
from holdfast.data.sampler import sample_indices


@given(st.integers(0, 2**62), st.integers(0, 2**31), st.integers(1, 5000))
def test_each_number_comes_once(seed: int, epoch: int, length: int) -> None:
    assert sorted(Walk(seed, epoch, length)[:].tolist()) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 65536, 65537, HELD + 1])
def test_each_number_comes_once_at_every_power_of_two(length: int) -> None:
    assert torch.equal(Walk(1, 2, length)[:].sort().values, torch.arange(length))


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_any_part_is_that_of_the_whole(start: int, stop: int) -> None:
    order = Walk(5, 1, 2500)
    assert torch.equal(order[start:stop], order[:][start:stop])


def test_the_order_is_that_of_earlier_versions() -> None:
    """A job goes on from its checkpoint at the samples that come next."""
    assert Walk(3, 1, 31_000_000)[:4].tolist() == [1593306, 2957560, 18754453, 25258654]
    assert permutation(3, 1, 10)[:4].tolist() == [9, 7, 8, 2]


def test_long_ones_are_not_held() -> None:
    assert isinstance(permutation(0, 0, HELD), torch.Tensor)
    assert isinstance(permutation(0, 0, HELD + 1), Walk)


def test_places_are_spread_as_if_drawn() -> None:
    """How often a number stands at a place, and how far it is to the next: chi-squared by degrees of freedom is 1."""
    length, drawn = 1000, 20000
    firsts = torch.stack([Walk(seed, 0, length)[:3] for seed in range(drawn)])
    steps = (firsts[:, 1] - firsts[:, 0]) % length
    for numbers, expected, least in ((firsts[:, 0], length, 0), (firsts[:, 2], length, 0), (steps, length - 1, 1)):
        counts = torch.bincount(numbers, minlength=length)[least:].double()
        mean = drawn / expected
        assert 0.8 < float(((counts - mean) ** 2 / mean).sum()) / (expected - 1) < 1.2


def test_a_micro_batch_reads_over_the_end_of_a_long_epoch() -> None:
    length = HELD + 5
    last = sample_indices(1, 0, length // 8, length, 8, length)
    rest = length % 8
    assert last[:rest] == permutation(1, 0, length)[length - rest :].tolist()
    assert last[rest:] == permutation(1, 1, length)[: 8 - rest].tolist()


MEMORY = """
import resource
from holdfast.data.sampler import sample_indices
sample_indices(1, 0, 0, 4, 8, 1000)
sample_indices(1, 0, 0, 4, 8, 1_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in (0, 1000, 312_499, 312_500, 400_000):
    for microbatch in range(4):
        assert len(set(sample_indices(1, step, microbatch, 4, 8, 10_000_003))) == 8
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_ten_million_samples_take_less_than_ten_megabytes() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 10 << 10, "KiB"
