"""Undo under the virtual clock, with real layers: a worker dies at each of its effects, and others must go back."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, home_placement
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.probing import probe
from holdfast.schedule.builders import home_plan
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import Agreed, HandingOver
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

from .test_handover import Recut

STEPS = 3
TOLERANCE = 1e-6
EFFECTS = range(30, 75, 2)
"""Of 1.1, around the commit of the first step."""
JOB = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 3, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": STEPS, "seed": 1},
    "resilience": {"commit": "undo"},
}


class Undoing:
    """Runs the job; the stages stay, so that one can look at every owner's weights."""

    def __init__(self, pipelines=2):
        torch.set_num_threads(1)
        self.job = parse_job({**JOB, "grid": {**JOB["grid"], "pipelines": pipelines}})
        found = probe(self.job)
        self.boundaries, self.ties = found.boundaries, found.ties
        self.plan = healthy_plan(self.job, len(self.boundaries))

    def run(self, **options):
        stages = {}

        def stage(worker, plan):
            stages[worker] = build_stage(self.job, plan, worker, self.boundaries).stage
            return stages[worker]

        # A step that is gone on with needs hardly ever be inverted, and what these deaths are to hit is so short that
        # decisions are stored at once.
        usual = {"steps": STEPS, "step_log": False, "delays": Delays(put=(0.0, 0.0))}
        result = VirtualCluster(Scenario(plan=self.plan, stage=stage, ties=self.ties, **{**usual, **options})).run()
        return result, {worker: stages[worker] for worker in stages if worker not in result.lost}


@pytest.fixture(scope="module")
def undoing():
    return Undoing()


@pytest.fixture(scope="module")
def healthy(undoing):
    result, stages = undoing.run()
    assert result.outcome == "done"
    return weights(stages)


def weights(stages):
    """Per worker and layer, all parameters in one row."""
    return {
        (worker, layer): torch.cat([p.double().flatten() for p in stage.export(layer).parameters.values()])
        for worker, stage in stages.items()
        for layer in stage.layer_steps()
        if stage.export(layer).parameters
    }


def check(result, stages, healthy):
    """Done, every owner close to the healthy run; returns how many layers of owners were inverted."""
    assert result.outcome == "done", result.detail
    assert result.step == STEPS
    for place, found in weights(stages).items():
        assert float((found - healthy[place]).norm()) <= TOLERANCE * float(healthy[place].norm()), place
    return sum(not stage.exact(layer) for stage in stages.values() for layer in stage.layer_steps())


def test_a_death_at_every_effect_around_the_commit(undoing, healthy):
    """Some of these deaths leave owners at two steps: they must go back, and end near the healthy run all the same."""
    inverted = []
    for effect in EFFECTS:
        result, stages = undoing.run(seed=effect, kill_at_effect=[(WorkerId(1, 1), effect)])
        inverted.append(check(result, stages, healthy))
        assert result.fired
    assert sum(count > 0 for count in inverted) >= 3, inverted
    assert sum(count == 0 for count in inverted) >= 3, "most deaths leave nothing to invert"


@pytest.mark.parametrize("step", range(STEPS))
def test_a_death_with_the_verdict_in_hand(undoing, healthy, step, staggered):
    """Others have updated by then and go back; not with updates ahead of the verdict, which all have made long ago."""
    result, stages = undoing.run(seed=2, faults=[Fault.parse(f"kill:1.1@{step}:verdict")])
    inverted = check(result, stages, healthy)
    assert inverted > 0 or (staggered and step < STEPS - 1)
    assert result.fired == (f"kill:1.1@{step}:verdict",)


