"""What a script wants of its data, as ``hf.steps`` is told it, or as a ``DataLoader`` says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data._utils import worker as _loading

from holdfast.data.feeds import PREFETCH, Feed, Indexed, Streamed
from holdfast.data.orders import Order, grouped_by_length, in_sequence, sampled, shuffled, weighted
from holdfast.data.streams import Stream
from holdfast.errors import ConfigError

__all__ = ["Wanted", "feed_of"]

_MARKED = 32
"""Items of a stream from one mark to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was said of the data; None: nothing.

    Attributes:
        dataset: samples by index, or one behind the other; or a ``DataLoader``, which says all the rest.
        size: samples of an item.
        shuffle: whether they are shuffled anew every epoch; None: unless another order is told.
        sampler: yields the samples of an epoch, or the batches.
        weights: of each sample, by which it is drawn with replacement.
        group_by_length: lengths of samples, or a function of a sample's number: samples of like length share an item.
        collate: makes a batch of samples.
        loaders: processes that load ahead, per worker.
        prefetch: items that each of them makes ahead.
        pin_memory: whether batches are in pinned memory where they are computed with.
        to_device: whether they are on the device there.
        on_start: called in each of them with its number.
        seed: of the order.
        drop_last: whether the samples at the end of an epoch are left out that fill no item.
    """

    dataset: Any
    size: int | None = None
    shuffle: bool | None = None
    sampler: Any = None
    weights: Any = None
    group_by_length: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    loaders: int | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    to_device: bool = False
    on_start: Callable[[int], object] | None = None
    seed: int = 0
    drop_last: bool = False


def feed_of(wanted: Wanted, tell: Callable[[str], None]) -> Feed:
    """Returns what items are made of.

    Args:
        wanted: what was said.
        tell: told what does not become of it what its user may think.

    Raises:
        ConfigError: it cannot be had with workers that come and go; says what can.
    """
    _check(wanted)
    if isinstance(wanted.dataset, DataLoader):
        wanted = _read_loader(wanted, wanted.dataset, tell)
    elif wanted.sampler is not None and not _is_stream(wanted.dataset):
        wanted = _ordered(wanted, wanted.sampler, tell)
    if _is_stream(wanted.dataset):
        return _streamed(wanted, tell)
    order = _order_of(wanted, _length_of(wanted.dataset))
    if wanted.drop_last:
        order = order.without_rest()
    return _feed(wanted, Indexed(wanted.dataset, order), order.num_samples)


def _check(wanted: Wanted) -> None:
    for name, value, least in (
        ("size", wanted.size, 1),
        ("workers", wanted.loaders, 0),
        ("prefetch", wanted.prefetch, 1),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"hf.steps: {name}: expected a whole number from {least}, got {value!r}")
    orders = [name for name in ("sampler", "weights", "group_by_length") if getattr(wanted, name) is not None]
    orders += ["shuffle"] * (wanted.shuffle is not None and (bool(orders) or isinstance(wanted.dataset, DataLoader)))
    if len(orders) > 1:
        raise ConfigError(f"hf.steps: expected one order, got {' and '.join(orders)}")
    if orders and isinstance(wanted.dataset, DataLoader):
        raise ConfigError(
            f"hf.steps: {orders[0]}: a DataLoader says the order of its samples; give its dataset instead"
        )


def _feed(wanted: Wanted, source: Any, num_samples: int) -> Feed:
    return Feed(
        source=source,
        num_samples=num_samples,
        collate=wanted.collate or default_collate,
        loaders=wanted.loaders or 0,
        prefetch=wanted.prefetch or PREFETCH,
        pin_memory=bool(wanted.pin_memory),
        to_device=wanted.to_device,
        on_start=wanted.on_start,
    )


def _size_of(wanted: Wanted) -> int:
    if wanted.size is None:
        raise ConfigError("hf.steps: size: expected the samples of an item; only a DataLoader says it by itself")
    return wanted.size


# --- samples by index -------------------------------------------------------------------------------------------------


def _length_of(dataset: Any) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"hf.steps: a {type(dataset).__name__} has no length, or no items by index")
    if not len(dataset):
        raise ConfigError("hf.steps: the dataset is empty")
    return len(dataset)


def _order_of(wanted: Wanted, length: int) -> Order:
    if wanted.sampler is not None:
        return sampled(wanted.seed, wanted.sampler, length, wanted.size)
    size = _size_of(wanted)
    if wanted.weights is not None:
        return weighted(wanted.seed, wanted.weights, length, size)
    if wanted.group_by_length is not None:
        return grouped_by_length(wanted.seed, wanted.group_by_length, length, size)
    if wanted.shuffle is False:
        return in_sequence(length, size)
    return shuffled(wanted.seed, length, size)


# --- samples one behind the other -------------------------------------------------------------------------------------


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _streamed(wanted: Wanted, tell: Callable[[str], None]) -> Feed:
    kind = type(wanted.dataset).__name__
    for name in ("sampler", "weights", "group_by_length", "shuffle"):
        if getattr(wanted, name):
            raise ConfigError(f"hf.steps: {name}: the samples of a {kind} have no numbers, and come in its own order")
    size = _size_of(wanted)
    stream = Stream(wanted.dataset, wanted.seed, _MARKED * size, tell)
    if stream.length is not None and size > stream.length:
        raise ConfigError(
            f"hf.steps: size: an item of {size} samples is larger than the dataset, which has {stream.length}"
        )
    if (wanted.loaders or 0) > 1:
        tell(f"hf.steps: one process loads ahead, and not {wanted.loaders}: each would read the whole {kind}")
        wanted = replace(wanted, loaders=1)
    if wanted.drop_last:
        tell(f"hf.steps: drop_last: an item in which an epoch of the {kind} ends goes on in the next one")
    return _feed(wanted, Streamed(stream, size), size)


# --- a DataLoader -----------------------------------------------------------------------------------------------------


def _read_loader(wanted: Wanted, loader: DataLoader[Any], tell: Callable[[str], None]) -> Wanted:
    """Returns what a DataLoader says, where nothing else was said."""
    said = replace(
        wanted,
        dataset=loader.dataset,
        collate=wanted.collate or loader.collate_fn,
        loaders=loader.num_workers if wanted.loaders is None else wanted.loaders,
        prefetch=wanted.prefetch or loader.prefetch_factor,
        pin_memory=loader.pin_memory if wanted.pin_memory is None else wanted.pin_memory,
        on_start=_started(loader),
        seed=wanted.seed if loader.generator is None else loader.generator.initial_seed() >> 1,
    )
    batches, size, drop_last = loader.batch_sampler, loader.batch_size, loader.drop_last
    if isinstance(loader.dataset, IterableDataset):
        return _unbatched(said) if size is None else replace(said, size=wanted.size or size, drop_last=drop_last)
    if batches is None:
        return _ordered(_unbatched(said), loader.sampler, tell)
    return _ordered(said, batches, tell)


def _started(loader: DataLoader[Any]) -> Callable[[int], object] | None:
    """Returns the loader's ``worker_init_fn``; while it runs, ``get_worker_info()`` tells it its dataset.

    Samples do not: none depends on who loads it.
    """
    start, dataset, workers = loader.worker_init_fn, loader.dataset, loader.num_workers
    if start is None:
        return None

    def started(number: int) -> None:
        _loading._worker_info = _loading.WorkerInfo(
            id=number, num_workers=workers, seed=torch.initial_seed(), dataset=dataset
        )
        try:
            start(number)
        finally:
            _loading._worker_info = None

    return started


def _unbatched(said: Wanted) -> Wanted:
    """With ``batch_size=None`` each sample is a batch."""
    if said.size not in (None, 1):
        raise ConfigError(f"hf.steps: size: {said.size}: with batch_size=None each sample is a batch; leave size out")
    collate = said.collate
    assert collate is not None, "a DataLoader has one"
    return replace(said, size=1, collate=lambda samples: collate(samples[0]))


def _ordered(said: Wanted, sampler: Any, tell: Callable[[str], None]) -> Wanted:
    """Returns it with the order of a sampler, or of a batch sampler; those of torch are known."""
    kind = type(sampler)
    if kind is BatchSampler:
        batched = replace(said, size=said.size or sampler.batch_size, drop_last=sampler.drop_last)
        return _ordered(batched, sampler.sampler, tell)
    if kind is SequentialSampler:
        return replace(said, sampler=None, shuffle=False)
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == _length_of(said.dataset):
        return replace(said, sampler=None, shuffle=True)
    if kind is DistributedSampler:
        return _undistributed(said, sampler, tell)
    if isinstance(sampler, DistributedSampler) or isinstance(getattr(sampler, "sampler", None), DistributedSampler):
        raise ConfigError(
            f"hf.steps: sampler: {kind.__name__} gives each rank its own samples, and here any worker may run any "
            "item; expected a sampler of all samples"
        )
    return replace(said, sampler=sampler)


def _undistributed(said: Wanted, sampler: Any, tell: Callable[[str], None]) -> Wanted:
    tell(
        "hf.steps: DistributedSampler is replaced: all workers share each step, so samples "
        + ("are shuffled by seed and epoch" if sampler.shuffle else "come in order")
        + ", and each comes once per epoch"
    )
    return replace(said, sampler=None, shuffle=sampler.shuffle)
