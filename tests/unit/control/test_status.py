"""What people are told of a running job."""

from dataclasses import replace

import pytest
from tests.processes import NODE
from tests.unit.control.test_agents import (
    ELSEWHERE,
    PLAN,
    THERE,
    W10,
    W20,
    Job,
    agent,
    begun_on_three_nodes,
    died,
    gone,
)

from holdfast.control.membership import Tell
from holdfast.control.messages import StepDone, Told, WorkerOffer
from holdfast.control.status import FailureStatus, Lately, status_of
from holdfast.telemetry.events import Detected

WORKERS = tuple(map(str, PLAN.workers))


@pytest.fixture
def job():
    return begun_on_three_nodes()


def told_of(job, now=0.0):
    return status_of("j", job.state, Lately(), now)


def test_of_a_healthy_job(job):
    job.give(WorkerOffer(worker=None, node=THERE), WorkerOffer(worker=None, node=THERE))
    status = told_of(job)
    assert (status.job, status.phase, status.step, status.steps) == ("j", "running", 0, 9)
    assert (status.alive, status.workers, status.checkpoint) == (WORKERS, 6, None)
    assert (status.workers_to_lose, status.nodes_to_lose) == (2, 2)
    assert [(node.name, node.workers, node.room, node.away_s) for node in status.nodes] == [
        (ELSEWHERE.name, ("2.0", "2.1"), 0, None),
        (NODE.name, ("0.0", "0.1"), 0, None),
        (THERE.name, ("1.0", "1.1"), 2, None),
    ]
    assert not any(node.leads for node in status.nodes), "nobody said where we are"


def test_whoever_is_lost_is_no_owner(job):
    job.give(died(W10))
    status = told_of(job)
    assert (status.phase, status.alive) == ("forming", tuple(name for name in WORKERS if name != str(W10)))
    assert (status.workers_to_lose, status.nodes_to_lose) == (1, 1)
    job.give(died(W20), *map(died, PLAN.workers[:1]))
    assert (told_of(job).workers_to_lose, told_of(job).nodes_to_lose) == (None, None)


def test_a_node_may_be_away_and_one_leads(job):
    job.state = replace(job.state, contact=replace(job.state.contact, home=NODE))
    job.give(gone(THERE), now=5.0)
    away = {node.name: (node.leads, node.away_s) for node in told_of(job, now=5.25).nodes}
    assert away == {NODE.name: (True, None), THERE.name: (False, 0.25), ELSEWHERE.name: (False, None)}


def test_of_a_job_that_has_not_begun():
    job = Job(PLAN, strategy="adaptive")
    job.state = job.blank
    job.give(agent(NODE))
    status = told_of(job)
    assert (status.phase, status.alive, status.step) == ("gathering", (), 0)
    assert (status.workers_to_lose, status.nodes_to_lose) == (None, None)


def done(step):
    return StepDone(worker=PLAN.workers[0], generation=1, step=step, loss=0.5, omitted=False)


def test_how_fast_steps_are_is_of_the_last_minute(job):
    lately = Lately()
    lately.heard([done(0)], 10.0)
    assert lately.steps_per_s(11.0) is None
    for number in range(1, 9):
        lately.heard([done(number)], 100.0 + number)
    lately.heard([done(3)], 109.0)  # after a recovery, somebody says it again
    assert lately.steps_per_s(111.0) == pytest.approx(0.7)
    assert lately.steps_per_s(999.0) is None


def lost(worker, how):
    return Tell(to=None, command=Told(news=Detected(worker=worker, how=how, generation=1)))


def test_the_newest_losses_are_told_and_who_went_together():
    lately = Lately()
    for number in range(6):
        lately.told([lost(f"{number}.0", "signal 9")], 10.0 * number)
    lately.told([lost("6.0", "its node is gone"), lost("6.1", "its node is gone"), lost("7.0", "signal 11")], 60.0)
    lately.told([], 61.0)
    assert lately.failures(61.0) == (
        FailureStatus(workers=("6.0", "6.1"), how="its node is gone", ago_s=1.0),
        FailureStatus(workers=("7.0",), how="signal 11", ago_s=1.0),
        *(FailureStatus(workers=(f"{n}.0",), how="signal 9", ago_s=61.0 - 10.0 * n) for n in (5, 4, 3, 2)),
    )
