"""``holdfast plan`` of a job whose pipelines are not alike: what training would do, whole and after losses."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import yaml

from holdfast.cli.main import main
from holdfast.config.load import load_job
from holdfast.core.builders import adaptive_plan
from holdfast.core.evaluate import evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.profile import unit_costs
from holdfast.planning.jobs import healthy_plan

LAYOUT = [{"stages": [3, 3], "microbatches": 5}, {"stages": [2, 2, 2], "microbatches": 3}]
JOB = {
    "model": {"kind": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16},
    "data": {"kind": "digits"},
    "grid": {"layout": LAYOUT},
    "train": {"steps": 1},
}


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "job.yaml"

    def run(*flags, **train):
        path.write_text(yaml.safe_dump({**JOB, "train": {**JOB["train"], **train}}))
        code = main(["plan", str(path), *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    run.path = path
    return run


def test_it_is_the_plan_of_training(plan):
    code, out, _ = plan("--format", "json")
    found = json.loads(out)
    job = load_job(plan.path)
    expected = evaluate(healthy_plan(job, 6), unit_costs(6))
    assert (code, found["makespan"], found["bound"], found["parts"]) == (0, expected.makespan, None, [])
    ran = {worker: [f"{kind}{p}.{i}" for kind, p, i, *_ in row] for worker, row in found["orders"].items()}
    assert ran == {str(worker): [str(op) for op in row] for worker, row in healthy_plan(job, 6).orders.rows}


def test_after_a_loss_it_tells_who_runs_which_part(plan):
    _, out, _ = plan("--format", "json", "--failed", "0.0")
    found, job = json.loads(out), load_job(plan.path)
    without = adaptive_plan(healthy_plan(job, 6), [WorkerId(0, 0)])
    assert found["makespan"] == evaluate(without, unit_costs(6)).makespan
    assert found["parts"] == [["1.1", "2:3", [f"0.{index}" for index in range(5)]]]
    _, table, _ = plan("--failed", "0.0")
    assert "parts     1.1 runs layers 2:3 of what it holds for 0.0 0.1 0.2 0.3 0.4" in table


def test_it_is_drawn(plan):
    _, out, _ = plan("--format", "svg", "--failed", "1.1")
    texts = [element.text for element in ElementTree.fromstring(out).iter() if element.text]
    assert {"0.0", "0.1", "1.0", "1.1", "1.2"} <= set(texts)


def test_that_the_planner_does_not_know_it_is_said(plan):
    assert "not regular, which staggered does not know" in plan(technique="staggered")[1]
    assert "not regular" not in plan(technique="1f1b")[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--failures", "1"), "--failures: "),
        (("--grid", "2x2"), "--grid: "),
        (("--solver", "cp-sat"), "--solver: "),
        (("--normalise", "paper"), "--normalise: "),
        (("--failed", "1.3"), "--failed 1.3: no such worker"),
        (("--failed", "0.0,1.1"), "no living worker holds layer(s) 2"),
    ],
)
def test_what_does_not_go_with_it_is_refused(plan, flags, told):
    code, _, errors = plan(*flags)
    assert code == 2
    assert told in errors
    assert errors.count("\n") == 1
