"""What a coordinator does with an event: decides, stores, records, sends. Without a socket, a thread or a clock.

The coordinator's service has one, and so has the simulated cluster.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

import msgspec

from holdfast.control.chain.leading import Stored
from holdfast.control.checkpoint_ledger import Settled
from holdfast.control.membership import (
    AnswerPlanned,
    Closed,
    Improved,
    Membership,
    Output,
    Phase,
    Record,
    StoredDecision,
    Tell,
    Tick,
    Unadvised,
    decide,
    end,
    node_due,
    to_store,
    unplaced,
    unplanned,
)
from holdfast.control.messages import Gathered, Heartbeat, Install, Message, News, Remark, StepDone, Told
from holdfast.core.excerpts import excerpts
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.errors import CoordinatorUnavailable, HoldfastError
from holdfast.recovery.actions import RecoveryPlan
from holdfast.telemetry.events import (
    Detected,
    Evaluated,
    Event,
    HandingOver,
    Log,
    Migrating,
    Notice,
    Parted,
    Seated,
    Synced,
)

__all__ = ["Decider", "Happening", "Outside", "Remarks"]

Happening = Message | Closed | Tick | AnswerPlanned | Improved | Unadvised | Settled | Stored
"""What a coordinator decides about."""
Remarks = queue.SimpleQueue[tuple[str, str]]
"""What the user should hear of, from any thread: its kind and a line; see :class:`Remark`."""
_Decided = Message | Closed | Tick | AnswerPlanned | Improved | Unadvised | Settled
_DECIDES_NOTHING = (Heartbeat, StepDone, Remark)
"""Events that need not wait for a decision that is being stored, as a rule."""


class Outside(Protocol):
    """Whom a decider speaks to: the workers, the agent, and the stores of decisions and checkpoints."""

    def store(self, decision: StoredDecision) -> None:
        """Begins to store a decision: a Stored follows, or several, of which the last one says that it is known."""

    def send(self, outputs: Sequence[Output]) -> None:
        """Sends each Tell, and begins to write each manifest: a Settled follows."""

    def look_at(self, awake_s: float | None) -> None:
        """Sees to it that :meth:`Decider.pass_time` is called when this process has run so long; None: need not be.

        That is sooner than it is anyway, and no longer wanted once this is called again.
        """

    def send_last(self, outputs: Sequence[Output], die: Callable[[], None]) -> None:
        """Sends each, and lets this process die as soon as they are out: a fault that was scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storing:
    """What was decided and is being stored: none of it is true, or told, before it is durable.

    Attributes:
        event: upon which.
        after: the membership to be.
        outputs: what is to be recorded and sent then.
        last: whether nobody will go on from there.
    """

    event: _Decided
    after: Membership
    outputs: tuple[Output, ...]
    last: bool


