"""Stages of several lanes, in virtual time: whoever dies or comes, the bits are those of one worker alone."""

from __future__ import annotations

import os
import random
from itertools import accumulate, pairwise

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import Batch
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

WIDE = ((((1, 2, 1), (1, 2, 1)), ((2, 2), (2, 1))), (4, 3))
"""Of each pipeline the layers and the lanes of each stage; and the micro-batches of each pipeline."""
ALIKE = ((((2, 2), (2, 2)), ((2, 2), (2, 2))), (4, 4))
"""Stages that all have two lanes, so that no two micro-batches after one another share a worker."""


def plan_of(layout):
    pipelines, counts = layout
    rows = []
    for sizes, lanes in pipelines:
        cuts = [LayerRange(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        rows.append([cut for cut, width in zip(cuts, lanes, strict=True) for _ in range(width)])
    return home_plan(home_placement(rows), Batch(counts))


def run(layout, seed=0, steps=STEPS, **options):
    return VirtualCluster(Scenario(plan=plan_of(layout), steps=steps, seed=seed, **options)).run()


def alone(layout, steps=STEPS):
    """The digest of one worker that has all layers and all micro-batches."""
    pipelines, counts = layout
    result = run(((((sum(pipelines[0][0]),), (1,)),), (sum(counts),)), steps=steps)
    assert result.outcome == "done"
    return result.digest


@pytest.mark.parametrize("layout", [WIDE, ALIKE])
def test_nothing_happens(layout):
    result = run(layout)
    assert (result.outcome, result.digest) == ("done", alone(layout))


@pytest.mark.parametrize("point", ["start", "forward", "backward", "reduce", "update", "commit"])
@pytest.mark.parametrize("worker", ["0.1", "0.2", "1.0", "1.2"])
def test_a_lane_or_its_neighbour_is_lost(worker, point):
    result = run(WIDE, faults=[Fault.parse(f"kill:{worker}@1:{point}")])
    assert result.fired
    assert (result.outcome, result.digest) == ("done", alone(WIDE)), result.detail


def test_a_stage_dies_with_its_node():
    """Nodes are 0.0, 0.1 and 0.2; then 0.3, 1.0 and 1.1; then 1.2."""
    result = run(WIDE, faults=[Fault.parse("kill-node:0@1:backward")], workers_per_node=3)
    assert sorted(map(str, result.lost)) == ["0.0", "0.1", "0.2"]
    assert (result.outcome, result.digest) == ("done", alone(WIDE)), result.detail


def test_a_lane_comes_back():
    faults = [Fault.parse(text) for text in ("kill:0.1@1:backward", "join:0.1@3")]
    result = run(WIDE, steps=20, faults=faults)
    assert (result.outcome, result.digest, result.lost) == ("done", alone(WIDE, 20), ())
    (synced,) = (event for _, event in result.events if isinstance(event, Synced))
    assert synced.worker == "0.1"


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_deaths_anywhere_at_any_time(start, staggered):
    done = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        layout = source.choice((WIDE, ALIKE))
        technique = source.choice((None, Technique.STAGGERED if staggered else Technique.DECOUPLED))
        plan = plan_of(layout)
        yielded = run(layout, technique=technique).effects
        victims = source.sample(plan.workers, source.randint(1, 3))
        kills = [(worker, source.randint(FIRST_EFFECT_AFTER_INSTALL, yielded[worker])) for worker in victims]
        try:
            result = run(layout, seed=seed, kill_at_effect=kills, technique=technique)
            assert result.fired
            if plan.placement.without(result.lost).unowned_layers():
                assert result.outcome == "lost", result.detail
                continue
            assert set(result.fired) == {f"kill:{worker}#{count}" for worker, count in kills}
            assert (result.outcome, result.digest) == ("done", alone(layout)), result.detail
            done += 1
        except BaseException as error:
            deaths = [(str(worker), count) for worker, count in kills]
            error.add_note(f"repeat: seed {seed}, layout {layout}, {technique}, kill_at_effect {deaths}")
            raise
    assert done > CHUNK // 2
