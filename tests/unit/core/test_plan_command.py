import argparse
import json
import re
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.cli.plan import add_plan_parser
from holdfast.config.profiles import load_profile
from holdfast.errors import ConfigError, InfeasiblePlan, StateUnavailable
from holdfast.models import bert, convnet, gpt, nt3, resnet, vit


def call(*flags):
    parser = argparse.ArgumentParser()
    add_plan_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *flags])
    return args.run(args)


@pytest.fixture
def plan_json(capsys):
    def run(flags):
        assert call(*flags.split(), "--format", "json") == 0
        return json.loads(capsys.readouterr().out)

    return run


GRID = "--grid 3x4 --microbatches 6"


def test_the_healthy_example(plan_json):
    found = plan_json(GRID)
    assert found.pop("solve_s") >= 0
    orders = found.pop("orders")
    assert found == {
        "period": 27,
        "makespan": 27,
        "bound": {"period": 27, "makespan": 27},
        "optimal": True,
        "failures_per_stage": [0, 0, 0, 0],
        "moves": [],
        "parts": [],
        "note": "",
        "peak_memory": {f"{p}.{s}": 4 - s for p in range(3) for s in range(4)},
    }
    assert len(orders) == 12
    assert orders["1.3"][:2] == [["F", 1, 0, 3, 4], ["B", 1, 0, 4, 6]]


def test_failed_workers_are_absent_and_their_microbatches_keep_their_pipeline(plan_json):
    costs = "--costs 10,11,8 --comm 1 --optimizer-cost 5"
    found = plan_json(f"{GRID} {costs} --failed 1.2,0.3 --keep-home --time-limit 0.2")
    assert sorted(found["orders"]) == sorted(
        f"{p}.{s}" for p in range(3) for s in range(4) if (p, s) not in {(1, 2), (0, 3)}
    )
    assert found["failures_per_stage"] == [0, 0, 1, 1]
    assert found["period"] == found["makespan"] + 5
    assert sorted({op[1] for op in found["orders"]["2.2"]}) == [1, 2]
    assert all(isinstance(time, int) for row in found["orders"].values() for op in row for time in op[3:])


@pytest.mark.parametrize(
    ("flags", "number", "value"),
    [
        ("--failed 1.2 --technique decoupled --memory 1,0,1,4", "makespan", 29),
        ("--failed 1.2 --technique staggered --memory 1,0,1,6", "period", 27),
        ("--technique decoupled", "makespan", 21),
        ("--technique staggered", "period", 19),
    ],
)
def test_the_example_decoupled_and_staggered(plan_json, flags, number, value):
    found = plan_json(f"{GRID} {flags}")
    assert found[number] == found["bound"][number] == value
    assert found["optimal"] is True


@pytest.mark.parametrize(("memory", "makespan"), [("", 33), (" --memory 1,0,1,4:3:2:1", 36)])
def test_adaptive_with_and_without_limits(plan_json, memory, makespan):
    assert plan_json(f"{GRID} --failed 1.2{memory} --time-limit 0.2")["makespan"] == makespan


def test_the_cost_of_a_split_is_paid_where_it_buys_more(plan_json):
    flags = "--grid 1x2 --microbatches 4 --costs 3:2,2:5,4:1 --technique decoupled --time-limit 0.2 --split-cost"
    cheap, dear = plan_json(f"{flags} 1"), plan_json(f"{flags} 9:8")
    assert cheap["makespan"] <= dear["makespan"]
    lengths = {(kind, name): end - start for name, row in cheap["orders"].items() for kind, _, _, start, end in row}
    assert lengths.items() <= {
        *{("F", "0.0"): 3, ("I", "0.0"): 3, ("W", "0.0"): 4, ("B", "0.0"): 6}.items(),
        *{("F", "0.1"): 2, ("I", "0.1"): 6, ("W", "0.1"): 1, ("B", "0.1"): 6}.items(),
    }
    assert {op[0] for row in dear["orders"].values() for op in row} == {"F", "B"}


def test_one_stage_is_optimal(plan_json):
    found = plan_json("--grid 2x1 --microbatches 3 --costs 0.5,0.25,1 --failures 1")
    assert found["optimal"] is True
    assert found["period"] == 6 * 1.75


