"""A driver that Gloo forgot to wake is replaced: the life goes on in another thread."""

from __future__ import annotations

import queue
import threading

import pytest

from holdfast.control.messages import Attached, Install, Raised, Resume, Shutdown, Status
from holdfast.core.builders import regular_plan
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.tensorspec import TensorSpec
from holdfast.core.work import WorkPhase
from holdfast.protocol.worker import WorkerLife
from holdfast.runtime.driver import Shell
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.runtime.injection import Injector
from holdfast.runtime.transport.copying import StateCopier
from holdfast.runtime.transport.exchange import RelayExchange
from holdfast.runtime.transport.transfer import StateServer
from holdfast.telemetry.events import EventLog


class DeafTransport:
    """Connects at once; what it receives never comes, and an abort does not wake who waits for it."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.never = threading.Event()
        self.abandoned = 0
        self.aborted = 0

    def build(self, generation, groups): ...

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
def shell(tmp_path):
    worker, sent = WorkerId(0, 1), queue.SimpleQueue()
    stage = EmulatedStage(layers=LayerRange(1, 2), num_layers=2, num_microbatches=2)
    life = WorkerLife(worker=worker, stage=stage, steps=2, microbatches=2, ties=(), pid=0)
    log = EventLog(tmp_path / "events.jsonl")
    spec = TensorSpec(shape=(WIDTH,), dtype="int64")
    exchange = RelayExchange(worker, sent.put)
    shell = Shell(
        life=life,
        stage=stage,
        transport=DeafTransport(),
        exchange=exchange,
        attach=lambda: None,
        send=sent.put,
        log=log,
        spec_of=lambda payload: spec,
        injector=Injector(worker=worker, faults=(), log=log, send=sent.put),
        copier=StateCopier(worker=worker, exchange=exchange, server=StateServer("127.0.0.1", "t"), token="t"),
        rebuild=lambda plan, state: pytest.fail("nothing is to be loaded"),
        expelled=pytest.fail,
    )
    yield shell, sent
    shell.transport.never.set()
    log.close()


def next_status(sent):
    while True:
        message = sent.get(timeout=10)
        if isinstance(message, Status):
            return message


def test_a_driver_that_nothing_wakes_is_replaced(shell):
    shell, sent = shell
    plan = regular_plan(1, split_evenly(2, 2), 2)
    ended = queue.SimpleQueue()
    runner = threading.Thread(target=lambda: ended.put(shell.run()), daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        shell.on_command(command)
    assert next_status(sent).generation == 1
    assert shell.transport.waiting.wait(10), "the driver waits for an activation that never comes"
    stuck = {thread.name for thread in threading.enumerate()}
    assert "driver-0" in stuck

    shell.on_command(Install(generation=2, plan=plan))
    assert next_status(sent).generation == 2
    assert shell.transport.aborted == 1
    assert shell.transport.abandoned == 1

    shell.on_command(Shutdown(reason="done"))
    assert ended.get(timeout=10) is None


def test_a_driver_that_wakes_is_not_replaced(shell):
    shell, sent = shell
    plan = regular_plan(1, split_evenly(2, 2), 2)
    runner = threading.Thread(target=shell.run, daemon=True)
    runner.start()
    shell.on_command(Attached())
    for generation in (1, 2, 3):
        shell.on_command(Install(generation=generation, plan=plan))
        assert next_status(sent).generation == generation
    shell.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()
    assert shell.transport.abandoned == 0


def test_a_driver_that_wakes_too_late_does_nothing_more(shell):
    """The receive that was given up comes after all, while another driver is at work."""
    shell, sent = shell
    plan = regular_plan(1, split_evenly(2, 2), 2)
    runner = threading.Thread(target=shell.run, daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        shell.on_command(command)
    assert next_status(sent).generation == 1
    assert shell.transport.waiting.wait(10)
    (late,) = [thread for thread in threading.enumerate() if thread.name == "driver-0"]
    shell.on_command(Install(generation=2, plan=plan))
    assert next_status(sent).generation == 2

    shell.transport.never.set()
    late.join(timeout=10)
    assert not late.is_alive()
    shell.on_command(Install(generation=3, plan=plan))
    assert next_status(sent).generation == 3, "the life is untouched by the late driver"
    shell.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()
    assert shell.transport.abandoned == 1


def test_an_interruption_just_before_a_wait_is_not_missed(shell, monkeypatch):
    """Nothing comes after the rescue that found nobody waiting, so the wait itself must look again."""
    shell, sent = shell
    plan = regular_plan(1, split_evenly(2, 2), 2)
    original, interrupted = Shell._wait, threading.Event()

    def racing(self, handle):
        if not interrupted.is_set():
            self.on_command(Install(generation=2, plan=plan))
            while not self._signals.empty():
                pass
            interrupted.set()
        return original(self, handle)

    monkeypatch.setattr(Shell, "_wait", racing)
    runner = threading.Thread(target=shell.run, daemon=True)
    runner.start()
    for command in (Attached(), Install(generation=1, plan=plan), Resume(generation=1, step=0)):
        shell.on_command(command)
    assert next_status(sent).generation == 1
    assert next_status(sent).generation == 2
    assert interrupted.is_set()
    assert not shell.transport.waiting.is_set(), "the driver did not begin to wait"
    shell.on_command(Shutdown(reason="done"))
    runner.join(timeout=10)
    assert not runner.is_alive()


def test_a_user_who_exits_does_not_leave_the_worker_waiting(shell, monkeypatch):
    shell, sent = shell
    plan = regular_plan(1, split_evenly(2, 2), 2)

    def leave(*arguments):
        raise SystemExit("from somebody's layer")

    monkeypatch.setattr(shell.stage, "layer_steps", leave)
    runner = threading.Thread(target=shell.run, daemon=True)
    runner.start()
    shell.on_command(Attached())
    shell.on_command(Install(generation=1, plan=plan))
    raised = sent.get(timeout=10)
    assert isinstance(raised, Raised)
    assert (raised.phase, raised.kind, shell.hello().raised) == (WorkPhase.OTHER, "SystemExit", raised)
    shell.on_command(Shutdown(reason="it raised"))
    runner.join(timeout=10)
    assert not runner.is_alive(), "it waits to be told to go, and goes"
