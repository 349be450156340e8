"""The agent of a node: supervises the node's processes, as the coordinator says, until the job has ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.config.job import Tls
from holdfast.control.client import ControlClient
from holdfast.control.messages import (
    BeginAnew,
    Command,
    Ended,
    Fence,
    Gathered,
    Hello,
    Leave,
    Message,
    NodeLeaving,
    Preempted,
    Progress,
    Pulse,
    Pulsed,
    Remark,
    StandBy,
    StandingBy,
    StartWorker,
    Strike,
    Told,
)
from holdfast.errors import ConfigError, CoordinatorUnavailable
from holdfast.runtime.node.inbox import EventQueue, Item, Preempt
from holdfast.runtime.node.local import LOOK_S, LocalProcesses
from holdfast.runtime.node.news import Reporter
from holdfast.runtime.node.signals import ONE_NOTICE_S
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import EventLog, Notice, Retold

__all__ = ["LEFT", "LEFT_JOB", "Line", "NodeAgent"]

LEFT = "left"
"""How it has ended for an agent whose node has left a job that goes on."""
LEFT_JOB = Ended(
    outcome=LEFT,
    detail="the workers of this node have left; the job goes on",
    step=0,
    directory="",
    generations=0,
    lost_layers=(),
)
_LEAVING = "the workers of this node leave between two steps, once others have their layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How the coordinator is reached.

    Attributes:
        address: ``host:port``, several joined by commas, or a socket.
        token: the job's.
        reattach_s: seconds without a coordinator after which it is given up.
        tls: certificates; None connects in the clear.
        impatient: whether another coordinator may lead, so that one that is silent is soon given up.
    """

    address: str
    token: str = field(repr=False)
    reattach_s: float
    tls: Tls | None
    impatient: bool = False


