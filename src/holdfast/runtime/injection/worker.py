"""Scheduled faults of one worker, put around its driver's ports: what strikes at a named point, for real."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from holdfast.control.messages import Message, Strike
from holdfast.core.faults import OF_A_STEP, Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution, Total
from holdfast.runtime.driver import Driver
from holdfast.runtime.injection.planned import WorkerFaults
from holdfast.runtime.isolation import wait_until_cut
from holdfast.runtime.transport.around import TransportAround
from holdfast.runtime.transport.port import SumHandle, SumKey, Transport
from holdfast.telemetry.events import Event, EventLog, EventReader, FaultInjected, Summed

__all__ = ["Means", "OnThisProcess", "WorkerInjector", "strike_worker"]

_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.HANG: signal.SIGSTOP,
    FaultKind.LEAVE: signal.SIGTERM,
    FaultKind.SUSPEND: signal.SIGUSR1,
    FaultKind.WAKE: signal.SIGUSR2,
}
_LOOK_S = 0.005
_OF_THE_AGENT = (FaultKind.KILL_NODE, FaultKind.PARTITION)
_OF_RECOVERIES = (Point.DETECT, Point.INSTALL, Point.REPLAY, Point.COPY)
_BEFORE_STEPS = (Point.DETECT, Point.INSTALL)
"""Those of them that a process also comes to before its first step, where nobody recovers from anything."""


def _strikes(fault: Fault, point: Point, step: int) -> bool:
    """Whether a fault is due at a point; nobody can foretell in which step a copy or a recovery finds a worker.

    Who is lost in a step can leave others behind in the step before it, and ahead of it. So these faults strike from
    the step before theirs on.
    """
    if fault.kind in (FaultKind.SLOW, FaultKind.JOIN) or fault.point is not point or point is Point.GRADIENTS:
        return False
    return step + 1 >= fault.step if point in _OF_RECOVERIES else step == fault.step


class Means(Protocol):
    """How faults are carried out on a process."""

    def signal(self, number: int) -> None:
        """The process is sent a signal."""

    def stand_still(self) -> None:
        """The thread that computes does nothing any more."""

    def wait_until_cut(self) -> None:
        """The thread that computes waits until the process's network link is down."""

    def sleep(self, seconds: float) -> None:
        """The thread that computes takes its time."""

    def note(self, event: Event) -> None:
        """Writes down what is about to take effect."""

    def wait_until_begun(self, workers: Collection[WorkerId], step: int, over: Callable[[], bool]) -> None:
        """The thread that computes waits until these workers have written that they are in a step, or it is over."""

    def wait_until_summed(self, workers: Collection[WorkerId], step: int, sums: int) -> None:
        """The thread that computes waits until these workers have written down that they hold so many sums."""

    def wait_until_noted(self, workers: Collection[WorkerId], step: int) -> None:
        """The thread that computes waits until faults in the middle of sums of these workers are noted."""


@dataclass(slots=True, kw_only=True)
class OnThisProcess:
    """The real means.

    Attributes:
        log: where faults are noted.
    """

    log: EventLog

    def signal(self, number: int) -> None:
        """See Means."""
        os.kill(os.getpid(), number)

    def stand_still(self) -> None:
        """See Means."""
        threading.Event().wait()

    def wait_until_cut(self) -> None:
        """See Means."""
        wait_until_cut()

    def sleep(self, seconds: float) -> None:
        """See Means."""
        time.sleep(seconds)

    def note(self, event: Event) -> None:
        """See Means."""
        self.log.write(time.monotonic(), event)

    def wait_until_begun(self, workers: Collection[WorkerId], step: int, over: Callable[[], bool]) -> None:
        """See Means."""
        self._wait(workers, lambda e: isinstance(e, Summed) and e.step == step, over)

    def wait_until_summed(self, workers: Collection[WorkerId], step: int, sums: int) -> None:
        """See Means."""
        self._wait(workers, lambda e: isinstance(e, Summed) and e.step == step and e.sums >= sums)

    def wait_until_noted(self, workers: Collection[WorkerId], step: int) -> None:
        """See Means."""
        self._wait(workers, lambda e: isinstance(e, FaultInjected) and e.step == step and e.point == Point.GRADIENTS)

    def _wait(
        self, workers: Collection[WorkerId], told: Callable[[Event], bool], over: Callable[[], bool] = lambda: False
    ) -> None:
        """Looks into the log until each of these has told this, or nobody waits for them any more."""
        missing, log = {str(worker) for worker in workers}, EventReader(self.log.path)
        while True:
            missing -= {getattr(event, "worker", "") for _, event in log.read() if told(event)}
            if not missing or over():
                return
            time.sleep(_LOOK_S)


