"""``holdfast advise``: its words, its JSON, and what it says to what cannot be."""

from __future__ import annotations

import json
import shlex

import pytest
from tests.unit.cli.test_simulate import JOB

from holdfast.cli.commands import run_command
from holdfast.config.load import load_job

QUICK = ("--mtbf", "40m", "--repair", "20m", "--hours", "1", "--runs", "1", "--speeds", "start_s=60")


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def advised(capsys, *arguments):
    assert run_command(["advise", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_it_says_what_to_set_and_why(capsys, job):
    told = advised(capsys, job, *QUICK)
    advice, command, table, *_ = told.split("\n\n")
    names = [line.split("  ")[0].split(" ")[0] for line in advice.splitlines() if not line.startswith(" ")]
    assert names == ["grid", "memory", "strategy", "failures", "checkpoints", "lost", "gain"]
    assert "(--worker-memory says it)" in advice
    words = shlex.split(command.strip())
    assert words[:3] == ["holdfast", "train", str(job)]
    load_job(job, [word for word in words[3:] if word != "--set"])
    assert table.startswith("job        medium")
    assert "not tried   snapshots: resilience.snapshot_every" in told
    assert "\nas it is " in told


def test_json_has_all_of_it_and_is_the_same_again(capsys, job):
    flags = (job, *QUICK, "--runs", 2, "--format", "json", "--worker-memory", "1e12")
    found = json.loads(advised(capsys, *flags))
    assert json.loads(advised(capsys, *flags, "--jobs", 1)) == found
    assert found["gain"] >= 0
    assert found["gain_ci95"][0] <= found["gain"] <= found["gain_ci95"][1]
    assert found["set"].items() <= found["settings"].items()
    assert next(iter(found["strategies"])) == "as it is"
    assert found["memory_bytes"] == 1e12
    assert found["missing"]["mostly"] <= found["missing"]["most"]
    assert set(found["checkpoints"]) == {"every", "between_s", "checkfreq"}
    assert found["recovery"]["reasons"]


def test_a_time_in_which_no_step_is_made_is_told(capsys, job, tmp_path):
    trace = tmp_path / "brief.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(6)) + "10,remove,n2\n")
    told = advised(capsys, job, "--trace", trace, "--hours", "0.0001")
    assert "a sample costs inf s of a machine" in told
    found = json.loads(advised(capsys, job, "--trace", trace, "--hours", "0.0001", "--format", "json"))
    assert found["gain"] is None
    assert found["strategies"]["as it is"]["machine_s_per_sample"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--mtbf"),
        (("--mtbf", "1h", "--trace", "periodic:1h"), "not allowed with"),
        (("--mtbf", "often"), "expected a time such as 90s, 30m, 17h or 2d"),
        (("--mtbf", "1h", "--repair", "soon"), "expected a time such as 90s, 30m, 17h or 2d"),
        (("--trace", "gone.csv"), "gone.csv: cannot be read"),
        (("--mtbf", "1h", "--worker-memory", "0"), "--worker-memory"),
        (("--mtbf", "1h", "--set", "train.profile=null"), "train.profile: without it nothing is known"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(capsys, job, arguments, told):
    try:
        code = run_command(["advise", str(job), *arguments])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_of_one_pipeline_it_says_how_much_logs_take_and_which_nodes_are_replayed_together(capsys, job):
    keys = ("grid.pipelines=1", "grid.stages=6", "grid.microbatches=12", "resilience.spares=2")
    flags = [word for key in keys for word in ("--set", key)] + ["--worker-memory", "1", "--log-storage", "1e11"]
    told = advised(capsys, job, *QUICK, *flags)
    logs = [line for line in told.splitlines() if line.startswith("logs ")]
    assert len(logs) == 1
    assert "GB at most, of " in logs[0]
    assert " are replayed together, and log nothing among themselves" in logs[0]
    command = shlex.split(next(line for line in told.splitlines() if line.startswith("  holdfast train")))
    (groups,) = (word for word in command if word.startswith("logging.groups="))
    assert load_job(job, [groups]).logging.groups
    found = json.loads(advised(capsys, job, *QUICK, *flags, "--format", "json"))
    assert found["logs"]["storage_bytes"] <= 1e11
    assert found["set"]["logging.groups"] == json.loads(groups.partition("=")[2])
