"""``holdfast templates``: both forms, whole, as people and programs call them."""

import json
from dataclasses import replace

import pytest

from holdfast.cli.commands import run_command
from holdfast.config.profiles import save_profile
from holdfast.core.profile import GpuProfile, uniform_profile

FLAGS = (
    *("--nodes", "7", "--gpus-per-node", "2", "--tolerate", "1"),
    *("--global-batch", "96", "--microbatch-size", "4"),
)


@pytest.fixture
def profile(tmp_path):
    """Six layers of 1 to 6 s for F, as much for I and W, on two GPUs half of it."""
    found = uniform_profile(6)
    layers = []
    for index, layer in enumerate(found.layers, 1):
        time, half = float(index), index / 2
        layers.append(
            replace(
                layer,
                forward_s=time,
                backward_input_s=time,
                backward_weight_s=time,
                held_after_forward_bytes=10,
                parameter_bytes=100,
                optimizer_bytes=100,
                by_gpus={"2": GpuProfile(forward_s=half, backward_input_s=half, backward_weight_s=half)},
            )
        )
    path = tmp_path / "profile.json"
    save_profile(replace(found, layers=tuple(layers)), path)
    return str(path)


@pytest.fixture
def templates(profile, capsys):
    def run(*flags, exits=0):
        assert run_command(["templates", "--profile", profile, *FLAGS, *flags]) == exits
        told = capsys.readouterr()
        return told.err if exits else told.out

    return run


def test_the_json_form(templates):
    found = json.loads(templates("--minimum", "2", "--planning-microbatches", "12", "--format", "json"))
    assert found["sizes"] == [2, 3, 4, 5, 6], "up to as many nodes as layers"
    assert found["planning_microbatches"] == 12
    assert list(found["templates"]) == ["2", "3", "4", "5", "6"]
    assert found["templates"]["2"] == {"stages": [[0, 4, 2], [4, 6, 2]], "iteration": 12 * 16.5 + 15}
    assert sum(pipeline["size"] for pipeline in found["pipelines"]) == 7
    assert sum(pipeline["microbatches"] for pipeline in found["pipelines"]) == 24
    assert len(found["pipelines"]) >= 2
    slowest = max(p["microbatches"] * max_stage(found["templates"][str(p["size"])]) for p in found["pipelines"])
    assert 0.7 * 96 / slowest < found["throughput"] <= 96 / slowest
    assert found["dormant"] == 0
    assert found["wasteful_nodes"] == []


def max_stage(template):
    return max(sum(3 * (layer + 1) / gpus for layer in range(a, b)) for a, b, gpus in template["stages"])


def test_shares_that_vary_least(templates):
    fastest, even = (
        json.loads(templates("--minimum", "2", "--shares", shares, "--format", "json"))
        for shares in ("fastest", "even")
    )
    assert [pipeline["size"] for pipeline in even["pipelines"]] == [
        pipeline["size"] for pipeline in fastest["pipelines"]
    ]
    assert sum(pipeline["microbatches"] for pipeline in even["pipelines"]) == 24
    assert even["throughput"] <= fastest["throughput"]


def test_memory_decides_the_fewest_nodes(templates):
    assert json.loads(templates("--format", "json"))["sizes"][0] == 1
    one = json.loads(templates("--memory", "950", "--format", "json"))
    assert one["sizes"][0] == 1, "300 bytes of state and 10 per micro-batch for each layer, shared by two GPUs"
    assert json.loads(templates("--memory", "500", "--format", "json"))["sizes"][0] == 2
    assert "no pipeline of 1 to 7 nodes can run 6 layers" in templates("--memory", "100", exits=2)
    more = json.loads(templates("--memory", "950", "--copies", "2", "--sums", "2", "--format", "json"))
    assert more["sizes"][0] == 2


