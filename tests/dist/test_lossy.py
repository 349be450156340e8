"""Lossy strategies on real processes, beside the same failure simulated in one: the same bits."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.dist.test_loops import told
from tests.plain import plain

from holdfast import parse_job
from holdfast.errors import ConfigError
from holdfast.telemetry.events import Agreed, read_events

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("lossy_script.py")
CASES = [
    ("sgd", "lossy-forward", "2+3", 50),
    ("momentum", "lossy-forward", "1+2+3", 75),
    ("adam", "skip", "3", 75),
    ("adamw", "lossy-forward", "0+2", 0),
    ("momentum", "rollback", "1+2", 75),
]
"""Every optimizer and strategy, and losses of one to three; whatever is decided at other points is in tests/sim."""


@functools.cache
def alone(*arguments):
    """What a script by itself ends with."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digest"
        plain(SCRIPT, *arguments, "--digest", path)
        return path.read_text()


def run(runs, path, optimizer, strategy, faults):
    arguments = ["--optimizer", optimizer, "--digest", str(path), "--told", str(path.parent)]
    runs_job = {
        "name": "lossy",
        "model": {"kind": "script", "path": str(SCRIPT), "arguments": arguments},
        "data": {"kind": "script"},
        "grid": {"pipelines": 4, "stages": 1, "microbatches": 1},
        "train": {"steps": 1, "compare_every": 0},  # a comparison runs an item more, and all are counted
        "resilience": {"strategy": strategy},
        "control": {"hang_s": 15},
    }
    summary = runs.train_job(parse_job(runs_job), faults)
    assert summary.unfired == ()
    return summary, path.read_text()


@pytest.mark.parametrize(("optimizer", "strategy", "casualties", "percent"), CASES)
def test_a_real_failure_and_a_simulated_one_end_in_the_same_bits(
    runs, tmp_path, optimizer, strategy, casualties, percent
):
    simulated = casualties if strategy == "lossy-forward" else "0+1+2+3"
    sim = alone("--optimizer", optimizer, "--simulate", f"{simulated},{percent},{strategy}")
    faults = [f"kill:{worker}.0@3:gradients:{percent}" for worker in casualties.split("+")]
    summary, real = run(runs, tmp_path / "real", optimizer, strategy, faults)
    assert summary.steps == 7 + (strategy == "rollback"), "what is run once more is a step of its own"
    assert sorted(f.worker for f in summary.report.failures) == [f"{worker}.0" for worker in casualties.split("+")]
    assert real == sim
    assert real != alone("--optimizer", optimizer)
    agreed = [e for _, e in read_events(summary.run_dir / "events.jsonl") if isinstance(e, Agreed) and e.goes_on]
    assert all(not each.redone and not each.regenerated for each in agreed), "nothing is run again"
    given = told(tmp_path)
    assert len(given) == 4
    times = Counter(item for items in given.values() for item in items)
    mini_batches = 1 + (strategy == "rollback")
    assert times == {(step, item): mini_batches if step == 3 else 1 for step in range(7) for item in range(8)}
    for process, items in given.items():
        assert items == sorted(items) or strategy == "rollback"
        lost = f"kill:{process.partition('-')[0]}@3:gradients:{percent}" in faults
        assert max(items)[0] == (3 if lost else 6), "the lost have ended the backward passes of their last step"


def test_rollback_is_the_same_mini_batch_on_half_updated_weights():
    ends = {percent: alone("--simulate", f"0+1+2+3,{percent},rollback") for percent in (0, 50)}
    assert ends[0] == alone(), "nothing was updated when it failed"
    assert ends[50] != ends[0]
    assert ends[50] != alone("--simulate", "0+1+2+3,50,skip")


def test_where_all_sums_are_there_nothing_is_left_out():
    assert alone("--simulate", "2+3,100,lossy-forward") == alone()


@pytest.mark.parametrize(
    ("simulated", "text"),
    [
        ("0+1+2+3,50,lossy-forward", "needs survivors"),
        ("2+4,50,lossy-forward", "workers are 0 to 3"),
        ("2,101,lossy-forward", "expected 0 to 100 percent, got 101"),
        ("2,50,rollback", "expected all 4 workers, got 1"),
        ("2,50,forward", "recovery: expected lossy-forward, skip or rollback"),
    ],
)
def test_an_impossible_failure_is_refused(simulated, text):
    ended = plain(SCRIPT, "--simulate", simulated, check=False)
    assert ended.returncode != 0
    assert text in ended.stderr


def test_lossy_strategies_are_for_data_parallelism_only(runs):
    with pytest.raises(ConfigError, match="expected pipelines of one stage"):
        runs.job("small", ("resilience.strategy=lossy-forward",))


def test_a_loss_before_any_sum_and_others_after_it(runs, tmp_path):
    """Losses one after another, in one step and in later ones, at points that nobody chose: survivors agree."""
    faults = ["kill:3.0@2:forward", "kill:2.0@2:backward", "kill:1.0@5:reduce"]
    summary, _ = run(runs, tmp_path / "real", "momentum", "lossy-forward", faults)
    assert len(summary.report.failures) == 3
    assert any(e.left_out for _, e in read_events(summary.run_dir / "events.jsonl") if isinstance(e, Agreed))
    assert summary.steps == 7
