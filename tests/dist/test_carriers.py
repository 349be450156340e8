"""Jobs whose long messages and sums are carried by process groups of torch, in real processes of which some die."""

from __future__ import annotations

import pytest
from tests.soak import some

from holdfast.telemetry.events import FaultInjected, StepOps, Suspected, read_events

pytestmark = pytest.mark.dist

GLOO = ("control.carrier=gloo", "control.carry_from=64")
LONG = ("train.steps=40",)


def carried(summary):
    """Bytes that groups have carried, by worker."""
    found = {}
    for _, event in read_events(summary.run_dir / "events.jsonl"):
        if isinstance(event, StepOps):
            found[event.worker] = found.get(event.worker, 0) + event.sent_carried
    return found


def test_a_job_is_promoted_and_ends_in_the_same_bits(runs):
    healthy = runs.healthy("gpt", LONG)
    summary = runs.train("gpt", overrides=(*LONG, *GLOO))
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert summary.generations == 1, "nobody is interrupted to get there"
    assert all(carried(summary).values()), "each of the twelve"


FAULTS = [
    ("gpt", ("kill:1.2@30:backward",), ()),
    ("gpt", ("kill:1.1@20:forward", "kill:0.1@30:reduce"), ("train.technique=staggered",)),
    ("convnet", ("kill:1.2@30:update",), ("train.technique=decoupled",)),
    ("gpt", ("hang:1.2@30:backward",), ()),
    ("gpt", ("kill:1.2@20:commit", "join:1.2@24"), ()),
    ("gpt", ("leave:1.2@20:start",), ()),
]


@pytest.mark.parametrize(("name", "faults", "overrides"), some(FAULTS, [FAULTS[at] for at in (0, 3, 4)]))
def test_what_is_lost_while_bodies_are_carried_is_recovered(runs, name, faults, overrides):
    overrides = (*LONG, *overrides)
    summary = runs.survives(name, *faults, overrides=(*overrides, *GLOO), healthy=runs.healthy(name, overrides))
    assert sum(carried(summary).values()) > 0
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    faulty = {event.worker for event in events if isinstance(event, FaultInjected)}
    assert {event.peer for event in events if isinstance(event, Suspected)} <= faulty, "no group has failed by itself"
