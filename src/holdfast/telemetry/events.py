"""Events for machines: one JSON object a line, the same from real runs and from simulated ones.

Every process of a job appends whole lines to one file of its machine, so that a line is there entirely or not at all,
and what a killed process had written stays. Times are seconds of the machine's monotonic clock; ``story.py`` makes one
story of the files of several. What a decision records bears its number: whoever leads next tells it once more, as its
predecessor may have died before it did, and readers leave out what is there twice.

That an event cannot be written stops nobody: it is missing then, and whoever reads the log is told how many are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from holdfast.errors import StorageError
from holdfast.parsing import parsing

__all__ = [
    "Agreed",
    "CheckpointFailed",
    "CheckpointRejected",
    "Checkpointed",
    "Chosen",
    "ClockCompared",
    "CoordinatorLost",
    "CoordinatorReady",
    "Detected",
    "Event",
    "EventLog",
    "Evaluated",
    "EventReader",
    "Log",
    "LogLine",
    "EventsMissing",
    "ExceptionRaised",
    "FaultInjected",
    "HandingOver",
    "Held",
    "Installed",
    "JobEnded",
    "JobStarted",
    "LibraryFilled",
    "Loaded",
    "Migrating",
    "Notice",
    "Parted",
    "Pinned",
    "PlanImproved",
    "Predicted",
    "Preparing",
    "Ran",
    "Reattached",
    "Rebuilt",
    "Replaying",
    "Retold",
    "Resumed",
    "MadeAgain",
    "Scheduled",
    "Seated",
    "Judged",
    "StepOmitted",
    "StepOps",
    "Summed",
    "Suspected",
    "Synced",
    "Timed",
    "WorkerReady",
    "read_events",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=False):
    """Base of all events."""

    schema: ClassVar[int] = 1


class JobStarted(_Event, frozen=True, tag="job_started", kw_only=True):
    """The agent starts a job; ``wall_time`` (seconds since 1970) belongs to the same moment as the line's ``time``.

    ``clock``: which one that is, see :func:`holdfast.telemetry.clocks.this_clock`; empty where there is but one.
    """

    name: str
    workers: int
    steps: int
    samples_per_step: int
    wall_time: float
    clock: str = ""


class Scheduled(_Event, frozen=True, tag="scheduled", kw_only=True):
    """By which technique steps are scheduled, where a job leaves that to its profile.

    Attributes:
        technique: as in a job file.
        in_flight: micro-batches that a worker may hold at once; None: as the technique has it.
        why: what decided, for people.
    """

    technique: str
    in_flight: int | None
    why: str


class Chosen(_Event, frozen=True, tag="chosen", kw_only=True):
    """How the job recovers from the loss of a node, and by which figures; see :mod:`holdfast.settings.ways`.

    Attributes:
        way: ``re-route``, ``replicate``, ``log``, ``checkpoint`` or ``stop``.
        advised: what the figures speak for.
        why: what decided.
        reasons: sentences with all figures.
        logging: whether workers log what they send to other nodes.
        alone: layers whose owners are all on one node.
        spares: processes that wait for a place.
        crossing_bytes: what would be logged in a step, by all workers.
        state_bytes: parameters and optimizer state of the model.
        copy_s: seconds of a step in which the most pressed sender copies what it logs; None where no profile tells.
        bubble_s: seconds of a step in which that one waits; None where no profile tells.
        step_log: whether workers keep what they hand on in a step.
        step_log_bytes: how much of that a worker keeps at most; 0 if none.
    """

    way: str
    advised: str
    why: str
    reasons: tuple[str, ...]
    logging: bool
    alone: tuple[int, ...]
    spares: int
    crossing_bytes: int
    state_bytes: int
    copy_s: float | None
    bubble_s: float | None
    step_log: bool
    step_log_bytes: int

    def figures(self) -> dict[str, object]:
        """Returns all of it by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Preparing(_Event, frozen=True, tag="preparing", kw_only=True):
    """What is done before the first step, or after the last; told to whoever waits, again and again, but not logged.

    Attributes:
        text: what is done.
        done: how much of it; out of ``of``, 0 if that cannot be said.
        missing: whose part of it is missing.
        waited_s: for how long it has been going on.
    """

    text: str
    done: int = 0
    of: int = 0
    missing: tuple[str, ...] = ()
    waited_s: float = 0.0


