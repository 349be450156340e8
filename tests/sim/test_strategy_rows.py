"""Strategies that nobody else knows of, a file each: ``dropping.py`` and ``shadowing.py``, under kills."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.sim import dropping, shadowing
from tests.sim.test_coming_and_going import LAYERS_PER_STAGE, healthy, of, run

import holdfast
from holdfast.core.placement import LayerRange
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.strategies import registry
from holdfast.telemetry.events import Agreed, Installed, StepOps

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
GRID, STEPS = (3, 2, 3), 12
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    rows = {row.name: row for row in (dropping.ROW, shadowing.ROW)}
    monkeypatch.setattr(registry, "STRATEGIES", MappingProxyType({**registry.STRATEGIES, **rows}))


def microbatches(result, step):
    """The micro-batches that somebody ran backward in a step, by their pipelines."""
    return {
        (pipeline, index)
        for event in of(result, StepOps)
        if event.step == step
        for kind, pipeline, index, *_ in event.ops
        if kind in ("B", "I")
    }


@pytest.mark.parametrize("point", POINTS)
def test_dropped_pipelines_count_in_no_step_and_the_others_train_on(point):
    result = run(GRID, f"kill:1.1@4:{point}", strategy="drop")
    assert result.outcome == "done", result.detail
    assert result.fired == (f"kill:1.1@4:{point}",)
    assert microbatches(result, 2) == {(pipeline, index) for pipeline in range(3) for index in range(3)}
    assert microbatches(result, 9) == {(pipeline, index) for pipeline in (0, 2) for index in range(3)}
    assert "drop" in {event.strategy for event in of(result, Installed)}
    assert result.digest != healthy(GRID, STEPS).digest, "its steps are of fewer samples"
    assert result.digest == run(GRID, f"kill:1.1@4:{point}", strategy="drop").digest


def test_what_is_audited_is_a_micro_batch_that_counts():
    result = run(GRID, "kill:0.1@4:forward", strategy="drop", audit_every=1)
    assert result.outcome == "done", result.detail
    assert result.fired == ("kill:0.1@4:forward",)
    assert result.digest == run(GRID, "kill:0.1@4:forward", strategy="drop").digest, "audits change nothing"


def test_when_no_pipeline_is_whole_what_lives_is_saved():
    result = run(GRID, "kill:0.0@2", "kill:1.1@4", "kill:2.0@6", strategy="drop")
    assert result.outcome != "done"
    assert len(result.fired) == 3


@pytest.fixture
def ahead(monkeypatch):
    """Steps, micro-batches and layers of the forward passes that add to nothing, as they are run."""
    found, forward = [], EmulatedStage.forward

    def noted(stage, step, microbatch, activation, layers=None, *, adds=True):
        if not adds:
            found.append((step, microbatch, layers))
        return forward(stage, step, microbatch, activation, layers, adds=adds)

    monkeypatch.setattr(EmulatedStage, "forward", noted)
    return found


@pytest.mark.parametrize("point", POINTS)
def test_a_shadow_computes_ahead_and_nobody_can_tell_from_the_result(point, ahead):
    result = run(GRID, f"kill:1.1@4:{point}", strategy="shadow")
    assert (result.outcome, result.digest) == ("done", healthy(GRID, STEPS).digest), result.detail
    assert result.fired == (f"kill:1.1@4:{point}",)
    last_stage = LayerRange(LAYERS_PER_STAGE, 2 * LAYERS_PER_STAGE)
    assert sorted(each for each in ahead if each[0] < 4) == [
        (step, microbatch, last_stage) for step in range(4) for microbatch in range(9)
    ]


def test_a_shadow_computes_ahead_again_once_the_grid_is_whole(ahead):
    """Its plan of the whole grid comes back at the boundary at which somebody has come."""
    faults, steps = ("kill:1.1@4:backward", "join:1.1@5"), 20
    result = run(GRID, *faults, strategy="shadow", steps=steps)
    assert (result.outcome, result.digest) == ("done", healthy(GRID, steps).digest), result.detail
    assert sorted(result.fired) == sorted(faults)
    of_steps = {step for step, *_ in ahead}
    assert max(of_steps) == steps - 1
    assert not of_steps & {5, 6}, "nobody computes ahead while the grid is not whole"


def test_what_a_shadow_has_run_ahead_is_not_run_again():
    """Its peer is lost when both have run all forward passes: only backward passes miss anything of them."""
    last = "kill:1.1@4:backward"
    plain = run(GRID, last, strategy="auto")
    shadow = run(GRID, last, strategy="shadow")
    regenerated = [sum(len(event.regenerated) for event in of(each, Agreed)) for each in (plain, shadow)]
    assert regenerated[1] <= regenerated[0]


def test_a_shadow_recalls_what_it_hands_itself_where_no_step_is_kept():
    result = run(GRID, "kill:1.1@4:backward", strategy="shadow", step_log=False)
    assert (result.outcome, result.digest) == ("done", healthy(GRID, STEPS).digest), result.detail
    assert result.fired == ("kill:1.1@4:backward",)


@pytest.mark.parametrize("strategy", ["drop", "shadow"])
def test_at_random(strategy):
    for seed in range(SEEDS):
        chosen = random.Random(seed)
        victims = chosen.sample([f"{p}.{s}" for p in range(2) for s in range(2)], 2)
        faults = [f"kill:{worker}@{chosen.randint(2, 7)}:{chosen.choice(POINTS)}" for worker in victims]
        result = run(GRID, *faults, strategy=strategy, seed=seed)
        assert result.outcome == "done", (seed, faults, result.detail)
        if strategy == "shadow":
            assert result.digest == healthy(GRID, STEPS).digest, (seed, faults)
            assert sorted(result.fired) == sorted(faults)


ASKS = re.compile(r"\bstrategy (==|!=|in|not in) |\bstrategy\.name\b")
ELSEWHERE = {"study", "strategies", "drawing", "telemetry", "recovery/overhead.py"}
"""What a study compares has names of its own; reports know how changes at boundaries, and fall-backs, are called."""


def test_nothing_outside_asks_which_strategy_it_is():
    home = Path(holdfast.__file__).parent
    found = []
    for path in home.rglob("*.py"):
        place = path.relative_to(home).as_posix()
        if place.split("/")[0] in ELSEWHERE or place in ELSEWHERE:
            continue
        found += [f"{place}: {line.strip()}" for line in path.read_text().splitlines() if ASKS.search(line)]
    assert found == []
