"""The agent is told to end: a checkpoint is pinned at the next boundary, whatever else goes on, and ends the job."""

from __future__ import annotations

import os
import random
from functools import cache

from holdfast.core.builders import regular_plan
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.telemetry.events import Checkpointed, CoordinatorLost, Installed, Parted, StepOps, Synced
from holdfast.testing.virtual import VirtualCluster, VirtualResult

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "75")) // 12
STEPS = 16
GRID = (3, 2, 2)
LAYERS = 5


@cache
def plan_of():
    pipelines, stages, microbatches = GRID
    return regular_plan(pipelines, split_evenly(LAYERS, stages), microbatches)


def cluster(seed=0, **options) -> VirtualResult:
    run = VirtualCluster(plan_of(), microbatches=GRID[2], seed=seed, **{"steps": STEPS, **options})
    return run.run()


@cache
def states(scaled=0.0) -> dict[int, tuple[str, ...]]:
    """The state after each step of a run in which nothing happens."""
    return dict(cluster(steps=2 * STEPS, checkpoint_every=1, scaled=scaled).checkpoints)


def length() -> float:
    return cluster().events[-1][0]


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


def test_every_moment_of_a_run():
    """Within two steps of the last one done; by a generation of the same plan, in which nobody is missing."""
    end = length()
    for seed in range(SEEDS):
        at = random.Random(seed).uniform(0.05, 0.8) * end
        result = cluster(seed=seed, preempted_at=at)
        assert 0 <= check(result, at) <= 3, seed
        first, pinned = [event for _, event in result.events if isinstance(event, Installed)]
        assert (pinned.strategy, pinned.workers) == ("boundary", first.workers)
        assert {(p.step, p.generation) for p in result.pinned} == {(result.step, 2)}
        assert sorted(p.layer for p in result.pinned) == list(range(LAYERS))


def test_a_regular_checkpoint_of_the_same_step_is_pinned_once():
    end = length()
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


def test_at_the_end_it_is_simply_done():
    """Nobody goes over a boundary behind the last step."""
    end = length()
    outcomes = {cluster(seed=seed, preempted_at=end * (0.7 + seed / 40)).outcome for seed in range(12)}
    assert outcomes == {"preempted", "done"}


def test_workers_that_die_meanwhile():
    """Before, during and after the boundary, and while they write."""
    end, fired, late = length(), 0, 0
    for seed in range(2 * SEEDS):
        source = random.Random(seed)
        at = source.uniform(0.1, 0.5) * end
        done = begun(cluster(seed=seed), at)
        point = source.choice(["start", "forward", "backward", "reduce", "update", "commit", "checkpoint"])
        step = done + source.randint(0, 2)
        victim = source.choice(plan_of().workers)
        fault = Fault.parse(f"kill:{victim}@{step}:{point}")
        result = cluster(seed=seed, preempted_at=at, faults=[fault])
        try:
            check(result, at)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, {fault}")
            raise
        fired += bool(result.fired)
        late += any(isinstance(e, Installed) and e.generation > 2 for _, e in result.events)
    assert fired > SEEDS // 2
    assert late > SEEDS // 8, "some died while it was under way"


def test_deaths_at_any_effect():
    end, fired = length(), 0
    for seed in range(2 * SEEDS):
        source = random.Random(seed)
        at = source.uniform(0.1, 0.5) * end
        kills = [(worker, source.randint(100, 900)) for worker in source.sample(plan_of().workers, 2)]
        result = cluster(seed=seed, preempted_at=at, kill_at_effect=kills)
        try:
            check(result, at)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, {[(str(w), n) for w, n in kills]}")
            raise
        fired += len(result.fired)
    assert fired > SEEDS // 4


def test_the_coordinator_dies_meanwhile():
    end, died = length(), 0
    for seed in range(2 * SEEDS):
        source = random.Random(seed)
        at = source.uniform(0.1, 0.5) * end
        dies = at + source.uniform(-0.1, 0.3)
        deaths = [(dies, source.uniform(0.05, 0.5))]
        result = cluster(seed=seed, preempted_at=at, coordinator_deaths=deaths)
        try:
            check(result, at)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}, coordinator {deaths}")
            raise
        died += any(isinstance(event, CoordinatorLost) for _, event in result.events)
    assert died > SEEDS


def test_while_workers_come_and_go():
    """A boundary that is under way is crossed first; whoever still waits to be let in is not."""
    came = left = 0
    for seed in range(2 * SEEDS):
        source = random.Random(seed)
        faults = [Fault.parse(text) for text in ("leave:1.0@4", "join:1.0@8", "kill:2.1@3", "join:2.1@9")]
        base = cluster(seed=seed, faults=faults, steps=2 * STEPS)
        marks = [time for time, event in base.events if isinstance(event, Parted | Synced | Installed)][1:]
        at = source.choice(marks) + source.uniform(-0.3, 0.1)
        result = cluster(seed=seed, preempted_at=at, faults=faults, steps=2 * STEPS)
        try:
            check(result, at)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, preempted at {at}")
            raise
        came += any(isinstance(event, Synced) for _, event in result.events)
        left += any(isinstance(event, Parted) for _, event in result.events)
    assert came > SEEDS // 8
    assert left > SEEDS // 8


def test_scaled_gradients_and_staggered_updates():
    """What was only presumed is settled before it is pinned."""
    end = length()
    for seed in range(SEEDS):
        at = random.Random(seed).uniform(0.05, 0.8) * end
        result = cluster(seed=seed, preempted_at=at, staggered=True, scaled=0.3)
        check(result, at, scaled=0.3)


def test_without_enough_workers_it_ends_at_once():
    """A layer has no owner left, and the job waits for somebody to come."""
    everyone = [Fault.parse(f"kill:{WorkerId(p, 1)}@4") for p in range(GRID[0])]
    options = {"faults": everyone, "checkpoint_every": 2, "wait_for_replacement": 1000.0}
    result = cluster(preempted_at=length() * 0.9, **options)
    assert (result.outcome, result.detail) == ("preempted", "not all workers are there")
    assert [step for step, _ in result.checkpoints] in ([2], [2, 4])