@dataclass(slots=True, kw_only=True)
class NodeAgent:
    """Starts, watches and fences a node's workers, and follows the coordinator's stream.

    Two threads meet here. The *control thread* brings commands and asks for hellos; the thread that calls
    :meth:`follow` does what is asked for. They share the inbox and the group, which has a lock.

    Attributes:
        line: to the coordinator.
        make_group: makes the node's workers, given what sends to the coordinator.
        local: the processes of this machine.
        log: the job's events.
        reporter: makes lines of news.
        gone: makes the error that ends the job when there was no coordinator for too long.
        notice_s: how long a checkpoint may take that is made at a notice to end; 0: a notice ends the job at once.
        leaves: whether a notice ends no job, but has the workers of this node leave it.
        on_progress: called after every step.
        inbox: what is to be handled.
        coordinators: the addresses of those that were started here.
        stand_by: starts one more, that stands by, and returns its address; "": it cannot.
        on_pulse: called with every sign of life of whoever leads, while its store has these, too.
        clock: of this machine, which is the log's.
        group: the node's workers.
        checkpoint: the newest that there is; 0 for none.
        last: the newest step that we heard of.
    """

    line: Line
    make_group: Callable[[Callable[[Message], None]], WorkerGroup]
    local: LocalProcesses
    log: EventLog
    reporter: Reporter
    gone: Callable[[CoordinatorUnavailable], Exception]
    notice_s: float
    on_progress: Callable[[Progress], None]
    inbox: EventQueue
    leaves: bool = False
    coordinators: tuple[str, ...] = ()
    stand_by: Callable[[], str] = lambda: ""
    on_pulse: Callable[[], None] = lambda: None
    clock: str = field(default_factory=this_clock)
    checkpoint: int = 0
    last: Progress | None = None
    group: WorkerGroup = field(init=False)
    _client: ControlClient = field(init=False)
    _preempted: bool = False
    _begins_anew: bool = False
    _retold: Retold = field(default_factory=Retold)

    def __post_init__(self) -> None:
        """Nothing is connected or started yet."""
        self._client = ControlClient(
            self.line.address,
            self.line.token,
            hello=self._hello,
            on_command=self._on_command,
            on_closed=self._on_closed,
            reattach_s=self.line.reattach_s,
            clock=self.local.awake,
            tls=self.line.tls,
            impatient=self.line.impatient,
            on_pulse=self._on_pulse,
        )
        self.group = self.make_group(self._client.send)

    @property
    def addresses(self) -> str:
        """Where there are coordinators, as far as we were told; joined by commas."""
        return self._client.addresses

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Connects; when something went wrong, nobody waits for what is still to be sent."""
        self._client.start()
        try:
            yield
        except BaseException:
            self._client.close(drain_s=0.0)
            raise
        self._client.close()

    def follow(self) -> Ended:
        """Does what the coordinator says until it says how the job has ended, or this node has left it (:data:`LEFT`).

        Raises:
            ConfigError: the coordinator refuses us, or cannot be started again.
            InternalError: the job cannot go on.
            Interrupted: a signal came.
        """
        notice = Preempt.LEAVE if self.leaves else Preempt.BEGIN
        on_notice = (lambda: self.inbox.put(notice)) if self.notice_s or self.leaves else None
        with self.local.signals.heard(on_notice=on_notice, wake=self.inbox.wake):
            while True:
                if (ended := self._handle(self._next())) is not None:
                    return ended

    def _next(self) -> Item:
        """What comes next; a signal, or the end of everybody, outranks whatever it may have caused."""
        while True:
            item = self.inbox.get(LOOK_S)
            self.local.check()
            if self.group.has_left and self._may_go and not isinstance(item, Ended):
                return Preempt.LEFT
            if item is not None:
                return item

    @property
    def _may_go(self) -> bool:
        """Whether there is a coordinator that does not end with us."""
        return bool(set(self._client.told) - set(self.coordinators))

    def _handle(self, item: Item) -> Ended | None:
        """Handles one item; returns how the job has ended, if it has."""
        match item:
            case Preempt.BEGIN:
                self._preempt()
            case Preempt.GIVE_UP:
                return self._give_up()
            case Preempt.LEAVE:
                self._tell_notice(_LEAVING, "them")
                self.group.leave()
            case Leave():
                self.local.teller.tell(self.log, Notice(worker="agent", text=f"holdfast drain: {_LEAVING}"))
                self.group.leave()
            case Preempt.LEFT:
                self._client.send(NodeLeaving(process=self.group.agent, left=True))
                return LEFT_JOB
            case Ended():
                if item.outcome == "preempted" and not item.detail:
                    self.checkpoint = item.step
                return item
            case CoordinatorUnavailable():
                raise self.gone(item)
            case Exception():
                raise item
            case Gathered() | Told() | Progress() | Fence() | Strike() | StartWorker() | Remark():
                self._obey(item)
            case BeginAnew(reason=reason):
                self.local.teller.say(f"{reason}: its processes are ended, and it takes part anew")
                self.group.begin_anew()
                self._begins_anew = False
            case StandBy():
                self._stand_by()
            case act if callable(act):
                act()
        return None

    def stand_down(self, why: str) -> None:
        """Its coordinator cannot be kept alive: others are asked for one."""
        self.local.teller.say(f"no coordinator stands by here any more: {why}")
        self.coordinators = ()
        self._client.send(StandingBy(process=self.group.agent, address=""))

    def _stand_by(self) -> None:
        """Starts a coordinator, unless there is one: it was asked for twice then."""
        if not self.coordinators and (address := self.stand_by()):
            self.coordinators = (address,)
        self._client.send(StandingBy(process=self.group.agent, address=",".join(self.coordinators)))

    def _obey(self, command: Gathered | Told | Progress | Fence | Strike | StartWorker | Remark) -> None:
        teller = self.local.teller
        match command:
            case Gathered(unplaced=unplaced) if unplaced:
                teller.prepare(f"waiting for agents with room for {unplaced} more workers")
            case Gathered(missing=missing, of=of):
                teller.prepare("starting workers" if missing else "waiting for the first step", missing, of)
            case Told(news=news, decision=decision) if not self._retold.knows(news, decision):
                teller.say(self.reporter.tell(news, time.monotonic()))
            case Progress():
                self._progress(command)
            case Fence() | Strike():
                self.group.obey(command)
            case StartWorker(worker=worker, first=first):
                if not first:
                    self.reporter.asked(str(worker), time.monotonic())
                self.group.obey(command)
            case Remark(kind=kind, text=text):
                teller.say_once(kind, text)

    def _progress(self, progress: Progress) -> None:
        """A step is done."""
        self.local.teller.prepared()
        if line := self.reporter.progressed(progress, time.monotonic()):
            self.local.teller.say(line)
        self.log.check()
        self.last = progress
        self.checkpoint = max(self.checkpoint, progress.checkpoint)
        self.group.obey(progress)
        self.on_progress(progress)

    def _preempt(self) -> None:
        """A notice to end: asks for one more checkpoint, and for the end of the job after it."""
        self._tell_notice(f"a checkpoint is made first, within {self.notice_s:g} s", "the job")
        self._preempted = True
        self.group.send(Preempted())
        self.inbox.put_later(self.notice_s, Preempt.GIVE_UP)

    def _tell_notice(self, what: str, whom: str) -> None:
        notice = self.local.signals.notice
        assert notice is not None, "somebody has asked for it"
        more = f"SIGTERM after more than {ONE_NOTICE_S:g} s, or Ctrl-C, ends {whom} at once"
        text = f"{signal.Signals(notice).name}: {what}; {more}"
        self.local.teller.tell(self.log, Notice(worker="agent", text=text))

    def _give_up(self) -> Ended:
        """The job ends without the checkpoint that was asked for."""
        detail = f"it was not written within {self.notice_s:g} s (checkpoint.on_sigterm)"
        return Ended(
            outcome="preempted", detail=detail, step=self.checkpoint, directory="", generations=0, lost_layers=()
        )

    def _hello(self) -> Hello:
        return replace(self.group.hello(), preempted=self._preempted, coordinators=self.coordinators)

    def _on_command(self, command: Command) -> None:
        """Takes a command, in the control thread; what a later hello must know of is noted at once."""
        if isinstance(command, StartWorker):
            self.group.expect(command.worker)
        if isinstance(command, BeginAnew):
            if self._begins_anew:  # it was told again, before it had offered its room
                return
            self._begins_anew = True
        self.inbox.put(command)

    def _on_pulse(self, pulse: Pulse) -> None:
        """Says what time it is here, in the control thread."""
        now_s = time.monotonic()
        if pulse.seen:
            self.on_pulse()
        self._client.send(Pulsed(process=self.group.agent, clock=self.clock, sent_s=pulse.sent_s, now_s=now_s))

    def _on_closed(self, error: ConfigError | CoordinatorUnavailable | None) -> None:
        self.inbox.put(error or CoordinatorUnavailable("the coordinator closed the connection"))
