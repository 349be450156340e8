"""Faults are put around the ports of what they strike; where none are planned, nothing is."""

from __future__ import annotations

import queue
import signal
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from tests.processes import NODE

from holdfast.control.messages import Strike
from holdfast.core.faults import Fault, Point
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.recovery.rules import JobRules
from holdfast.runtime.injection.networks import InNamespace, IsolatedWorkers
from holdfast.runtime.injection.node import struck, struck_coordinator
from holdfast.runtime.injection.planned import WorkerFaults
from holdfast.runtime.injection.worker import OnThisProcess, WorkerInjector
from holdfast.runtime.isolation import Namespace
from holdfast.runtime.node.entries import STRIKE_COORDINATOR, STRIKE_WORKER, WORKER
from holdfast.runtime.specs import WorkerSpec
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import EventLog, Summed

PLAN = regular_plan(2, split_evenly(2, 2), 2)
A, B, C, D = PLAN.workers
NUM_SUMS = 4


@dataclass
class Told:
    """The means, and the transport, which say what was done in one order."""

    done: list = field(default_factory=list)

    def __getattr__(self, name):
        return lambda *args: self.done.append((name, *args))

    def all_reduce(self, key, value):
        self.done.append(("all_reduce", key.step))
        return SimpleNamespace(ready=True, wait=lambda: value)


@pytest.fixture
def driven():
    """A function from faults of B to the ports of its driver, with these around them, and what comes of them."""

    def make(*faults, **options):
        told = Told()
        driver = SimpleNamespace(
            on_point=None,
            on_run=None,
            strikes=None,
            transport=told,
            superseded=False,
            protocol=SimpleNamespace(worker=B, plan=PLAN, program=SimpleNamespace(reductions=(None,) * NUM_SUMS)),
        )
        parsed = tuple(map(Fault.parse, faults))
        sent = queue.SimpleQueue()
        WorkerInjector(worker=B, faults=parsed, means=told, send=sent.put, **options).put_around(driver)
        return driver, told.done, sent

    return make


def names(done):
    return [each[0] for each in done]


def a_step(driver, step=3):
    """Contributes to all sums, then takes each."""
    driver.on_point(Point.START, step)
    key = SimpleNamespace(step=step)
    for handle in [driver.transport.all_reduce(key, "a sum") for _ in range(NUM_SUMS)]:
        assert handle.ready
        assert handle.wait() == "a sum"


def test_a_point_strikes_in_its_step_and_once(driven):
    driver, done, _ = driven("kill:0.1@3:forward")
    for point, step in ((Point.FORWARD, 2), (Point.BACKWARD, 3), (Point.FORWARD, 3), (Point.FORWARD, 3)):
        driver.on_point(point, step)
    assert names(done) == ["wait_until_begun", "note", "signal"]
    assert done[0][1:3] == ([A, C, D], 3)
    assert done[2] == ("signal", signal.SIGKILL)


def test_nobody_is_waited_for_who_will_not_come_as_another_generation_has_begun(driven):
    driver, done, _ = driven("kill:0.1@3:forward")
    driver.on_point(Point.FORWARD, 3)
    over = done[0][3]
    assert not over()
    driver.superseded = True
    assert over()


