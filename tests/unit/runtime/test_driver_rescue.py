"""A thread that Gloo forgot to wake is replaced: the protocol goes on in another one."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from holdfast.control.messages import Attached, Install, Raised, Resume, Shutdown, Status
from holdfast.core.builders import regular_plan
from holdfast.core.ids import Batch, WorkerId
from holdfast.core.lower import Payload, Receive
from holdfast.core.placement import split_evenly
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase
from holdfast.protocol.executor import Committed
from holdfast.protocol.worker import WorkerProtocol
from holdfast.runtime.checkpointing import CheckpointWriter
from holdfast.runtime.driver import Driver
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.runtime.injection import OnThisProcess, WorkerInjector
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.transfer import StateServer
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import EventLog, Pinned, read_events


class DeafTransport:
    """Connects at once; what it receives never comes, and an abort does not wake who waits for it."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.never = threading.Event()
        self.abandoned = 0
        self.aborted = 0

    sent = None

    def build(self, generation, groups, neighbours=(), **told): ...

    def receive(self, key, peer, spec):
        return self

    def wait(self):
        self.waiting.set()
        self.never.wait()

    def abort(self, generation):
        self.aborted = generation

    def abandon(self):
        self.abandoned += 1

    def close(self): ...


@pytest.fixture
def driver(tmp_path):
    worker, sent = WorkerId(0, 1), queue.SimpleQueue()
    stage = EmulatedStage(layers=(1,), num_layers=2, num_microbatches=2)
    protocol = WorkerProtocol(worker=worker, stage=stage, steps=2, ties=(), pid=0)
    log = EventLog(tmp_path / "events.jsonl")
    spec = TensorSpec(shape=(WIDTH,), dtype="int64")
    exchange = RelayExchange(worker, sent.put)
    driver = Driver(
        protocol=protocol,
        stage=stage,
        transport=DeafTransport(),
        exchange=exchange,
        attach=lambda: None,
        send=sent.put,
        log=log,
        spec_of=lambda payload: spec,
        injector=WorkerInjector(worker=worker, faults=(), means=OnThisProcess(log=log), send=sent.put),
        copier=StateCopier(worker=worker, exchange=exchange, server=StateServer("127.0.0.1", "t"), token="t"),
        rebuild=lambda plan, state: pytest.fail("nothing is to be loaded"),
        expelled=pytest.fail,
    )
    yield driver, sent
    driver.transport.never.set()
    log.close()


def next_status(sent):
    while True:
        message = sent.get(timeout=10)
        if isinstance(message, Status):
            return message