def test_where_steps_are_gone_on_with_others_go_forward_instead_of_back(undoing, healthy, staggered):
    """Whoever lacks the updates makes them, by the verdict that another knows.

    Updates ahead of the verdict are inverted all the same: the step is run again whole then.
    """
    inverted, concluded = [], 0
    for effect in EFFECTS:
        result, stages = undoing.run(seed=effect, kill_at_effect=[(WorkerId(1, 1), effect)], step_log=True)
        inverted.append(check(result, stages, healthy))
        told = [event for _, event in result.events if isinstance(event, Agreed)]
        concluded += any(event.concluded for event in told)
        assert result.fired
    assert (sum(count > 0 for count in inverted) > 1) == staggered, inverted
    assert concluded >= 3 or staggered


def test_without_deaths_nothing_is_inverted(undoing, healthy):
    result, stages = undoing.run(seed=3)
    assert check(result, stages, healthy) == 0


CUT = [[LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 4)], [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]]


def test_layers_are_handed_over_while_steps_are_undone(undoing):
    """One dies with the verdict in hand before, while and after 1.1 takes a layer over: others go back by inverting."""
    steps = 16
    after = home_plan(home_placement(CUT), undoing.plan.routes.batch)
    usual = weights(undoing.run(steps=steps)[1])
    usual = {layer: found for (_, layer), found in usual.items()}
    options = {"steps": steps, "delays": Delays(copy=(0.5, 0.5))}
    inverted = handed = 0
    for step in range(1, 9):
        fault = Fault.parse(f"kill:0.1@{step}:verdict")
        result, stages = undoing.run(seed=step, better=Recut(after, ever=True), faults=[fault], **options)
        assert (result.outcome, result.fired) == ("done", (str(fault),)), result.detail
        for (worker, layer), found in weights(stages).items():
            assert float((found - usual[layer]).norm()) <= TOLERANCE * float(usual[layer].norm()), (step, worker, layer)
        inverted += any(not s.exact(layer) for s in stages.values() for layer in s.layer_steps())
        handed += any(isinstance(event, HandingOver) for _, event in result.events)
        assert stages[WorkerId(1, 1)].layers == (1, 2)
    assert inverted > 2
    assert handed > 5


def test_whoever_comes_is_given_a_layer_that_its_owners_hold_in_other_bits():
    """0.0 has inverted the step that 1.0 had not made; then 2.0 is lost, and who replaces it can be given either's."""
    undoing = Undoing(pipelines=3)
    usual = weights(undoing.run(steps=9)[1])
    faults = [Fault.parse("kill:2.0@3:forward"), Fault.parse("join:2.0@4")]
    unlike = 0
    for effect in (33, 63):
        result, stages = undoing.run(steps=9, seed=effect, kill_at_effect=[(WorkerId(1, 1), effect)], faults=faults)
        assert (result.outcome, len(result.fired)) == ("done", 3), (effect, result.detail)
        for place, found in weights(stages).items():
            assert float((found - usual[place]).norm()) <= TOLERANCE * float(usual[place].norm()), (effect, place)
        unlike += len({stages[WorkerId(pipeline, 0)].layer_digest(0) for pipeline in range(3)}) == 2
    assert unlike > 0


def test_told_to_end_while_a_worker_dies_around_a_commit(undoing, healthy):
    """What was undone by then is redone before a checkpoint of it is pinned; who runs on is where it should be."""
    at_step = {STEPS: healthy} | {step: weights(undoing.run(steps=step)[1]) for step in range(1, STEPS)}
    end = undoing.run()[0].events[-1][0]
    inverted = 0
    for effect in EFFECTS:
        at = end * effect / 100
        result, stages = undoing.run(seed=effect, kill_at_effect=[(WorkerId(1, 1), effect)], preempted_at=at)
        assert result.fired
        assert result.outcome in ("preempted", "done"), (effect, result.detail)
        if result.outcome == "preempted":
            assert result.step in dict(result.checkpoints), effect
        for (worker, layer), found in weights(stages).items():
            usual = at_step[stages[worker].layer_steps()[layer]][worker, layer]
            assert float((found - usual).norm()) <= TOLERANCE * float(usual.norm()), (effect, worker, layer)
            inverted += result.outcome == "preempted" and not stages[worker].exact(layer)
    assert inverted
