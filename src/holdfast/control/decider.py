"""What a coordinator does with an event: decides, stores, records, sends. Without a socket, a thread or a clock.

The coordinator's service has one, and so has the simulated cluster.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

import msgspec

from holdfast.control.checkpoint_ledger import Settled
from holdfast.control.membership import (
    AnswerPlanned,
    Closed,
    Improved,
    Membership,
    Output,
    Phase,
    Record,
    Tell,
    Tick,
    Unadvised,
    decide,
    end,
    to_store,
    unplanned,
)
from holdfast.control.messages import Gathered, Heartbeat, Install, Message, News, Remark, StepDone, Told
from holdfast.control.store import StoredDecision
from holdfast.core.excerpts import excerpts
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.errors import CoordinatorUnavailable, HoldfastError, StoreAway
from holdfast.recovery.actions import RecoveryPlan
from holdfast.telemetry.events import Detected, Event, HandingOver, Log, Migrating, Notice, Parted, Seated, Synced

__all__ = ["Decider", "Happening", "Outside", "Remarks", "Store"]

Happening = Message | Closed | Tick | AnswerPlanned | Improved | Unadvised | Settled
"""What a coordinator decides about."""
Remarks = queue.SimpleQueue[tuple[str, str]]
"""What the user should hear of, from any thread: its kind and a line; see :class:`Remark`."""
_DECIDES_NOTHING = (Heartbeat, StepDone, Remark, AnswerPlanned)
"""Events that need not wait for those before them."""


class Store(Protocol):
    """Where decisions are durable."""

    def put(self, decision: StoredDecision) -> None:
        """Stores one, before it returns. Raises StoreAway: not now, safe to repeat."""


class Outside(Protocol):
    """Whom a decider speaks to: the workers, the agent, and the store of checkpoints."""

    def send(self, outputs: Sequence[Output]) -> None:
        """Sends each Tell, and begins to write each manifest: a Settled follows."""

    def send_last(self, outputs: Sequence[Output], die: Callable[[], None]) -> None:
        """Sends each, and lets this process die as soon as they are out: a fault that was scheduled."""


@dataclass(slots=True, kw_only=True)
class Decider:
    """Carries out what ``decide`` says: stores it, then sends it.

    Attributes:
        membership: the state so far.
        store: where decisions go before they are sent; None if that cannot be used, and nothing is to be stored.
        log: where events go.
        clock: seconds, monotonic; of the log.
        awake: seconds that this process has run; by them everybody is judged.
        outside: whom it speaks to.
        on_point: called at each named point, with the membership by which it is told which step that is in.
        remarks: passed on to the agent.
        resigned: whether another coordinator leads now.
    """

    membership: Membership
    store: Store | None
    log: Log
    clock: Callable[[], float]
    awake: Callable[[], float]
    outside: Outside
    on_point: Callable[[Point, Membership], None] = lambda point, membership: None
    remarks: Remarks = field(default_factory=queue.SimpleQueue)
    resigned: bool = False
    _looked_at: float | None = None
    _unplannable: set[tuple[int, frozenset[WorkerId]]] = field(default_factory=set)
    _waiting: list[Happening] = field(default_factory=list)
    _away: str = ""
    _told_waiting: set[str] = field(default_factory=set)
    _ahead: Membership = field(init=False)
    """What the membership will be once what waits is handled."""
    _before: Membership = field(init=False)
    """What it was: plans prepared for naught are freed with it, which takes a while, after the answer is sent."""

    def __post_init__(self) -> None:
        """Nothing waits."""
        self._ahead = self._before = self.membership

    @property
    def over(self) -> bool:
        """Whether there is nothing left to decide: the job has ended, or another coordinator leads."""
        return self.resigned or self.membership.phase is Phase.ENDED

    @property
    def waits(self) -> bool:
        """Whether decisions wait for the store."""
        return bool(self._waiting)

    def take(self, events: Sequence[Happening]) -> None:
        """Takes events; if a decision fails, or is refused for good, the job ends and everyone is told."""
        try:
            for event in events:
                self._handle_in_turn(event)
        except CoordinatorUnavailable as error:  # another one leads; nothing was stored, so nothing is told
            self.note(str(error))
            self.resigned = True
        except Exception as error:  # noqa: BLE001 - the last resort of a service: nobody else would notice
            self._give_up(f"coordinator: {type(error).__name__}: {error}")

    def pass_time(self) -> None:
        """To be called a few times a second: whoever is overdue is found, and what could not be stored tried again."""
        now = self.clock()
        self.take([Tick(gap_s=0.0 if self._looked_at is None else now - self._looked_at)])
        self._looked_at = now
        self._try_again()
        self.pass_remarks_on()

    def handle(self, event: Happening) -> None:
        """Takes one event: decides, stores, records, sends.

        Raises:
            StoreAway: what was decided could not be stored; nothing has changed.
            CoordinatorUnavailable: another coordinator leads.
        """
        before = self.membership
        after, outputs = decide(before, event, now=self.awake())
        if after.roster.lost - before.roster.lost:
            self.on_point(Point.DETECT, before)
        if decision := to_store(before, after):
            self.on_point(Point.PERSIST, before)
            self._put(decision, last=after.phase is Phase.ENDED)
        for output in outputs:
            if isinstance(output, Record):
                self.log.write(self.clock(), output.event)
        if decision:
            self.on_point(Point.BROADCAST, before)
        self._before, self.membership = before, after
        if reports := _reports(before, after, outputs):
            self.outside.send(reports)
        self.on_point(Point.INSTALL, before)
        self.outside.send(_excerpted(outputs))
        self.on_point(Point.START, after)
        self.on_point(Point.COPY, after)

    def _put(self, decision: StoredDecision, *, last: bool) -> None:
        """Stores a decision; the last one is told even if it cannot be stored, as nobody will go on from there."""
        assert self.store is not None, "only what follows upon a known past is stored"
        try:
            self.store.put(decision)
        except StoreAway:
            if not last:
                raise

    def _handle_in_turn(self, event: Happening) -> None:
        """Handles an event now; or later, if what it decides, or what came before it, cannot be stored yet."""
        if self._waiting and not isinstance(event, _DECIDES_NOTHING):
            if not isinstance(event, Tick):
                self._wait_with(event, self._away, self._ahead)
            return
        try:
            self.handle(event)
        except StoreAway as error:
            self._wait_with(event, str(error), self.membership)

    def _wait_with(self, event: Happening, away: str, before: Membership) -> None:
        """Puts an event off until the store can be written, and says so; ``before``: what it will be decided in.

        Training goes on meanwhile, unless everybody waits for the very decision.
        """
        self._waiting.append(event)
        self._away, (self._ahead, _) = away, decide(before, event, now=self.awake())
        if self._ahead.phase is Phase.RUNNING:
            return self._tell_waiting("store", f"{away}; decisions wait until it can be written, training goes on")
        lost = ", ".join(map(str, sorted(self._ahead.roster.lost - self.membership.roster.lost)))
        what = f"the answer to the loss of {lost}" if lost else f"what follows upon {type(event).__name__}"
        text = f"{away}; {what} waits until it can be written: training stands still"
        return self._tell_waiting("store-all", text)

    def _tell_waiting(self, kind: str, text: str) -> None:
        """Once each time that the store goes away; whatever waits is tried again and again."""
        if kind not in self._told_waiting:
            self._told_waiting.add(kind)
            self.remarks.put((kind, text))

    def _try_again(self) -> None:
        """Handles what waits for the store, in the order in which it came."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.take(waiting)
            if not self._waiting:
                self._told_waiting.clear()
                self.note("decisions can be stored again")

    def note(self, text: str) -> None:
        """Writes a line into the log."""
        self.log.write(self.clock(), Notice(worker="coordinator", text=text))

    def _give_up(self, detail: str) -> None:
        self.membership, outputs = end(self.membership, detail)
        self.outside.send(outputs)

    def pass_remarks_on(self) -> None:
        """Tells the agent what others here had to say."""
        told: list[Output] = []
        while not self.remarks.empty():
            kind, text = self.remarks.get()
            told.append(Tell(to=None, command=Remark(worker=None, kind=kind, text=text)))
        if told:
            self.outside.send(told)

    def unanswered(self) -> tuple[frozenset[WorkerId], ...]:
        """The losses that could come next and whose answer can be prepared; none while decisions wait."""
        if self._waiting:
            return ()
        state = self.membership
        return tuple(lost for lost in unplanned(state) if (state.generation, lost) not in self._unplannable)

    def answer(self, before: Membership, lost: frozenset[WorkerId], recovery: RecoveryPlan | HoldfastError) -> bool:
        """Keeps what was prepared for a loss.

        Args:
            before: the membership for which it was.
            lost: all who would be gone.
            recovery: the answer; or why there is none, to be met again, and told, if it ever comes to that.

        Returns:
            Whether the others that were unanswered then still are the ones to prepare.
        """
        if isinstance(recovery, HoldfastError):
            names = ", ".join(map(str, sorted(lost)))
            self.note(f"no answer could be prepared for the loss of {names}: {recovery}")
            self._unplannable.add((before.generation, lost))
            return True
        now = self.membership
        same = (now.generation, now.roster.dormant) == (before.generation, before.roster.dormant)
        if not same or lost not in unplanned(now):
            return False  # somebody was lost, has moved or rests meanwhile: other answers are needed now
        self.take([AnswerPlanned(lost=lost, recovery=recovery)])
        return True