@dataclass(slots=True, kw_only=True)
class Decider:
    """Carries out what ``decide`` says: has it stored, then sends it.

    One decision is stored at a time; events wait for it meanwhile, in order, but for those that decide nothing: so
    whoever works is heard, and progress is shown, however long the store is away. Nobody is judged in that time.

    Attributes:
        membership: the state so far; all of it that must be is durable.
        log: where events go.
        clock: seconds, monotonic; of the log.
        awake: seconds that this process has run; by them everybody is judged.
        outside: whom it speaks to.
        on_point: called at each named point, with the membership by which it is told which step that is in.
        remarks: passed on to the agent.
        resigned: whether another coordinator leads now.
    """

    membership: Membership
    log: Log
    clock: Callable[[], float]
    awake: Callable[[], float]
    outside: Outside
    on_point: Callable[[Point, Membership], None] = lambda point, membership: None
    remarks: Remarks = field(default_factory=queue.SimpleQueue)
    resigned: bool = False
    _looked_at: float | None = None
    _unplannable: set[tuple[int, frozenset[WorkerId]]] = field(default_factory=set)
    _storing: _Storing | None = None
    _waiting: deque[_Decided] = field(default_factory=deque)
    _away: str = ""
    _told_away: set[str] = field(default_factory=set)
    _ahead: Membership = field(init=False)
    """While the store is away: what the membership will be once what waits is handled."""
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
        """Whether a decision waits for the store."""
        return self._storing is not None

    def take(self, events: Sequence[Happening]) -> None:
        """Takes events; if a decision fails, or is refused for good, the job ends and everyone is told."""
        try:
            for event in events:
                if isinstance(event, Stored):
                    self._on_stored(event)
                elif not self._passes(event):
                    self._wait_with(event)
                while self._waiting and not (self.waits or self.resigned):
                    self._handle(self._waiting.popleft())
        except CoordinatorUnavailable as error:  # another one leads; nothing was stored, so nothing is told
            self.note(str(error))
            self.resigned = True
        except Exception as error:  # noqa: BLE001 - the last resort of a service: nobody else would notice
            self._give_up(f"coordinator: {type(error).__name__}: {error}")

    def pass_time(self) -> None:
        """To be called a few times a second: whoever is overdue is found."""
        now = self.clock()
        if not self.waits:
            self.take([Tick(gap_s=0.0 if self._looked_at is None else now - self._looked_at)])
            self._looked_at = now
            self.outside.look_at(node_due(self.membership))
        self.pass_remarks_on()

    def _wait_with(self, event: _Decided) -> None:
        """Puts an event behind those that have come; it is handled as soon as no decision is being stored."""
        self._waiting.append(event)
        if self._away:
            self._ahead, _ = decide(self._ahead, event, now=self.awake())
            self._tell_away(event)

    def _handle(self, event: _Decided) -> None:
        """Decides about an event; what must be durable is stored first, everything else carried out at once."""
        before = self.membership
        after, outputs = decide(before, event, now=self.awake())
        if after.roster.lost - before.roster.lost:
            self.on_point(Point.DETECT, before)
        if decision := to_store(before, after, outputs):
            self.on_point(Point.PERSIST, before)
            last = after.phase is Phase.ENDED
            self._storing = _Storing(event=event, after=after, outputs=outputs, last=last)
            return self.outside.store(decision)
        return self._carry_out(before, after, outputs)

    def _passes(self, event: _Decided) -> bool:
        """Whether an event that came while a decision is stored could be handled at once: it is heard in both states.

        What it makes known is told as of the state that holds.
        """
        if self._storing is None or not isinstance(event, _DECIDES_NOTHING):
            return False
        now, states = self.awake(), (self.membership, self._storing.after)
        (here, outputs), (then, _) = (decide(state, event, now=now) for state in states)
        if to_store(states[0], here) or to_store(states[1], then):
            return False
        self._storing = replace(self._storing, after=then)
        self._carry_out(states[0], here, outputs)
        return True

    def _on_stored(self, stored: Stored) -> None:
        """What was decided is durable, so it is carried out; or it is not known yet, or will never be."""
        storing = self._storing
        if storing is None:
            return None  # the last decision was told though it could not be stored
        if stored.error is not None:
            raise stored.error
        if stored.away and not storing.last:
            return self._on_away(stored.away, storing)
        self._storing = None
        self._carry_out(self.membership, storing.after, storing.outputs, durable=True)
        if self._away and not stored.away:
            self._away = ""
            self._told_away.clear()
            self.note("decisions can be stored again")
        return None

    def _on_away(self, away: str, storing: _Storing) -> None:
        """The store cannot be written now; it is tried again and again."""
        if self._away:
            return
        waiting, self._waiting = self._waiting, deque[_Decided]()
        self._away, self._ahead = away, storing.after
        self._tell_away(storing.event)
        for event in waiting:
            self._wait_with(event)

    def _carry_out(
        self, before: Membership, after: Membership, outputs: tuple[Output, ...], *, durable: bool = False
    ) -> None:
        """Records and sends what was decided; ``durable``: whether it was stored for that."""
        decision = after.revision if durable else 0
        self._record([output.event for output in outputs if isinstance(output, Record)], decision)
        if durable:
            self.on_point(Point.BROADCAST, before)
        self._before, self.membership = before, after
        if before.contact is not after.contact or before.roster is not after.roster or before.phase is not after.phase:
            self.outside.look_at(node_due(after))
        if reports := _reports(before, after, outputs, decision):
            self.outside.send(reports)
        self.on_point(Point.INSTALL, before)
        self.outside.send(_excerpted(outputs))
        self.on_point(Point.START, after)
        self.on_point(Point.COPY, after)

    def _record(self, events: Sequence[Event], decision: int) -> None:
        for event in events:
            self.log.write(self.clock(), event, decision)

    def tell_again(self, recorded: Sequence[Event]) -> None:
        """Records and tells what the decision in force records: whoever made it may have died before it did."""
        decision = self.membership.revision
        self._record(recorded, decision)
        if news := _news(recorded, decision):
            self.outside.send(news)

    def _tell_away(self, event: _Decided) -> None:
        """Says once, each time that the store goes away, that decisions wait for it, and once that all wait for one.

        Training goes on meanwhile, unless everybody waits for the very decision.
        """
        if self._ahead.phase is Phase.RUNNING:
            return self._say_once("store", "decisions wait until it can be written, training goes on")
        lost = ", ".join(map(str, sorted(self._ahead.roster.lost - self.membership.roster.lost)))
        what = f"the answer to the loss of {lost}" if lost else f"what follows upon {type(event).__name__}"
        return self._say_once("store-all", f"{what} waits until it can be written: training stands still")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._told_away:
            self._told_away.add(kind)
            self.remarks.put((kind, f"{self._away}; {text}"))

    def note(self, text: str) -> None:
        """Writes a line into the log."""
        self.log.write(self.clock(), Notice(worker="coordinator", text=text))

    def _give_up(self, detail: str) -> None:
        self._storing = None
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
        if self.waits:
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
        if self.waits:
            return False
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


def _reports(before: Membership, after: Membership, outputs: Sequence[Output], decision: int) -> tuple[Tell, ...]:
    """What tells the agent what its user waits for, or should hear of."""
    told: tuple[Tell, ...] = ()
    if Phase.GATHERING in (before.phase, after.phase) and _gathered(before) != _gathered(after):
        told = (Tell(to=None, command=_gathered(after)),)
    return told + _news([output.event for output in outputs if isinstance(output, Record)], decision)


def _gathered(state: Membership) -> Gathered:
    workers = state.grid.baseline.workers
    missing = tuple(worker for worker in workers if worker not in state.roster.processes)
    return Gathered(missing=missing, of=len(workers), unplaced=unplaced(state))


def _news(recorded: Sequence[Event], decision: int) -> tuple[Tell, ...]:
    """What tells the agent of events that its user should hear of."""
    return tuple(Tell(to=None, command=Told(news=each, decision=decision)) for each in recorded if _is_news(each))


def _is_news(event: Event) -> TypeGuard[News]:
    """Whether something happened to a worker that the user should hear of."""
    return isinstance(event, Detected | Seated | Parted | Synced | Migrating | HandingOver | Evaluated) or (
        isinstance(event, Notice) and event.worker[0].isdigit()
    )
