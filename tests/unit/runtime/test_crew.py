"""Which faults a worker's process is given: the first all of its own, a later one those still to come."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from holdfast.control.messages import Offer
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.runtime.crew import Crew
from holdfast.telemetry.events import EventLog, FaultInjected, read_events

A, B, C, D = (WorkerId(pipeline, stage) for pipeline in range(2) for stage in range(2))


@dataclass(frozen=True)
class Spec:
    """What a process would be told."""

    worker: WorkerId
    faults: tuple[Fault, ...]
    resume: str | None = "a checkpoint"


@dataclass
class Starter:
    """Starts no process, but one that could be waited for for ever; keeps what it would have been told."""

    pipe: tuple[int, int]
    told: list = field(default_factory=list)

    def __call__(self, *, target, args, name, daemon):
        self.told.append(args[0])
        return SimpleNamespace(start=lambda: None, sentinel=self.pipe[0], pid=1)


@pytest.fixture
def crew(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    sent = []

    def make(*faults):
        parsed = tuple(Fault.parse(text) for text in faults)
        return Crew(
            process=Starter(os.pipe()),
            nodes=((A, B), (C, D)),
            faults=parsed,
            spec_of=Spec,
            send=sent.append,
            cut=pytest.fail,
            log=log,
            grace_s=0.0,
        )

    yield make, sent, tmp_path / "events.jsonl"
    log.close()


def given(crew):
    return [[str(fault) for fault in spec.faults] for spec in crew.process.told]


def test_each_first_process_has_its_own_faults_and_the_first_of_a_node_those_of_the_node(crew):
    crew = crew[0]("kill:0.0@3", "hang:0.1@4", "kill-node:1@5", "join:0.0@6")
    for worker in (A, B, C, D):
        crew.start(worker)
    assert given(crew) == [["kill:0.0@3:start"], ["hang:0.1@4:start"], ["kill-node:1@5:start"], []]


def test_a_later_process_is_struck_by_what_is_still_to_come_only(crew):
    """Its predecessor may have been one step further than the newest that is known to have begun."""
    crew = crew[0]("kill:0.0@3", "kill:0.0@8", "kill:0.0@9:commit", "stall:0.0@20")
    crew.start(A)
    crew.reach(7)
    crew.start(A)
    assert given(crew)[1] == ["kill:0.0@9:commit", "stall:0.0@20:start"]


def test_a_later_process_gets_its_state_from_its_peers_not_from_a_checkpoint(crew):
    crew = crew[0]()
    crew.start(A)
    crew.start(A)
    assert [spec.resume for spec in crew.process.told] == ["a checkpoint", None]


def test_workers_that_are_to_come_are_offered_once_when_their_step_begins(crew):
    make, sent, events = crew
    crew = make("join:1.1@4", "join:new@5")
    crew.reach(3)
    assert sent == []
    for step in (4, 4, 6, 7):
        crew.reach(step)
    assert sent == [Offer(worker=D), Offer(worker=None)]
    fired = [event.spec for _, event in read_events(events) if isinstance(event, FaultInjected)]
    assert fired == ["join:1.1@4", "join:new@5"]
