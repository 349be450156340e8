"""An exception in a worker: what ends the job at once, and what is told of the rest."""

from __future__ import annotations

import traceback

from holdfast.control.messages import Raised
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.core.work import WorkPhase
from holdfast.errors import ConfigError, InternalError, InvalidSchedule, NotSaved, ReplicaDiverged, WorkFailed

__all__ = ["LONGEST_TEXT", "ends_job", "report_of"]

_AT_ONCE = (ConfigError, InternalError, InvalidSchedule, ReplicaDiverged, NotSaved, AssertionError)
"""The user's input, our own bugs and a full disk: nobody needs to wait to learn whose fault they are."""
LONGEST_TEXT = 16_000
"""Characters of a traceback or a message, which is stored with decisions."""
_SICK = ("AcceleratorError", "CudaError")


def ends_job(error: BaseException) -> bool:
    """Whether an error that came out of a worker's protocol ends the job at once, whoever else meets it."""
    return isinstance(error, _AT_ONCE)


def report_of(
    error: BaseException, *, worker: WorkerId, process: Process, generation: int, step: int, whole: bool = True
) -> Raised:
    """Returns what a worker tells of the exception that has stopped it.

    Args:
        error: what was raised.
        worker: who we are.
        process: ours.
        generation: in which.
        step: in which.
        whole: whether the state of every layer is that of its step.
    """
    work = error if isinstance(error, WorkFailed) else WorkFailed(WorkPhase.OTHER, error)
    origin = error.__cause__ if isinstance(error, WorkFailed) and error.__cause__ is not None else error
    return Raised(
        worker=worker,
        process=process,
        generation=generation,
        step=step,
        phase=WorkPhase(work.phase),
        kind=work.kind,
        error=work.detail[:LONGEST_TEXT],
        layer=work.layer,
        item=work.item,
        microbatch=work.microbatch,
        traceback="".join(traceback.format_exception(origin))[-LONGEST_TEXT:],
        sound=whole and not _from_sick_device(origin),
    )


def _from_sick_device(error: BaseException) -> bool:
    """Whether an accelerator failed in a way after which nothing in its memory can be trusted."""
    classes = {each.__name__ for each in type(error).__mro__}
    return not classes.isdisjoint(_SICK) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