class WorkerReady(_Event, frozen=True, tag="worker_ready", kw_only=True):
    """A worker has its model and data and attached to the coordinator; ``node``: that it runs on, for people."""

    worker: str
    pid: int
    nonce: str = ""
    node: str = ""


class Notice(_Event, frozen=True, tag="notice", kw_only=True):
    """Something that a person should know and that changes nothing: a fall-back, for example."""

    worker: str
    text: str


class EventsMissing(_Event, frozen=True, tag="events_missing", kw_only=True):
    """A process could not write so many events before this one; ``why`` for people."""

    count: int
    why: str


class FaultInjected(_Event, frozen=True, tag="fault_injected", kw_only=True):
    """A scheduled fault fired; written before it takes effect."""

    worker: str
    kind: str
    step: int
    point: str
    spec: str


class Detected(_Event, frozen=True, tag="detected", kw_only=True):
    """The coordinator holds a worker for lost; where it was a spare, nobody had to recover."""

    worker: str
    how: str
    generation: int
    spare: bool = False


class Seated(_Event, frozen=True, tag="seated", kw_only=True):
    """A spare has taken the place of a lost worker; it has yet to be given its state."""

    worker: str
    place: str


class Parted(_Event, frozen=True, tag="parted", kw_only=True):
    """A worker that was told to go has gone, before ``step``; nothing was run again for it."""

    worker: str
    step: int


class Synced(_Event, frozen=True, tag="synced", kw_only=True):
    """A worker that came into the running job has caught up with its peers before ``step``.

    Attributes:
        entered: the step before which it entered, and whose state it was given.
        bytes: how much state it was given, as it is encoded for sending.
        owners: as in :class:`Installed`, with this one.
    """

    worker: str
    entered: int
    step: int
    bytes: int
    owners: int | None = None


class Suspected(_Event, frozen=True, tag="suspected", kw_only=True):
    """A worker's communication failed."""

    worker: str
    peer: str
    generation: int
    detail: str


class ExceptionRaised(_Event, frozen=True, tag="exception_raised", kw_only=True):
    """A worker has stopped because of an exception: its own fault, or the program's.

    Attributes:
        phase: what it did, as in :class:`holdfast.core.work.WorkPhase`.
        layer: on which layer; None if on none.
        item: with which item of the data; None if with none.
        microbatch: for which micro-batch, its global number; None if for none.
        error: the class and the message.
    """

    worker: str
    generation: int
    step: int
    phase: str
    layer: int | None
    item: int | None
    microbatch: int | None
    error: str


class Installed(_Event, frozen=True, tag="installed", kw_only=True):
    """The coordinator decided, stored and sends a new generation.

    Attributes:
        workers: those that take part.
        strategy: what it answers, and how; empty where nothing failed.
        owners: how many of them hold the state of the layer that the fewest hold; None where nobody tells.
    """

    generation: int
    workers: tuple[str, ...]
    strategy: str
    owners: int | None = None


class Summed(_Event, frozen=True, tag="summed", kw_only=True):
    """A worker has begun a step, and holds so many sums of it; told only where a fault is scheduled in steps."""

    worker: str
    step: int
    sums: int


class Agreed(_Event, frozen=True, tag="agreed", kw_only=True):
    """The state of every survivor is known: all run from ``step``, or go on with it.

    Attributes:
        recomputed_microbatches: (layer, micro-batch) pairs that are run again, the regenerated and dropped among them,
            as far as that is known: of a lost worker, by its last heartbeat, or from what others have of it.
        recomputed_at_most: so many, if the lost had run all that they may have run since; None where nobody tells.
        goes_on: whether what the survivors have of ``step`` is kept.
        concluded: whether only updates were missing, as somebody knew the verdict: all run from the step behind.
        redone: then, the pairs that were lost and are run again.
        regenerated: the pairs that are run again for a message alone.
        dropped: how many pairs of the step behind were begun, and are given up.
        left_out: micro-batches of ``step`` that do not count where nobody had counted them.
    """

    generation: int
    step: int
    recomputed_microbatches: int
    recomputed_at_most: int | None = None
    goes_on: bool = False
    concluded: bool = False
    redone: tuple[tuple[int, int], ...] = ()
    regenerated: tuple[tuple[int, int], ...] = ()
    dropped: int = 0
    left_out: tuple[int, ...] = ()


