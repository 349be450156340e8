"""Layers are handed from worker to worker while real processes train: nobody stops, and the bits stay.

Who wants it is not this file's matter: a coordinator that died finds it among its decisions when it is back.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.decisions import newest_in, put_in
from tests.soak import some

from holdfast.control.chain.opening import plans_in
from holdfast.core.ids import WorkerId
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import CoordinatorLost, HandingOver, Reattached, StepOps, Synced, read_events

pytestmark = pytest.mark.dist

LAYERS, STEPS = 6, "train.steps=90"
OTHER = "grid.layout=[{stages: [5, 1], microbatches: 5}, {stages: [1, 1, 4], microbatches: 3}]"
"""Beside 3+3 and 2+2+2: 0.0 takes two layers from 0.1, 1.1 and 1.2 one each; 1.2 keeps its own two besides."""
TAKES = (("0.0", "3:5"), ("1.1", "1:2"), ("1.2", "2:4"))


class Wanted:
    """While the coordinator is away, decides that the grid becomes another one; it may come back then."""

    def __init__(self, runs, overrides):
        self._plan = healthy_plan(runs.job("unlike", (OTHER, *overrides)), LAYERS)
        self.folder = None

    def __call__(self, events):
        if not any(isinstance(event, CoordinatorLost) for event in events):
            return False
        latest = newest_in(self.folder / "control.db")
        grid = replace(latest.grid, target=self._plan)
        decided = msgspec.structs.replace(latest, revision=latest.revision + 1, grid=grid)
        put_in(self.folder / "control.db", decided)
        return True


def handed_over(runs, overrides, *faults):
    """A run in which that is decided while the coordinator is away, in the bits of one worker alone; and its events."""
    overrides = (STEPS, *overrides)
    wanted = Wanted(runs, overrides)
    with runs.absence(wanted) as away:
        wanted.folder = away.run_dir
        overrides = (*overrides, *away.overrides)
        alone = runs.healthy("unlike", ("grid.layout=[{stages: [6], microbatches: 8}]", STEPS))
        summary = runs.survives("unlike", *faults, overrides=overrides, run_dir=away.run_dir, healthy=alone)
    return summary, [event for _, event in read_events(summary.run_dir / "events.jsonl")]


TWO_LATER = ("kill:0.0@70:backward", "kill:0.1@80:forward")


HANDED = [
    ("1f1b", "shadow", ()),
    ("1f1b", "shadow", TWO_LATER),
    ("staggered", "shadow", TWO_LATER),
    ("1f1b", "undo", TWO_LATER),
]


@pytest.mark.parametrize(("technique", "commit", "faults"), some(HANDED, [HANDED[0], HANDED[2]]))
def test_layers_go_over_to_other_workers(runs, technique, commit, faults):
    """Two are lost later, or nobody is."""
    overrides = (f"train.technique={technique}", f"resilience.commit={commit}")
    summary, events = handed_over(runs, overrides, "kill-coordinator@2", *faults)
    assert [event.adopted for event in events if isinstance(event, Reattached)] == [True]
    assert [event.takes for event in events if isinstance(event, HandingOver)] == [TAKES]
    synced = [event for event in events if isinstance(event, Synced)]
    assert sorted(event.worker for event in synced) == ["0.0", "1.1", "1.2"]
    assert all(event.bytes > 0 for event in synced)
    assert len({event.entered for event in synced}) == 1
    plans = plans_in(summary.run_dir / "control.db")
    last = max(event.generation for event in events if isinstance(event, StepOps))
    assert plans[3].placement.layers_of(WorkerId(0, 0)) == (0, 1, 2, 3, 4)
    assert plans[3].placement.layers_of(WorkerId(1, 2)) == (2, 3, 4, 5)
    assert (last == 3) == (not faults)
    followed = {event.step for event in events if isinstance(event, StepOps) and event.generation == 2}
    assert min(event.step for event in synced) in followed | {max(followed) + 1}


def test_the_coordinator_dies_while_state_is_copied(runs):
    """What was offered to the takers may be lost with it: then all begin anew, and layers are handed over once more."""
    _, events = handed_over(runs, (), "kill-coordinator@2", "kill-coordinator@3:copy")
    first, all_offers_came = (event.adopted for event in events if isinstance(event, Reattached))
    assert first
    handed = [event.takes for event in events if isinstance(event, HandingOver)]
    assert handed == ([TAKES] if all_offers_came else [TAKES, TAKES])
    assert {event.worker for event in events if isinstance(event, Synced)} == {"0.0", "1.1", "1.2"}