@dataclass(slots=True, kw_only=True)
class WorkerInjector:
    """Carries out the faults of one worker, each once.

    Attributes:
        worker: whose.
        faults: what is scheduled.
        means: how they are noted, before they take effect, and carried out.
        send: to the coordinator, for what the agent has to do.
        steps: in which somebody is struck; whoever begins one writes that down.
        witnesses: workers that live through a fault in the middle of sums.
        fellows: workers that are struck there, too; all strike once all have come there.
    """

    worker: WorkerId
    faults: tuple[Fault, ...]
    means: Means
    send: Callable[[Message], None]
    steps: frozenset[int] = frozenset()
    witnesses: tuple[WorkerId, ...] = ()
    fellows: tuple[WorkerId, ...] = ()
    _struck: set[Fault] = field(default_factory=set)
    _began: bool = False
    _contributed: int = 0
    _summed: int = 0
    _driver: Driver | None = None

    def put_around(self, driver: Driver) -> None:
        """From now on strikes whoever this drives."""
        self._driver = driver
        driver.on_point, driver.on_run, driver.strikes = self.reach, self.slow_down, self.asked
        if self.worker in self.witnesses or any(fault.point is Point.GRADIENTS for fault in self.faults):
            driver.transport = _StruckTransport(driver.transport, self, partial(_num_sums, driver))

    def asked(self) -> tuple[str, ...]:
        """What the agent was asked to carry out, in text form; asked again whenever that may have been lost."""
        return tuple(sorted(str(fault) for fault in tuple(self._struck) if fault.kind in _OF_THE_AGENT))

    def reach(self, point: Point, step: int) -> None:
        """Strikes with whatever is due here."""
        if point is Point.START:
            self._began, self._contributed, self._summed = True, 0, 0
            if step in self.steps:
                self.means.note(Summed(worker=str(self.worker), step=step, sums=0))
        if point in _BEFORE_STEPS and not self._began:
            return
        for fault in self.faults:
            if fault not in self._struck and _strikes(fault, point, step):
                self._struck.add(fault)
                if point in OF_A_STEP:
                    self._await_others(step)
                if fault.kind not in _OF_THE_AGENT:  # which notes every worker that it strikes
                    self._note(fault, point, step)
                self._strike(fault)

    def contributing(self, step: int, of: int) -> None:
        """A contribution to one of ``of`` sums is about to be made; those to the sums before it were."""
        self._contribute(step, self._contributed, of)
        self._contributed += 1

    def summed(self, step: int, of: int) -> None:
        """One more of ``of`` sums is there; whoever lives through the faults of others writes down how many are."""
        self._summed += 1
        if self.worker in self.witnesses:
            self.means.note(Summed(worker=str(self.worker), step=step, sums=self._summed))
        if self._summed == of:
            self._contribute(step, of, of)

    def _contribute(self, step: int, sums: int, of: int) -> None:
        """Strikes with what is due when so many contributions were made, once those who are to hold these sums do."""
        for fault in self.faults:
            due = fault.point is Point.GRADIENTS and fault.step == step and fault.reductions(of) == sums
            if due and fault not in self._struck:
                self._struck.add(fault)
                self._await_others(step)
                self.means.wait_until_summed(self.witnesses, step, sums)
                self._note(fault, Point.GRADIENTS, step)
                self.means.wait_until_noted(self.fellows, step)
                self._strike(fault)

    def _await_others(self, step: int) -> None:
        """All others are in the step, too: else it would be a loss in the step before, for those who are behind."""
        assert self._driver is not None, "it is put around a driver"
        driver, plan = self._driver, self._driver.protocol.plan
        others = [] if plan is None else [worker for worker in plan.workers if worker != self.worker]
        self.means.wait_until_begun(others, step, lambda: driver.superseded)

    def slow_down(self, step: int, duration_s: float) -> None:
        """Makes an operation that took ``duration_s`` last as long as a scheduled ``slow`` wants."""
        for fault in self.faults:
            if fault.kind is FaultKind.SLOW and step >= fault.step:
                if fault not in self._struck:
                    self._struck.add(fault)
                    self._note(fault, Point.START, step)
                self.means.sleep(duration_s * (fault.factor - 1.0))

    def _note(self, fault: Fault, point: Point, step: int) -> None:
        event = FaultInjected(worker=str(self.worker), kind=fault.kind, step=step, point=point, spec=str(fault))
        self.means.note(event)

    def _strike(self, fault: Fault) -> None:
        if fault.kind in _SIGNALS:
            self.means.signal(_SIGNALS[fault.kind])
        elif fault.kind is FaultKind.STALL:
            self.means.stand_still()
        elif fault.kind in _OF_THE_AGENT:
            self.send(Strike(worker=self.worker, spec=str(fault)))
            if fault.kind is FaultKind.PARTITION:
                self.means.wait_until_cut()  # and goes on, cut off
            else:
                self.means.stand_still()


def strike_worker(faults: WorkerFaults, driver: Driver) -> None:
    """Puts a worker's faults around its driver, which runs in this process."""
    assert isinstance(driver.log, EventLog), "a process writes into the job's log"
    injector = WorkerInjector(
        worker=driver.protocol.worker,
        faults=faults.faults,
        means=OnThisProcess(log=driver.log),
        send=driver.send,
        steps=faults.steps,
        witnesses=faults.witnesses,
        fellows=faults.fellows,
    )
    injector.put_around(driver)


def _num_sums(driver: Driver) -> int:
    """How many reductions a worker takes part in, in a whole step."""
    return 0 if driver.protocol.program is None else len(driver.protocol.program.reductions)


class _StruckTransport(TransportAround):
    """See Transport; tells an injector of each contribution before it is made, and of each sum that is there.

    Args:
        inner: what carries everything.
        injector: may strike then.
        num_sums: how many sums a whole step has.
    """

    def __init__(self, inner: Transport, injector: WorkerInjector, num_sums: Callable[[], int]) -> None:
        super().__init__(inner)
        self._injector = injector
        self._num_sums = num_sums

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """See Transport.all_reduce."""
        of = self._num_sums()
        self._injector.contributing(key.step, of)
        return _StruckSum(super().all_reduce(key, contribution), partial(self._injector.summed, key.step, of))


@dataclass(frozen=True, slots=True)
class _StruckSum:
    """See SumHandle; ``on_sum`` is called once the sum is there."""

    inner: SumHandle
    on_sum: Callable[[], None]

    @property
    def ready(self) -> bool:
        return self.inner.ready

    def wait(self) -> Total:
        found = self.inner.wait()
        self.on_sum()
        return found
