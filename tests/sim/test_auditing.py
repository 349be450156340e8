"""Audits in simulated jobs: whoever computes wrong is named and leaves, whoever is right never does."""

from __future__ import annotations

import os
import random
from functools import cache

import numpy
import pytest
from tests.detection import detection_rate

from holdfast.core.faults import Fault, Point
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.recovery.audit import sample
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Installed, Notice, StepOps
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS, MICROBATCHES, STAGES = 6, 2, 2
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6")) // 4
LONG = int(os.environ.get("HOLDFAST_AUDITED_STEPS", "1000"))


@cache
def plan_of(pipelines: int):
    return regular_plan(pipelines, split_evenly(STAGES + 1, STAGES), MICROBATCHES)


class Wrong(EmulatedStage):
    """Flips a bit: in what a layer hands on, in a gradient, or in a weight; ``strikes`` says when."""

    def __init__(self, what, strikes, **options):
        super().__init__(**options)
        self._what, self._strikes, self._struck = what, strikes, False

    def begin(self, step, counted=None):
        super().begin(step, counted)
        if self._what == "weight" and self._strikes(step, self.layers[0], 0) and not self._struck:
            self._struck = True
            self._weights[self.layers[0]][self._live[self.layers[0]]] = flipped(self._weight(self.layers[0]))

    def _through(self, layer, value, step, microbatch):
        found = super()._through(layer, value, step, microbatch)
        return flipped(found) if self._what == "activation" and self._strikes(step, layer, microbatch) else found

    def _back(self, layer, gradient, taken, step, microbatch):
        found = super()._back(layer, gradient, taken, step, microbatch)
        return flipped(found) if self._what == "gradient" and self._strikes(step, layer, microbatch) else found


def flipped(words):
    return words ^ numpy.array([0, 0, 4, 0, 0, 0, 0, 0])


def run(pipelines, wrong=None, what="activation", strikes=lambda *_: True, steps=STEPS, every=1, **options):
    """One worker computes wrong as ``strikes`` says; None: nobody."""
    plan = plan_of(pipelines)

    def stage(worker, of):
        common = {
            "layers": of.placement.layers_of(worker),
            "num_layers": of.placement.num_layers,
            "num_microbatches": len(plan.routes.microbatches),
        }
        bad = wrong == worker or wrong == "everybody"
        return Wrong(what, strikes, **common) if bad else EmulatedStage(**common)

    return VirtualCluster(Scenario(plan=plan, steps=steps, stage=stage, audit_every=every, **options)).run()


@cache
def healthy(pipelines, steps=STEPS):
    return run(pipelines, steps=steps, every=0).digest


def told(result):
    return [event.text for _, event in result.events if isinstance(event, Notice)]


def lost(result):
    return [WorkerId.parse(event.worker) for _, event in result.events if isinstance(event, Detected)]