class Replaying(_Event, frozen=True, tag="replaying", kw_only=True):
    """Layers that nobody holds are computed again, from a checkpoint and what was logged.

    Attributes:
        layers: the first, and one past the last.
        workers: who replays them, each some of the micro-batches.
        start: the step that the checkpoint is of.
        stop: the first step that is not replayed.
    """

    generation: int
    layers: tuple[int, int]
    workers: tuple[str, ...]
    start: int
    stop: int


class Rebuilt(_Event, frozen=True, tag="rebuilt", kw_only=True):
    """Every survivor's transport of this generation stands."""

    generation: int


class MadeAgain(_Event, frozen=True, tag="made-again", kw_only=True):
    """The updates of a step, made ahead of its verdict, do not stand: all make them again; ``why`` for people."""

    step: int
    generation: int
    why: str


class PlanImproved(_Event, frozen=True, tag="plan-improved", kw_only=True):
    """All go over to a better plan for the same workers, in this generation; periods in the units of the costs."""

    generation: int
    before: float
    period: float


class LibraryFilled(_Event, frozen=True, tag="library-filled", kw_only=True):
    """The process that makes plans ahead has made and improved all that it was to, for 1 to ``failures`` failures."""

    failures: int


class Predicted(_Event, frozen=True, tag="predicted", kw_only=True):
    """A loss is answered by the way that is expected to make the most steps until the next one.

    Attributes:
        chosen: its name.
        steps: how many each of the ways is expected to make, by its name.
        until_s: seconds until the next failure, on average, as far as anybody knows.
    """

    chosen: str
    steps: tuple[tuple[str, float], ...]
    until_s: float


class Held(_Event, frozen=True, tag="held", kw_only=True):
    """What was expected of such a way, and what came of it until the next failure, whoever has come meanwhile.

    Attributes:
        chosen: its name.
        seconds: how long that was.
        expected: steps in that time.
        made: steps that were committed in it and had never been before.
    """

    chosen: str
    seconds: float
    expected: float
    made: int


class Migrating(_Event, frozen=True, tag="migrating", kw_only=True):
    """Workers change places from this generation on; periods in seconds.

    Attributes:
        moves: who moves, and the lost worker whose place it takes.
        before: the period expected if nobody moved.
        meanwhile: that while those who move get their state.
        period: that once they have it.
    """

    generation: int
    moves: tuple[tuple[str, str], ...]
    before: float
    meanwhile: float
    period: float


class HandingOver(_Event, frozen=True, tag="handing-over", kw_only=True):
    """Workers begin to take layers over from others, which hold them until then.

    Attributes:
        takes: who takes over which range.
    """

    generation: int
    takes: tuple[tuple[str, str], ...]


class StepOps(_Event, frozen=True, tag="step", kw_only=True):
    """A worker swapped in the results of a step.

    Attributes:
        ops: what it ran, in order: kind, pipeline and index of the micro-batch, start and end time.
        loss: mean over the step's micro-batches; None unless the worker holds the last layer, and where it is not
            finite, which JSON has no number for.
        omitted: the loss or a gradient was not finite, so the step left the weights as they were.
        besides: what it did but compute, in order: ``reduce`` (waited for the sum over the owners of these layers),
            ``audit`` (computed a sample of this layer a second time) or ``update``; the layers (empty for an update),
            start and end time.
        memory: bytes of the process in memory, when it swapped; 0 where that is not known.
        knows_loss: whether the worker holds the last layer.
        sent_messages: bytes that it has sent in messages to others since the step before; 0 where nobody counts.
        sent_sums: the same for sums.
        sent_state: the same of its state, to whoever takes layers over; by links alone.
        sent_carried: of all these, what process groups have carried.
        whole: whether the step was run as its plan orders it; else it was interrupted, and ``ops`` are those before and
            after.
    """

    worker: str
    generation: int
    step: int
    loss: float | None
    omitted: bool
    ops: tuple[tuple[str, int, int, float, float], ...]
    besides: tuple[tuple[str, tuple[int, ...], float, float], ...] = ()
    memory: int = 0
    knows_loss: bool = False
    sent_messages: int = 0
    sent_sums: int = 0
    sent_state: int = 0
    sent_carried: int = 0
    whole: bool = True