@pytest.mark.parametrize(("count", "lost"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (4, [2, 1, 1]), (6, [2, 2, 2])])
def test_a_number_of_failures_is_placed_where_it_costs_least(plan_json, count, lost):
    assert plan_json(f"--grid 3x3 --microbatches 4 --failures {count} --time-limit 0.1")["failures_per_stage"] == lost


def test_a_table_for_people(capsys):
    assert call(*GRID.split()) == 0
    text = capsys.readouterr().out
    assert "2.3  .    .    .    F2.0 B2.0 =" in text
    assert "bound     period 27, makespan 27 (reached: optimal)\n" in text
    assert call("--grid", "1x1", "--microbatches", "1") == 0
    assert "reached: optimal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--microbatches 6", ConfigError, "--grid is missing"),
        ("--grid 3x4", ConfigError, "--microbatches is missing"),
        (f"{GRID} --failed 3.1", ConfigError, r"--failed 3\.1: .* 0\.0 to 2\.3"),
        (f"{GRID} --failed 1.2 --technique 1f1b", ConfigError, "--technique 1f1b"),
        (f"{GRID} --costs 1,1", ConfigError, "--costs 1,1"),
        (f"{GRID} --failures 9", InfeasiblePlan, "at most 8"),
        (f"{GRID} --failed 0.2,1.2,2.2", StateUnavailable, r"layer\(s\) 2"),
        (f"{GRID} --memory 2,1,1,1", InfeasiblePlan, "stage 0 .* at least 2"),
    ],
)
def test_bad_input_is_named(flags, error, message):
    with pytest.raises(error, match=message):
        call(*flags.split())


@pytest.mark.parametrize(("form", "start"), [("svg", "<svg "), ("perfetto", '{"traceEvents": ')])
def test_pictures(capsys, form, start):
    assert call(*f"{GRID} --failed 1.2 --format {form}".split()) == 0
    assert capsys.readouterr().out.startswith(start)


def test_cp_sat_proves_what_the_bound_does_not(plan_json):
    flags = f"{GRID} --failed 1.2 --technique staggered --memory 2,1,1,8 --solver cp-sat --time-limit 40"
    found = plan_json(flags)
    assert found["period"] == found["bound"]["period"] == 27
    assert found["optimal"] is True
    assert max(found["peak_memory"].values()) <= 8


def test_a_missing_solver_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = "--grid 1x2 --microbatches 3 --costs 3,1,2 --memory 2,1,1,2 --technique staggered --time-limit 0.01"
    with pytest.raises(ConfigError, match=r"holdfast\[solver\]"):
        call(*flags.split(), "--solver", "cp-sat")


def test_a_library_is_filled(capsys, tmp_path):
    flags = f"{GRID} --technique staggered --all-failures 4 --time-limit 0.02 --out {tmp_path}"
    assert call(*flags.split()) == 0
    text = capsys.readouterr().out
    assert "plans for 1 to 4 failures" in text
    assert "wall time" in text
    assert "CPU time" in text
    assert "worst gap to the bound" in text
    assert list(tmp_path.glob("*.plan"))


def test_a_folder_and_what_to_put_there_go_together():
    with pytest.raises(ConfigError, match="--out DIR go together"):
        call(*GRID.split(), "--all-failures", "3")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--grid 3by4", "--grid: 3by4 is no grid"),
        ("--grid 3x0", "--grid: 3x0 is no grid"),
        ("--microbatches 0", "--microbatches: 0 is impossible: expected a whole number from 1"),
        ("--failures -1", "--failures: -1 is impossible: expected a whole number from 0"),
        ("--failed 1-2", "--failed: 1-2: "),
        ("--all-failures 0", "--all-failures: 0 is impossible: expected a whole number from 1"),
        ("--time-limit 0", "--time-limit: 0 is impossible: expected seconds, such as 10, and above 0"),
        ("--time-limit soon", "--time-limit: soon: expected seconds, such as 10"),
    ],
)
def test_bad_values_of_flags_are_named_in_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *GRID.split(), *flags.split()])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in told
    assert told.count("\n") == 1


