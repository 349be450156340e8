"""The planner's plans on real processes: halves of the backward pass apart, and the bits of 1F1B without failures."""

from __future__ import annotations

import pytest

from holdfast.telemetry.events import StepOps, read_events

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "technique", "fault"),
    [
        ("gpt", "decoupled", "kill:1.2@2:backward"),
        ("gpt", "staggered", "kill:0.0@2:update"),
        ("convnet", "staggered", "kill:1.2@1:reduce"),
    ],
)
def test_a_kill_under_the_planners_plans(runs, name, technique, fault):
    overrides = (f"train.technique={technique}",)
    summary = runs.survives(name, fault, overrides=overrides, healthy=runs.healthy(name))
    ran: dict[int, set[str]] = {}
    for _, event in read_events(summary.run_dir / "events.jsonl"):
        if isinstance(event, StepOps):
            ran.setdefault(event.generation, set()).update(kind for kind, *_ in event.ops)
    assert len(ran) == 2
    assert all({"F", "I", "W"} <= kinds for kinds in ran.values()), "before the loss and after it"
