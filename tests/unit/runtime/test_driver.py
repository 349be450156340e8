"""The driver of a worker: in a thread that waits, and by hand, call by call."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from tests.processes import process_of
from tests.waiting import LIMIT_S

from holdfast.control.messages import Attached, Expel, Install, Joined, Raised, Resume, Shutdown, Status
from holdfast.core.faults import Point
from holdfast.core.ids import Batch, WorkerId
from holdfast.core.instructions import Payload, Receive
from holdfast.core.placement import split_evenly
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase
from holdfast.errors import ClusterError, InternalError, PeerLost, StaleGeneration
from holdfast.protocol.effects import (
    Attach,
    Disconnect,
    Drain,
    Listen,
    Pin,
    Release,
    Report,
    Written,
)
from holdfast.protocol.executor import Expect, StepCommitted
from holdfast.protocol.progress_monitor import ProgressMonitor
from holdfast.protocol.worker import Reach, WorkerProtocol
from holdfast.recovery.rules import JobRules
from holdfast.runtime.checkpointing import CheckpointWriter
from holdfast.runtime.driver import Driver
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.runtime.main.driving import drive
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.schedule.builders import regular_plan
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import EventLog, Pinned, read_events

PLAN = regular_plan(1, split_evenly(2, 2), 2)


class Scripted(WorkerProtocol):
    """A worker's protocol, unless a test says what is yielded instead."""

    script = None

    def run(self):
        return WorkerProtocol.run(self) if self.script is None else self.script()


class IdleTransport:
    """Connects at once; what it receives never comes. An abort wakes who waits for it."""

    sent = None

    def __init__(self):
        self.waiting = threading.Event()
        self.asked = []
        self._aborted = threading.Event()

    def build(self, generation, groups, neighbours=(), **told):
        self.waiting.clear()
        self._aborted.clear()

    def receive(self, key, peer, spec):
        self.asked.append(key)
        return self

    def hand_on(self):
        """Nothing is sent."""

    def kept(self):
        return None

    def wait(self):
        self.waiting.set()
        assert self._aborted.wait(10)
        raise StaleGeneration(1)

    def abort(self, generation):
        self._aborted.set()


class IdleCopier:
    """Has nothing to drop."""

    def release(self, keep): ...


@pytest.fixture
def driver(tmp_path):
    worker, sent = WorkerId(0, 1), queue.SimpleQueue()
    stage = EmulatedStage(layers=(1,), num_layers=2, num_microbatches=2)
    log = EventLog(tmp_path / "events.jsonl")
    spec = TensorSpec(shape=(WIDTH,), dtype="int64")
    driver = Driver(
        protocol=Scripted(worker=worker, stage=stage, rules=JobRules(steps=2), process=process_of(worker, 1)),
        transport=IdleTransport(),
        meet=lambda peers: None,
        exchange=RelayExchange(worker, sent.put),
        commands=queue.SimpleQueue(),
        attach=lambda: None,
        send=sent.put,
        log=log,
        clock=time.monotonic,
        spec_of=lambda payload: spec,
        copier=IdleCopier(),
        rebuild=lambda plan, state: pytest.fail("nothing is to be loaded"),
        expelled=pytest.fail,
        monitor=ProgressMonitor(),
    )
    yield driver, sent
    log.close()


@pytest.fixture
def running(driver):
    """A driver in its thread, what it has sent, and what became of it."""
    driver, sent = driver
    ended = queue.SimpleQueue()

    def run():
        try:
            drive(driver)
        except InternalError as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, daemon=True).start()
    driver.on_command(Attached())
    yield driver, sent, ended
    driver.on_command(Shutdown(reason="the test is over"))


def next_status(sent):
    while True:
        message = sent.get(timeout=LIMIT_S)
        if isinstance(message, Status):
            return message


def test_a_newer_generation_ends_what_is_waited_for(running):
    driver, sent, ended = running
    driver.on_command(Install(generation=1, plan=PLAN))
    driver.on_command(Resume(generation=1, step=0))
    assert next_status(sent).generation == 1
    assert driver.transport.waiting.wait(10), "it waits for an activation that never comes"
    driver.on_command(Install(generation=2, plan=PLAN))
    assert next_status(sent).generation == 2
    driver.on_command(Shutdown(reason="done"))
    assert ended.get(timeout=LIMIT_S) is None


