"""`auto` under kills: whatever way it takes, the bits are those of the run in which nothing failed."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest

from holdfast.control.reshaper import Reshaper
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import LayerProfile, Link, Profile, costs_from_profile
from holdfast.planning.reshaping import Shapes
from holdfast.planning.templates.stages import stage_table
from holdfast.recovery.rates import Rates
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import HandingOver, Held, Installed, Predicted, Replaying
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
LAYERS, STEPS = 12, 24
POINTS = ["start", "forward", "backward", "reduce", "update", "commit"]
PROFILE = Profile(
    link=Link(latency_s=0.0, bytes_per_s=1e9),
    layers=tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_s=0.02,
            backward_input_s=0.02,
            backward_weight_s=0.02,
            held_after_forward_bytes=8,
            held_after_input_bytes=4,
            boundary_bytes=1000,
            parameter_bytes=10_000_000,
            optimizer_bytes=20_000_000,
            optimizer_s=0.005,
        )
        for index in range(LAYERS)
    ),
)
FAST = Link(latency_s=0.0, bytes_per_s=1e9)
RATES = Rates(
    profile=PROFILE, message_s=0.001, control_s=0.001, connect_s=0.01, start_s=0.5, copy=FAST, load=FAST, save=FAST
)


def shapes_of(stages):
    return Shapes(
        costs=costs_from_profile(PROFILE),
        minimum=stages,
        smallest=-(-stages // 2),
        state=tuple(layer.state_bytes for layer in PROFILE.layers),
        copy_s=tuple(0.03 for _ in PROFILE.layers),
        table=stage_table(PROFILE, 1),
    )


class Reshape:
    """What the coordinator is told by its reshaper."""

    def __init__(self, stages):
        self._reshaper = Reshaper(shapes_of(stages))

    def __call__(self, state):
        return next((news.offer for news in self._reshaper.news(state)), None)


def run(grid, *faults, reshapes=True, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(LAYERS, stages), microbatches)
    more = {"weighs": True, "better": Reshape(stages)} if reshapes else {}
    told = {"steps": STEPS, "checkpoint_every": 4, "supposed": RATES, "rates": RATES, "shapes": shapes_of(stages)}
    parsed = tuple(Fault.parse(text) for text in faults)
    return VirtualCluster(Scenario(plan=plan, faults=parsed, **{**told, **more, **options})).run()


@cache
def healthy(grid, **options):
    return run(grid, **options).digest


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def test_what_was_expected_is_told_beside_what_came_of_it():
    faults = ("kill:0.1@9:forward", "kill:0.2@17:forward")
    result = run((1, 4, 6), *faults, reshapes=False)
    assert (result.outcome, result.digest) == ("done", healthy((1, 4, 6))), result.detail
    assert sorted(result.fired) == sorted(faults)
    first, second = of(result, Predicted)
    assert first.chosen in dict(first.steps)
    assert len(first.steps) > 1
    assert max(first.steps, key=lambda each: each[1])[0] == first.chosen
    (held,) = of(result, Held)
    assert held.chosen == first.chosen
    assert held.made == pytest.approx(held.expected, abs=1.5), "from its loss to the next one"
    assert second.until_s < first.until_s, "failures are more frequent than was supposed"


def test_a_replay_is_taken_where_the_checkpoint_is_far_away_and_a_smaller_grid_where_it_is_near():
    far, near = (
        run((1, 4, 6), fault, logs=True, reshapes=False, checkpoint_every=every, steps=40)
        for fault, every in (("kill:0.1@30:forward", 31), ("kill:0.1@30:forward", 30))
    )
    assert {each.outcome for each in (far, near)} == {"done"}
    assert of(far, Replaying), of(far, Predicted)
    assert not of(near, Replaying)
    assert len(far.fired) == len(near.fired) == 1
    assert far.digest == near.digest == healthy((1, 4, 6), steps=40)


@pytest.mark.parametrize("grid", [(1, 4, 6), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("logs", [False, True], ids=["", "logs"])
def test_at_random(grid, logs):
    found = set()
    for seed in range(SEEDS):
        chosen = random.Random(f"{seed} {grid} {logs}")
        places = [f"{p}.{s}" for p in range(grid[0]) for s in range(grid[1])]
        kills = [f"kill:{w}@{chosen.randint(2, 18)}:{chosen.choice(POINTS)}" for w in chosen.sample(places, 2)]
        spares = tuple((chosen.uniform(0, 20), WorkerId(9, number)) for number in range(2))
        result = run(grid, *kills, logs=logs, seed=seed, spares=spares)
        assert (result.outcome, result.digest) == ("done", healthy(grid)), (seed, kills, result.detail)
        found |= {event.chosen.split(",")[0] for event in of(result, Predicted)}
        found |= {"handed over"} if of(result, HandingOver) else set()
        assert of(result, Installed), kills
    assert found & ({"load", "replay"} if grid[0] == 1 else {"handed over"})
