"""Which samples a micro-batch holds: a pure function of seed, step and global micro-batch number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from holdfast.core.tensorspec import ItemSpec
from holdfast.core.work import WorkPhase, working
from holdfast.data.items import Inputs, stack
from holdfast.data.permutations import permutation
from holdfast.errors import ConfigError

__all__ = ["Dataset", "load_items", "load_microbatch", "sample_indices"]

TRIES = 3
RETRY_S = 0.2


class Dataset(Protocol):
    """Items by index, each inputs and a target: see `holdfast.data.items`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def sample_indices(
    seed: int, step: int, microbatch: int, num_microbatches: int, microbatch_size: int, dataset_len: int
) -> list[int]:
    """Return the samples of a micro-batch: shuffled anew every epoch, without replacement within it.

    The micro-batches of all steps, in order, read through one sequence of epochs; one that reaches the end of an epoch
    goes on in the next.

    Args:
        seed: seed of the job.
        step: 0-based step.
        microbatch: global number within the step.
        num_microbatches: micro-batches of a step.
        microbatch_size: samples of a micro-batch.
        dataset_len: number of samples, at least 1.

    Raises:
        ConfigError: the dataset is empty.

    >>> sorted(sum((sample_indices(7, 0, m, 3, 2, 6) for m in range(3)), []))
    [0, 1, 2, 3, 4, 5]
    """
    if dataset_len < 1:
        raise ConfigError("data: the dataset is empty")
    first = (step * num_microbatches + microbatch) * microbatch_size
    found: list[int] = []
    while (missing := microbatch_size - len(found)) > 0:
        epoch, place = divmod(first + len(found), dataset_len)
        found += permutation(seed, epoch, dataset_len)[place : place + missing].tolist()
    return found


def load_microbatch(
    dataset: Dataset,
    *,
    seed: int,
    step: int,
    microbatch: int,
    num_microbatches: int,
    microbatch_size: int,
    expected: ItemSpec | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Inputs, Tensor]:
    """Load a micro-batch: inputs and targets, each stacked along a new first dimension of ``microbatch_size``.

    An item that cannot be read (OSError) is tried three times, as a file system may be away for a moment; it draws the
    same numbers from torch's default generator every time.

    Args:
        expected: what every item is like; None: like the first one of the micro-batch.
        sleep: lets seconds pass before an item is tried again.

    Raises:
        ConfigError: an item is no pair of inputs and a target, or is not like the others.
        WorkFailed: an item cannot be loaded.
    """
    indices = sample_indices(seed, step, microbatch, num_microbatches, microbatch_size, len(dataset))
    return stack(indices, load_items(dataset, indices, sleep), expected)


def load_items(dataset: Dataset, indices: Iterable[int], sleep: Callable[[float], None] = time.sleep) -> list[object]:
    """Load items in order, each tried three times as in `load_microbatch`.

    Raises:
        WorkFailed: an item cannot be loaded.
    """
    return [_item(dataset, index, sleep) for index in indices]


def _item(dataset: Dataset, index: int, sleep: Callable[[float], None]) -> object:
    with working(WorkPhase.LOADING, item=index):
        drawn_before = torch.get_rng_state()
        for _ in range(TRIES - 1):
            try:
                return dataset[index]
            except OSError:
                sleep(RETRY_S)
                torch.set_rng_state(drawn_before)
        return dataset[index]
