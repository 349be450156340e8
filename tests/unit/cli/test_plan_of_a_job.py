"""``holdfast plan JOB.yaml`` shows what training uses."""

import json
from dataclasses import replace

import pytest

from holdfast.cli.main import main
from holdfast.config.load import load_job
from holdfast.config.profiles import dump_profile
from holdfast.core.ids import WorkerId
from holdfast.core.profile import uniform_profile
from holdfast.planning.training import rerouted
from holdfast.settings.planning import healthy_plan, terms_of

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


def test_it_says_how_the_loss_of_a_node_is_recovered_from_where_a_profile_tells_figures(capsys, tmp_path):
    path, profile = tmp_path / "job.yaml", tmp_path / "profile.json"
    path.write_text(f"{JOB % '1f1b'}checkpoint: {{every: 10}}\n".replace("pipelines: 3", "pipelines: 1"))
    layers = uniform_profile(5, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, boundary_bytes=1000).layers
    sized = replace(uniform_profile(5), layers=tuple(replace(each, parameter_bytes=9000) for each in layers))
    profile.write_bytes(dump_profile(sized))
    flags = ["plan", str(path), "--profile", str(profile)]
    assert main([*flags, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["recovery"]
    assert (found["way"], found["crossing_bytes"], found["state_bytes"]) == ("log", 18_000, 45_000)
    assert found["copy_s"] < found["bubble_s"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "\nrecovery  for the loss of a node: log\n            no other node has an owner of layer(s) 0-4\n" in text
    path.write_text(path.read_text().replace("in_flight: 5", f"profile: {profile}"))
    assert main([*flags[:2], "--format", "json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["recovery"]["crossing_bytes"] == 18_000, (
        "shown with a layer for each stage, told of the job's layers"
    )
    assert max(trained["step_log_bytes"].values()) == 6_000
    path.write_text(path.read_text().replace(f"profile: {profile}", "in_flight: 5"))
    for other in ([*flags[:2]], [*flags[:1], *flags[2:], "--grid", "1x4", "--microbatches", "3"]):
        assert main([*other, "--format", "json"]) == 0
        assert "recovery" not in json.loads(capsys.readouterr().out), "no profile, or no job"


def test_after_losses_it_does_not_say_so(capsys, tmp_path):
    path, profile = tmp_path / "job.yaml", tmp_path / "profile.json"
    path.write_text(JOB % "1f1b")
    sized = uniform_profile(5, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, boundary_bytes=1000)
    profile.write_bytes(dump_profile(sized))
    for flags, told in ([], True), (["--failed", "1.2"], False):
        assert main(["plan", str(path), "--profile", str(profile), *flags, "--format", "json"]) == 0
        assert ("recovery" in json.loads(capsys.readouterr().out)) is told


def test_flags_ask_for_another(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB % "decoupled")
    coupled = shown(capsys, path, "--technique", "1f1b")
    assert {op[0] for row in coupled.values() for op in row} == {"F", "B"}
