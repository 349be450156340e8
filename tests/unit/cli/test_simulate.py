"""``holdfast simulate``: its JSON, its table, and what it says to what cannot be."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.unit.sim.test_engine import SPEEDS
from tests.unit.sim.test_engine import job as simulated_job
from tests.waiting import until

from holdfast.cli.commands import run_command
from holdfast.cli.simulate_page import throughput_of
from holdfast.runtime.node.kin import in_session
from holdfast.sim.compare import Compared, interval
from holdfast.sim.engine import simulate
from holdfast.sim.failures import parse_failures
from holdfast.sim.systems.rows import SYSTEMS
from holdfast.telemetry.events import Detected, EventLog, FaultInjected

ROOT = Path(__file__).resolve().parents[3]
PROFILE = ROOT / "profiles" / "gpt3-medium-350m.json"
JOB = f"""
name: medium
model: {{kind: gpt, layers: 24, width: 64, heads: 4, context: 64}}
data: {{kind: text, path: stdlib}}
grid: {{pipelines: 3, stages: 2, microbatches: 4, microbatch_size: 2}}
optimizer: {{kind: adamw, lr: 3.0e-4}}
train: {{steps: 40, seed: 0, profile: {PROFILE}}}
resilience: {{wait_for_replacement: 60}}
checkpoint: {{every: 200}}
"""
SVG = "{http://www.w3.org/2000/svg}"
PARTS = {"useful", "redo", "copy", "restart", "checkpoint", "idle"}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def simulated(capsys, *arguments):
    assert run_command(["simulate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    try:
        code = run_command(["simulate", *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def test_json_has_what_was_promised_and_is_the_same_again(capsys, job):
    flags = (
        "--trace poisson:mtbf=30m,repair=30m --strategies adaptive,checkpoint-restart --hours 3 --runs 2 --format json"
    )
    command = (job, *flags.split())
    told = simulated(capsys, *command)
    found = json.loads(told)
    assert simulated(capsys, *command) == told
    assert set(found["strategies"]) == {"adaptive", "checkpoint-restart"}
    for row in found["strategies"].values():
        assert set(row) >= {"throughput", "goodput", "lost_s", "breakdown", "failures", "ci95"}
        assert set(row["breakdown"]) == PARTS
        assert math.fsum(row["breakdown"].values()) == pytest.approx(3 * 3600) == pytest.approx(found["seconds"])
        low, high = row["ci95"]
        assert low <= row["throughput"] <= high
    redone = [found["strategies"][name]["breakdown"]["redo"] for name in ("adaptive", "checkpoint-restart")]
    assert 0 < redone[0] < redone[1]
    assert found["assumptions"]["start_s"] == 5
    paid = [row["machine_s_per_sample"] * row["throughput"] for row in found["strategies"].values()]
    assert 4.5 < paid[0] < 6, "machines that are there, on average"
    assert paid[0] == pytest.approx(paid[1], rel=0.01)
    other = json.loads(simulated(capsys, *command, "--seed", 1))
    assert other["strategies"]["adaptive"]["throughput"] != found["strategies"]["adaptive"]["throughput"]


def test_a_table_is_for_people(capsys, job):
    told = simulated(
        capsys, job, "--trace", "periodic:1h,repair=10m", "--hours", 2.5, "--speeds", "start_s=30,copy=1e9"
    )
    head, table = told.split("\n\n")
    assert "a step of 24 samples" in head
    assert "1 run(s) of 2.5 h; on average 2 failures" in head
    assert "start_s 30" in head
    names, row = table.splitlines()
    assert names.split()[:2] == ["strategy", "samples/s"]
    assert row.split()[0] == "auto"


def test_spares_are_machines_that_are_there(capsys, job):
    told = simulated(capsys, job, "--trace", "periodic:1h", "--hours", 2.5, "--set", "resilience.spares=1")
    assert "machines of 7\n" in told


def test_a_trace_is_followed_as_far_as_it_goes(capsys, job, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "".join(f"0,add,n{i}\n" for i in range(6)) + "3600000,remove,n2\n7200000,add,n6\n9000000,remove,n1\n"
    )
    found = json.loads(simulated(capsys, job, "--trace", trace, "--format", "json"))
    assert found["seconds"] == 9000
    (row,) = found["strategies"].values()
    assert row["failures"] == 1
    assert row["ci95"] == [row["throughput"]] * 2


def test_a_page_shows_the_table_and_three_pictures_and_needs_nothing_else(capsys, job, tmp_path):
    trace = tmp_path / "<a&b>.csv"
    trace.write_text("".join(f"0,add,n{i}\n" for i in range(6)) + "3600000,remove,n2\n7200000,add,n6\n")
    page = simulated(capsys, job, "--trace", trace, "--strategies", "adaptive,checkpoint-restart", "--format", "html")
    tree = ElementTree.fromstring(page.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    assert tree.findtext("body/h1") == "medium under failures"
    assert any("<a&b>.csv" in "".join(each.itertext()) for each in tree.iter("p"))
    rows = [[cell.text for cell in row] for row in tree.iter("tr")]
    assert [row[0] for row in rows] == ["strategy", "adaptive", "checkpoint-restart"]
    assert rows[0][-1] == "machine s/sample"
    pictures = list(tree.iter(f"{SVG}svg"))
    captions = [next(each.text for each in picture.iter(f"{SVG}text")) for picture in pictures]
    assert [caption.split()[0] for caption in captions] == ["Samples", "Machines", "Time"]
    assert not {"href", "src"} & {name for each in tree.iter() for name in each.attrib}


def test_each_run_of_each_strategy_has_a_log_to_inspect(capsys, job, tmp_path):
    told, logs = "--trace poisson:mtbf=30m,repair=30m --strategies adaptive,varuna", tmp_path / "logs"
    flags = (*told.split(), "--hours", 2, "--runs", 2)
    found = json.loads(simulated(capsys, job, *flags, "--format", "json", "--events", logs))
    assert sorted(path.name for path in logs.iterdir()) == ["adaptive-0", "adaptive-1"], "varuna is a model only"
    seen = []
    for run in sorted(logs.iterdir()):
        assert run_command(["inspect", "--format", "json", str(run)]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    steps = sum(each["steps_committed"] for each in seen) / 2
    assert steps == found["strategies"]["adaptive"]["steps"]
    assert {each["outcome"] for each in seen} == {"simulated"}
    assert run_command(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "job medium: 6 workers" in text
    assert "FAULT kill strikes worker" in text
    again = refused(capsys, job, *flags, "--events", logs)
    assert "--events" in again
    assert "nothing was overwritten" in again
    assert "cannot be written" in refused(capsys, job, *flags, "--events", run / "events.jsonl")


def test_attempts_of_a_job_that_ended_and_began_again_are_set_aside(capsys, job, tmp_path):
    trace, logs = tmp_path / "trace.csv", tmp_path / "logs"
    there = "".join(f"0,add,n{i}\n" for i in range(6)) + "".join(f"3600000,remove,n{i}\n" for i in range(6))
    trace.write_text(there + "".join(f"5400000,add,m{i}\n" for i in range(6)) + "9000000,remove,m0\n")
    simulated(capsys, job, "--trace", trace, "--strategies", "adaptive", "--events", logs)
    assert (logs / "adaptive-0" / "attempts" / "0001" / "events.jsonl").is_file()
    assert run_command(["inspect", str(logs / "adaptive-0")]) == 0
    assert capsys.readouterr().out.startswith("attempt 1 began ")


def test_its_curve_is_what_was_trained():
    prepared = simulated_job("adaptive")
    world = parse_failures("periodic:10m,repair=10m").draw(6, 3600.0, "curve")
    found = Compared(outcomes=(simulate(prepared, world, SPEEDS),), samples=7)
    points = throughput_of(found)
    trained = sum(value for _, value in points) * found.outcomes[0].seconds / len(points)
    assert trained == pytest.approx(7 * found.outcomes[0].steps, rel=0.01)
    assert found.outcomes[0].failures == 5
    assert sum(found.lost.values()) == pytest.approx(found.outcomes[0].lost_s)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--trace", "hourly:1h"), "--trace hourly:1h: expected FILE, periodic:30m"),
        (("--trace", "gone.csv"), "gone.csv: cannot be read: No such file"),
        (("--trace", "poisson:mtbf=1h", "--strategies", "adaptive,hope"), "hope"),
        (("--trace", "poisson:mtbf=1h", "--strategies", "adaptive,,"), "--strategies adaptive,,: expected names"),
        (
            ("--trace", "poisson:mtbf=1h", "--set", "checkpoint.every=0", "--strategies", "checkpoint-restart"),
            "checkpoint.every",
        ),
        (("--trace", "poisson:mtbf=1h", "--speeds", "start_s=0"), "--speeds start_s=0: expected NAME=NUMBER above 0"),
        (("--trace", "poisson:mtbf=1h", "--speeds", "warp=9"), "--speeds warp=9: expected NAME=NUMBER"),
        (("--trace", "poisson:mtbf=1h", "--set", "train.profile=null"), "train.profile: without it nothing is known"),
        (("--trace", "poisson:mtbf=1h", "--profile", "gone.json"), "gone.json"),
        (("--trace", "poisson:mtbf=1h", "--set", "model.layers=12"), "is it the profile of another model?"),
        (("--trace", "poisson:mtbf=1h", "--hours", "0"), "--hours"),
        (("--trace", "poisson:mtbf=1h", "--set", "train.audit_every=9"), "audits are not simulated yet"),
        (
            (
                "--trace", "poisson:mtbf=1h", "--set", "grid.pipelines=1", "--set", "logging.use=on",
                "--set", "logging.bandwidth=1e3",
            ),
            "so steps would be left out of the logs",
        ),
        ((), "--trace"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_a_line(capsys, job, arguments, told):
    assert told in refused(capsys, job, *arguments)


def test_a_trace_that_is_too_small_for_the_job_is_told(capsys, job, tmp_path):
    trace = tmp_path / "small.csv"
    trace.write_text("0,add,a\n0,add,b\n60000,remove,a\n")
    assert "never are more than 2 machines there, and the job needs 6" in refused(capsys, job, "--trace", trace)


def test_systems_without_a_runtime_are_told_apart(capsys, job):
    arguments = (job, "--trace", "periodic:30m,repair=10m", "--hours", "2")
    names = ",".join(["adaptive", *SYSTEMS])
    found = json.loads(simulated(capsys, *arguments, "--strategies", names, "--format", "json"))
    assert list(found["strategies"]) == names.split(",")
    assert set(found["models"]) == set(SYSTEMS)
    assert all(all(each.values()) for each in found["models"].values())
    table = simulated(capsys, *arguments, "--strategies", "varuna,adaptive")
    assert "model only varuna: as their authors say" in table
    assert found["strategies"]["adaptive"]["throughput"] > found["strategies"]["bamboo"]["throughput"]
    unlike = "grid.layout=[{stages: [13, 13], microbatches: 6}, {stages: [6, 7, 7, 6], microbatches: 6}]"
    assert "pipelines that are alike" in refused(capsys, *arguments, "--strategies", "varuna", "--set", unlike)


@pytest.fixture
def ran(tmp_path):
    """A run in which somebody was lost, of a job without a profile."""
    run_dir = tmp_path / "ran"
    run_dir.mkdir()
    (run_dir / "job.yaml").write_text(JOB.replace(f", profile: {PROFILE}", ""))
    log = EventLog(run_dir / "events.jsonl")
    log.write(10.0, FaultInjected(worker="1.0", kind="kill", step=3, point="start", spec="kill:1.0@3:start"))
    log.write(10.5, Detected(worker="1.0", how="process ended: signal 9", generation=1))
    log.close()
    return run_dir


def test_what_a_run_shows_goes_before_what_is_assumed_and_what_is_said_before_that(capsys, job, ran):
    arguments = (job, "--trace", "periodic:30m", "--hours", "0.1", "--speeds-of", ran)
    found = json.loads(simulated(capsys, *arguments, "--format", "json"))
    assert (found["assumptions"]["detect_s"], found["measured"]) == (0.5, ["detect_s"])
    assert "measured   detect_s of these, by runs" in simulated(capsys, *arguments)
    said = json.loads(simulated(capsys, *arguments, "--speeds", "detect_s=2", "--format", "json"))
    assert (said["assumptions"]["detect_s"], said["measured"]) == (2.0, [])


def test_a_run_with_layers_shows_how_long_steps_take_beyond_them(capsys, job, ran):
    (ran / "profile.json").write_bytes(PROFILE.read_bytes())
    plain = json.loads(simulated(capsys, job, "--trace", "periodic:30m", "--hours", "0.1", "--format", "json"))
    arguments = (job, "--trace", "periodic:30m", "--hours", "0.1", "--speeds-of", ran, "--format", "json")
    found = json.loads(simulated(capsys, *arguments))
    assert found["measured"] == ["detect_s"], "no step was run"
    assert found["assumptions"] == plain["assumptions"] | {"detect_s": 0.5}


def test_a_run_that_cannot_be_read_is_told(capsys, job, ran):
    assert "gone/job.yaml" in refused(capsys, job, "--trace", "periodic:30m", "--speeds-of", "gone")
    (ran / "events.jsonl").write_text("no event\n")
    assert "is no log of events" in refused(capsys, job, "--trace", "periodic:30m", "--speeds-of", ran)


def test_an_interval_gets_smaller_with_more_runs():
    assert interval([1.0, 2.0, 3.0])[0] == pytest.approx(2 - 4.303 / 3**0.5)
    wide, narrow = interval([0.0, 1.0] * 8), interval([0.0, 1.0] * 60)
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_simulation_outlives_the_command(tmp_path, number):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    flags = [
        "--trace",
        "poisson:mtbf=5m,repair=5m",
        "--strategies",
        "templates",
        "--hours",
        "200",
        "--runs",
        "2",
        "--jobs",
        "2",
    ]
    command = subprocess.Popen([sys.executable, "-m", "holdfast", "simulate", path, *flags], start_new_session=True)
    try:
        until(lambda: len(in_session(command.pid)) == 3)
        command.send_signal(number)
        assert command.wait(120) == (130 if number == signal.SIGINT else -number)
        until(lambda: not in_session(command.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