def test_fewer_nodes_that_live(templates):
    found = json.loads(templates("--minimum", "2", "--alive", "5", "--format", "json"))
    assert sorted(pipeline["size"] for pipeline in found["pipelines"]) == [2, 3]
    assert "3 nodes and 24 micro-batches do not make 2 pipeline(s)" in templates(
        "--minimum", "2", "--alive", "3", exits=2
    )
    assert "--alive 8: expected at most the 7 of --nodes" in templates("--alive", "8", exits=2)


def test_tables_and_pictures_tell_the_same(templates):
    table = templates("--minimum", "3")
    assert "    3" in table
    assert "throughput" in table
    assert "any 6 to 7 nodes form 2 pipeline(s) or more, and none is dormant" in table
    picture = templates("--minimum", "3", "--format", "svg")
    assert picture.startswith("<svg")
    assert "3 node(s)" in picture


def test_nodes_that_would_be_dormant_are_told(templates):
    """Pipelines of 4 to 6 nodes, as there are six layers, cannot use seven."""
    table = templates("--minimum", "4", "--tolerate", "0", "--nodes", "7")
    assert "of 7 nodes some would be dormant" in table
    assert "dormant     1 node(s)" in table


def test_a_batch_that_cannot_be_split_is_refused_with_a_recommendation(templates):
    assert "expected 96, the nearest that can" in templates("--global-batch", "97", exits=2)
    assert "expected 8, the nearest that can" in templates("--global-batch", "4", exits=2)


def test_times_that_the_profile_lacks_are_refused(templates):
    assert "has no times on 3 GPUs: expected by_gpus.3" in templates("--gpus-per-node", "3", exits=2)


def reconfigure(capsys, *flags):
    code = run_command(["templates", "--reconfigure", *flags])
    told = capsys.readouterr()
    return code, told.out or told.err


def test_reconfiguration(capsys):
    code, told = reconfigure(capsys, "[[0,1],[2,3,4]]", "--lost", "2,4", "--minimum", "2", "--format", "json")
    assert (code, json.loads(told)) == (0, {"pipelines": [[3, 0, 1]]})
    code, told = reconfigure(capsys, "[[0,1],[2,3,4]]", "--lost", "1", "--minimum", "2")
    assert (code, told) == (0, "pipeline 0  nodes 0 4\npipeline 1  nodes 2 3\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["[[0,1],[2"], "expected the nodes of each pipeline"),
        (["[0,1]", "--minimum", "1"], "expected the nodes of each pipeline"),
        (["[[0,true]]", "--minimum", "1"], "expected the nodes of each pipeline"),
        (["[[0,0]]", "--minimum", "1"], "node 0 of"),
        (["[[0,1]]", "--lost", "x", "--minimum", "1"], "--lost x: expected numbers of nodes"),
        (["[[0,1]]", "--lost", "7", "--minimum", "1"], "node 7 is in no pipeline"),
        (["[[0,1]]", "--lost", "1", "--minimum", "2"], "1 node(s) are left, but a pipeline needs 2"),
        (["[[0,1]]"], "--minimum is missing"),
        (["[[0,1]]", "--minimum", "1", "--nodes", "2"], "--nodes says nothing of --reconfigure"),
        (["[[0,1]]", "--minimum", "1", "--copies", "1"], "--copies says nothing of --reconfigure"),
        (["[[0,1]]", "--minimum", "1", "--activation-checkpointing"], "--activation-checkpointing says nothing of"),
        (["[[0,1]]", "--minimum", "1", "--format", "svg"], "--format svg: expected json or table"),
    ],
)
def test_bad_reconfigurations_are_refused_in_one_line(capsys, flags, message):
    code, told = reconfigure(capsys, *([*flags, "--minimum", "1"] if flags == ["[[0,1],[2"] else flags))
    assert code == 2
    assert message in told
    assert told.count("\n") == 1


def test_templates_need_their_flags(capsys):
    assert run_command(["templates", "--nodes", "2"]) == 2
    assert "--profile is missing" in capsys.readouterr().err
