"""Pipelines of whoever is left, in virtual time: losses are re-routed at once, then layers move, and the bits stay."""

from __future__ import annotations

import os
import random

import pytest

from holdfast.control.reshaper import Reshaper
from holdfast.core.faults import Fault
from holdfast.core.profile import unit_costs
from holdfast.planning.reshaping import Shapes
from holdfast.telemetry.events import HandingOver, Installed, Notice

from .test_unlike import alone, effects, plan_of, run

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "100"))
CHUNK = 20
STEPS = 24
LAYOUT = ((2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)), (3, 3, 3)


class Reshape:
    """What the coordinator is told by its reshaper."""

    def __init__(self, layout, minimum):
        layers = plan_of(layout).placement.num_layers
        self._reshaper = Reshaper(Shapes(costs=unit_costs(layers), minimum=minimum, state=(1,) * layers))

    def __call__(self, state):
        return next((news.offer for news in self._reshaper.news(state)), None)


def events_of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def told(result):
    return [event.text for event in events_of(result, Notice) if event.worker == "coordinator"]


def test_three_pipelines_of_four_become_others_without_a_lost_one(staggered):
    result = run(LAYOUT, steps=STEPS, better=Reshape(LAYOUT, 3), faults=[Fault.parse("kill:1.2@1:backward")])
    assert (result.outcome, result.digest) == ("done", alone(LAYOUT, STEPS, staggered)), result.detail
    assert told(result) == ["11 workers become pipelines of 3 + 4 + 4: steps are 23% faster"]
    (handing,) = events_of(result, HandingOver)
    assert all(worker.startswith("1.") for worker, _ in handing.takes), "the others are left as they are"
    assert "1.2" not in map(str, result.layers)
    assert {(str(worker), layers) for worker, layers in result.layers.items() if worker.pipeline != 1} == {
        (str(worker), plan_of(LAYOUT).placement.layers_of(worker))
        for worker in plan_of(LAYOUT).workers
        if worker.pipeline != 1
    }


def test_nothing_is_changed_before_a_loss_nor_for_nothing(staggered):
    result = run(LAYOUT, steps=STEPS, better=Reshape(LAYOUT, 3))
    assert (result.outcome, events_of(result, HandingOver)) == ("done", [])
    late = run(LAYOUT, steps=6, better=Reshape(LAYOUT, 3), faults=[Fault.parse("kill:1.2@3:backward")])
    assert (late.outcome, events_of(late, HandingOver)) == ("done", []), "too few steps are left to gain one"


@pytest.mark.parametrize("lost", [("1.2", "0.1"), ("0.0", "1.0"), ("0.3", "1.0", "2.1"), ("0.0", "0.1", "0.2", "0.3")])
def test_several_are_lost_one_after_another(lost, staggered):
    faults = [Fault.parse(f"kill:{worker}@{1 + 5 * number}:backward") for number, worker in enumerate(lost)]
    result = run(LAYOUT, steps=40, better=Reshape(LAYOUT, 2), faults=faults)
    assert (result.outcome, result.digest) == ("done", alone(LAYOUT, 40, staggered)), result.detail
    assert set(result.fired) == set(map(str, faults))
    assert events_of(result, HandingOver)


@pytest.mark.parametrize("start", range(0, SEEDS // 2, CHUNK))
def test_deaths_anywhere_at_any_time(start, staggered):
    """Also while layers are handed over, and of those who take or give them."""
    done = handed = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        workers = plan_of(LAYOUT).workers
        yielded = effects(LAYOUT, staggered)
        victims = source.sample(workers, source.randint(1, 5))
        kills = [(worker, source.randint(4, yielded[worker] * 4)) for worker in victims]
        try:
            result = run(LAYOUT, seed=seed, steps=STEPS, better=Reshape(LAYOUT, 2), kill_at_effect=kills)
            assert result.fired
            handed += bool(events_of(result, HandingOver))
            if result.outcome != "lost":
                assert (result.outcome, result.digest) == ("done", alone(LAYOUT, STEPS, staggered)), result.detail
                done += 1
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, kill_at_effect {[(str(w), n) for w, n in kills]}")
            raise
    assert done > CHUNK // 2
    assert handed > CHUNK // 2


@pytest.mark.parametrize("step", range(2, 8))
def test_a_worker_comes_back_just_when_its_place_is_given_up(step, staggered):
    """Then it keeps its place; or it, or a process in its stead, takes the next one that is vacant."""
    for seed in range(8):
        faults = [Fault.parse(text) for text in ("kill:1.2@1:backward", f"join:1.2@{step}", "kill:2.0@20:backward")]
        result = run(LAYOUT, seed=seed, steps=40, better=Reshape(LAYOUT, 3), faults=faults)
        assert (result.outcome, result.digest) == ("done", alone(LAYOUT, 40, staggered)), result.detail
        assert set(result.fired) == set(map(str, faults))
        assert len(events_of(result, Installed)) < 12, "it is not asked in at every boundary"
        assert len(result.layers) == 11, "two were lost, and one has come"


@pytest.mark.parametrize("start", range(0, SEEDS // 2, CHUNK))
def test_workers_go_and_come_back_meanwhile(start, staggered):
    """Before their places are given up, while layers move, and afterwards; some find a place, and others wait."""
    handed = back = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        faults = []
        for victim in source.sample(plan_of(LAYOUT).workers, source.randint(1, 3)):
            kind, step = source.choice(["kill", "hang", "leave"]), source.randrange(1, 12)
            faults.append(f"{kind}:{victim}@{step}:{source.choice(['forward', 'backward', 'reduce'])}")
            faults.append(f"join:{victim}@{step + source.randrange(1, 8)}")
        try:
            parsed = [Fault.parse(text) for text in faults]
            result = run(LAYOUT, seed=seed, steps=40, better=Reshape(LAYOUT, 2), faults=parsed)
            if result.outcome == "lost":
                continue
            assert (result.outcome, result.digest) == ("done", alone(LAYOUT, 40, staggered)), result.detail
            assert len(events_of(result, Installed)) < 30
            handed += bool(events_of(result, HandingOver))
            back += len(result.layers) == 12
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, faults {faults}")
            raise
    assert handed > CHUNK // 3
    assert back