def sampled(worker, seed, step, pipelines=3):
    """Whether a worker runs the sample of a step by the plan of all."""
    plan = plan_of(pipelines)
    found = sample(seed, step, 1, plan.placement.num_layers, len(plan.routes.microbatches))
    visits = next(r for r in plan.routes.routes if r.microbatch.number == found.microbatch).visits
    return next(v.worker for v in visits if found.layer in v.layers) == worker


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_audits_change_nothing_where_all_is_well(pipelines, staggered):
    result = run(pipelines)
    assert result.digest == healthy(pipelines)
    assert lost(result) == []
    assert result.generations == 1
    assert [text for text in told(result) if "audit" in text] == (
        ["no audit of layer(s) 0, 1, 2: each has one owner, whom nobody can contradict"] if pipelines == 1 else []
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("what", ["activation", "gradient"])
def test_whoever_is_always_wrong_from_its_first_sample_on_is_told_to_leave(what, seed):
    """Nothing that it computed wrong is committed: it strikes only what is sampled."""
    source = random.Random(seed)
    bad = source.choice(plan_of(3).workers)
    first = next((step for step in range(1, 40) if sampled(bad, seed, step)), None)
    assert first is not None

    def strikes(step, layer, microbatch):
        found = sample(seed, step, 1, 3, 3 * MICROBATCHES)
        return step >= first and (layer, microbatch) == (found.layer, found.microbatch)

    result = run(3, bad, what, strikes, steps=first + 3, seed=seed)
    assert result.outcome == "done"
    assert lost(result) == [bad], told(result)
    assert result.digest == healthy(3, first + 3)
    found = [text for text in told(result) if "found wrong" in text]
    word = "output" if what == "activation" else "gradient"
    assert [text.rpartition(": ")[2] for text in found] == [
        f"wrong {word} (found wrong once)",
        f"wrong {word} (found wrong twice)",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_wrong_weights_are_found_and_their_owner_leaves(seed):
    bad = random.Random(seed).choice(plan_of(3).workers)
    result = run(3, bad, "weight", lambda step, *_: step == 2, every=2, steps=8, seed=seed)
    assert result.outcome == "done"
    assert lost(result) == [bad]
    at_once = any(text.startswith("audit of step 2,") for text in told(result))
    assert (result.digest == healthy(3, 8)) == at_once, "else what it gave to sums before is in all weights"
    assert sum("found wrong twice" in text for text in told(result)) == 1
    found = [event for _, event in result.events if isinstance(event, Notice) and "found wrong" in event.text]
    assert [event.worker for event in found] == [str(bad)] * 2


@pytest.mark.parametrize("pipelines", [2, 3])
@pytest.mark.parametrize("who", range(4))
def test_one_flip_costs_a_strike_and_nobody(pipelines, who):
    """It happens once in the process, in what is sampled in step 2; what is computed again is right."""
    bad, times = plan_of(pipelines).workers[who], []

    def strikes(step, layer, microbatch):
        found = sample(3, step, 1, 3, pipelines * MICROBATCHES)
        strikes = step == 2 and (layer, microbatch) == (found.layer, found.microbatch) and not times
        times.extend([step] * strikes)
        return strikes

    result = run(pipelines, bad, "gradient", strikes, seed=3)
    assert result.outcome == "done"
    assert result.digest == healthy(pipelines)
    assert lost(result) == []
    assert sum("wrong gradient (found wrong once)" in text for text in told(result)) == len(times)
    events = [event for _, event in result.events if isinstance(event, Notice) and "found wrong" in event.text]
    assert [event.worker for event in events] == [str(bad)] * len(times)


def test_a_flip_of_every_worker_is_struck_once_each():
    """The test above struck somebody."""
    assert any(sampled(worker, 3, 2) for worker in plan_of(3).workers[:4])


@pytest.mark.parametrize("what", ["activation", "gradient", "weight"])
def test_of_two_owners_nobody_can_tell_who_is_wrong_so_the_job_ends(what):
    result = run(2, WorkerId(0, 1), what, lambda step, *_: step >= 2, steps=30)
    assert result.outcome == "error"
    assert "nobody can tell who is right" in result.detail
    assert lost(result) == []


class Dice(EmulatedStage):
    """One layer's output is drawn, from so many."""

    def __init__(self, source, sides, **options):
        super().__init__(**options)
        self._source, self._sides = source, sides

    def _through(self, layer, value, step, microbatch):
        found = super()._through(layer, value, step, microbatch)
        return found + self._source.randrange(self._sides) if layer == 1 and step >= 2 else found


@pytest.mark.parametrize("pipelines", [2, 3])
@pytest.mark.parametrize("sides", [2, 2**40])
@pytest.mark.parametrize("seed", range(2))
def test_a_layer_that_does_not_repeat_is_told_and_nobody_leaves(pipelines, sides, seed):
    plan, source = plan_of(pipelines), random.Random(seed)

    def stage(worker, of):
        number = len(plan.routes.microbatches)
        return Dice(source, sides, layers=of.placement.layers_of(worker), num_layers=3, num_microbatches=number)

    result = VirtualCluster(Scenario(plan=plan, steps=30, stage=stage, audit_every=1, seed=seed)).run()
    assert result.outcome == "done", result.detail
    assert lost(result) == []
    assert [text for text in told(result) if text.startswith("layer 1 does not repeat")]
    assert len([text for text in told(result) if "does not repeat" in text]) == 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_befalls_others_meanwhile_the_bits_are_right(seed):
    """Somebody computes wrong for good; others die, and the coordinator with them, at any moment around that."""
    source = random.Random(seed)
    workers = plan_of(3).workers
    bad, other = source.sample(workers, 2)
    first = next(step for step in range(1, 40) if sampled(bad, seed, step))

    def strikes(step, layer, microbatch):
        found = sample(seed, step, 1, 3, 3 * MICROBATCHES)
        return step >= first and (layer, microbatch) == (found.layer, found.microbatch)

    point = source.choice([Point.START, Point.FORWARD, Point.BACKWARD, Point.REDUCE, Point.DETECT, Point.INSTALL])
    faults = [Fault.parse(f"kill:{other}@{source.choice([first, first + 1])}:{point}")]
    alone = run(3, bad, "activation", strikes, steps=first + 3, seed=seed)
    deaths = ((source.uniform(0.3, 0.9) * alone.seconds, 0.2),) if seed % 2 else ()
    result = run(3, bad, "activation", strikes, steps=first + 3, seed=seed, faults=faults, coordinator_deaths=deaths)
    if result.outcome == "error":  # two are left of this stage, and nobody knows which is right
        assert "nobody can tell" in result.detail
        assert other.stage == bad.stage
        return
    assert result.outcome == "done", result.detail
    assert set(lost(result)) <= {bad, other}
    assert result.digest == healthy(3, first + 3)


def test_no_false_alarm_in_many_steps():
    """Of 5,000 steps in ``make soak``, and of as many audits in tests/unit/recovery/test_audit.py."""
    result = run(2, steps=LONG, every=10, seed=11)
    assert result.outcome == "done"
    assert [event for _, event in result.events if isinstance(event, Notice | Detected)] == []
    assert sum(isinstance(event, Installed) for _, event in result.events) == 1
    audits = [kind for _, event in result.events if isinstance(event, StepOps) for kind, *_ in event.besides]
    assert audits.count("audit") == LONG // 10


def test_as_often_as_is_computed_is_corruption_found():
    """One worker of six is wrong in all that it computes of one step in three, for 12 steps."""
    seeds, every, steps = 60, 3, 12
    bad = WorkerId(1, 0)
    share = len(plan_of(3).placement.layers_of(bad)) / 3 / 3
    found = 0
    for seed in range(seeds):
        result = run(3, bad, "activation", steps=steps, every=every, seed=seed)
        found += any("audit of step" in text for text in told(result))
    rate = detection_rate(2 * share, every, steps)
    assert found / seeds == pytest.approx(rate, abs=4 * (0.25 / seeds) ** 0.5)
