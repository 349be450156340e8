"""In which order a dataset's samples come: in every epoch a function of its number and of a seed alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from holdfast.data.permutations import Permutation, permutation
from holdfast.data.randomness import apart, mixed, seed_all
from holdfast.errors import ConfigError

__all__ = ["Order", "grouped_by_length", "in_sequence", "sampled", "shuffled", "weighted"]

Entries = Sequence[Any] | Permutation
_MEGABATCH = 50
"""So many items are drawn at once and sorted by length: enough to be alike, few enough that epochs differ."""
_WEIGHTS = 1
_TOO_LONG = 100
"""A sampler that gives so many times the dataset's length is taken for one without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The samples of all epochs, one behind the other, cut into items.

    Attributes:
        epoch: returns the entries of an epoch: samples, or, where somebody else makes the batches, a list of them each.
        length: entries of each epoch, at least 1.
        size: entries of an item.
        num_samples: of an item, as far as that is known beforehand.
    """

    epoch: Callable[[int], Entries]
    length: int
    size: int
    num_samples: int

    def item(self, number: int) -> tuple[int, ...]:
        """Returns the samples of an item; ``number``: counted over all steps."""
        at, end = number * self.size, (number + 1) * self.size
        found: list[Any] = []
        while at < end:
            epoch, place = divmod(at, self.length)
            entries = self.epoch(epoch)[place : min(place + end - at, self.length)]
            found += entries.tolist() if isinstance(entries, Tensor) else entries
            at += len(entries)
        return tuple(chain.from_iterable(map(_samples, found)))

    def without_rest(self) -> Order:
        """Returns the order in which the samples at the end of an epoch are left out that fill no item."""
        return replace(self, length=self.length - self.length % self.size)


def _samples(entry: Any) -> Iterable[int]:
    return entry if isinstance(entry, tuple) else (int(entry),)


def _flat(epoch: Callable[[int], Entries], length: int, size: int) -> Order:
    if size > length:
        raise ConfigError(
            f"hf.steps: size: an item of {size} samples is larger than the dataset, which has {length} in an epoch; "
            f"expected at most {length}"
        )
    return Order(epoch=lru_cache(maxsize=2)(epoch), length=length, size=size, num_samples=size)


def shuffled(seed: int, length: int, size: int) -> Order:
    """Returns the order in which every sample comes once in each epoch, shuffled anew."""
    return _flat(lambda epoch: permutation(seed, epoch, length), length, size)


def in_sequence(length: int, size: int) -> Order:
    """Returns the order of the dataset itself, the same in every epoch."""
    return _flat(lambda epoch: range(length), length, size)


def weighted(seed: int, weights: Any, length: int, size: int) -> Order:
    """Returns the order in which each sample is drawn by its weight, with replacement.

    Raises:
        ConfigError: there is not one weight for each sample, or not one that is above 0.
    """
    sums = _sums_of(weights, length)
    last = int(torch.searchsorted(sums, sums[-1]))  # behind it all weights are 0

    def draw(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mixed(seed, epoch, _WEIGHTS))
        drawn = torch.rand(length, dtype=torch.float64, generator=generator) * sums[-1]
        return torch.searchsorted(sums, drawn, right=True).clamp_(max=last)

    return _flat(draw, length, size)


def _sums_of(weights: Any, length: int) -> Tensor:
    numbers = _numbers("weights", weights, length).double()
    if not bool(torch.isfinite(numbers).all()) or bool((numbers < 0).any()) or not bool((numbers > 0).any()):
        raise ConfigError("hf.steps: weights: expected finite numbers from 0, and one above it")
    return numbers.cumsum(0)


def _numbers(name: str, values: Any, length: int) -> Tensor:
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"hf.steps: {name}: expected a number for each sample: {error}") from error
    if tuple(found.shape) != (length,):
        raise ConfigError(f"hf.steps: {name}: expected {length} numbers, one for each sample, got {tuple(found.shape)}")
    return found


def grouped_by_length(seed: int, lengths: Any, length: int, size: int) -> Order:
    """Returns the order in which samples of like length share an item, and items are shuffled; each sample comes once.

    Where ``size`` does not divide the dataset, one item of each epoch has fewer samples.

    Args:
        seed: of the shuffle.
        lengths: of each sample, or a function that returns it, given the sample's number.
        length: of the dataset.
        size: of an item.
    """
    told = [lengths(index) for index in range(length)] if callable(lengths) else lengths
    sizes = _numbers("group_by_length", told, length)

    def draw(epoch: int) -> list[tuple[int, ...]]:
        drawn = _cut(permutation(seed, epoch, length)[:], _MEGABATCH * size)
        ordered = torch.cat([each[sizes[each].argsort(descending=True, stable=True)] for each in drawn])
        batches = [tuple(each.tolist()) for each in _cut(ordered, size)]
        return [batches[place] for place in permutation(mixed(seed, epoch) >> 1, epoch, len(batches))[:].tolist()]

    _flat(draw, length, size)  # refuses what is too large
    return Order(epoch=lru_cache(maxsize=2)(draw), length=-(-length // size), size=1, num_samples=size)


def _cut(numbers: Tensor, size: int) -> list[Tensor]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def sampled(seed: int, sampler: Any, dataset_len: int, size: int | None) -> Order:
    """Returns the order that a sampler says, or a batch sampler: read once per epoch, under a seed of that epoch.

    ``set_epoch`` of it is called before, where it has one, and a generator of its own is seeded.

    Args:
        seed: of all epochs.
        sampler: yields samples, or lists of them.
        dataset_len: of the dataset.
        size: samples of an item; None: whoever samples makes the items.

    Raises:
        ConfigError: it is no function of seed and epoch, or cannot be read.
    """
    name = type(sampler).__name__
    first = _read(seed, sampler, 0, dataset_len)
    if not first:
        raise ConfigError(f"hf.steps: sampler: {name} gives nothing in epoch 0")
    _read(seed, sampler, 1, dataset_len)  # one that counts its epochs by itself shows
    if _read(seed, sampler, 0, dataset_len) != first:
        raise ConfigError(
            f"hf.steps: sampler: {name} gives another order when it is read again under the same seed, so no worker "
            "could stand in for another one; expected one that draws from torch, numpy or random alone, or from a "
            "generator that set_epoch(epoch) seeds"
        )

    def read(epoch: int) -> Sequence[Any]:
        found = _read(seed, sampler, epoch, dataset_len)
        if len(found) != len(first):
            raise ConfigError(
                f"hf.steps: sampler: {name} gives {len(found)} in epoch {epoch}, and {len(first)} in epoch 0; expected "
                "as many in each"
            )
        return found

    if not isinstance(first[0], tuple):
        if size is None:
            raise ConfigError(f"hf.steps: size: expected the samples of an item, as {name} gives one at a time")
        return _flat(read, len(first), size)
    if size is not None:
        raise ConfigError(f"hf.steps: size: {name} makes the batches by itself; leave size out")
    return Order(epoch=lru_cache(maxsize=2)(read), length=len(first), size=1, num_samples=len(first[0]))


def _read(seed: int, sampler: Any, epoch: int, dataset_len: int) -> Sequence[Any]:
    most = _TOO_LONG * (dataset_len + _TOO_LONG)
    with apart():
        seed_all(seed, epoch)
        for each in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
            _begin(each, epoch, mixed(seed, epoch))
        found = [_entry(sampler, each) for each in islice(iter(sampler), most)]
    if len(found) == most:
        raise ConfigError(f"hf.steps: sampler: {type(sampler).__name__} does not come to an end; expected an epoch")
    return found if any(isinstance(each, tuple) for each in found) else array("q", found)  # 8 bytes each, and not 36


def _begin(sampler: Any, epoch: int, seed: int) -> None:
    if callable(getattr(sampler, "set_epoch", None)):
        sampler.set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed)


def _entry(sampler: Any, entry: Any) -> int | tuple[int, ...]:
    try:
        if isinstance(entry, list | tuple) or (isinstance(entry, Tensor) and entry.ndim):
            return tuple(int(each) for each in entry)
        return int(entry)
    except (TypeError, ValueError):
        raise ConfigError(
            f"hf.steps: sampler: {type(sampler).__name__} gives a {type(entry).__name__}; expected numbers of samples, "
            "or lists of them"
        ) from None
