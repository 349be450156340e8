"""Names of workers and micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from holdfast.errors import ConfigError

__all__ = ["Batch", "Interval", "MicroBatch", "WorkerId", "beside", "evaluated", "intervals", "place_in_evaluation"]

_NAMES = 1 << 20
"""At most so many micro-batches has a step, and a pipeline stages."""
_PAIR = re.compile(r"(\d{1,9})\.(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """A worker, named by its first place in the grid; it keeps this id for life.

    Attributes:
        pipeline: 0-based pipeline of its first place.
        stage: 0-based stage of its first place.

    >>> str(WorkerId(1, 2)), WorkerId.parse("1.2") < WorkerId(2, 0)
    ('1.2', True)
    """

    pipeline: int
    stage: int

    def __post_init__(self) -> None:
        _check_natural("worker", self.pipeline, self.stage)

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> WorkerId:
        """Returns the worker that a text such as ``1.2`` names.

        Raises:
            ConfigError: the text is no such name; the message says what would be right.
        """
        match = _PAIR.fullmatch(text.strip())
        if match is None:
            right = "pipeline.stage such as 1.2, two numbers that count from 0"
            raise ConfigError(f"{text!r} is no worker: expected {right}")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class MicroBatch:
    """One micro-batch of a step: its global number, and what people call it. Made by :class:`Batch`.

    Attributes:
        number: counts through the pipelines in order. It alone says which micro-batch this is, and decides its samples
            and seeds.
        pipeline: 0-based pipeline whose data it is, wherever it is computed.
        index: 0-based position within that pipeline.
    """

    number: int
    pipeline: int = field(compare=False)
    index: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.index}"

    @property
    def trains(self) -> bool:
        """Whether it is one of a step, and no other name."""
        return self.number < _NAMES


Interval = tuple[int, int]
"""Global numbers of micro-batches: the first one, and the one behind the last."""


def intervals(numbers: Iterable[int]) -> tuple[Interval, ...]:
    """Returns numbers as ascending intervals that do not touch one another.

    >>> intervals([4, 0, 1, 5, 2])
    ((0, 3), (4, 6))
    """
    found: list[Interval] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of a step, by their names.

    Attributes:
        counts: how many pipeline 0, 1, ... has, at least 1 each.

    >>> [str(microbatch) for microbatch in Batch((2, 1)).microbatches], Batch((5, 3)).named(1, 2).number
    (['0.0', '0.1', '1.0'], 7)
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1 or sum(self.counts) > _NAMES:
            raise ConfigError(
                f"a step of {self.counts} micro-batches is impossible: "
                f"every pipeline has at least 1, all together at most {_NAMES}"
            )

    @property
    def microbatches(self) -> tuple[MicroBatch, ...]:
        """All of them, in the order of their numbers."""
        starts = enumerate(zip(accumulate(self.counts, initial=0), self.counts, strict=False))
        return tuple(MicroBatch(first + i, p, i) for p, (first, count) in starts for i in range(count))

    def named(self, pipeline: int, index: int) -> MicroBatch:
        """Returns the micro-batch of a name.

        Raises:
            ConfigError: no pipeline has it.
        """
        _check_natural("micro-batch", pipeline, index)
        if not self.has(pipeline, index):
            raise ConfigError(f"there is no micro-batch {pipeline}.{index}: the pipelines have {self.counts}")
        return MicroBatch(sum(self.counts[:pipeline]) + index, pipeline, index)

    def has(self, pipeline: int, index: int) -> bool:
        """Whether there is a micro-batch of this name."""
        return 0 <= pipeline < len(self.counts) and 0 <= index < self.counts[pipeline]


def beside(pipeline: int, index: int) -> MicroBatch:
    """Returns a name for what is no micro-batch: ``index`` is beyond those of the pipeline, the number beyond all."""
    return MicroBatch(_NAMES * (1 + pipeline) + index, pipeline, index)


def evaluated(number: int) -> MicroBatch:
    """Returns the name of a micro-batch that a job is evaluated by: its number is beyond those of all that train."""
    return MicroBatch(_NAMES + number, 0, _NAMES + number)


def place_in_evaluation(microbatch: MicroBatch) -> int:
    """Returns the number that a name was made of by :func:`evaluated`."""
    return microbatch.number - _NAMES


def _check_natural(what: str, first: int, second: int) -> None:
    if first < 0 or second < 0:
        raise ConfigError(f"{what} {first}.{second} is impossible: both numbers count from 0")
