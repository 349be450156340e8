"""Which faults a worker's process is given: the first all of its own, a later one those still to come."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from tests.processes import NODE
from tests.waiting import LIMIT_S, until

from holdfast.control.messages import Exited, NodeLost, Progress, StartWorker, Strike, WorkerOffer
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process
from holdfast.runtime.injection.node import NodeFaults
from holdfast.runtime.node.children import Children
from holdfast.runtime.node.worker_group import WorkerGroup
from holdfast.telemetry.events import EventLog, FaultInjected, Notice, read_events

A, B, C, D = (WorkerId(pipeline, stage) for pipeline in range(2) for stage in range(2))


@dataclass(frozen=True)
class Spec:
    """What a process would be told."""

    worker: WorkerId
    faults: tuple[Fault, ...] = ()
    resume: str | None = "a checkpoint"


class Fake:
    """Stands for a process: it runs until the test, or the group, ends it."""

    def __init__(self, pid):
        self.pid, self.exitcode = pid, None
        self.sentinel, self._other_end = os.pipe()

    def start(self):
        pass

    def join(self):
        pass

    def close(self):
        os.close(self.sentinel)

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        if self.is_alive():
            self.exitcode = -9
            os.close(self._other_end)


@dataclass
class Starter:
    """Starts no process; keeps what it would have been told."""

    told: list = field(default_factory=list)
    made: list = field(default_factory=list)

    def __call__(self, *, target, args, name, daemon):
        self.told.append(args[0])
        self.made.append(Fake(pid=len(self.told)))
        return self.made[-1]

    def end(self):
        """All end; whoever waits for one of them wakes up."""
        for process in self.made:
            process.kill()


@pytest.fixture
def group(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    sent = []
    starter = Starter()

    def make(*faults):
        numbers = count(1)
        group = WorkerGroup(
            children=Children(process=starter),
            node=NODE,
            node_of=lambda worker: NODE,
            spec_of=lambda worker, nonce, begins: Spec(worker) if begins else Spec(worker, resume=None),
            send=sent.append,
            log=log,
            grace_s=0.0,
            draw=lambda: f"{next(numbers):016x}",
        )
        if faults:
            NodeFaults(
                faults=tuple(Fault.parse(text) for text in faults),
                nodes=((A, B), (C, D)),
                tell=lambda spec, own: replace(spec, faults=own),
                cut=pytest.fail,
                log=log,
            ).put_around(group)
        return group

    yield make, sent, tmp_path / "events.jsonl"
    starter.end()
    log.close()


def nth(number):
    """The process that was started as the so-many-th."""
    return Process(NODE, number, f"{number:016x}")


def progress(step):
    """A step is done: the next one has begun."""
    return Progress(step=step, loss=None, omitted=False, alive=4, generation=1)


def given(group):
    return [[str(fault) for fault in spec.faults] for spec in group.children.process.told]


def test_each_first_process_has_its_own_faults_and_the_first_of_a_node_those_of_the_node(group):
    group = group[0]("kill:0.0@3", "hang:0.1@4", "kill-node:1@5", "join:0.0@6")
    for worker in (A, B, C, D):
        group.start(worker, first=True)
    assert given(group) == [["kill:0.0@3:start"], ["hang:0.1@4:start"], ["kill-node:1@5:start"], []]


def test_a_later_process_is_struck_by_what_is_still_to_come_only(group):
    """Its predecessor may have been one step further than the newest that is known to have begun."""
    group = group[0]("kill:0.0@3", "kill:0.0@8", "kill:0.0@9:commit", "stall:0.0@20")
    group.start(A, first=True)
    group.obey(progress(6))
    group.fence(A, nth(1))
    group.obey(StartWorker(worker=A))
    assert given(group)[1] == ["kill:0.0@9:commit", "stall:0.0@20:start"]


def test_a_later_process_gets_its_state_from_its_peers_not_from_a_checkpoint(group):
    group = group[0]()
    group.start(A, first=True)
    group.fence(A, nth(1))
    group.obey(StartWorker(worker=A))
    assert [spec.resume for spec in group.children.process.told] == ["a checkpoint", None]


def test_a_process_that_comes_into_a_running_job_does_so_where_none_of_its_worker_was_before(group):
    """Its predecessor was another node's."""
    group = group[0]("kill:0.0@3")
    group.obey(progress(6))
    group.obey(StartWorker(worker=A))
    assert ([spec.resume for spec in group.children.process.told], given(group)) == ([None], [[]])


@pytest.mark.parametrize("asked", ["kill-node:0@5:start", "partition:1.0@1:start", "kill-node:1@6:start", "", "\0"])
def test_a_fault_that_was_not_scheduled_is_not_carried_out(group, asked):
    """A worker that went astray asks for it, say."""
    make, sent, _ = group
    group = make("kill-node:1@5")
    for worker in (A, B, C, D):
        group.start(worker, first=True)
    before = list(sent)
    group.obey(Strike(worker=A, spec=asked))
    assert sent == before
    group.obey(Strike(worker=C, spec="kill-node:1@5:start"))
    assert NodeLost(node=1, workers=(C, D)) in sent


