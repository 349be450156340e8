"""The agent is told to end: a checkpoint is pinned at the next boundary, whatever else goes on, and ends the job."""

from __future__ import annotations

import os
import random
from functools import cache

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Checkpointed, FaultInjected, Installed, MadeAgain, Parted, StepOps, Synced
from holdfast.testing.scenario import Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "20")) // 12
STEPS = 16
GRID = (3, 2, 2)
LAYERS = 5


@cache
def plan_of():
    pipelines, stages, microbatches = GRID
    return regular_plan(pipelines, split_evenly(LAYERS, stages), microbatches)


def cluster(seed=0, **options) -> VirtualResult:
    run = VirtualCluster(Scenario(plan=plan_of(), seed=seed, **{"steps": STEPS, **options}))
    return run.run()


@cache
def states(scaled=0.0) -> dict[int, tuple[str, ...]]:
    """The state after each step of a run in which nothing happens."""
    return dict(cluster(steps=2 * STEPS, checkpoint_every=1, scaled=scaled).checkpoints)


def end_of(result: VirtualResult) -> float:
    return result.events[-1][0]


@cache
def length(staggered) -> float:
    return end_of(cluster())


@cache
def calm(seed, staggered) -> tuple[float, VirtualResult]:
    """Tells when the agent is told, and what comes of it if nothing else happens."""
    at = random.Random(seed).uniform(0.1, 0.5) * length(staggered)
    return at, cluster(seed=seed, preempted_at=at)


def struck_at(result: VirtualResult) -> dict[str, float]:
    """When each named fault struck."""
    return {event.spec: time for time, event in result.events if isinstance(event, FaultInjected)}


def begun(result: VirtualResult, at: float) -> int:
    """Steps that every worker had done by then."""
    done: dict[int, set[str]] = {}
    for time, event in result.events:
        if isinstance(event, StepOps) and time <= at:
            done.setdefault(event.step, set()).add(event.worker)
    return max(done, default=-1) + 1


def check(result: VirtualResult, at: float, *, scaled=0.0) -> int:
    """It ended on a checkpoint of a state that is that of the healthy run, and no step done before is lost."""
    assert (result.outcome, result.detail) == ("preempted", "")
    made = dict(result.checkpoints)
    assert made[result.step] == states(scaled)[result.step]
    assert all(states(scaled)[step] == digests for step, digests in made.items())
    told = [event.step for _, event in result.events if isinstance(event, Checkpointed)]
    assert told[-1] == result.step == max(made)
    return result.step - begun(result, at)


def test_every_moment_of_a_run(staggered):
    """Within two steps of the last one done; by a generation of the same plan, in which nobody is missing."""
    end = length(staggered)
    for seed in range(SEEDS):
        at = random.Random(seed).uniform(0.05, 0.8) * end
        result = cluster(seed=seed, preempted_at=at)
        assert 0 <= check(result, at) <= 3, seed
        first, pinned = [event for _, event in result.events if isinstance(event, Installed)]
        assert (pinned.strategy, pinned.workers) == ("boundary", first.workers)
        assert {(p.step, p.generation) for p in result.pinned} == {(result.step, 2)}
        assert sorted(p.layer for p in result.pinned) == list(range(LAYERS))


def test_a_regular_checkpoint_of_the_same_step_is_pinned_once(staggered):
    end = length(staggered)
    for seed in range(SEEDS):
        at = random.Random(seed).uniform(0.05, 0.8) * end
        result = cluster(seed=seed, preempted_at=at, checkpoint_every=1)
        assert 0 <= check(result, at) <= 3, seed
        pins = [(p.step, p.layer) for p in result.pinned]
        assert len(pins) == len(set(pins))


def test_before_the_first_step_nothing_is_waited_for():
    result = cluster(preempted_at=0.0)
    assert (result.outcome, result.detail) == ("preempted", "not all workers are there")
    assert result.checkpoints == ()


def test_at_the_end_it_is_simply_done(staggered):
    """Nobody goes over a boundary behind the last step."""
    end = length(staggered)
    outcomes = {cluster(seed=seed, preempted_at=end * (0.7 + seed / 40)).outcome for seed in range(12)}
    assert outcomes == {"preempted", "done"}


