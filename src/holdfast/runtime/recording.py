"""What a worker writes down of its steps: what it ran and when, what else it did; and that this was as ordered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.control.messages import Message, StepDone
from holdfast.core.schedule import Op
from holdfast.devices.stamps import Stamps
from holdfast.errors import InternalError
from holdfast.protocol.executor import StepCommitted
from holdfast.protocol.span_recorder import SpanRecorder, add_span
from holdfast.protocol.worker import WorkerProtocol, mean_loss
from holdfast.runtime.transport.port import Sent
from holdfast.telemetry.events import Judged, Log, StepOmitted, StepOps

__all__ = ["StepRecord"]


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Records one worker's steps.

    Attributes:
        protocol: the worker's.
        log: the job's events.
        clock: seconds, of the spans and the log.
        memory: bytes that the process has in memory.
        stamps: of what is computed on.
        recorder: what the worker does besides computing.
    """

    protocol: WorkerProtocol
    log: Log
    clock: Callable[[], float]
    memory: Callable[[], int]
    stamps: Stamps
    recorder: SpanRecorder = field(init=False)
    _spans: list[tuple[Op, Any, Any]] = field(default_factory=list)
    _spans_of: int = -1
    _omitted: set[int] = field(default_factory=set)
    _sent: Sent = field(default_factory=Sent)

    def __post_init__(self) -> None:
        """All of it has one clock."""
        self.recorder = SpanRecorder(self.clock)

    def clear(self) -> None:
        """Forgets a step, at its end or as it is given up."""
        self._spans.clear()
        self.recorder.clear()

    def run(self, step: int) -> Any:
        """An operation of a step is about to be run; returns a stamp of its beginning."""
        if self._spans_of != step:  # of a step that is gone on with, what was run before is told, too
            self._spans.clear()
            self._spans_of = step
        return self.stamps.stamp(self.clock())

    def ran(self, op: Op, start: Any) -> Any:
        """An operation, or the next part of one, was run; ``start``: since when. Returns a stamp of its end."""
        end = self.stamps.stamp(self.clock())
        self._spans.append((op, start, end))
        return end

    def told(self, message: Message) -> None:
        """Logs that a step is settled; of one that was logged as updated ahead of that, also that it was omitted."""
        if not isinstance(message, StepDone):
            return
        stage, worker, generation, step = self.protocol.stage, str(message.worker), message.generation, message.step
        if message.omitted and step not in self._omitted:
            self.log.write(self.clock(), StepOmitted(worker=worker, generation=generation, step=step))
        norm = None if message.omitted else stage.norm
        judged = Judged(worker=worker, generation=generation, step=step, norm=norm, rate=stage.rate(step))
        self.log.write(self.clock(), judged)

    def committed(self, committed: StepCommitted, sent: Sent) -> None:
        """Logs a step.

        Args:
            committed: what was run of it.
            sent: what the worker has sent, ever.

        Raises:
            InternalError: it did not run what its plan orders.
        """
        self._check_order(committed)
        loss, omitted = mean_loss(self.protocol.stage), self.protocol.stage.omitted
        new, self._sent = sent.since(self._sent), sent
        self._omitted = {committed.step} if omitted else set()
        event = StepOps(
            worker=str(self.protocol.worker),
            generation=self.protocol.generation,
            step=committed.step,
            loss=loss,
            omitted=omitted,
            ops=self._ops(),
            besides=tuple(self.recorder.spans),
            memory=self.memory(),
            sent_messages=new.messages,
            sent_sums=new.sums,
            sent_state=new.state,
            sent_carried=new.carried,
            knows_loss=loss is not None,
            whole=committed.whole,
        )
        self.log.write(self.clock(), event)
        self.clear()

    def _ops(self) -> tuple[tuple[str, int, int, float, float], ...]:
        """See StepOps.ops."""
        spans: list[tuple[str, int, int, float, float]] = []
        times = iter(self.stamps.seconds([stamp for _, *both in self._spans for stamp in both]))
        for op, _, _ in self._spans:
            add_span(spans, op, next(times), next(times))
        return tuple(spans)

    def _check_order(self, committed: StepCommitted) -> None:
        """What was run must be what the plan ordered, or what was left of a step that was interrupted."""
        ordered = committed.order
        if ordered is not None and committed.ops != ordered:
            raise InternalError(
                f"worker {self.protocol.worker} ran {' '.join(map(str, committed.ops))} in step {committed.step}, "
                f"its order is {' '.join(map(str, ordered))}"
            )
