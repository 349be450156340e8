"""What a run says of itself at its end is true, whatever became of its files meanwhile."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing

import msgspec
import pytest

from holdfast.cli.inspect import narrate, sum_up
from holdfast.cli.train import describe
from holdfast.control.store import DecisionStore
from holdfast.errors import DecisionsLost
from holdfast.optim.digest import digest_run
from holdfast.telemetry.events import CoordinatorReady, FaultInjected, JobStarted, Notice, read_events

pytestmark = pytest.mark.dist


def told(events):
    return [event.text for event in events if isinstance(event, Notice)]


def test_a_run_that_ends_on_losses_that_are_not_finite_does_not_look_healthy(runs):
    """The first step's update ruins the weights: all steps after it are omitted."""
    overrides = ("grid.pipelines=1", "grid.stages=2", "optimizer.lr=1e38")
    summary = runs.train("convnet", overrides=overrides)
    written = json.loads((summary.run_dir / "summary.json").read_text())
    assert written["steps"] == 4
    assert written["final_loss"] is None, "not that of the last step which counted"
    assert written["reasons"] == {"final_loss": "step 3, the last one, was omitted: its loss was not finite"}
    assert written["omitted_steps"] == 3
    said = "3 of 4 steps changed nothing: the loss or a gradient was not finite; the last 3 among them"
    first, second, *_ = describe(summary).splitlines()
    assert first.startswith("DONE, BUT NOT WELL: 4 steps, loss -, ")
    assert second == said
    events = read_events(summary.run_dir / "events.jsonl")
    assert f"OMITTED: {said}" in sum_up(events).splitlines()
    story = narrate(events)
    assert "step 3 done by 0.1, OMITTED: the loss was not finite" in story


def test_events_are_deleted_and_the_summary_cannot_be_written(runs):
    """Before a worker dies: the warnings come once, and nothing else is lost."""
    folder, events = runs.folder(), []
    log = folder / "events.jsonl"

    def spoil(progress):
        if progress.step == 5:
            log.unlink()
            (folder / "summary.json").mkdir()

    summary = runs.survives("small", "kill:1.1@40:backward", run_dir=folder, on_progress=spoil, on_event=events.append)
    deleted, unwritten = told(events)
    assert deleted == f"{log}: was deleted or moved, and is made again; training goes on"
    assert unwritten.startswith(f"{folder / 'summary.json'}: cannot be written: Is a directory")
    assert summary.reasons == {}
    kinds = [type(event) for _, event in read_events(log)]
    assert kinds[0] is JobStarted
    assert kinds.count(FaultInjected) == 1
    assert [step for step, _ in summary.report.commits] == list(range(60))


def empty(store):
    for path in store.parent.glob("control.db*"):
        path.unlink()
    return "the store of decisions is empty, though some were made"


def exchange(store):
    with closing(DecisionStore(store)) as ours:
        foreign = msgspec.structs.replace(ours.latest(), job="another", revision=1)
    empty(store)
    with closing(DecisionStore(store)) as other:
        other.put(foreign)
    return f"{store} holds the decisions of another job"


def damage(store):
    empty(store)
    store.write_bytes(b"no database " * 1000)
    return f"{store} is corrupt: expected a database of decisions, found file is not a database"


@pytest.mark.parametrize("spoil", [empty, exchange, damage])
def test_a_coordinator_that_knows_nothing_of_the_job_any_more_saves_what_lives(runs, spoil):
    """One worker died before and is known to the agent alone; what the others hold is of one step, to the bit."""
    folder, events, why = runs.folder(), [], []

    def strike(progress):
        if progress.step >= 20 and progress.alive == 3 and not why:
            why.append(spoil(folder / "control.db"))
            told = [event for _, event in read_events(folder / "events.jsonl") if isinstance(event, CoordinatorReady)]
            os.kill(told[-1].pid, signal.SIGKILL)

    overrides = ("grid.pipelines=2", "train.steps=2000", "control.hang_s=15")
    with pytest.raises(DecisionsLost) as raised:
        runs.train(
            "small",
            "kill:1.1@5:backward",
            overrides=overrides,
            run_dir=folder,
            on_progress=strike,
            on_event=events.append,
        )
    assert told(events) == [f"{why[0]}: what lives is saved, and the job ends"]
    summary = json.loads((folder / "summary.json").read_text())
    step = summary["steps"]
    assert 20 < step < 2000
    assert str(raised.value) == f"{why[0]}; step {step} of what lives is saved in {folder / 'final'}"
    assert summary["weights_sha256"] is None
    if spoil is empty:
        whole = runs.healthy("small", ("grid.pipelines=2", f"train.steps={step}"))
        assert digest_run(folder / "final") == (whole.weights_sha256, whole.state_sha256)
    else:
        assert len(list((folder / "final").glob("layer-*"))) == 4
