"""Takes part in a job that was begun on another machine, and tells how it went if it was led to its end from here."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.control.messages import Ended
from holdfast.errors import HoldfastError
from holdfast.runtime.launch.ending import JobOutcome
from holdfast.runtime.launch.joining import Joiner, JoinRequest
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.summary import summarise, write_summary
from holdfast.telemetry.events import Event, Notice

__all__ = ["join"]


def join(request: JoinRequest, *, on_event: Callable[[Event], None] = lambda event: None) -> Ended:
    """Takes part to the end of the job; no process of it is left on this machine when this returns or raises.

    A job that a coordinator on this machine has led to its end is summed up in ``RUN_DIR/summary.json``, as
    :func:`holdfast.runtime.train.train` does where it was begun: that machine may be gone.

    Args:
        request: what was asked for.
        on_event: called with what is worth a line.

    Raises:
        ConfigError: the token is refused, or this machine does not have what the job needs.
        CoordinatorUnavailable: there was none for as long as the job waits for one (``control.reattach_s``).
        Interrupted: a signal came.
    """

    def sum_up(outcome: JobOutcome, begun: RunRequest) -> None:
        try:
            write_summary(summarise(begun.run_dir, outcome, begun.faults), on_event)
        except (HoldfastError, OSError) as error:  # the job has ended as it has all the same
            on_event(Notice(worker="agent", text=f"{begun.run_dir}: cannot be summed up: {error}"))

    return Joiner(request=request, on_event=on_event, on_led=sum_up).run()