def profile_of(num_layers):
    """A profile of uneven layers, in which a stage cut by count would be far from balanced."""
    layers = [
        {
            "name": f"layer{k}",
            "forward_s": 0.002 + 0.001 * (k == 0),
            "backward_input_s": 0.003,
            "backward_weight_s": 0.001 + 0.009 * (k == num_layers - 1),
            "held_after_forward_bytes": 1000,
            "held_after_input_bytes": 400,
            "boundary_bytes": 2000,
            "parameter_bytes": 100,
            "optimizer_bytes": 200,
            "optimizer_s": 0.004,
        }
        for k in range(num_layers)
    ]
    return {"layers": layers, "link": {"latency_s": 0.0001, "bytes_per_s": 2e7}, "machine": {}}


JOB = """
model: {kind: gpt, layers: 5, width: 16, heads: 2, context: 8}
data: {kind: text, path: stdlib}
grid: {pipelines: 2, stages: 3, microbatches: 4, microbatch_size: 1}
train: {steps: 1}
"""


@pytest.fixture
def profiled(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "profile.json").write_text(json.dumps(profile_of(7)))
    return f"{tmp_path}/job.yaml --profile {tmp_path}/profile.json"


def test_a_job_is_planned_from_its_profile(plan_json, profiled):
    found = plan_json(f"{profiled} --failed 1.1 --technique staggered --time-limit 0.1")
    assert sorted(found["orders"]) == ["0.0", "0.1", "0.2", "1.0", "1.2"]
    first = found["orders"]["0.0"][0]
    lengths = {name: row[0][4] - row[0][3] for name, row in found["orders"].items()}
    assert first[:3] == ["F", 0, 0]
    assert lengths["0.0"] == pytest.approx(0.007)
    assert lengths["0.2"] == pytest.approx(0.002)
    assert found["orders"]["0.1"][0][3] >= lengths["0.0"] + 0.0002


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_the_head_of_gpt_and_bert_is_tied_to_the_embedding(plan_json, profiled, tmp_path, kind):
    """Only the job says so. Then the first stage's optimizer waits for the last one's long W."""
    (tmp_path / "job.yaml").write_text(JOB.replace("kind: gpt", f"kind: {kind}"))
    flags = "--costs 2,2,1:1:5 --optimizer-cost 6:1:1 --time-limit 0.3 --technique"
    alone, job = "--grid 2x3 --microbatches 4", f"{tmp_path}/job.yaml"
    assert plan_json(f"{alone} {flags} decoupled")["period"] == plan_json(f"{job} {flags} decoupled")["period"]
    assert plan_json(f"{alone} {flags} staggered")["period"] < 4 + 4 * 9 + 6
    assert plan_json(f"{job} {flags} staggered")["period"] >= 4 + 4 * 9 + 6, "the way down, the last stage, the step"


def test_with_a_profile_memory_is_a_number_of_bytes(plan_json, profiled):
    flags = f"{profiled} --technique staggered --time-limit 0.1 --memory"
    assert max(plan_json(f"{flags} 6000")["peak_memory"].values()) <= 6000
    with pytest.raises(InfeasiblePlan, match=r"no cut of 7 layers into 3 stages"):
        call(*f"{flags} 2000".split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--costs 1,1,1", "--costs 1,1,1: --profile .* gives that"),
        ("--optimizer-cost 1", "--optimizer-cost 1: --profile"),
        ("--split-cost 1", "--split-cost 1: --profile"),
        ("--memory 2,1,1,8", "--memory 2,1,1,8: expected bytes"),
        ("--memory 0", "--memory 0 is impossible: expected bytes.* above 0"),
        ("--grid 2x9", "9 stages do not fit a model of 7 layers"),
    ],
)
def test_flags_that_do_not_go_with_a_profile_are_named(profiled, flags, message):
    with pytest.raises(ConfigError, match=message):
        call(*profiled.split(), *flags.split())


