"""A study end to end: interrupted by Ctrl-C it goes on by the same command, and another job is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import psutil
import pytest
import yaml
from tests.commands import holdfast
from tests.waiting import LIMIT_S

from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.study.running import run_study
from holdfast.study.scenarios import plan_study

pytestmark = pytest.mark.dist

JOB = """
model: {kind: resnet, width: 2}
data: {kind: digits}
grid: {pipelines: 4, stages: 1, microbatches: 1, microbatch_size: 2}
optimizer: {kind: sgd, lr: 0.1, momentum: 0.9}
train: {steps: 6, seed: 3}
"""
ASKED = ("--at", "1,4", "--progress", "50", "--survivors", "2", "--seeds", "3,", "--format", "json")
NUM_RECORDS = 1 + 2 * 5


@pytest.fixture
def command(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return ["study", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out"), *ASKED]


def records(out):
    found = (*out.glob("seed-*/*.json"), *out.glob("seed-*/step-*/*.json"))
    return {path: path.stat().st_mtime_ns for path in found}


def wait_for_record(process, out):
    """Until the first record is there, which says that the study is under way."""
    while not records(out):
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended before it was interrupted: {process.wait(timeout=0.02)}")


def test_an_interrupted_study_goes_on(command, tmp_path):
    out = tmp_path / "out"
    line = [sys.executable, "-m", "holdfast", *command]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_record(process, out)
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        shown, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, shown) == (130, ""), errors
    assert errors.startswith(f"scenario 0/{NUM_RECORDS}\n")
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert alive == []
    before = records(out)
    assert 0 < len(before) < NUM_RECORDS

    done = holdfast(*command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"scenario {len(before)}/{NUM_RECORDS}\n")
    after = records(out)
    assert len(after) == NUM_RECORDS
    assert before.items() <= after.items(), "what was done is not done again"
    assert not list(out.rglob("*.tmp"))
    _check(json.loads(done.stdout), out)

    again = holdfast(*command)
    assert (again.stdout, records(out)) == (done.stdout, after)
    other = holdfast(*command, "--set", "train.steps=7")
    assert other.returncode == 2
    assert "holds the study of another job" in other.stderr


def _check(found, out):
    assert found == json.loads((out / "study.json").read_text())
    (baseline,) = found["baselines"]
    by_name = {(each["at"], each["strategy"]): each for each in found["outcomes"]}
    for at in (1, 4):
        whole = baseline["weights_sha256"][str(at)]
        assert by_name[at, "checkpoint-restart"]["weights_sha256"] == whole
        assert by_name[at, "adaptive"]["weights_sha256"] == whole
        assert by_name[at, "checkpoint-restart"]["replayed"] == at
        others = {by_name[at, name]["weights_sha256"] for name in ("lossy-forward", "rollback", "skip")}
        assert len(others | {whole}) == 4
    for picture in out.glob("*.svg"):
        ElementTree.parse(picture)
    assert {"report.md", "study.csv", "curve-loss.svg", "replay.svg", "slowdown-step-4.svg"} <= {
        each.name for each in out.iterdir()
    }


def test_what_cannot_be_studied_is_refused_before_anything_is_written(command, tmp_path):
    done = holdfast(*command, "--set", "grid.stages=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected pipelines of one stage" in done.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    done = holdfast(*command)
    assert done.returncode == 2
    assert "is not empty, and holds no study" in done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data={kind: nt3, path: missing.csv}", "missing.csv: there is no such file"),
        ("data={kind: breast-cancer}", "layer 0 (Sequential)"),
    ],
    ids=["missing", "of-another-shape"],
)
def test_what_is_wrong_with_the_data_is_told(command, override, message):
    done = holdfast(*command, "--set", override)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_state_is_told_and_made_again(tmp_path):
    job = parse_job(yaml.safe_load(JOB))
    states, record = tmp_path / "seed-3" / "states", tmp_path / "seed-3" / "step-1" / "skip-50.json"
    first, other = (plan_study(job, strategies=("skip",), progress=(50,), at=(at,)) for at in (1, 4))
    outcome = run_study(job, first, tmp_path).outcomes[0]
    (states / "step-1" / "layer-0000.safetensors").write_bytes(b"half")
    record.unlink()
    with pytest.raises(ConfigError, match=f"delete {states} to have it made again"):
        run_study(job, first, tmp_path)
    shutil.rmtree(states)
    assert run_study(job, other, tmp_path).baselines[0].before.keys() == {1, 4}, "what was asked for before, too"
    assert run_study(job, first, tmp_path).outcomes[0].weights_sha256 == outcome.weights_sha256
    assert not list(tmp_path.rglob("*.tmp"))