class Ran(_Event, frozen=True, tag="ran", kw_only=True):
    """Steps of a simulated job were committed, one after another; the last of them now.

    Attributes:
        generation: in which.
        first: the first of them.
        stop: the first that was not.
        step_s: seconds that each took.
        workers: who computed.
    """

    generation: int
    first: int
    stop: int
    step_s: float
    workers: tuple[str, ...]

    def committed(self, step: int, last: float) -> float:
        """When one of them was, if the last one was at ``last``; of the one before the first: when they began."""
        return last - (self.stop - 1 - step) * self.step_s


class Judged(_Event, frozen=True, tag="judged", kw_only=True):
    """The verdict over a step is known; told by one worker, who knows what came of it.

    Attributes:
        norm: L2 norm of the mean gradient of the whole model, before it was clipped; None where it was not finite (the
            step changed nothing then), or where nobody knows.
        rate: the learning rate of the step, of the optimizer's first group; None in a loop of one's own.
    """

    worker: str
    generation: int
    step: int
    norm: float | None
    rate: float | None


class StepOmitted(_Event, frozen=True, tag="step-omitted", kw_only=True):
    """A step that was updated ahead of its verdict was omitted after all; told by one worker."""

    worker: str
    generation: int
    step: int


class Evaluated(_Event, frozen=True, tag="evaluated", kw_only=True):
    """The state before ``step`` was evaluated: the means of ``loss`` and other scores over so many micro-batches.

    One that is no finite number is None. ``of``: how many micro-batches there are; of the others nothing was heard.
    ``best``: no state before was better, by the score that the job names.
    """

    step: int
    scores: tuple[tuple[str, float | None], ...]
    microbatches: int
    of: int
    best: bool = False

    @property
    def told(self) -> str:
        """For people, in one line."""
        scores = (f"{name} {'not finite' if score is None else f'{score:.6g}'}" for name, score in self.scores)
        lost = "" if self.microbatches == self.of else f" ({self.of - self.microbatches} of {self.of} parts were lost)"
        best = ", the best so far" if self.best else ""
        return f"evaluated before step {self.step}: {', '.join(scores) or 'nothing'}{best}{lost}"


class Pinned(_Event, frozen=True, tag="pinned", kw_only=True):
    """A worker copied its part of the checkpoint of ``step``; ``seconds`` is how long its training waited for that."""

    worker: str
    step: int
    seconds: float


class Checkpointed(_Event, frozen=True, tag="checkpointed", kw_only=True):
    """The checkpoint of the state after ``step`` steps is complete at ``url``."""

    step: int
    url: str


class Loaded(_Event, frozen=True, tag="loaded", kw_only=True):
    """A worker read its layers from the checkpoint of ``step``, or made them as its seed does (step 0).

    Attributes:
        layers: which.
        seconds: how long that took.
    """

    worker: str
    step: int
    layers: tuple[int, ...]
    seconds: float


class CheckpointFailed(_Event, frozen=True, tag="checkpoint_failed", kw_only=True):
    """There will be no checkpoint of ``step``; training went on. ``worker``: who could not write; empty: nobody's."""

    step: int
    worker: str
    detail: str


class CheckpointRejected(_Event, frozen=True, tag="checkpoint_rejected", kw_only=True):
    """A checkpoint was found not to be what was written, and the one before it was looked at."""

    step: int
    reason: str


class Resumed(_Event, frozen=True, tag="resumed", kw_only=True):
    """The run goes on from the checkpoint of ``step`` at ``url``.

    ``notes``: what differs from the job that made it, and was accepted or could not be compared.
    """

    step: int
    url: str
    notes: tuple[str, ...] = ()


class CoordinatorLost(_Event, frozen=True, tag="coordinator_lost", kw_only=True):
    """The coordinator's process ended before the job did; its supervisor starts it again."""

    how: str


class CoordinatorReady(_Event, frozen=True, tag="coordinator_ready", kw_only=True):
    """A coordinator leads and accepts connections; ``generation`` is what its store told, 0 if nothing.

    ``node``: that it runs on, for people; empty if no other could lead.
    """

    pid: int
    generation: int
    node: str = ""


class Reattached(_Event, frozen=True, tag="reattached", kw_only=True):
    """Every living worker is back at a coordinator that was started again.

    ``adopted``: all of them run the stored ``generation``, so they go on undisturbed; otherwise a new one follows.
    """

    generation: int
    adopted: bool


