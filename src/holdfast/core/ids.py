"""Names of workers and micro-batches."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.errors import ConfigError

__all__ = ["MicroBatch", "WorkerId"]

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
        return cls(*_parse_pair(text, "worker", "pipeline.stage such as 1.2"))


@dataclass(frozen=True, slots=True, order=True)
class MicroBatch:
    """One micro-batch of a step.

    Attributes:
        pipeline: 0-based pipeline whose data it is, wherever it is computed.
        index: 0-based position within that pipeline.
    """

    pipeline: int
    index: int

    def __post_init__(self) -> None:
        _check_natural("micro-batch", self.pipeline, self.index)

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> MicroBatch:
        """Returns the micro-batch that a text such as ``1.5`` names.

        Raises:
            ConfigError: the text is no such name; the message says what would be right.
        """
        return cls(*_parse_pair(text, "micro-batch", "pipeline.index such as 1.5"))

    def number(self, microbatches: int) -> int:
        """Returns the global number, which counts through the pipelines in order and alone decides samples and seeds.

        Args:
            microbatches: micro-batches per pipeline, above ``index``.

        Raises:
            ConfigError: ``index`` is not below ``microbatches``, so the number would belong to another micro-batch.
        """
        if self.index >= microbatches:
            raise ConfigError(f"micro-batch {self} has no number: a pipeline has only {microbatches} micro-batches")
        return self.pipeline * microbatches + self.index


def _parse_pair(text: str, what: str, right: str) -> tuple[int, int]:
    match = _PAIR.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no {what}: expected {right}, two numbers that count from 0")
    return int(match[1]), int(match[2])


def _check_natural(what: str, first: int, second: int) -> None:
    if first < 0 or second < 0:
        raise ConfigError(f"{what} {first}.{second} is impossible: both numbers count from 0")
