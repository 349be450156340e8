"""The baselines on real processes: a new one in the place of the lost, back to the checkpoint, the same bits."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from holdfast.core.faults import Fault
from holdfast.core.profile import uniform_profile
from holdfast.recovery.checkfreq import checkpoint_interval
from holdfast.telemetry.events import (
    Agreed,
    Installed,
    JobStarted,
    Notice,
    Pinned,
    StepOps,
    Synced,
    WorkerReady,
    read_events,
)

pytestmark = pytest.mark.dist

COMMON = ("checkpoint.every=3", "train.steps=7", "resilience.wait_for_replacement=120")
BASELINES = {
    "checkpoint-restart": (*COMMON, "resilience.strategy=checkpoint-restart", "checkpoint.synchronous=true"),
    "checkfreq": (*COMMON, "resilience.strategy=checkfreq"),
}
PACE = "slow:0.1@6:6x"
"""From step 6 on most of each step is waiting, so that a new process is ready long before the last step."""
GRID = ("grid.pipelines=2", "grid.stages=2")


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


@pytest.mark.parametrize(("name", "strategy"), [("gpt", "checkpoint-restart"), ("convnet", "checkfreq")])
def test_all_go_back_to_the_checkpoint_and_end_with_the_same_bits(runs, name, strategy):
    fault = "kill:1.1@5:backward"
    summary = runs.train(name, fault, overrides=(*GRID, *BASELINES[strategy]))
    healthy = runs.healthy(name, (*GRID, "train.steps=7"))
    assert summary.unfired == ()
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert (summary.final_loss, summary.steps) == (healthy.final_loss, healthy.steps)
    last = events_of(summary, Installed)[-1]
    assert (last.strategy, len(last.workers)) == (strategy, 4)
    agreed = events_of(summary, Agreed)[-1].step
    assert agreed == 3 or (strategy == "checkfreq" and agreed == 0), "3 unless it was still being written"
    ran = [event.step for event in events_of(summary, StepOps) if event.worker == "1.0"]  # who gave 1.1 its step 5
    assert ran == [0, 1, 2, 3, 4, *range(agreed, 7)], "the lost steps were run again"
    assert len(events_of(summary, WorkerReady)) == events_of(summary, JobStarted)[0].workers + 1
    assert {event.step for event in events_of(summary, Pinned)} == {3, 6}


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("gpt", ["kill:1.1@5:backward"]),
        ("convnet", ["kill:1.0@5:verdict"]),
        ("gpt", ["kill:1.1@5:backward", "kill-coordinator@5:persist"]),
    ],
    ids=["backward", "verdict", "coordinator"],
)
def test_survivors_go_back_to_their_snapshots_and_a_joiner_joins(runs, name, faults):
    overrides = (*GRID, "train.steps=40", "resilience.strategy=snapshots", "resilience.snapshot_every=3")
    summary = runs.train(name, *faults, PACE, overrides=overrides)
    healthy = runs.healthy(name, (*GRID, "train.steps=40"))
    assert summary.unfired == ()
    assert (summary.weights_sha256, summary.state_sha256) == (healthy.weights_sha256, healthy.state_sha256)
    assert (summary.final_loss, summary.steps) == (healthy.final_loss, healthy.steps)
    assert [event.step for event in events_of(summary, Agreed)] == [0, 3]
    assert events_of(summary, Installed)[1].strategy == "snapshots"
    ran = [event.step for event in events_of(summary, StepOps) if event.worker == "0.0"]
    once = [
        [*range(stop), *range(3, 40)] for stop in (4, 5, 6)
    ]  # it may be a step behind the one that was lost, or ahead
    assert ran in once, "the lost steps were run again"
    assert len(events_of(summary, WorkerReady)) == events_of(summary, JobStarted)[0].workers + 1
    assert [event.worker for event in events_of(summary, Synced)] == [str(Fault.parse(faults[0]).worker)]
    assert events_of(summary, Pinned) == [], "nothing was written"


SLEEPS = uniform_profile(2, forward_s=0.035, backward_input_s=0.02, backward_weight_s=0.015)
"""Operations that take so long that a checkpoint of next to nothing costs next to nothing of a step."""
COSTS = re.compile(
    r"up for (\S+) ms and is written after (\S+) ms, a step takes (\S+) ms: one after every (\d+) steps now, not (\d+)"
)


def test_checkfreq_sets_its_own_interval(runs):
    """The first checkpoint comes after ten steps; it cost so little that the next come sooner, in the same bits.

    The second, after twenty, is for a machine that was too busy during the first.
    """
    own = ("resilience.strategy=checkfreq", "resilience.wait_for_replacement=120", "train.steps=26")
    summary = runs.train("small", overrides=own, emulate=SLEEPS)
    alone = ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=6", "train.steps=26")
    healthy = runs.train("small", overrides=alone, emulate=uniform_profile(2))
    assert (summary.weights_sha256, summary.final_loss) == (healthy.weights_sha256, healthy.final_loss)
    notices = [COSTS.search(event.text) for event in events_of(summary, Notice)]
    told = [tuple(map(float, found.groups())) for found in notices if found]
    assert told[0][-1] == 10
    for *costs_ms, wanted, before in told:
        assert abs(wanted - checkpoint_interval(*(cost / 1e3 for cost in costs_ms))) <= 1, "costs are told in 3 digits"
        assert wanted != before
    installed = [event.strategy for event in events_of(summary, Installed)]
    assert "boundary" in installed
    assert installed[1:] == ["boundary"] * len(installed[1:]), "a generation for a change, and for nothing else"
    assert len(installed) - 1 <= len(told)
    pinned = sorted({event.step for event in events_of(summary, Pinned)})
    assert pinned[0] == 10
    assert {after - before for before, after in pairwise(pinned)} & {wanted for *_, wanted, _ in told} - {10}
