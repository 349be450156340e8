"""What a worker does in code that is not ours, so that an exception there can be told as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from holdfast.errors import HoldfastError, WorkFailed

__all__ = ["Busy", "WorkPhase", "working"]


class WorkPhase(StrEnum):
    """A kind of work: ``loading`` a data item, a layer's ``forward`` and ``backward`` pass, the ``loss``, the
    optimizer's ``update`` of a layer, ``saving`` a layer, the loop of a user's ``script``; ``other``: whatever else a
    worker does.
    """

    LOADING = "loading"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"
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


@contextmanager
def working(
    phase: WorkPhase, *, layer: int | None = None, item: int | None = None, microbatch: int | None = None
) -> Iterator[None]:
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
    try:
        yield
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:  # nobody can know what somebody else's code raises
        raise WorkFailed(phase, error, layer=layer, item=item, microbatch=microbatch) from error
