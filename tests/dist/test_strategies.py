"""Every strategy against every way to be lost, at every point of a step, pairwise: real processes, the same bits."""

from __future__ import annotations

import itertools

import pytest
from tests.soak import some

from holdfast.telemetry.events import Installed, read_events

pytestmark = pytest.mark.dist

KINDS = ["kill", "hang", "stall"]
POINTS = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]
BACK = ("checkpoint.every=2", "resilience.wait_for_replacement=120")
STRATEGIES = {
    "adaptive": (),
    "templates": (),
    "checkpoint-restart": (*BACK, "checkpoint.synchronous=true"),
    "checkfreq": BACK,
    "snapshots": ("resilience.snapshot_every=2",),
}
VICTIMS = ["1.1", "0.0", "2.1", "1.0"]
"""Whoever is left holds all layers, even if nobody comes."""
RUNS = [(strategy, half) for strategy in STRATEGIES for half in (0, 1)]


def faults_of(strategy, half):
    """Up to four losses in a row, every other step, once the workers are warm: before, hangs take longer to show."""
    turn = list(STRATEGIES).index(strategy)
    points = POINTS[:4] if half == 0 else POINTS[4:]
    numbered = [(KINDS[(turn + POINTS.index(point)) % 3], point) for point in points]
    return [f"{kind}:{VICTIMS[i]}@{2 * i + 3}:{point}" for i, (kind, point) in enumerate(numbered)]


def test_the_runs_below_cover_every_pair():
    runs = set()
    for strategy, half in RUNS:
        for fault in faults_of(strategy, half):
            kind, _, rest = fault.partition(":")
            runs.add((strategy, kind, rest.rpartition(":")[2]))
    for one, other in itertools.combinations(range(3), 2):
        wanted = set(itertools.product(*((STRATEGIES, KINDS, POINTS)[i] for i in (one, other))))
        assert {(run[one], run[other]) for run in runs} == wanted


@pytest.mark.parametrize(("strategy", "half"), some(RUNS, [*RUNS[::2], RUNS[1]]))
def test_losses_in_a_row(runs, strategy, half):
    settings = ("train.steps=11", f"resilience.strategy={strategy}", *STRATEGIES[strategy])
    faults = faults_of(strategy, half)
    summary = runs.survives("small", *faults, overrides=settings, healthy=runs.healthy("small", ("train.steps=11",)))
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    assert [event.strategy for event in events if isinstance(event, Installed)].count(strategy) >= len(faults)


@pytest.mark.parametrize("strategy", some(STRATEGIES, ["templates", "checkfreq"]))
def test_losses_where_updates_run_ahead_of_the_verdict(runs, strategy):
    """One with the verdict in hand, one in the middle of its updates; checkpoints and snapshots need settled states."""
    settings = ("train.steps=11", f"resilience.strategy={strategy}", *STRATEGIES[strategy])
    healthy = runs.healthy("small", ("train.steps=11",))
    faults = ("kill:1.1@3:verdict", "hang:0.0@5:update")
    summary = runs.survives("small", *faults, overrides=(*settings, "train.technique=staggered"), healthy=healthy)
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    assert [event.strategy for event in events if isinstance(event, Installed)].count(strategy) >= len(faults)