def test_workers_that_are_to_come_are_offered_once_when_their_step_begins(group):
    make, sent, events = group
    group = make("join:1.1@4", "join:new@5")
    group.obey(progress(2))
    assert sent == []
    for step in (4, 4, 6, 7):
        group.obey(progress(step - 1))
    assert sent == [WorkerOffer(worker=D, node=NODE), WorkerOffer(worker=None, node=NODE)]
    fired = [event.spec for _, event in read_events(events) if isinstance(event, FaultInjected)]
    assert fired == ["join:1.1@4", "join:new@5"]


def test_what_strikes_at_a_time_is_under_way_once_the_first_step_is_over(group):
    make, sent, events = group
    group = make("kill:0.1@+2s", "join:new@+3s", "kill-node:1@+4s", "kill:0.1@+5s")
    timers = []
    group.later = lambda delay, act: timers.append((delay, act))
    for worker in (A, B, C, D):
        group.start(worker, first=True)
    assert given(group) == [[]] * 4, "no process strikes itself at a time"
    for step in (0, 1):
        group.obey(progress(step))
    assert [delay for delay, _ in timers] == [2, 3, 4, 5], "once"
    sent.clear()
    for _, act in timers:
        act()
        until(lambda: group.running.isdisjoint({B}))
    assert [each for each in sent if not isinstance(each, Exited)] == [
        WorkerOffer(worker=None, node=NODE),
        NodeLost(node=1, workers=(C, D)),
    ]
    fired = [
        (event.worker, event.step, event.point) for _, event in read_events(events) if isinstance(event, FaultInjected)
    ]
    assert fired == [("0.1", 2, "+2s"), ("new", 2, "+3s"), ("1.0", 2, "+4s"), ("1.1", 2, "+4s")], "nobody is lost twice"
    group.kill(A)
    until(lambda: not group.running)
    sent.clear()
    timers[1][1]()
    assert sent == [], "nobody joins a job that is over"


def test_an_offer_is_listed_and_queued_while_no_hello_can_be_made(group):
    """A hello in between would have it, and the offer would follow: two places would be filled."""
    group = group[0]("join:new@1")
    locked = []
    group.send = lambda message: locked.append(group._lock.locked())
    group.obey(progress(0))
    assert locked == [True]
    assert group.hello().offers == (None,)


def notices(path):
    return [event.worker for _, event in read_events(path) if isinstance(event, Notice)]


def test_a_process_that_runs_is_not_started_twice(group):
    make, _, events = group
    group = make()
    group.start(A, first=True)
    group.expect(A)
    group.start(A, first=True)
    assert len(group.children.process.told) == 1
    assert notices(events) == ["0.0"]
    assert group.hello().coming == (A,), "what was asked for is on its way: the one that runs"


def test_one_that_was_asked_for_twice_comes_no_more_when_it_has_ended(group):
    make, sent, _ = group
    group = make()
    group.start(A, first=True)
    group.expect(A)
    group.start(A, first=True)
    group.children.process.made[0].kill()
    await_exit(sent)
    assert group.hello().coming == ()
    assert group.hello().exits == (Exited(worker=A, process=nth(1), status=-9),)


def test_one_that_has_ended_is_started_again(group):
    make, sent, events = group
    group = make()
    group.start(A, first=True)
    group.children.process.made[0].kill()
    await_exit(sent)
    group.start(A, first=True)
    assert len(group.children.process.told) == 2
    assert notices(events) == []


def test_in_place_of_one_that_was_fenced_another_is_started_and_fenced_in_its_turn(group):
    group = group[0]()
    group.grace_s = LIMIT_S
    group.start(A, first=True)
    group.fence(A, nth(1))
    group.start(A, first=True)
    assert [process.is_alive() for process in group.children.process.made] == [True, True]
    group.fence(A, nth(1))  # told again: it is not the current one any more
    group.start(A, first=True)
    assert len(group.children.process.told) == 2
    group.fence(A, nth(2))
    group.start(A, first=True)
    assert len(group.children.process.told) == 3


def await_exit(sent):
    until(lambda: any(isinstance(message, Exited) for message in sent))


def test_who_begins_anew_ends_all_and_offers_all_its_room(group):
    """One that was fenced, and has yet to end, too; and one that was asked for and is on its way."""
    make, sent, _ = group
    group = make()
    group.slots, group.grace_s = 3, LIMIT_S
    for worker in (A, B):
        group.start(worker, first=True)
    group.fence(A, nth(1))
    group.expect(C)
    group.begin_anew()
    assert not any(process.is_alive() for process in group.children.process.made)
    assert [message for message in sent if isinstance(message, WorkerOffer)] == [
        WorkerOffer(worker=None, node=NODE)
    ] * 3
    hello = group.hello()
    assert (hello.offers, hello.coming, hello.started, group.running) == ((None, None, None), (), (), frozenset())
    group.start(A, first=False)
    assert group.running == {A}