def test_whoever_is_in_the_log_or_of_another_generation_is_waited_for_no_more(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    means = OnThisProcess(log=log)
    means.note(Summed(worker="0.0", step=3, sums=0))
    means.note(Summed(worker="1.0", step=2, sums=4))
    means.wait_until_begun([A], 3, lambda: pytest.fail("it has begun"))
    looks = iter((False, True))
    means.wait_until_begun([A, C], 3, lambda: next(looks))
    assert next(looks, None) is None, "looked twice"
    noting = threading.Thread(target=means.note, args=(Summed(worker="1.0", step=3, sums=0),))
    means.wait_until_begun([A, C], 3, lambda: noting.ident is None and noting.start())
    noting.join()


def test_whoever_begins_a_step_in_which_somebody_is_struck_writes_that_down(driven):
    driver, done, _ = driven(steps=frozenset({3}))
    for step in (2, 3, 4):
        driver.on_point(Point.START, step)
    assert done == [("note", Summed(worker="0.1", step=3, sums=0))]


@pytest.mark.parametrize("point", [Point.DETECT, Point.INSTALL, Point.REPLAY, Point.COPY])
@pytest.mark.parametrize(("found", "strikes"), [(1, False), (2, True), (3, True), (5, True)])
def test_what_strikes_in_a_recovery_does_so_where_it_finds_the_worker(driven, point, found, strikes):
    """A step behind who was lost, or ahead."""
    driver, done, _ = driven(f"kill:0.1@3:{point}")
    driver.on_point(Point.START, found)
    driver.on_point(point, found)
    assert names(done) == (["note", "signal"] if strikes else [])


@pytest.mark.parametrize("point", [Point.DETECT, Point.INSTALL])
def test_a_plan_that_a_process_begins_with_is_no_recovery(driven, point):
    driver, done, _ = driven(f"kill:0.1@1:{point}")
    driver.on_point(point, 0)
    assert done == []
    driver.on_point(Point.START, 0)
    driver.on_point(point, 0)
    assert names(done) == ["note", "signal"]


def test_what_the_agent_has_to_do_is_told_again_in_every_hello(driven):
    driver, done, sent = driven("kill-node:0@3:commit")
    assert driver.strikes() == ()
    driver.on_point(Point.COMMIT, 3)
    assert sent.get_nowait() == Strike(worker=B, spec="kill-node:0@3:commit")
    assert driver.strikes() == ("kill-node:0@3:commit",)
    assert names(done) == ["wait_until_begun", "stand_still"]


def test_what_is_slow_sleeps_within_each_operation(driven):
    driver, done, _ = driven("slow:0.1@3:3x")
    for step in (2, 3, 4):
        driver.on_run(step, 0.5)
    assert names(done) == ["note", "sleep", "sleep"]
    assert done[1:] == [("sleep", 1.0)] * 2


@pytest.mark.parametrize(("percent", "before"), [(0, 0), (50, 2), (75, 3)])
def test_a_fault_in_the_middle_of_sums_strikes_before_the_next_contribution(driven, percent, before):
    driver, done, _ = driven(f"kill:0.1@3:gradients:{percent}", witnesses=(A,), fellows=(B, C))
    a_step(driver)
    assert names(done) == [
        *["all_reduce"] * before,
        *["wait_until_begun", "wait_until_summed", "note", "wait_until_noted", "signal"],
        *["all_reduce"] * (NUM_SUMS - before),
    ]
    assert done[before + 1][1:] == ((A,), 3, before)


def test_after_all_sums_it_strikes_once_they_are_there(driven):
    driver, done, _ = driven("hang:0.1@3:gradients:100")
    a_step(driver, step=2)
    a_step(driver, step=3)
    struck_there = ["wait_until_begun", "wait_until_summed", "note", "wait_until_noted", "signal"]
    assert names(done) == [*["all_reduce"] * 8, *struck_there]


def test_who_lives_through_it_writes_down_how_many_sums_it_has_in_each_step(driven):
    driver, done, _ = driven(witnesses=(B,))
    a_step(driver, step=3)
    a_step(driver, step=4)
    noted = [each[1] for each in done if each[0] == "note"]
    assert noted == [Summed(worker="0.1", step=step, sums=sums) for step in (3, 4) for sums in (1, 2, 3, 4)]


def test_where_nothing_strikes_in_sums_the_transport_is_left_alone(driven):
    driver, _, _ = driven("kill:0.1@3:forward")
    assert isinstance(driver.transport, Told)


@dataclass(frozen=True)
class Spec:
    """What a worker would be told."""

    worker: WorkerId
    plan: object = PLAN
    around: tuple = ()


def told(*faults):
    """What each worker has put around it."""
    parsed = tuple(map(Fault.parse, faults))
    own = {worker: tuple(fault for fault in parsed if fault.worker == worker) for worker in PLAN.workers}
    return [struck(parsed, Spec(worker), own[worker]).around for worker in PLAN.workers]


def test_who_is_struck_in_a_step_is_told_of_it_and_all_others_that_somebody_is():
    faults = (Fault.parse("kill:0.1@3"),)
    (first, second, *_) = around = told("kill:0.1@3")
    assert [len(each) for each in around] == [1, 1, 1, 1]
    assert (first[0].func, first[0].args) == (STRIKE_WORKER, (WorkerFaults(faults=(), steps=frozenset({3})),))
    assert second[0].args == (WorkerFaults(faults=faults, steps=frozenset({3})),)


@pytest.mark.parametrize("fault", ["kill:0.1@3:replay", "kill:0.1@3:checkpoint", "slow:0.1@3:2x"])
def test_who_is_not_struck_has_nothing_around_it(fault):
    assert [len(each) for each in told(fault)] == [0, 1, 0, 0]


def test_whoever_lives_through_a_fault_in_the_middle_of_sums_is_a_witness():
    around = told("kill:0.1@3:gradients:50", "kill:1.0@3:gradients:50")
    (faults, *others) = [partial_.args[0] for (partial_,) in around]
    assert faults == WorkerFaults(faults=(), steps=frozenset({3}), witnesses=(A, D))
    assert [each.fellows for each in others] == [(B, C), (B, C), ()]


def test_a_coordinator_is_told_of_its_own_faults_alone():
    faults = (Fault.parse("kill:0.1@3"), Fault.parse("kill-coordinator@3:persist"))
    (around,) = struck_coordinator(faults, Spec(A)).around
    assert (around.func, around.args) == (STRIKE_COORDINATOR, (faults[1:],))
    assert struck_coordinator(faults[:1], Spec(A)).around == ()


def test_each_worker_starts_in_the_network_of_its_node_and_listens_there():
    started = []
    networks = SimpleNamespace(node=lambda number: Namespace(path=f"node {number}", host=f"10.0.0.{number}"))
    inner = SimpleNamespace(start=lambda main, spec, name: started.append((main, spec.host, name)))
    other = NodeId("there", NODE.nonce)
    workers = IsolatedWorkers(inner=inner, networks=networks, nodes=((A, B), (C, D)), ids=(NODE, other))
    assert (workers.node_of(A), workers.node_of(C)) == (NODE, other)
    spec = WorkerSpec(
        worker=C,
        node=NODE,
        nonce=NODE.nonce,
        job=None,
        rules=JobRules(steps=9),
        plan=PLAN,
        host="127.0.0.1",
        address="",
        token="",
        events="",
        boundaries=(),
        emulate=None,
        checkpoints="",
        resume=None,
    )
    workers.start(WORKER, spec, name="1.0")
    assert started == [(InNamespace.of(WORKER, networks.node(1)), "10.0.0.1", "1.0")]