def test_what_ends_a_job_comes_out_of_the_thread(running, monkeypatch):
    driver, _, ended = running

    def fail():
        raise InternalError("a bug of ours")

    monkeypatch.setattr(driver.protocol.stage, "discard", fail)
    driver.on_command(Install(generation=1, plan=PLAN))
    assert str(ended.get(timeout=LIMIT_S)) == "a bug of ours"


def test_a_user_who_exits_does_not_leave_the_worker_waiting(running, monkeypatch):
    driver, sent, ended = running

    def leave(*arguments):
        raise SystemExit("from somebody's layer")

    monkeypatch.setattr(driver.protocol.stage, "layer_steps", leave)
    driver.on_command(Install(generation=1, plan=PLAN))
    raised = sent.get(timeout=LIMIT_S)
    assert isinstance(raised, Raised)
    assert (raised.phase, raised.kind, driver.hello().raised) == (WorkPhase.OTHER, "SystemExit", raised)
    driver.on_command(Shutdown(reason="it raised"))
    assert ended.get(timeout=LIMIT_S) is None, "it waits to be told to go, and goes"


def test_who_is_no_member_is_expelled_by_the_thread_that_hears_of_it(driver):
    driver, _ = driver
    reasons = []
    driver.expelled = reasons.append
    driver.on_command(Expel(reason="held for lost"))
    assert reasons == ["held for lost"]


def by_hand(driver, effects):
    """Lets a script of these effects be driven; returns the calls, and what the script was given for each effect."""
    answers = []

    def script():
        for effect in effects:
            try:
                answers.append((yield effect))
            except ClusterError as error:
                answers.append(error)

    driver.protocol.script = script
    return driver.run(), answers


def make(calls, call=None, *, until=None):
    """Makes the calls of a driver, the first one unless told, up to one of this function; returns that."""
    call = call or next(calls, None)
    while call is not None and (until is None or getattr(call, "func", call) != until):
        try:
            call = calls.send(call())
        except StopIteration:
            return None
    return call


def test_every_effect_is_told_before_it_is_performed(driver):
    driver, sent = driver
    told = []
    driver.on_effect = lambda effect: told.append((effect, sent.empty()))
    report = Report(Joined(worker=WorkerId(0, 1), generation=1))
    calls, _ = by_hand(driver, [report, Attach()])
    make(calls)
    assert told == [(report, True), (Attach(), False)]


def test_what_a_call_raises_comes_where_the_effect_was_yielded(driver):
    driver, _ = driver
    calls, answers = by_hand(driver, [Listen(), Attach()])
    make(calls, until=driver.commands.get)
    lost = PeerLost("0.0", 1)
    with pytest.raises(StopIteration):
        calls.throw(lost)
    assert answers == [lost, None]


def test_what_belongs_to_a_generation_is_refused_once_a_newer_one_is_heard_of(driver):
    driver, _ = driver
    driver.on_command(Install(generation=1, plan=PLAN))
    effects = [Release(()), Disconnect(), Reach(Point.START, 0), Attach()]
    calls, answers = by_hand(driver, effects)
    make(calls)
    assert [isinstance(answer, StaleGeneration) for answer in answers] == [False, False, True, False]


def test_commands_of_older_generations_are_not_listened_to(driver):
    driver, _ = driver
    newest = Install(generation=3, plan=PLAN)
    for command in (Install(generation=1, plan=PLAN), Resume(generation=1, step=0), newest):
        driver.on_command(command)
    calls, answers = by_hand(driver, [Listen()])
    make(calls)
    assert answers == [newest]


def test_a_driver_that_is_dropped_performs_nothing_more(driver):
    driver, _ = driver
    calls, answers = by_hand(driver, [Listen(), Attach()])
    make(calls, until=driver.commands.get)
    calls.close()
    assert answers == []


def test_receives_are_posted_four_ahead(driver):
    driver, _ = driver
    receives = [Receive(Payload.ACTIVATION, each, WorkerId(0, 0)) for each in Batch((6,)).microbatches]
    calls, _ = by_hand(driver, [Expect(tuple((receive, step) for step, receive in enumerate(receives)))])
    make(calls)
    assert len(driver.transport.asked) == 4


