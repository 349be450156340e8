"""Lines on a job that runs: what comes up, how far it is."""

from __future__ import annotations

import sys
import time

from holdfast.cli.arguments import hours
from holdfast.cli.inspect import tell_checkpoint
from holdfast.cli.ways_shown import tell_technique, tell_way
from holdfast.config.job import Job
from holdfast.control.messages import Ended, Progress
from holdfast.plain import one_line
from holdfast.telemetry.events import Chosen, Event, JobStarted, Notice, Preparing, Scheduled

__all__ = ["EventLines", "ProgressLine", "describe_ended", "describe_preparing"]

_EVERY_S = 10.0
_NAMED = 4


class EventLines:
    """Lines that tell what comes up; what is being prepared is one that is replaced.

    Off a terminal: a new line whenever something else begins, and every ten seconds.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0
        self._doing = ""
        self._open = False

    def tell(self, event: Event) -> None:
        """Tells what came up: what is being prepared in the line that is replaced, all else in one that stays."""
        if isinstance(event, Preparing):
            self._prepare(event)
        elif isinstance(event, Chosen | Scheduled):
            if not self._quiet:
                told = tell_way(event) if isinstance(event, Chosen) else tell_technique(event.technique, event.why)
                self._stay(one_line(told))
        elif text := event.text if isinstance(event, Notice) else tell_checkpoint(event):
            self._stay(f"holdfast: {one_line(text)}")

    def _stay(self, line: str) -> None:
        fresh = "\r\x1b[K" if self._open else ""
        print(f"{fresh}{line}", file=sys.stderr, flush=True)
        self._open = False

    def _prepare(self, event: Preparing) -> None:
        now = time.monotonic()
        due = self._terminal or event.text != self._doing or now - self._shown >= _EVERY_S
        if not self._quiet and due:
            self._doing, self._shown = event.text, now
            self._print(describe_preparing(event))

    def _print(self, text: str) -> None:
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the line."""
        if self._open:
            print(file=sys.stderr)
            self._open = False


class ProgressLine(EventLines):
    """These, and one that tells step, loss, speed, workers alive and time left.

    Attributes:
        where: told once the job begins: where its run is written, and how to look at it; empty: nothing is.
    """

    def __init__(self, job: Job, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.where = ""
        self._started = JobStarted(
            name=job.name,
            workers=job.num_workers,
            steps=job.train.steps,
            samples_per_step=job.samples_per_step,
            wall_time=0.0,
        )
        self._times: list[float] = []

    def tell(self, event: Event) -> None:
        """See EventLines.tell."""
        if isinstance(event, JobStarted):
            self._started = event
            if self.where and not self._quiet:
                self._stay(self.where)
        else:
            super().tell(event)

    def show(self, progress: Progress) -> None:
        """Shows a step that was done."""
        now = time.monotonic()
        self._times = [*self._times[-19:], now]
        last = progress.step == self._started.steps - 1
        first = len(self._times) == 1
        due = self._terminal or first or last or progress.omitted or now - self._shown >= _EVERY_S
        if not self._quiet and due:
            self._shown = now
            self._print(self._text(progress))

    def _text(self, progress: Progress) -> str:
        steps = self._started.steps
        loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
        text = f"step {progress.step + 1}/{steps}  loss {loss}"
        if len(self._times) > 1:
            rate = (len(self._times) - 1) / (self._times[-1] - self._times[0])
            left = round((steps - progress.step - 1) / rate)
            text += f"  {rate * self._started.samples_per_step:.1f} samples/s  left {hours(left)}"
        text += f"  workers {progress.alive}/{self._started.workers}"
        text += f"  checkpoint {progress.checkpoint}" if progress.checkpoint else ""
        return text + ("  OMITTED: a gradient was not finite" if progress.omitted else "")


def describe_ended(ended: Ended) -> str:
    """Returns a line on how a job has ended."""
    return one_line(f"the job has ended: {ended.outcome}" + (f", {ended.detail}" if ended.detail else ""))


def describe_preparing(event: Preparing) -> str:
    """Returns a line on what is done before the first step."""
    much = f" ({event.done} of {event.of})" if event.of and event.missing else ""
    waited = f", for {event.waited_s:.0f} s" if event.waited_s >= 1 else ""
    some = ", ".join(event.missing[:_NAMED]) + (", ..." if len(event.missing) > _NAMED else "")
    missing = f"; missing: {some}" if some and waited else ""
    return f"{event.text}{much}{waited}{missing}"