def test_the_profile_of_another_model_is_refused(tmp_path, profiled):
    (tmp_path / "profile.json").write_text(json.dumps(profile_of(9)))
    with pytest.raises(ConfigError, match=r"has 9 layers, but the model of .*job\.yaml has 7"):
        call(*profiled.split())
    with pytest.raises(ConfigError, match=r"missing\.json: No such file"):
        call(*GRID.split(), "--profile", str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{kind: gpt, layers: 3}", len(gpt.build(layers=3, width=16, heads=2, context=8))),
        ("{kind: bert, layers: 3}", len(bert.build(layers=3, width=16, heads=2, context=8))),
        ("{kind: convnet}", len(convnet.build())),
        ("{kind: resnet}", len(resnet.build())),
        ("{kind: resnet, depth: 50}", len(resnet.build_50())),
        ("{kind: nt3}", len(nt3.build(width=2, values=30))),
        ("{kind: vit, layers: 3}", len(vit.build(layers=3, width=16, heads=2))),
    ],
)
def test_the_layers_of_a_model_that_ships_are_counted_without_building_it(tmp_path, model, expected):
    (tmp_path / "job.yaml").write_text(re.sub("model: {.*", f"model: {model}", JOB))
    (tmp_path / "profile.json").write_text(json.dumps(profile_of(expected)))
    assert call(str(tmp_path / "job.yaml"), "--profile", str(tmp_path / "profile.json")) == 0


PROFILE = str(Path(__file__).parents[3] / "profiles" / "gpt3-medium-350m.json")


def test_failures_are_moved_to_where_they_cost_least_and_it_says_who_copies_what(plan_json, capsys):
    flags = f"--grid 3x4 --microbatches 6 --profile {PROFILE} --technique staggered --failed 1.2,0.0 --time-limit 0.1"
    stayed, moved = plan_json(flags), plan_json(f"{flags} --normalise min-max")
    assert (stayed["moves"], stayed["failures_per_stage"]) == ([], [1, 0, 1, 0])
    assert moved["failures_per_stage"] != [1, 0, 1, 0]
    state = [layer.state_bytes for layer in load_profile(PROFILE).layers]
    for move in moved["moves"]:
        assert move["worker"] not in moved["orders"]
        assert move["takes"] in moved["orders"]
        assert 0 < move["copied_bytes"] < sum(state)
    assert call(*flags.split(), "--normalise", "min-max") == 0
    first = moved["moves"][0]
    told = f"moves     {first['worker']} takes the place of {first['takes']}, copies {first['copied_bytes']:,} bytes"
    assert told in capsys.readouterr().out


def test_the_papers_normalisation_can_be_asked_for(plan_json):
    flags = "--grid 32x8 --microbatches 16 --failures 64 --technique adaptive --time-limit 0.1 --normalise"
    assert plan_json(f"{flags} paper")["failures_per_stage"] == [13, 13, 13, 5, 5, 5, 5, 5]
    with pytest.raises(ConfigError, match="expected min-max with --all-failures"):
        call(*GRID.split(), "--all-failures", "1", "--out", "nowhere", "--normalise", "paper")


def test_memory_of_a_worker_holds_the_state_of_its_layers_too(plan_json):
    layers = load_profile(PROFILE).layers
    state = 2 * sum(layer.state_bytes for layer in layers) + 2 * sum(layer.parameter_bytes for layer in layers)
    flags = f"--grid 1x1 --microbatches 2 --profile {PROFILE} --memory"
    peak = plan_json(f"{flags} 80e9")["peak_memory"]["0.0"]
    assert peak > state
    assert plan_json(f"{flags} {peak}")["peak_memory"] == {"0.0": peak}
    with pytest.raises(InfeasiblePlan):
        call(*flags.split(), str(state))


def test_a_solver_with_too_little_time_says_what_would_do(plan_json):
    flags = "--grid 3x4 --microbatches 6 --costs 10,11,9:13:9:9 --failed 1.2 --technique staggered --memory 2,1,1,8"
    note = plan_json(f"{flags} --solver cp-sat --time-limit 0.05")["note"]
    assert "cp-sat found no" in note
    assert "longer --time-limit" in note


def test_cp_sat_does_not_take_1f1b_for_something_else(plan_json):
    """It knows no limit of micro-batches, and found 70 below the bound of 85."""
    flags = "--grid 1x4 --microbatches 6 --costs 2:3:1:4,4:2:1:1,1:4:3:1 --comm 2 --time-limit 3 --technique 1f1b"
    found, asked = plan_json(flags), plan_json(f"{flags} --solver cp-sat")
    assert found["makespan"] == asked["makespan"] >= found["bound"]["makespan"]
    assert "nothing to solve" in asked["note"]
    assert found["note"] == ""
