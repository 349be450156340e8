"""What a worker does in code that is not ours, so that an exception there can be told as what it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

from holdfast.errors import HoldfastError, WorkFailed

__all__ = ["Busy", "WorkPhase", "working"]


class WorkPhase(StrEnum):
    """A kind of work: ``loading`` a data item, a layer's ``forward`` and ``backward`` pass, the ``loss``, the
    optimizer's ``update`` of a layer, the ``evaluation`` before a step, ``saving`` a layer, the loop of a user's
    ``script``; ``other``: whatever else a worker does.
    """

    LOADING = "loading"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"
    EVALUATION = "evaluation"
    SAVING = "saving"
    SCRIPT = "script"
    OTHER = "other"


class Busy(StrEnum):
    """What keeps a worker busy, by which it is judged how long that may take: ``computing`` is whatever is neither
    ``loading`` an item's data nor ``compiling`` a model.
    """

    COMPUTING = "computing"
    LOADING = "loading"
    COMPILING = "compiling"


def working(
    phase: WorkPhase, *, layer: int | None = None, item: int | None = None, microbatch: int | None = None
) -> AbstractContextManager[None]:
    """Turns what is raised within into a WorkFailed that says where; our own errors pass as they are.

    Args:
        phase: what is done.
        layer: on which layer, if on one.
        item: with which item of the data, if with one.
        microbatch: for which micro-batch of the step, its global number, if for one.

    >>> with working(WorkPhase.FORWARD, layer=3, microbatch=5):
    ...     raise ValueError("no such token")
    Traceback (most recent call last):
    ...
    holdfast.errors.WorkFailed: forward of layer 3, micro-batch 5: ValueError: no such token
    """
    return _Working(phase, layer, item, microbatch)


class _Working(AbstractContextManager[None]):
    """See `working`; entered around each sample and each operation."""

    __slots__ = ("_of",)

    def __init__(self, *of: Any) -> None:
        self._of = of

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # nobody can know what somebody else's code raises
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, HoldfastError):
            phase, layer, item, microbatch = self._of
            raise WorkFailed(phase, error, layer=layer, item=item, microbatch=microbatch) from error
