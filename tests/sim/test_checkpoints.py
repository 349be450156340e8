"""Checkpoints under a virtual clock: the right worker pins the right layer at the right step, whoever dies."""

from __future__ import annotations

import os
import random
from functools import cache

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed, Checkpointed, Installed
from holdfast.testing.scenario import Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 3
STEPS = 6
EVERY = 2
GRID = (3, 2, 2)
LAYERS = 5


@cache
def plan_of():
    pipelines, stages, microbatches = GRID
    return regular_plan(pipelines, split_evenly(LAYERS, stages), microbatches)


def cluster(seed=0, every=EVERY, **options) -> VirtualResult:
    run = VirtualCluster(Scenario(plan=plan_of(), steps=STEPS, seed=seed, checkpoint_every=every, **options))
    return run.run()


@cache
def healthy() -> VirtualResult:
    return cluster()


def test_every_layer_is_pinned_once_by_its_writer_and_committed():
    result = healthy()
    assert result.outcome == "done"
    assert [(p.step, p.layer) for p in sorted(result.pinned, key=lambda p: (p.step, p.layer))] == [
        (step, layer) for step in (2, 4, 6) for layer in range(LAYERS)
    ]
    assert all(p.worker == plan_of().writer_of(p.layer) for p in result.pinned)
    assert [step for step, _ in result.checkpoints] == [2, 4, 6]
    assert [e.step for _, e in result.events if isinstance(e, Checkpointed)] == [2, 4, 6]


def test_the_work_is_spread_over_the_owners():
    assert len({plan_of().writer_of(layer) for layer in range(LAYERS)}) == LAYERS


def test_no_checkpoints_unless_asked_for():
    assert cluster(every=0).pinned == ()
    assert cluster(every=7).pinned == ()


def test_each_is_at_its_own_state():
    """The oracle can tell the steps apart, and the last one is that of the end."""
    digests = [texts for _, texts in healthy().checkpoints]
    assert len(set(digests)) == 3


def check(result: VirtualResult) -> None:
    """Whatever was committed is what the healthy run committed; after the last recovery nothing is missing."""
    expected = dict(healthy().checkpoints)
    for step, digests in result.checkpoints:
        assert digests == expected[step]
    if result.outcome != "done":
        return
    resumed = [event.step for _, event in result.events if isinstance(event, Agreed)][-1]
    assert {step for step in expected if step >= max(resumed, 1)} <= {step for step, _ in result.checkpoints}


def test_deaths_anywhere_never_make_a_wrong_checkpoint():
    done, effects = 0, cluster().effects
    for seed in range(SEEDS):
        source = random.Random(seed)
        victims = source.sample(plan_of().workers, source.randint(1, 3))
        kills = [(worker, source.randint(4, effects[worker])) for worker in victims]
        try:
            result = cluster(seed=seed, kill_at_effect=kills)
            check(result)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, kill_at_effect {[(str(w), n) for w, n in kills]}")
            raise
        planned = {f"kill:{worker}#{count}" for worker, count in kills}
        assert set(result.fired) == planned or (result.outcome == "lost" and result.fired), (result.fired, planned)
        done += result.outcome == "done"
    assert done >= SEEDS // 2


def test_a_writer_that_dies_while_it_writes():
    victim = plan_of().writer_of(0)
    fault = Fault.parse(f"kill:{victim}@4:checkpoint")
    for seed in range(20):
        result = cluster(seed=seed, faults=[fault])
        assert result.fired == (str(fault),)
        assert result.outcome == "done"
        check(result)
        assert [step for step, _ in result.checkpoints][-1] == 6
        assert victim not in {p.worker for p in result.pinned if p.step == 6}, "another owner has taken over"


def test_a_recovery_that_runs_from_a_checkpointed_step_pins_it_again():
    """Whoever died in the step may have died before it wrote."""
    fault = Fault.parse("kill:1.0@4:start")
    result = cluster(faults=[fault])
    assert result.fired == (str(fault),)
    generations = {p.generation for p in result.pinned if p.step == 4}
    assert 2 in generations
    assert len([e for _, e in result.events if isinstance(e, Installed)]) == 2
    check(result)
    again = [p for p in result.pinned if p.step == 4 and p.generation == 2]
    assert sorted(p.layer for p in again) == list(range(LAYERS))
    assert WorkerId(1, 0) not in {p.worker for p in again}