class ClockCompared(_Event, frozen=True, tag="clock_compared", kw_only=True):
    """A coordinator has asked an agent of another machine for the time.

    Attributes:
        mine: the coordinator's clock, by which this line's ``time`` is, too.
        other: the agent's.
        ahead_s: what the other one shows more at the same moment.
        within_s: how far off that may be: half of the round trip.
    """

    mine: str
    other: str
    ahead_s: float
    within_s: float


class JobEnded(_Event, frozen=True, tag="job_ended", kw_only=True):
    """The job is over."""

    outcome: str
    step: int


Event = (
    JobStarted
    | Chosen
    | Scheduled
    | Preparing
    | WorkerReady
    | Notice
    | EventsMissing
    | FaultInjected
    | Detected
    | Seated
    | Evaluated
    | Parted
    | Synced
    | Suspected
    | ExceptionRaised
    | Installed
    | Agreed
    | Rebuilt
    | Replaying
    | MadeAgain
    | PlanImproved
    | LibraryFilled
    | HandingOver
    | Predicted
    | Held
    | Migrating
    | StepOps
    | Ran
    | Judged
    | StepOmitted
    | Summed
    | Pinned
    | Loaded
    | Checkpointed
    | CheckpointFailed
    | CheckpointRejected
    | Resumed
    | CoordinatorLost
    | CoordinatorReady
    | Reattached
    | ClockCompared
    | JobEnded
)

Timed = tuple[float, Event]
"""When it happened, and what."""


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a log: when it happened, what, and the number of the decision that records it; 0: of none."""

    time: float
    data: Event
    decision: int = 0


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LogLine)
_COPY_BYTES = 1 << 20
_BEGIN = b'{"time":'  # nowhere else in a line: within texts, quotes are escaped


class Log(Protocol):
    """Where events go."""

    def write(self, time: float, event: Event, decision: int = 0, /) -> bool:
        """Appends one that happened at ``time``, in seconds of a clock; returns whether that worked.

        ``decision``: the number of the one that records it; an event of a decision counts once. 0: of none.
        """


class Retold:
    """Tells what is heard again: an event of a decision counts once, though whoever leads next tells it anew."""

    def __init__(self) -> None:
        self._decision = 0
        self._events: set[Event] = set()

    def knows(self, event: Event, decision: int) -> bool:
        """Returns whether this was heard before, and notes it.

        Whoever makes a decision has told all of the one before it, so of an older one everything is known.

        Args:
            event: what is told.
            decision: the number of the one that records it; 0: of none, and never told again.
        """
        if not decision:
            return False
        if decision > self._decision:
            self._decision, self._events = decision, set()
        known = decision < self._decision or event in self._events
        self._events.add(event)
        return known


class EventLog:
    """Appends events to a file that many processes share.

    One event is one write to a file opened for appending, so lines of different processes never mix. A file that was
    moved away or deleted is made again.

    Args:
        path: of the file; made if it is not there.
        complain: told, once for each kind of trouble, what became of events: the kind, and a line for people. May be
            called in any thread, with this log's lock held: it must write nothing here.
        keeps: whether this process writes again what it finds deleted; one of a job's does.
    """

    def __init__(
        self, path: str | Path, *, complain: Callable[[str, str], None] = lambda kind, text: None, keeps: bool = False
    ) -> None:
        self._path = Path(path)
        self._complain = complain
        self._keeps = keeps
        self._told: set[str] = set()
        self._missing, self._missed_at = 0, 0.0
        self._why = ""
        # Any thread of this process may write: everything here but `path` is used under the lock, so that a line and
        # the one about what is missing before it stay together. `complain` is called with it held, and must write
        # nothing here. Other processes write to the same file: what is written at once are whole lines.
        self._lock = threading.Lock()
        self._file: int | None = None
        self._strays: list[_Stray] = []
        self.check()

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._path

    def write(self, time: float, event: Event, decision: int = 0, /) -> bool:
        """Appends one event; returns whether that worked. See :class:`Log`.

        After failure: events before and after this one can still be read, and are preceded by how many are missing.
        """
        with self._lock:
            return self._write(LogLine(time, event, decision))

    def check(self) -> None:
        """Finds out whether the file is still where it was, without an event to write."""
        with self._lock, contextlib.suppress(OSError):  # whoever has something to write will meet it
            self._stay()

    def close(self) -> None:
        """Closes the file; a last try to say how many events are missing."""
        with self._lock:
            with contextlib.suppress(OSError):  # it was told by `complain`
                self._tell_missing(self._stay())
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _tell_missing(self, file: int) -> None:
        if self._missing:
            _append(file, LogLine(self._missed_at, EventsMissing(count=self._missing, why=self._why)))
            self._missing = 0

    def _write(self, line: LogLine) -> bool:
        try:
            file = self._stay()
            self._tell_missing(file)
            _append(file, line)
        except OSError as error:
            self._missing, self._missed_at = self._missing + 1, line.time
            self._why = error.strerror or str(error)
            self._tell("write", f"cannot be written: {self._why}; events are missing from it")
            return False
        return True

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._complain(f"events-{kind}", f"{self._path}: {text}; training goes on")

    def _stay(self) -> int:
        """Returns the file, after seeing to it that it is the one of that name."""
        if self._file is None or not _is_at(self._file, self._path):
            self._change_file()
        assert self._file is not None
        while self._strays:
            self._strays[0].copy_to(self._file)
            self._strays.pop(0).close()
        return self._file

    def _change_file(self) -> None:
        before, mode = self._file, os.O_RDWR if self._keeps else os.O_WRONLY
        self._file = os.open(self._path, mode | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if before is None:
            return
        self._tell("gone", "was deleted or moved, and is made again")
        if self._keeps:
            self._strays.append(_Stray(before))
        else:
            os.close(before)


class _Stray:
    """A file that is not in its place any more, whose lines are to be written again."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._done = 0

    def copy_to(self, file: int) -> None:
        """Appends what was not copied yet; after a failure the line that was cut is written again."""
        while data := os.pread(self._file, _COPY_BYTES, self._done):
            lines = data[: data.rfind(b"\n") + 1] or data
            written = os.write(file, lines)
            if written < len(lines):
                self._done += lines.rfind(b"\n", 0, written) + 1
                raise OSError(errno.ENOSPC, "events were written in part")
            self._done += written

    def close(self) -> None:
        os.close(self._file)


