"""Scripts in which something takes long: in all workers at once it is waited for, in one alone it is a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import parse_job, train
from holdfast.telemetry.events import Detected, Notice, StepOps, read_events

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("busy_script.py")
HANG_S, LONG_S = 1.0, 3.0


def run(runs, *arguments, workers=4, **control):
    job = {
        "name": "busy",
        "model": {"kind": "script", "path": str(SCRIPT), "arguments": [*map(str, arguments)]},
        "data": {"kind": "script"},
        "grid": {"pipelines": workers, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
        "control": control,
    }
    return train(parse_job(job), run_dir=runs.folder())


@pytest.fixture(scope="module")
def calm(runs):
    return run(runs, "loads", workers=1, hang_s=15).weights_sha256


def events(summary):
    return read_events(summary.run_dir / "events.jsonl")


def told(summary):
    return [event.text for _, event in events(summary) if isinstance(event, Notice)]


def longest_s(summary):
    """The longest that one item took in any worker."""
    steps = [event for _, event in events(summary) if isinstance(event, StepOps) and event.step == 4]
    assert len({event.worker for event in steps}) == 4
    return [max(end - start for _, _, _, start, end in event.ops) for event in steps]


@pytest.mark.parametrize(
    ("what", "doing"), [("loads", "loading"), ("computes", "computing"), ("compiles", "compiling")]
)
def test_what_takes_long_in_all_workers_is_waited_for(runs, calm, what, doing):
    summary = run(runs, what, "--seconds", LONG_S, hang_s=HANG_S)
    assert min(longest_s(summary)) >= LONG_S > 2 * HANG_S, "each was busy for longer than it may be stuck"
    assert summary.report.failures == ()
    assert summary.weights_sha256 == calm
    slow = [text for text in told(summary) if text.startswith(f"is slow: {doing} in step 4")]
    assert len(slow) == 4, told(summary)
    waited_for = [text for text in told(summary) if text.startswith("waiting for")]
    assert bool(waited_for) == (what == "computes"), "the others have limits of their own"


def test_one_that_loads_alone_for_long_is_waited_for(runs, calm):
    summary = run(runs, "loads", "--seconds", LONG_S, "--worker", "1.0", hang_s=HANG_S)
    assert summary.report.failures == ()
    assert summary.weights_sha256 == calm


def test_one_that_spins_alone_is_found_as_fast_as_ever(runs, calm):
    summary = run(runs, "spins", "--worker", "1.0", hang_s=HANG_S)
    (lost,) = [event for _, event in events(summary) if isinstance(event, Detected)]
    assert lost.worker == "1.0"
    assert lost.how.startswith("stuck in step 4 for")
    assert float(lost.how.split()[-2]) < HANG_S + 1.0
    assert summary.weights_sha256 == calm


def test_a_limit_of_loading_can_be_set(runs, calm):
    summary = run(runs, "loads", "--seconds", 600, "--worker", "1.0", hang_s=HANG_S, load_s=1.5)
    (lost,) = [event for _, event in events(summary) if isinstance(event, Detected)]
    assert (lost.worker, lost.how.partition(" for")[0]) == ("1.0", "stuck in step 4, loading")
    assert summary.weights_sha256 == calm
