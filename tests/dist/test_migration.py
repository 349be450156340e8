"""Real workers change places while they train: the bits stay, and nothing is run again for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.config.profiles import save_profile
from holdfast.core.profile import uniform_profile
from holdfast.telemetry.events import Agreed, Migrating, StepOps, Synced, read_events

pytestmark = pytest.mark.dist

DEATHS = ("kill:0.1@2:backward", "kill:1.1@3:forward")
"""Two of the three workers of one stage: the third has to do the work of all."""


def profile_of(*layers_ms):
    """F, I and W of each layer take equally long."""
    alike = uniform_profile(len(layers_ms))
    layers = (
        replace(layer, forward_s=ms / 1000, backward_input_s=ms / 1000, backward_weight_s=ms / 1000)
        for layer, ms in zip(alike.layers, layers_ms, strict=True)
    )
    return replace(alike, layers=tuple(layers))


@pytest.mark.parametrize(
    ("name", "layers_ms", "steps"),
    [("gpt", (10, 10, 10, 10, 10), 24), ("convnet", (5, 5, 5, 5, 10, 5, 5), 50)],
)
def test_workers_take_the_places_of_lost_ones(runs, tmp_path, name, layers_ms, steps):
    """Once the library has the plan for two losses elsewhere; weights, moments and running averages go with them."""
    path = tmp_path / "profile.json"
    save_profile(profile_of(*layers_ms), path)
    healthy = runs.healthy(name, (f"train.steps={steps}",))
    summary = runs.survives(
        name,
        *DEATHS,
        overrides=(
            f"train.steps={steps}",
            f"train.profile={path}",
            "train.technique=staggered",
            "resilience.strategy=adaptive",
            "resilience.tolerate=2",
            "resilience.failure_every_s=3600",
        ),
        healthy=healthy,
    )
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    (moved,) = [event for event in events if isinstance(event, Migrating)]
    migrating = {worker for worker, _ in moved.moves}
    assert moved.period < moved.before
    assert {event.worker for event in events if isinstance(event, Synced)} == migrating
    assert len([event for event in events if isinstance(event, Agreed)]) == 1 + len(DEATHS)
    last = {event.worker: event.ops for event in events if isinstance(event, StepOps) and event.step == steps - 1}
    assert all(last[worker] for worker in migrating), "they compute at their new places"
