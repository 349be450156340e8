"""A loop that is stopped before its time ends behind the same step everywhere, with the bits of one that was to end."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from tests.plain import plain
from tests.waiting import LIMIT_S

from holdfast import Fault, parse_job, train
from holdfast.errors import ConfigError

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("stopping_script.py")
STOPPED = 6
"""Steps that are run where a script stops its loop in step 5 or behind it."""
KILLS = ["backward", "reduce", "verdict", "commit"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script ends with in one process, by its arguments."""
    known = {}

    def run(*arguments):
        if arguments not in known:
            path = tmp_path_factory.mktemp("alone") / "told"
            plain(SCRIPT, *arguments, "--told", path)
            known[arguments] = json.loads(path.read_text())
        return known[arguments]

    return run


@pytest.fixture
def run(runs, tmp_path):
    """Runs the script on three workers; returns the summary, and what it ended with."""
    numbers = count()

    def with_faults(*arguments, faults=(), overrides=(), **others):
        path = tmp_path / f"told{next(numbers)}"
        job = parse_job(
            {
                "name": "stopping",
                "model": {"kind": "script", "path": str(SCRIPT), "arguments": [*arguments, "--told", str(path)]},
                "data": {"kind": "script"},
                "grid": {"pipelines": 3, "stages": 1, "microbatches": 1},
                "train": {"steps": 1},
                "control": {"hang_s": 15},
            },
            overrides,
        )
        others.setdefault("run_dir", runs.folder())
        summary = train(job, faults=[Fault.parse(text) for text in faults], **others)
        assert summary.unfired == ()
        return summary, json.loads(path.read_text())

    return with_faults


def test_alone_it_ends_as_if_it_had_fewer_steps(alone):
    fewer = alone("--steps", str(STOPPED))
    assert alone("--stop", "in:5") == alone("--stop", "behind:5") == fewer
    assert fewer["seen"] == STOPPED
    assert fewer["totals"][1] == STOPPED * 6
    assert alone()["seen"] == 12


@pytest.mark.parametrize("stop", ["in:5", "behind:5", "one:5"])
def test_all_workers_end_behind_the_same_step(run, alone, stop):
    summary, told = run("--stop", stop)
    assert summary.steps == STOPPED
    assert told == alone("--steps", str(STOPPED)) | {"seen": told["seen"]}
    assert told["seen"] == STOPPED


@pytest.mark.parametrize("point", KILLS)
def test_a_worker_dies_in_the_step_in_which_one_item_stops_the_loop(run, alone, point):
    summary, told = run("--stop", "in:5", faults=[f"kill:1.0@5:{point}"])
    assert [failure.worker for failure in summary.report.failures] == ["1.0"]
    assert (summary.steps, told) == (STOPPED, alone("--steps", str(STOPPED)))


@pytest.mark.parametrize("point", ["start", "verdict"])
def test_a_worker_dies_in_the_step_that_is_not_to_be(run, alone, point):
    """All have stopped behind step 5; what each of them hands over of step 6 says so."""
    summary, told = run("--stop", "behind:5", faults=[f"kill:1.0@6:{point}"])
    assert [failure.worker for failure in summary.report.failures] == ["1.0"]
    assert (summary.steps, told) == (STOPPED, alone("--steps", str(STOPPED)))


@pytest.mark.parametrize("stop", ["in:5", "behind:5"])
def test_the_coordinator_dies_beside_it(run, alone, stop):
    summary, told = run("--stop", stop, faults=["kill:2.0@4:backward", "kill-coordinator@5:persist"])
    assert (summary.steps, told) == (STOPPED, alone("--steps", str(STOPPED)))


def test_a_job_that_was_stopped_goes_on_from_there(run, runs, alone):
    folder = runs.folder()
    keeps = ("checkpoint.every=6", "checkpoint.synchronous=true")
    summary, _ = run("--stop", "behind:5", run_dir=folder, overrides=keeps)
    assert summary.steps == STOPPED
    summary, told = run(resume=folder / "checkpoints", accept=["model.arguments"], overrides=keeps)
    assert (summary.resumed_from, summary.steps) == (STOPPED, 12)
    assert told["digest"] == alone()["digest"]


def test_a_time_limit_ends_it_behind_a_step(run, alone):
    summary, told = run("--steps", "1000000", overrides=("train.time_limit=3",))
    assert 0 < summary.steps < 1_000_000
    assert told["digest"] == alone("--steps", str(summary.steps))["digest"]
    told = alone("--steps", "1000000", "--time-limit", "0.5")
    assert told["digest"] == alone("--steps", str(told["seen"]))["digest"]


def test_who_breaks_out_of_the_loop_is_told_what_to_write(run, tmp_path):
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--stop", "break:2", "--told", tmp_path / "told"], capture_output=True, timeout=LIMIT_S
    )
    assert ended.returncode == 2
    assert b"expected hf.stop() instead of `break`" in ended.stderr
    assert (tmp_path / "told").exists(), "what stands behind the loop is run"
    with pytest.raises(ConfigError, match=r"left its loop .* expected hf\.stop\(\) instead of `break`"):
        run("--stop", "break:2")


@pytest.mark.parametrize("stop", ["held:2", "exit:2"])
def test_a_loop_that_somebody_holds_or_that_is_exited_from_is_left_too(stop, tmp_path):
    """As a progress bar holds it: the iterator is there to the end of the process, and never told that it was left."""
    words = [sys.executable, SCRIPT, "--stop", stop, "--told", tmp_path / "told"]
    ended = subprocess.run(words, capture_output=True, timeout=LIMIT_S)
    assert ended.returncode == 2
    assert b"expected hf.stop() instead of `break`" in ended.stderr


def test_items_count_by_their_weights(run, alone):
    told = alone("--weights", "all")
    assert told["digest"] != alone()["digest"]
    summary, survived = run("--weights", "all", faults=["kill:1.0@3:backward", "kill:2.0@7:verdict"])
    assert survived == told
    assert summary.final_loss == pytest.approx(told["losses"][-1], rel=0.5)


@pytest.mark.parametrize("kind", ["some", "negative"])
def test_weights_that_are_none_are_refused(kind, tmp_path):
    ended = plain(SCRIPT, "--weights", kind, check=False)
    assert ended.returncode != 0
    wanted = {"some": "expected one in each step.backward, or in none", "negative": "weight: expected a number from 0"}
    assert wanted[kind] in ended.stderr
