"""What came of a scenario, as it is kept: one JSON file each, written when it is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import ConfigError
from holdfast.study.scenarios import name_of

__all__ = ["Baseline", "Held", "Outcome", "Spent", "load", "points", "save"]

LATER = (1, 10, 100)
"""So many mini-batches after the one that failed it is looked again."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Loss (nats) and accuracy (0 to 1; None where targets are no classes) of held-out data, after so many steps."""

    steps: int
    loss: float
    accuracy: float | None = None


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: by the clock, and of the processor."""

    wall_s: float
    cpu_s: float


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The run in which nothing fails.

    Attributes:
        seed: of the run.
        curve: now and then.
        before: before the mini-batch, by its step.
        after: after it and later, by its step.
        weights_sha256: right after it, by its step.
        minibatch_s: processor seconds of a mini-batch, the mean of all.
        checkpoint: to write a checkpoint, the mean.
        steps_per_epoch: mini-batches of an epoch.
        model_bytes: of all parameters.
        state_bytes: of these, of the optimizer's state and of buffers.
        samples: trained on, and held out.
    """

    seed: int
    curve: tuple[Held, ...]
    before: dict[int, Held]
    after: dict[int, tuple[Held, ...]]
    weights_sha256: dict[int, str]
    minibatch_s: float
    checkpoint: Spent
    steps_per_epoch: int
    model_bytes: int
    state_bytes: int
    samples: tuple[int, int]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a scenario.

    Attributes:
        seed: of the run.
        at: the step whose mini-batch failed.
        strategy: what answered it.
        progress: percent of the gradients.
        survivors: how many went on.
        after: after the mini-batch and later.
        weights_sha256: right after it.
        minibatch_s: processor seconds of the mini-batch, over all workers.
        baseline_s: those of the same one without a failure, measured beside it.
        init: to build model, optimizer and data; of checkpoint-restart only, as what follows.
        restart: to load the checkpoint.
        replay: to run the mini-batches since the epoch began.
        replayed: how many these were.
    """

    seed: int
    at: int
    strategy: str
    progress: int | None
    survivors: int | None
    after: tuple[Held, ...]
    weights_sha256: str
    minibatch_s: float
    baseline_s: float
    init: Spent | None = None
    restart: Spent | None = None
    replay: Spent | None = None
    replayed: int | None = None

    @property
    def name(self) -> str:
        """As of its scenario."""
        return name_of(self.strategy, self.progress, self.survivors)


def points(at: int, steps: int) -> tuple[int, ...]:
    """Returns after how many steps it is looked what came of a failure in step ``at``: at once, later, at the end.

    >>> points(20, 300), points(295, 300)
    ((21, 22, 31, 121, 300), (296, 297, 300))
    """
    wanted = {at + 1, *(at + 1 + later for later in LATER), steps}
    return tuple(sorted(each for each in wanted if each <= steps))


_Record = TypeVar("_Record", Baseline, Outcome)


def save(path: Path, record: Baseline | Outcome) -> None:
    """Writes a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    os.replace(temporary, path)


def load(path: Path, kind: type[_Record]) -> _Record | None:
    """Returns a record; None if it was not written yet.

    Raises:
        ConfigError: the file is no such record.
    """
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no record of a study: {error}; delete it to have it made again") from error
