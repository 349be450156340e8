"""Pipelines that are not alike, in virtual time: whoever dies or comes, the bits are those of one pipeline alone."""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import accumulate, pairwise

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, home_placement
from holdfast.planning.planner import Technique
from holdfast.schedule.builders import home_plan
from holdfast.telemetry.events import Synced
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
CHUNK = 20
STEPS = 4
FIRST_EFFECT_AFTER_INSTALL = 4

UNLIKE = ((3, 3), (2, 2, 2), (1, 4, 1)), (5, 3, 2)
"""The layers of each stage of each pipeline, and the micro-batches of each pipeline."""


def plan_of(layout):
    pipelines, counts = layout
    stages = [[LayerRange(*pair) for pair in pairwise(accumulate(sizes, initial=0))] for sizes in pipelines]
    return home_plan(home_placement(stages), Batch(counts))


def run(layout, seed=0, steps=STEPS, **options):
    return VirtualCluster(Scenario(plan=plan_of(layout), steps=steps, seed=seed, **options)).run()


@cache
def alone(layout, steps, staggered):
    """The digest of one worker that has all layers and all micro-batches."""
    pipelines, counts = layout
    result = run((((sum(pipelines[0]),),), (sum(counts),)), steps=steps)
    assert result.outcome == "done"
    return result.digest


@cache
def effects(layout, staggered, technique=None):
    """How many effects each worker yields if nothing happens."""
    return run(layout, technique=technique).effects


def techniques(staggered):
    """By 1F1B's rules, and by the planner's."""
    return (None, Technique.STAGGERED) if staggered else (None, Technique.DECOUPLED)


def any_layout(source):
    layers = source.randint(2, 6)
    pipelines = []
    for _ in range(source.randint(2, 4)):
        cuts = sorted(source.sample(range(1, layers), min(layers - 1, source.randint(0, 3))))
        pipelines.append(tuple(b - a for a, b in pairwise([0, *cuts, layers])))
    return tuple(pipelines), tuple(source.randint(1, 3) for _ in pipelines)


def lost_layers(layout, lost):
    return plan_of(layout).placement.without(lost).unowned_layers()


def test_nothing_happens(staggered):
    result = run(UNLIKE)
    assert (result.outcome, result.digest) == ("done", alone(UNLIKE, STEPS, staggered))


@pytest.mark.parametrize("point", ["start", "forward", "backward", "reduce", "update", "commit"])
@pytest.mark.parametrize("worker", [str(worker) for worker in plan_of(UNLIKE).workers])
def test_anybody_is_lost(worker, point, staggered):
    result = run(UNLIKE, faults=[Fault.parse(f"kill:{worker}@1:{point}")])
    assert result.fired
    assert (result.outcome, result.digest) == ("done", alone(UNLIKE, STEPS, staggered)), result.detail


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_deaths_anywhere_at_any_time(start, staggered):
    done = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        layout, technique = any_layout(source), source.choice(techniques(staggered))
        workers = plan_of(layout).workers
        yielded = effects(layout, staggered, technique)
        victims = source.sample(workers, source.randint(1, max(1, len(workers) // 2)))
        kills = [(worker, source.randint(FIRST_EFFECT_AFTER_INSTALL, yielded[worker])) for worker in victims]
        try:
            result = run(layout, seed=seed, kill_at_effect=kills, technique=technique)
            assert result.fired
            if lost_layers(layout, result.lost):
                assert result.outcome == "lost", result.detail
                continue
            assert set(result.fired) == {f"kill:{worker}#{count}" for worker, count in kills}
            assert (result.outcome, result.digest) == ("done", alone(layout, STEPS, staggered)), result.detail
            done += 1
        except BaseException as error:
            deaths = [(str(worker), count) for worker, count in kills]
            error.add_note(f"repeat: seed {seed}, layout {layout}, {technique}, kill_at_effect {deaths}")
            raise
    assert done > CHUNK // 4


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_workers_go_and_come_back(start, staggered):
    steps, back = 20, 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        layout, technique = any_layout(source), source.choice(techniques(staggered))
        pipelines, _ = layout
        victim = source.randrange(len(pipelines))
        faults = []
        for stage in range(len(pipelines[victim])):
            kind, step = source.choice(["kill", "hang", "leave"]), source.randrange(1, 6)
            faults.append(f"{kind}:{victim}.{stage}@{step}:{source.choice(['forward', 'backward', 'reduce'])}")
            faults.append(f"join:{victim}.{stage}@{step + source.randrange(2, 5)}")
        try:
            parsed = [Fault.parse(text) for text in faults]
            result = run(layout, seed=seed, steps=steps, faults=parsed, technique=technique)
            assert (result.outcome, result.digest) == ("done", alone(layout, steps, staggered)), result.detail
            assert {text for text in result.fired if not text.startswith("join")}
            back += sum(isinstance(event, Synced) for _, event in result.events)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, layout {layout}, {technique}, faults {faults}")
            raise
    assert back > CHUNK


def test_a_worker_whose_layers_nobody_else_holds_just_so_comes_back(staggered):
    faults = [Fault.parse(text) for text in ("kill:2.1@1:backward", "join:2.1@3")]
    result = run(UNLIKE, steps=20, faults=faults)
    assert (result.outcome, result.digest) == ("done", alone(UNLIKE, 20, staggered))
    assert result.lost == ()
    (synced,) = (event for _, event in result.events if isinstance(event, Synced))
    assert synced.worker == "2.1"


def test_the_last_owner_of_a_layer_is_missed(staggered):
    layout = (((2, 1), (1, 2)), (1, 1))
    faults = [Fault.parse(text) for text in ("kill:0.0@1:start", "kill:1.1@1:start")]
    result = run(layout, faults=faults)
    assert result.outcome == "lost"
    assert lost_layers(layout, [WorkerId(0, 0), WorkerId(1, 1)]) == (1,)
