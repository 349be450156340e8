"""The agent was told to end: which transitions lead to the checkpoint that ends the job, and which end it without."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.processes import process_of

from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.membership import GridState, Improved, Membership, Phase, Record, Tell, decide
from holdfast.control.messages import (
    Ended,
    Exited,
    Finished,
    Hello,
    Install,
    Joined,
    Leaving,
    Preempted,
    ShardFailed,
    ShardWritten,
    Shutdown,
    StateAt,
    Status,
    StepDone,
)
from holdfast.core.placement import split_evenly
from holdfast.planning.training import Rerouted
from holdfast.protocol.effects import Pin, Written
from holdfast.protocol.worker import WorkerProtocol
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Checkpointed, CheckpointFailed

LAYERS = 3
PLAN = regular_plan(2, split_evenly(LAYERS, 2), 2)
W00, W01, W10, W11 = PLAN.workers
STEPS = 9


class Job:
    """A job that runs, and what its last events led to."""

    def __init__(self):
        self.state = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=STEPS, directory="out"))
        self.outputs = ()
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers))
        self.run(0)

    def give(self, *events):
        self.outputs = ()
        for event in events:
            self.state, outputs = decide(self.state, event)
            self.outputs += outputs
        return self

    def run(self, step):
        """Everyone says what it holds, and that it is connected."""
        for worker in self.state.alive:
            layers = tuple((layer, step) for layer in PLAN.placement.layers_of(worker))
            self.give(Status(worker=worker, generation=self.state.generation, layer_steps=layers, executed=()))
        return self.joined()

    def joined(self, step=None):
        """Connected; with a step, in the prepared generation at its boundary."""
        upcoming = self.state.running.upcoming
        generation = self.state.generation if step is None else upcoming.generation
        workers = self.state.alive if step is None else upcoming.plan.workers
        return self.give(*(Joined(worker=worker, generation=generation, step=step) for worker in workers))

    def written(self, step, generation):
        shards = [
            Shard(layer=layer, name=f"layer-{layer:04d}-{layer:016x}.safetensors", sha256="0" * 64, size=1)
            for layer in range(LAYERS)
        ]
        return self.give(*(ShardWritten(worker=W00, generation=generation, step=step, shard=s) for s in shards))

    def told(self, kind):
        return [o.command for o in self.outputs if isinstance(o, Tell) and isinstance(o.command, kind)]

    @property
    def ended(self):
        (ended,) = self.told(Ended)
        return ended.outcome, ended.detail, ended.step


@pytest.fixture
def job():
    return Job()


def test_a_generation_of_the_same_plan_pins_and_its_manifest_ends_the_job(job):
    job.give(Preempted())
    orders = job.told(Install)
    assert len(orders) == len(PLAN.workers)
    assert {(o.generation, o.plan, o.at_boundary, o.pins) for o in orders} == {(2, PLAN, True, True)}
    job.give(Preempted(), Hello(worker=None, process=process_of(None, 0), preempted=True))
    assert job.told(Install) == []
    job.joined(step=4)
    assert (job.state.generation, job.state.phase) == (2, Phase.RUNNING)
    assert job.told(Install) == [], "it is pinned already"
    job.written(4, 2)
    (commit,) = (o for o in job.outputs if isinstance(o, WriteManifest))
    assert commit.step == 4
    job.give(Settled(step=4, url="u"))
    assert Record(event=Checkpointed(step=4, url="u")) in job.outputs
    assert job.ended == ("preempted", "", 4)
    assert len(job.told(Shutdown)) == len(PLAN.workers)


def test_the_agent_repeats_it_to_a_coordinator_that_gathers():
    begins = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=STEPS, directory="out"))
    state, outputs = decide(begins, Hello(worker=None, process=process_of(None, 0), preempted=True))
    assert state.phase is Phase.ENDED
    assert [o.command.outcome for o in outputs if isinstance(o, Tell) and isinstance(o.command, Ended)] == ["preempted"]


def test_whoever_would_have_to_be_waited_for_is_not(job):
    """A layer has no owner any more: no step can be run, and no checkpoint of it be made."""
    job.state = replace(
        job.state,
        rules=replace(job.state.rules, wait_s=1000.0),
        restoring=replace(job.state.restoring, restorable=(StateAt(url="u", step=2),)),
    )
    job.give(
        Preempted(),
        Exited(worker=W01, process=process_of(W01, 1), status=-9),
        Exited(worker=W11, process=process_of(W11, 1), status=-9),
    )
    assert job.ended == ("preempted", "not all workers are there", 0)


def test_an_earlier_checkpoint_ends_nothing(job):
    job.give(Settled(step=2, url="u"), Preempted(), Settled(step=3, url="u"))
    assert job.told(Ended) == []
    job.joined(step=5).give(Settled(step=4, url="u"))
    assert job.told(Ended) == []
    job.give(Settled(step=6, url="u"))
    assert job.ended == ("preempted", "", 6)


def test_a_recovery_pins_again_and_what_was_pinned_counts_if_it_is_written_after_all(job):
    job.give(Preempted()).joined(step=4).give(Exited(worker=W11, process=process_of(W11, 1), status=-9))
    assert not any(order.pins for order in job.told(Install))
    job.run(4)
    assert {(order.generation, order.pins) for order in job.told(Install)} == {(4, True)}
    job.give(Settled(step=4, url="u"))
    assert job.ended == ("preempted", "", 4)


def test_a_death_before_the_boundary(job):
    job.give(Preempted(), Exited(worker=W11, process=process_of(W11, 1), status=-9)).run(4)
    assert {(order.at_boundary, order.pins) for order in job.told(Install)} == {(True, True)}


def test_a_boundary_that_is_under_way_is_crossed_first(job):
    job.give(Leaving(worker=W11))
    assert {order.pins for order in job.told(Install)} == {False}
    job.give(Preempted())
    assert job.told(Install) == []
    job.joined(step=4)
    assert {(order.generation, order.pins) for order in job.told(Install)} == {(3, True)}


def test_nobody_comes_or_goes_any_more(job):
    job.give(Exited(worker=W11, process=process_of(W11, 1), status=-9)).run(2).give(
        Preempted(), Hello(worker=W11, process=process_of(W11, 2))
    ).joined(step=4)
    assert job.told(Install) == []
    job.give(Leaving(worker=W10))
    assert job.told(Install) == []


def test_no_plan_is_improved_any_more(job):
    job.give(Preempted()).joined(step=4)
    job.state = replace(job.state, running=replace(job.state.running, period=1.0))
    improved = Improved(lost=frozenset(), offer=Rerouted(plan=PLAN, period=0.5))
    job.give(improved)
    assert job.told(Install) == []
    job.state = replace(job.state, preempted=False)
    job.give(improved)
    assert job.told(Install), "it would have been"


@pytest.mark.parametrize("step", [4, 5])
def test_a_part_that_cannot_be_written_ends_it_at_once_if_it_is_of_that_checkpoint(job, step):
    job.give(Preempted()).joined(step=4)
    job.give(ShardFailed(worker=W00, generation=2, step=step, detail="no space"))
    assert Record(event=CheckpointFailed(step=step, worker=str(W00), detail="no space")) in job.outputs
    assert bool(job.told(Ended)) == (step == 4)
    if step == 4:
        assert job.ended[:2] == ("preempted", "no space")


def test_a_manifest_that_cannot_be_written_ends_it_too(job):
    job.give(Preempted()).joined(step=4).written(4, 2).give(Settled(step=4, url="u", error="no space"))
    assert job.ended[:2] == ("preempted", "no space")


def test_it_ends_at_once_if_it_is_told_to(job):
    job.give(Preempted(at_once=True))
    assert job.ended == ("preempted", "it was told to end at once", 0)


@pytest.fixture
def needed(job):
    """Nobody else has the layers of 0.1, which was told to go; the checkpoint behind that is being written."""
    job.state = replace(job.state, rules=replace(job.state.rules, checkpoint_every=100))
    job.give(Exited(worker=W11, process=process_of(W11, 1), status=-9)).run(2).give(Leaving(worker=W01))
    assert {order.pins for order in job.told(Install)} == {True}
    return job.joined(step=4)


def test_a_checkpoint_because_somebody_is_needed_ends_nothing(needed):
    assert needed.told(Install) == [], "it is pinned once"
    generation = needed.state.generation
    needed.give(ShardFailed(worker=W00, generation=generation, step=4, detail="no space"))
    assert needed.told(Ended) == []
    needed.give(Settled(step=4, url="u"), Leaving(worker=W01))
    assert (needed.told(Ended), needed.told(Install), needed.state.roster.needed) == ([], [], {W01})


def test_the_one_that_ends_the_job_is_another_one(needed):
    needed.give(Preempted())
    assert {order.pins for order in needed.told(Install)} == {True}
    needed.give(Settled(step=4, url="u"))
    assert needed.told(Ended) == []
    needed.joined(step=6).give(Settled(step=6, url="u"))
    assert needed.ended == ("preempted", "", 6)


def test_before_all_are_there_it_ends_at_once():
    state = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=STEPS, directory="out"))
    _, outputs = decide(state, Preempted())
    (ended,) = (o.command for o in outputs if isinstance(o, Tell) and isinstance(o.command, Ended))
    assert (ended.outcome, ended.detail) == ("preempted", "not all workers are there")


def test_behind_the_last_step_it_is_done(job):
    job.give(Preempted(), StepDone(worker=W00, generation=1, step=STEPS - 1, loss=None, omitted=False))
    job.give(*(Finished(worker=worker, generation=1, step=STEPS) for worker in PLAN.workers))
    assert job.state.phase is Phase.SAVING
    job.give(ShardFailed(worker=W00, generation=1, step=STEPS, detail="no space"), Settled(step=STEPS, url="u"))
    assert job.told(Ended) == []


def test_a_worker_pins_it_once_all_before_is_written_so_that_it_is_never_left_out():
    stage = SimpleNamespace(layer_steps=lambda: {0: 4})
    protocol = WorkerProtocol(
        worker=W00,
        stage=stage,
        rules=JobRules(steps=STEPS, checkpoint_every=5),
        process=process_of(W00, 1),
        generation=2,
        plan=PLAN,
    )
    assert list(protocol._checkpoint(4)) == []
    assert list(protocol._checkpoint(5)) == [Pin(generation=2, step=5, layers=(0,))]
    protocol.pins_at = 4
    assert list(protocol._checkpoint(4)) == [Written(), Pin(generation=2, step=4, layers=(0,))]