def test_a_driver_that_nothing_wakes_is_replaced(driver):
    driver, sent = driver
    plan = regular_plan(1, split_evenly(2, 2), 2)
    ended = queue.SimpleQueue()
    runner = threading.Thread(target=lambda: ended.put(driver.run()), daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        driver.on_command(command)
    assert next_status(sent).generation == 1
    assert driver.transport.waiting.wait(10), "the driver waits for an activation that never comes"
    stuck = {thread.name for thread in threading.enumerate()}
    assert "driver-0" in stuck

    driver.on_command(Install(generation=2, plan=plan))
    assert next_status(sent).generation == 2
    assert driver.transport.aborted == 1
    assert driver.transport.abandoned == 1

    driver.on_command(Shutdown(reason="done"))
    assert ended.get(timeout=10) is None


def test_a_driver_that_wakes_is_not_replaced(driver):
    driver, sent = driver
    plan = regular_plan(1, split_evenly(2, 2), 2)
    runner = threading.Thread(target=driver.run, daemon=True)
    runner.start()
    driver.on_command(Attached())
    for generation in (1, 2, 3):
        driver.on_command(Install(generation=generation, plan=plan))
        assert next_status(sent).generation == generation
    driver.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()
    assert driver.transport.abandoned == 0


def test_a_first_step_that_is_done_is_told_at_once(driver):
    """Whoever stops right after it is judged by what it needs when warm, not by the patience for first steps."""
    driver, sent = driver
    driver.protocol.generation = 1
    driver._committed(Committed(0, ()))
    assert sent.get_nowait().slowest_s > 0
    driver._committed(Committed(1, ()))
    assert sent.empty(), "after the first one, heartbeats come in their time"


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
    driver.writer, driver.protocol.generation = held.writer, 1
    driver._pin(1, 5, (1,))
    (pinned,) = [event for _, event in read_events(tmp_path / "events.jsonl") if isinstance(event, Pinned)]
    assert (pinned.worker, pinned.step) == ("0.1", 5)
    waiting = threading.Thread(target=driver._await_writer, daemon=True)
    moves = driver.pace.moves
    waiting.start()
    until = time.monotonic() + 10
    while driver.pace.moves < moves + 3:
        assert time.monotonic() < until
        assert waiting.is_alive(), "nothing is written yet"
    held.may.set()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_driver_that_wakes_too_late_does_nothing_more(driver):
    """The receive that was given up comes after all, while another driver is at work."""
    driver, sent = driver
    plan = regular_plan(1, split_evenly(2, 2), 2)
    runner = threading.Thread(target=driver.run, daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        driver.on_command(command)
    assert next_status(sent).generation == 1
    assert driver.transport.waiting.wait(10)
    (late,) = [thread for thread in threading.enumerate() if thread.name == "driver-0"]
    driver.on_command(Install(generation=2, plan=plan))
    assert next_status(sent).generation == 2

    driver.transport.never.set()
    late.join(timeout=10)
    assert not late.is_alive()
    driver.on_command(Install(generation=3, plan=plan))
    assert next_status(sent).generation == 3, "the protocol is untouched by the late thread"
    driver.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()
    assert driver.transport.abandoned == 1


def test_an_interruption_just_before_a_wait_is_not_missed(driver, monkeypatch):
    """Nothing comes after the rescue that found nobody waiting, so the wait itself must look again."""
    driver, sent = driver
    plan = regular_plan(1, split_evenly(2, 2), 2)
    original, interrupted = Driver._wait, threading.Event()

    def racing(self, handle):
        if not interrupted.is_set():
            self.on_command(Install(generation=2, plan=plan))
            while not self._signals.empty():
                pass
            interrupted.set()
        return original(self, handle)

    monkeypatch.setattr(Driver, "_wait", racing)
    runner = threading.Thread(target=driver.run, daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        driver.on_command(command)
    assert next_status(sent).generation == 1
    assert next_status(sent).generation == 2
    assert interrupted.is_set()
    assert not driver.transport.waiting.is_set(), "the driver did not begin to wait"
    driver.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()


def test_a_user_who_exits_does_not_leave_the_worker_waiting(driver, monkeypatch):
    driver, sent = driver
    plan = regular_plan(1, split_evenly(2, 2), 2)

    def leave(*arguments):
        raise SystemExit("from somebody's layer")

    monkeypatch.setattr(driver.stage, "layer_steps", leave)
    runner = threading.Thread(target=driver.run, daemon=True)
    runner.start()
    driver.on_command(Attached())
    driver.on_command(Install(generation=1, plan=plan))
    raised = sent.get(timeout=10)
    assert isinstance(raised, Raised)
    assert (raised.phase, raised.kind, driver.hello().raised) == (WorkPhase.OTHER, "SystemExit", raised)
    driver.on_command(Shutdown(reason="it raised"))
    runner.join(timeout=10)
    assert not runner.is_alive(), "it waits to be told to go, and goes"


def test_a_thread_that_waits_in_the_newest_generation_is_not_replaced(driver):
    """It had gone on by itself before anybody looked."""
    driver, _ = driver
    driver._newest = driver._waits_in = 2
    driver._rescue(driver.protocol.run())
    assert driver.transport.abandoned == 0


def test_receives_are_posted_four_ahead(driver):
    driver, _ = driver
    asked = []
    driver.transport.receive = lambda key, peer, spec: asked.append(key)
    receives = [Receive(Payload.ACTIVATION, each, WorkerId(0, 0)) for each in Batch((6,)).microbatches]
    driver._expect(tuple((receive, step) for step, receive in enumerate(receives)))
    assert len(asked) == 4


def test_one_that_was_told_to_go_says_so_wherever_it_attaches(driver):
    driver, _ = driver
    assert not driver.hello().leaving
    driver.leaving = True
    assert driver.hello().leaving