def _append(file: int, line: LogLine) -> None:
    data = _encoder.encode(line) + b"\n"
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, an event was written in part")


def _is_at(file: int, path: Path) -> bool:
    """Whether a file that is open is the one of that name; devices and pipes are wherever they are."""
    ours = os.fstat(file)
    try:
        there = path.stat()
    except FileNotFoundError:
        return not stat.S_ISREG(ours.st_mode)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) or not stat.S_ISREG(ours.st_mode)


def read_events(path: str | Path) -> list[Timed]:
    """Returns (time, event) of a log, in the order of time.

    What a full disk or a kill in the middle of a write cut off is left out: at the end of the log, or before the event
    that another process appended to it.

    Raises:
        StorageError: it cannot be read, or is no log of events.
    """
    return EventReader(path).read()


class EventReader:
    """Reads a log that grows, each time what has been appended to it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read = 0
        self._file: tuple[int, int] | None = None
        self._retold = Retold()

    def read(self) -> list[Timed]:
        """Returns the events that are new; see :func:`read_events`.

        A log that has become shorter, or is another file, is another one, and is read whole.
        """
        lines = self.read_lines()
        news = [(line.time, line.data) for line in lines if not self._retold.knows(line.data, line.decision)]
        return sorted(news, key=lambda pair: pair[0])

    def read_lines(self) -> list[LogLine]:
        """Returns the lines that are new, in the order in which they were written; what is told again among them."""
        with (
            parsing(lambda text: StorageError(f"{self._path}: is no log of events: {text}"), OSError),
            self._path.open("rb") as log,
        ):
            known = os.fstat(log.fileno())
            if self._read > known.st_size or self._file not in (None, (known.st_dev, known.st_ino)):
                self._read, self._retold = 0, Retold()
            self._file = known.st_dev, known.st_ino
            log.seek(self._read)
            data = log.read()
            *lines, rest = data.split(b"\n")
            new = [_decoder.decode(line[line.rindex(_BEGIN) :]) for line in lines]
        self._read += len(data) - len(rest)
        return new
