"""``holdfast plan`` of a job whose pipelines are not alike: what training would do, whole and after losses."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import yaml

from holdfast.cli.main import main
from holdfast.config.load import load_job
from holdfast.core.ids import WorkerId
from holdfast.core.profile import unit_costs
from holdfast.planning.solvers.process import installed
from holdfast.planning.training import rerouted
from holdfast.schedule.builders import adaptive_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.settings.planning import healthy_plan, terms_of

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
    assert (code, found["makespan"], found["parts"]) == (0, expected.makespan, [])
    assert found["bound"]["makespan"] <= found["makespan"]
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


@pytest.mark.parametrize("technique", ["1f1b", "gpipe", "staggered"])
@pytest.mark.parametrize("failed", ["", "1.1"])
def test_stages_of_several_gpus_are_shown_as_training_has_them(plan, monkeypatch, technique, failed):
    wide = {"pipelines": 2, "stages": 2, "microbatches": 4, "gpus_per_stage": 2, "workers_per_node": 4}
    monkeypatch.setitem(JOB, "grid", wide)
    code, out, _ = plan("--format", "json", *(["--failed", failed] if failed else []), technique=technique)
    found, job, ties = json.loads(out), load_job(plan.path), ((0, 5),)
    expected, terms = healthy_plan(job, 6, ties=ties), terms_of(job, 6, ties=ties)
    if failed:
        gone = [WorkerId.parse(failed)]
        expected = adaptive_plan(expected, gone) if terms is None else rerouted(expected, gone, terms).plan
    ran = {worker: [f"{kind}{p}.{i}" for kind, p, i, *_ in row] for worker, row in found["orders"].items()}
    assert (code, ran) == (0, {str(worker): [str(op) for op in row] for worker, row in expected.orders.rows})
    assert plan("--grid", "2x2")[0] == 2


def test_it_is_drawn(plan):
    _, out, _ = plan("--format", "svg", "--failed", "1.1")
    texts = [element.text for element in ElementTree.fromstring(out).iter() if element.text]
    assert {"0.0", "0.1", "1.0", "1.1", "1.2"} <= set(texts)


@pytest.mark.parametrize("technique", ["decoupled", "staggered"])
@pytest.mark.parametrize("failed", ["", "0.0"])
def test_the_planners_techniques_are_shown_as_training_has_them(plan, technique, failed):
    code, out, _ = plan("--format", "json", *(["--failed", failed] if failed else []), technique=technique)
    found, job = json.loads(out), load_job(plan.path)
    terms = terms_of(job, 6, ties=((0, 5),))
    expected = healthy_plan(job, 6, ties=((0, 5),))
    if failed:
        expected = rerouted(expected, [WorkerId.parse(failed)], terms).plan
    ran = {worker: [f"{kind}{p}.{i}" for kind, p, i, *_ in row] for worker, row in found["orders"].items()}
    assert (code, ran) == (0, {str(worker): [str(op) for op in row] for worker, row in expected.orders.rows})
    assert found["bound"]["period"] <= found["period"]


def test_flags_ask_for_another_technique(plan):
    made = [json.loads(plan("--format", "json", "--technique", each)[1]) for each in ("1f1b", "adaptive", "decoupled")]
    assert [found["bound"] is not None for found in made] == [True] * 3
    assert made[0]["makespan"] >= made[1]["makespan"] > made[2]["makespan"]
    assert plan("--technique", "1f1b", "--failed", "0.0")[0] == 2


@pytest.mark.skipif(not installed(), reason="CP-SAT is not installed: pip install holdfast[solver]")
def test_cp_sat_is_asked(plan):
    found = json.loads(plan("--format", "json", "--solver", "cp-sat", "--technique", "decoupled", "--failed", "0.0")[1])
    assert found["optimal"] or found["note"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--failures", "1"), "--failures: "),
        (("--grid", "2x2"), "--grid: "),
        (("--keep-home",), "--keep-home: "),
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


def test_pipelines_that_are_alike_are_shown_as_training_has_them(plan, monkeypatch):
    alike = {**JOB["grid"], "layout": [{"stages": [2, 2, 2], "microbatches": 6}] * 3}
    monkeypatch.setitem(JOB, "grid", alike)
    _, out, _ = plan("--format", "json", "--failed", "0.0,1.1", technique="staggered")
    job, ties = load_job(plan.path), ((0, 5),)
    healthy = healthy_plan(job, 6, ties=ties)
    trained = rerouted(healthy, [WorkerId(0, 0), WorkerId(1, 1)], terms_of(job, 6, ties=ties)).plan
    ran = {worker: [f"{kind}{p}.{i}" for kind, p, i, *_ in row] for worker, row in json.loads(out)["orders"].items()}
    assert ran == {str(worker): [str(op) for op in row] for worker, row in trained.orders.rows}
