"""``holdfast plan JOB.yaml`` shows what training uses."""

import json

import pytest

from holdfast.cli.main import main
from holdfast.config.load import load_job
from holdfast.core.ids import WorkerId
from holdfast.planning.jobs import healthy_plan, terms_of
from holdfast.planning.training import rerouted

JOB = """
model: {kind: gpt, layers: 3}
data: {kind: digits}
grid: {pipelines: 3, stages: 4, microbatches: 3}
train: {steps: 1, technique: %s, in_flight: 5}
"""


def shown(capsys, *flags):
    assert main(["plan", *map(str, flags), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["orders"]


def rows(plan):
    return {
        str(worker): [[op.kind.value, op.microbatch.pipeline, op.microbatch.index] for op in row]
        for worker, row in plan.orders.rows
    }


@pytest.mark.parametrize("technique", ["decoupled", "staggered"])
def test_it_is_the_plan_of_the_training(capsys, tmp_path, technique):
    path = tmp_path / "job.yaml"
    path.write_text(JOB % technique)
    job = load_job(path)
    plan = healthy_plan(job, 5, ties=((0, 4),))
    assert {w: [op[:3] for op in row] for w, row in shown(capsys, path).items()} == rows(plan)
    answer = rerouted(plan, [WorkerId(1, 2)], terms_of(job, 5, ties=((0, 4),))).plan
    found = shown(capsys, path, "--failed", "1.2")
    assert {w: [op[:3] for op in row] for w, row in found.items()} == rows(answer)


def test_flags_ask_for_another(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB % "decoupled")
    coupled = shown(capsys, path, "--technique", "1f1b")
    assert {op[0] for row in coupled.values() for op in row} == {"F", "B"}