def _excerpted(outputs: Sequence[Output]) -> list[Output]:
    """What is sent for these: of a plan each worker hears no more than it needs, as all of them read it at once."""
    workers = [each.to for each in outputs if isinstance(each, Tell) and each.to is not None]
    known: dict[int, dict[WorkerId, Plan]] = {}
    sent: list[Output] = []
    for output in outputs:
        match output:
            case Tell(to=WorkerId() as to, command=Install(plan=Plan() as plan) as order):
                known[id(plan)] = known.get(id(plan)) or excerpts(plan, workers, all_routes=order.audits is not None)
                order = msgspec.structs.replace(order, plan=known[id(plan)][to])
                sent.append(replace(output, command=order))
            case _:
                sent.append(output)
    return sent


def _reports(before: Membership, after: Membership, outputs: Sequence[Output]) -> tuple[Tell, ...]:
    """What tells the agent what its user waits for, or should hear of."""
    told = list[Gathered | Told]()
    if (
        Phase.GATHERING in (before.phase, after.phase)
        and before.roster.processes.keys() != after.roster.processes.keys()
    ):
        workers = after.grid.baseline.workers
        told.append(Gathered(missing=tuple(w for w in workers if w not in after.roster.processes), of=len(workers)))
    for output in outputs:
        if isinstance(output, Record) and _is_news(output.event):
            told.append(Told(news=output.event))
    return tuple(Tell(to=None, command=each) for each in told)


def _is_news(event: Event) -> TypeGuard[News]:
    """Whether something happened to a worker that the user should hear of."""
    return isinstance(event, Detected | Seated | Parted | Synced | Migrating | HandingOver) or (
        isinstance(event, Notice) and event.worker[0].isdigit()
    )
