"""What the items of a loop are made of: names of samples, by which any process makes the same batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import default_collate

from holdfast.data.orders import Order
from holdfast.data.randomness import LOADING, mixed, seed_host
from holdfast.data.sampler import Dataset, load_items
from holdfast.data.streams import Stream

__all__ = ["PREFETCH", "Asked", "Feed", "Indexed", "Source", "Streamed"]

PREFETCH = 2
"""Items that each loader process makes ahead, unless told."""

Asked = tuple[int, ...]
"""The names of an item's samples."""


class Source(Protocol):
    """Where samples come from."""

    @property
    def length(self) -> int | None:
        """Entries of an epoch; None if nobody knows."""

    @property
    def size(self) -> int:
        """Entries of an item."""

    @property
    def dataset(self) -> Any:
        """What has them; it has a length, 0 if nobody knows."""

    def ask(self, item: int, oldest: int, /) -> Asked:
        """Returns the names of an item's samples.

        Args:
            item: counted over all steps.
            oldest: no item before this one is likely to be asked for any more.
        """

    def read(self, asked: Asked, /) -> list[Any]:
        """Returns samples by their names."""

    def told(self, asked: Asked, /) -> str:
        """Says which samples they are, for people."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """Samples by their numbers, in some order."""

    dataset: Dataset
    order: Order

    @property
    def length(self) -> int:
        """Entries of an epoch: samples, or batches."""
        return self.order.length

    @property
    def size(self) -> int:
        """Entries of an item."""
        return self.order.size

    def ask(self, item: int, oldest: int) -> Asked:
        """Returns the numbers of an item's samples."""
        return self.order.item(item)

    def read(self, asked: Asked) -> list[Any]:
        """Returns samples by their numbers; see `load_items`."""
        return load_items(self.dataset, asked)

    def told(self, asked: Asked) -> str:
        """Says which samples they are."""
        shown = ", ".join(map(str, asked[:8]))
        return f"samples {shown}{', ...' if len(asked) > 8 else ''}"


@dataclass(frozen=True, slots=True)
class Streamed:
    """Samples by their place in a stream, in the order in which they come."""

    stream: Stream
    size: int

    @property
    def length(self) -> int | None:
        """Samples of an epoch; None if the stream has no length."""
        return self.stream.length

    @property
    def dataset(self) -> Any:
        """The stream."""
        return self.stream

    def ask(self, item: int, oldest: int) -> Asked:
        """Returns the first place, how many there are, and before which place nothing is needed any more.

        That is forgotten here, too: a process that has others read keeps the marks that they tell.
        """
        self.stream.forget(min(oldest, item) * self.size)
        return item * self.size, self.size, oldest * self.size

    def read(self, asked: Asked) -> list[Any]:
        """Returns samples by their places."""
        first, count, oldest = asked
        return self.stream.take(first, count, oldest)

    def hint(self, item: int) -> dict[str, Any] | None:
        """Returns from where an item can be read, in the form of JSON, for others; None: from the beginning only."""
        return self.stream.hint(item * self.size)

    def told(self, asked: Asked) -> str:
        """Says which samples they are."""
        return f"samples {asked[0]} to {asked[0] + asked[1] - 1} of the stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How items are made, the same in every process.

    Attributes:
        source: of samples.
        num_samples: of an item.
        collate: makes what is yielded of the samples of an item.
        loaders: processes that load ahead, per worker; 0: each item is loaded where it runs, before it does.
        prefetch: items that each of them makes ahead.
        pin_memory: whether a batch is in pinned memory where it is computed with.
        to_device: whether it is on the device there.
        on_start: called in each of them with its number, before it loads anything.
    """

    source: Source
    num_samples: int
    collate: Callable[[list[Any]], Any] = default_collate
    loaders: int = 0
    prefetch: int = PREFETCH
    pin_memory: bool = False
    to_device: bool = False
    on_start: Callable[[int], object] | None = None

    @property
    def dataset(self) -> Any:
        """What has the samples."""
        return self.source.dataset

    @property
    def streamed(self) -> Streamed | None:
        """Where samples come from, if they come one behind the other."""
        return self.source if isinstance(self.source, Streamed) else None

    def make(self, asked: Asked, seed: int, step: int, number: int) -> Any:
        """Returns an item's batch; what is drawn for it is the same in every process.

        Args:
            asked: the names of its samples.
            seed: of the job.
            step: as the loop counts.
            number: of the item in the step.

        Raises:
            WorkFailed: a sample cannot be loaded.
        """
        seed_host(mixed(seed, step, number, LOADING))
        return self.collate(self.source.read(asked))
