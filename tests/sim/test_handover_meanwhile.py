"""Layers are handed over while something else is under way, in virtual time: checkpoints, snapshots, waiting, going."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest

from holdfast.control.detection import PATIENCE
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Agreed, Detected, HandingOver, Installed, Parted, Synced
from holdfast.testing.scenario import Delays, Pause
from holdfast.testing.virtual_worker import HANG_S

from .test_handover import AFTER, BEFORE, Recut, events_of, held, recut
from .test_unlike import alone, any_layout, plan_of, run

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 5
STEPS = 16
SLOW = Delays(copy=(1.0, 1.0))
"""A copy takes a few steps, so that much can happen before it is there."""


@cache
def states(layout, staggered):
    """The state of each layer after each step, as one worker has it that does everything."""
    pipelines, counts = layout
    return dict(run((((sum(pipelines[0]),),), (sum(counts),)), steps=2 * STEPS, checkpoint_every=1).checkpoints)


def placed(layout, lost=()):
    """What each worker that is not lost holds at the end."""
    plan = plan_of(layout)
    return {str(worker): plan.placement.layers_of(worker) for worker in plan.workers if str(worker) not in lost}


def check(result, layout, staggered, *faults, steps=STEPS):
    """It ended in the bits of one worker alone; layers were handed over, and each fault has struck."""
    assert (result.outcome, result.digest) == ("done", alone(layout, steps, staggered)), result.detail
    assert set(result.fired) == set(faults)
    assert events_of(result, HandingOver)


def parsed(*faults):
    return [Fault.parse(text) for text in faults]


def copied(result):
    """From when on layers were followed for the first time until all takers had them, in virtual seconds."""
    begun = next(at for at, event in result.events if isinstance(event, HandingOver))
    return begun, max(at for at, event in result.events if isinstance(event, Synced))


def test_checkpoints_are_made_meanwhile_of_what_is_held(staggered):
    meanwhile = 0
    for seed in range(SEEDS):
        source = random.Random(seed)
        before = any_layout(source)
        after, every = recut(source, before), source.choice([1, 2, 3])
        options = {"better": Recut(after), "checkpoint_every": every, "delays": SLOW}
        try:
            result = run(before, seed=seed, steps=STEPS, **options)
            assert (result.outcome, result.digest) == ("done", alone(before, STEPS, staggered)), result.detail
            made = dict(result.checkpoints)
            assert list(made) == list(range(every, STEPS + 1, every))
            assert made == {step: states(before, staggered)[step] for step in made}
            if events_of(result, HandingOver):
                meanwhile += any(pin.generation == 2 for pin in result.pinned)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, {before} to {after}, checkpoint_every {every}")
            raise
    assert meanwhile > SEEDS // 4


@pytest.mark.parametrize("worker", ["0.0", "0.1", "1.0", "1.1"])
@pytest.mark.parametrize("step", [3, 5, 7])
def test_survivors_go_back_to_snapshots_meanwhile(worker, step, staggered):
    """Whoever takes layers over drops the snapshots that do not have them: all stay at the lowest step then."""
    fault = f"kill:{worker}@{step}:backward"
    options = {"strategy": "snapshots", "snapshot_every": 3, "delays": SLOW, "faults": parsed(fault)}
    result = run(BEFORE, seed=step, steps=40, better=Recut(AFTER, ever=True), **options)
    check(result, BEFORE, staggered, fault, steps=40)
    assert [event.strategy for event in events_of(result, Installed)].count("snapshots") == 1
    assert step - 3 <= events_of(result, Agreed)[-1].step <= step
    assert (result.lost, held(result)) == ((), placed(AFTER)), "the lost one's new process has come"


@pytest.mark.parametrize("seed", range(3))
def test_a_replacement_is_waited_for_meanwhile(seed, staggered):
    """0.0 and 1.1 hold layers 1 to 3, which nobody has taken over yet: all load a checkpoint once 0.0 is back."""
    faults = ("kill:0.0@5:forward", "kill:1.1@5:forward", "join:0.0@2")
    options = {"faults": parsed(*faults), "checkpoint_every": 2, "wait_for_replacement": 30.0, "delays": SLOW}
    result = run(BEFORE, seed=seed, steps=30, better=Recut(AFTER, after=3), **options)
    check(result, BEFORE, staggered, *faults, steps=30)
    assert "fallback" in [event.strategy for event in events_of(result, Installed)]
    assert events_of(result, Agreed)[-1].step in (2, 4), "a checkpoint"
    assert len(events_of(result, HandingOver)) > 1, "it begins anew once all go on"
    assert held(result) == placed(AFTER, lost=["1.1"])


@pytest.mark.parametrize("worker", ["0.0", "0.1", "1.0", "1.1"])
@pytest.mark.parametrize("step", [4, 5, 7])
def test_all_go_back_to_a_checkpoint_meanwhile(worker, step, staggered):
    """The baseline that waits for everybody after any loss."""
    fault = f"kill:{worker}@{step}:forward"
    options = {"strategy": "checkpoint-restart", "checkpoint_every": 2, "wait_for_replacement": 30.0}
    result = run(BEFORE, steps=30, better=Recut(AFTER), faults=parsed(fault), delays=SLOW, **options)
    check(result, BEFORE, staggered, fault, steps=30)
    assert "checkpoint-restart" in [event.strategy for event in events_of(result, Installed)]
    assert (result.lost, held(result)) == ((), placed(AFTER))


@pytest.mark.parametrize("worker", ["0.0", "0.1", "1.0", "1.1"])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_somebody_is_told_to_go_meanwhile(worker, step, staggered):
    """It goes when layers have been handed over, if it was told so while they were; nothing is run again."""
    fault = f"leave:{worker}@{step}:forward"
    result = run(BEFORE, steps=30, better=Recut(AFTER, ever=True), faults=parsed(fault), delays=SLOW)
    check(result, BEFORE, staggered, fault, steps=30)
    assert [event.worker for event in events_of(result, Parted)] == [worker]
    assert len(events_of(result, Agreed)) == 1, "nobody was aborted"
    assert held(result) == placed(AFTER, lost=[worker])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_job_is_told_to_end_meanwhile(seed, staggered):
    """The checkpoint that ends it is pinned at the next boundary: that at which they take the layers over."""
    begun, there = copied(run(BEFORE, seed=seed, steps=30, better=Recut(AFTER), delays=SLOW))
    at = random.Random(seed).uniform(begun - 0.2, there)
    result = run(BEFORE, seed=seed, steps=30, better=Recut(AFTER), delays=SLOW, preempted_at=at)
    assert (result.outcome, result.detail) == ("preempted", "")
    made = dict(result.checkpoints)
    assert list(made) == [result.step]
    assert made == {result.step: states(BEFORE, staggered)[result.step]}
    if at > begun:
        assert events_of(result, HandingOver)
        assert held(result) == placed(AFTER)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_processes_stand_still_meanwhile(seed, staggered):
    """All of them for long, which is nobody's fault; or one of them, which is lost."""
    source = random.Random(seed)
    calm = run(BEFORE, seed=seed, steps=30, better=Recut(AFTER), delays=SLOW)
    begun, there = copied(calm)
    everybody = seed % 2 == 0
    workers = plan_of(BEFORE).workers if everybody else tuple(source.sample(plan_of(BEFORE).workers, 1))
    lasts_s = source.uniform(1.0, 10.0) if everybody else PATIENCE * HANG_S + source.uniform(1.0, 10.0)
    pause = Pause(at=source.uniform(begun, there), lasts_s=lasts_s, workers=workers, coordinator=everybody)
    result = run(BEFORE, seed=seed, steps=30, better=Recut(AFTER), delays=SLOW, pauses=[pause])
    check(result, BEFORE, staggered, str(pause), steps=30)
    lost = () if everybody else workers
    assert (result.lost, len(events_of(result, Detected))) == (lost, len(lost))
    assert held(result) == placed(AFTER, lost=[str(worker) for worker in lost])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_exception_in_a_taker_ends_the_attempt_with_it(seed, staggered):
    """As where it has no room for both sets of layers: it is lost, and layers are handed over among the others."""
    source = random.Random(seed)
    worker = source.choice([WorkerId(0, 1), WorkerId(1, 0)])
    count = source.randint(80, run(BEFORE, seed=seed, steps=12, better=Recut(AFTER), delays=SLOW).effects[worker])
    options = {"better": Recut(AFTER, ever=True), "delays": SLOW, "raise_at_effect": [(worker, count)]}
    result = run(BEFORE, seed=seed, steps=30, **options)
    check(result, BEFORE, staggered, f"raise:{worker}#{count}", steps=30)
    assert (result.lost, held(result)) == ((worker,), placed(AFTER, lost=[str(worker)]))
    assert len(events_of(result, HandingOver)) <= 2, "it is not tried again and again"
