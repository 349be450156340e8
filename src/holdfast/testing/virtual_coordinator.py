"""The coordinator of a simulated job: the real one, without its sockets; it can die, be stopped, and come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from holdfast.control.chain.entry import Entry
from holdfast.control.chain.leading import Stored
from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.decider import Decider, Happening
from holdfast.control.membership import (
    HEARD_S,
    Improved,
    Membership,
    Output,
    StoredDecision,
    Tell,
    plan_recovery,
    restore,
)
from holdfast.control.messages import Ended
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.errors import HoldfastError, InternalError
from holdfast.recovery.actions import RecoveryPlan
from holdfast.strategies.registry import strategy_named
from holdfast.telemetry.events import CoordinatorReady, Event
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual_log import VirtualLog
from holdfast.testing.virtual_time import Sleep, VirtualTime

__all__ = ["TICK_S", "VirtualCoordinator", "VirtualStore"]

TICK_S = 0.2
REATTACH_S = 60.0
_ANSWERS: dict[tuple[Hashable, ...], RecoveryPlan] = {}
_MOST_ANSWERS = 4096


def _answered(state: Membership, lost: frozenset[WorkerId]) -> RecoveryPlan | HoldfastError:
    """What :func:`plan_recovery` comes to: if bits stay the same a function of a few values, which many runs share."""
    if not strategy_named(state.rules.strategy).exact:  # what is left out depends on what has run
        return _planned(state, lost)
    about = (state.rules, state.grid.baseline, lost, state.roster.dormant, len(state.roster.spares))
    if about not in _ANSWERS:
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.clear()
        answer = _planned(state, lost)
        if isinstance(answer, HoldfastError):
            return answer
        _ANSWERS[about] = answer
    return _ANSWERS[about]


def _planned(state: Membership, lost: frozenset[WorkerId]) -> RecoveryPlan | HoldfastError:
    try:
        return plan_recovery(state, lost)
    except HoldfastError as error:
        return error


class VirtualStore:
    """What outlives a coordinator: its newest decision, and the manifests of checkpoints."""

    def __init__(self) -> None:
        self._newest: StoredDecision | None = None
        self.checkpoints: dict[int, tuple[str, ...]] = {}

    def put(self, decision: StoredDecision) -> None:
        """Stores one: durable at once, whenever whoever stores it hears that it is."""
        self._newest = decision

    def latest(self) -> StoredDecision | None:
        """Returns the newest decision, as it would be read; None if there is none."""
        return Entry.decoded(Entry(by="", decision=self._newest).encoded).decision


class Telling(Protocol):
    """Who is told what a coordinator says."""

    def tell(self, tell: Tell, process: Process | None) -> None:
        """Sends to a process; to the agent if that is None."""


class VirtualCoordinator:
    """One process of it.

    Args:
        scenario: the job.
        begins: the membership of a job that has not begun.
        store: what the coordinators before left.
        time: that passes.
        log: where events go.
        telling: carries what it says.
        ended: told how the job ended.
    """

    def __init__(
        self,
        scenario: Scenario,
        begins: Membership,
        store: VirtualStore,
        time: VirtualTime,
        log: VirtualLog,
        telling: Telling,
        ended: Callable[[Ended], None],
    ) -> None:
        self.alive = True
        self.asleep = Sleep(time, log.fire_once)
        self._scenario = scenario
        self._store = store
        self._time = time
        self._putting = random.Random(scenario.seed)  # of its own, so that no other delay is drawn differently
        self._telling = telling
        self._ended = ended
        self._recorded: tuple[Event, ...] = ()
        self._looks = object()
        if (stored := store.latest()) is not None:
            self._recorded = stored.recorded
            begins = restore(begins, stored, reattach_until=self.asleep.awake_s() + REATTACH_S)
        self.decider = Decider(
            membership=begins,
            log=log,
            clock=lambda: time.now,
            awake=self.asleep.awake_s,
            outside=self,
        )

    def run(self, *, again: bool) -> None:
        """Tells and writes what the one before was to tell and to write, and begins to look at what is overdue."""
        if again:
            state = self.decider.membership
            contact = replace(state.contact, seats_from=self.asleep.awake_s() + HEARD_S)
            self.decider.membership = replace(state, contact=contact)
        self.decider.tell_again(self._recorded)
        for commit in self.decider.membership.unsettled:
            self._wrote(commit)
        if again:
            ready = CoordinatorReady(pid=0, generation=self.decider.membership.generation)
            self.decider.log.write(self._time.now, ready)
        self._tick()

    def _tick(self) -> None:
        if not self.alive or self.asleep.puts_off(self._tick):
            return
        self._time.after(TICK_S, self._tick)
        self.decider.pass_time()
        self._complain()
        before = self.decider.membership
        if ahead := self.decider.unanswered():
            lost = self._time.random.choice(ahead)
            recovery = _answered(before, lost)
            self._time.after(
                self._time.draw(self._scenario.delays.control), lambda: self._answer(before, lost, recovery)
            )
        if offer := self._scenario.better(before):
            self.take(Improved(lost=before.absent, offer=offer))

    def _answer(self, before: Membership, lost: frozenset[WorkerId], recovery: RecoveryPlan | HoldfastError) -> None:
        """What was prepared is there, after the time of a message, if we live that long."""
        if self.alive and not self.asleep.puts_off(lambda: self._answer(before, lost, recovery)):
            self.decider.answer(before, lost, recovery)
            self._complain()

    def take(self, event: Happening) -> None:
        """An event is there."""
        if not self.alive or self.asleep.puts_off(lambda: self.take(event)):
            return
        self.decider.take([event])
        self._complain()

    def _complain(self) -> None:
        """A bug of ours ends a real job; here it is to be seen."""
        ended = self.decider.membership.ended
        if ended is not None and ended.detail.startswith("coordinator: "):
            raise InternalError(ended.detail)

    def look_at(self, awake_s: float | None) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        self._looks = look = object()

        def pass_time() -> None:
            if self.alive and self._looks is look and not self.asleep.puts_off(pass_time):
                self.decider.pass_time()
                self._complain()

        if awake_s is not None:
            self._time.after(max(0.0, awake_s - self.asleep.awake_s()), pass_time)

    def send(self, outputs: Sequence[Output]) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        processes = self.decider.membership.roster.processes
        for output in outputs:
            match output:
                case WriteManifest():
                    self._write(output)
                case Tell(to=None, command=Ended() as ended):
                    self._ended(ended)
                case Tell(to=None):
                    self._telling.tell(output, None)
                case Tell(to=WorkerId() as to) if output.process or to in processes:
                    self._telling.tell(output, output.process or processes[to])

    def send_last(self, outputs: Sequence[Output], die: Callable[[], None]) -> None:
        """See :class:`holdfast.control.decider.Outside`; no fault of this kind is scheduled here."""
        raise InternalError("nothing strikes a simulated coordinator in the middle of what it does")

    def store(self, decision: StoredDecision) -> None:
        """See :class:`holdfast.control.decider.Outside`: whoever dies before the answer comes has stored it."""
        self._store.put(decision)
        self._time.after(self._putting.uniform(*self._scenario.delays.put), lambda: self.take(Stored()))

    def _write(self, commit: WriteManifest) -> None:
        """Writes a manifest: others may be begun meanwhile, but they are written one after another."""

        def written() -> None:
            if self.alive:
                self._wrote(commit)

        self._time.after(self._time.draw(self._scenario.delays.store), written, "store")

    def _wrote(self, commit: WriteManifest) -> None:
        self._store.checkpoints[commit.step] = tuple(shard.sha256 for shard in commit.shards)
        self.take(Settled(step=commit.step, url="virtual"))