def test_a_first_step_that_is_done_is_told_at_once(driver):
    """Whoever stops right after it is judged by what it needs when warm, not by the patience for first steps."""
    driver, sent = driver
    driver.protocol.generation = 1
    calls, _ = by_hand(driver, [StepCommitted(0, ()), StepCommitted(1, ())])
    make(calls)
    assert sent.get_nowait().slowest_s > 0
    assert sent.empty(), "after the first one, heartbeats come in their time"


def test_what_was_run_must_be_what_was_ordered(driver):
    driver, _ = driver
    ran = PLAN.orders.of(WorkerId(0, 1))
    calls, _ = by_hand(driver, [StepCommitted(0, ran, order=())])
    with pytest.raises(InternalError, match=r"its order is $"):
        make(calls)


class HeldWriter:
    """A real writer, whose first shard is not reported before it may be."""

    def __init__(self, folder):
        self.may = threading.Event()
        checkpoints = Checkpoints(LocalStore(folder))
        self.writer = CheckpointWriter(WorkerId(0, 1), checkpoints, lambda message: None, self._reach)

    def _reach(self, point, step):
        assert self.may.wait(10)


def test_who_waits_for_its_checkpoint_goes_on_when_it_is_written(driver, tmp_path):
    """Meanwhile that counts as moving along; and that it was pinned is in the log."""
    driver, _ = driver
    held = HeldWriter(tmp_path / "checkpoints")
    driver.writer = held.writer
    calls, answers = by_hand(driver, [Pin(0, 5, (1,)), Written()])
    call = make(calls, until=held.writer.written)
    (pinned,) = [event for _, event in read_events(tmp_path / "events.jsonl") if isinstance(event, Pinned)]
    assert (pinned.worker, pinned.step) == ("0.1", 5)
    for _ in range(3):
        moves, written = driver.monitor.moves, call()
        assert not written, "nothing is written yet"
        call = calls.send(written)
        assert driver.monitor.moves == moves + 1
    held.may.set()
    make(calls, call)
    assert answers == [None, None]


def test_one_that_was_told_to_go_says_so_wherever_it_attaches(driver):
    driver, _ = driver
    assert not driver.hello().leaving
    driver.leaving = True
    assert driver.hello().leaving


class OnItsWay(IdleTransport):
    """Has something to hand on; the other end may be gone."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor, self.lost, self.waited = monitor, False, []

    def hand_on(self):
        self.waited.append(self.monitor.busy_s() == 0.0)
        if self.lost:
            raise PeerLost("0.0", 1)


def test_the_device_is_waited_for_before_others_are_and_that_is_work_of_our_own(driver):
    driver, _ = driver
    driver.transport = OnItsWay(driver.monitor)
    driver.on_command(Attached())
    calls, _ = by_hand(driver, [Attach(), Listen()])
    make(calls)
    assert driver.transport.waited == [False], "before Listen alone, and it still counts as busy"


def test_who_is_lost_while_it_is_handed_on_is_told_unless_another_generation_follows(driver):
    driver, _ = driver
    driver.transport = OnItsWay(driver.monitor)
    driver.transport.lost = True
    driver.on_command(Attached())
    calls, answers = by_hand(driver, [Drain(), Listen()])
    handed_on = next(calls)
    with pytest.raises(PeerLost) as lost:
        handed_on()
    make(calls, calls.throw(lost.value))
    assert isinstance(answers[0], PeerLost)
    assert answers[1] == Attached()


class Sick(OnItsWay):
    """Its device has failed: whatever is asked of it raises."""

    def hand_on(self):
        self.waited.append(True)
        raise RuntimeError("an illegal memory access was encountered")


def test_one_whose_device_has_failed_says_so_and_asks_nothing_of_it_any_more(driver):
    driver, sent = driver
    driver.transport = Sick(driver.monitor)
    driver.on_command(Attached())
    driver.on_command(Shutdown(reason="it raised"))
    calls, _ = by_hand(driver, [Drain()])
    call = next(calls)
    with pytest.raises(RuntimeError) as failed:
        call()
    make(calls, calls.throw(failed.value))
    raised = sent.get_nowait()
    assert isinstance(raised, Raised)
    assert raised.kind == "RuntimeError"
    assert driver.transport.waited == [True]