def test_workers_that_die_meanwhile(staggered):
    """Before, during and after the boundary, and while they write."""
    late = 0
    for seed in range(2 * SEEDS):
        source, (at, alive) = random.Random(seed), calm(seed, staggered)
        point = source.choice(["start", "forward", "backward", "reduce", "update", "commit", "checkpoint"])
        step = alive.step if point == "checkpoint" else source.randrange(begun(alive, at), alive.step)
        victim = source.choice([p.worker for p in alive.pinned] if point == "checkpoint" else plan_of().workers)
        fault = Fault.parse(f"kill:{victim}@{step}:{point}")
        result = cluster(seed=seed, preempted_at=at, faults=[fault])
        try:
            check(result, at)
            assert result.fired == (str(fault),)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, {fault}")
            raise
        late += struck_at(result)[str(fault)] > at
    assert late >= SEEDS, "most died while it was under way"


def test_deaths_at_any_effect(staggered):
    """Of those that a worker yields if nobody dies, the later half, as it is told to end late in its life.

    The first death may make the checkpoint come earlier, so that hardly ever the other one has no time any more.
    """
    fired = 0
    for seed in range(2 * SEEDS):
        source, (at, alive) = random.Random(seed), calm(seed, staggered)
        victims = source.sample(plan_of().workers, 2)
        kills = [(worker, source.randint(alive.effects[worker] // 2, alive.effects[worker])) for worker in victims]
        result = cluster(seed=seed, preempted_at=at, kill_at_effect=kills)
        fired += len(result.fired)
        try:
            check(result, at)
            assert result.fired
            assert set(result.fired) <= {f"kill:{worker}#{count}" for worker, count in kills}
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, {[(str(w), n) for w, n in kills]}")
            raise
    assert fired >= 0.9 * 4 * SEEDS


def test_the_coordinator_dies_meanwhile(staggered):
    """From just before the agent is told until the job would have ended; the steps are so many that it is not done."""
    for seed in range(2 * SEEDS):
        source, (at, alive) = random.Random(seed), calm(seed, staggered)
        dies = source.uniform(at - 0.1, end_of(alive))
        deaths = [(dies, source.uniform(0.05, 0.5))]
        result = cluster(seed=seed, preempted_at=at, coordinator_deaths=deaths, steps=2 * STEPS)
        try:
            check(result, at)
            assert result.fired == (f"kill-coordinator#{dies}",)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, coordinator {deaths}")
            raise


def test_while_workers_come_and_go():
    """A boundary that is under way is crossed first; whoever still waits to be let in is not."""
    came = left = 0
    for seed in range(2 * SEEDS):
        source = random.Random(seed)
        faults = [Fault.parse(text) for text in ("leave:1.0@4", "join:1.0@8", "kill:2.1@3", "join:2.1@9")]
        base = cluster(seed=seed, faults=faults, steps=2 * STEPS)
        assert set(base.fired) == set(map(str, faults))
        kind = (Parted, Synced, Installed)[seed % 3]
        struck = struck_at(base)
        marks = [time for time, event in base.events if isinstance(event, kind) and time > min(struck.values())]
        at = source.choice(marks) + source.uniform(-0.3, 0.1)
        before = {spec for spec, time in struck.items() if time < at}
        result = cluster(seed=seed, preempted_at=at, faults=faults, steps=2 * STEPS)
        try:
            check(result, at)
            assert set(result.fired) >= before
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}")
            raise
        came += any(isinstance(event, Synced) for _, event in result.events)
        left += any(isinstance(event, Parted) for _, event in result.events)
    assert came > SEEDS // 8
    assert left > SEEDS // 8


def test_scaled_gradients_and_staggered_updates(staggered):
    """What was only presumed is settled before it is pinned, also what does not stand."""
    end, made_again = length(staggered), 0
    for seed in range(SEEDS):
        at = random.Random(seed).uniform(0.05, 0.8) * end
        result = cluster(seed=seed, preempted_at=at, staggered=True, scaled=0.3)
        check(result, at, scaled=0.3)
        made_again += any(isinstance(event, MadeAgain) for _, event in result.events)
    assert states(0.3)[STEPS] != states()[STEPS]
    assert made_again > SEEDS // 2


def test_without_enough_workers_it_ends_at_once(staggered):
    """A layer has no owner left, and the job waits for somebody to come."""
    everyone = [Fault.parse(f"kill:{WorkerId(p, 1)}@4") for p in range(GRID[0])]
    options = {"faults": everyone, "checkpoint_every": 2, "wait_for_replacement": 1000.0}
    result = cluster(preempted_at=length(staggered) * 0.9, **options)
    assert (result.outcome, result.detail) == ("preempted", "not all workers are there")
    assert len(result.fired) == GRID[0]
    assert [step for step, _ in result.checkpoints] in ([2], [2, 4])
