"""``holdfast inspect`` of a real run in which workers die, hang, leave and come back."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cli.main import main
from holdfast.config.load import load_job
from holdfast.optim.digest import load_layer
from holdfast.telemetry.events import Chosen, Replaying, StepOps, read_events
from holdfast.telemetry.timeline import Mode, run_timeline
from holdfast.testing.traces import trace_faults

pytestmark = pytest.mark.dist

FAULTS = ["kill:1.2@2:backward", "join:1.2@3", "hang:0.1@6:forward", "leave:2.3@9:start"]
STEPS = ("train.steps=40",)


@pytest.fixture(scope="module")
def summary(runs):
    """Long enough for the joiner to catch up, whatever else the machine has to do."""
    return runs.train("gpt", *FAULTS, overrides=STEPS)


def test_the_bits_are_those_of_the_run_in_which_nothing_happens(summary, runs):
    assert summary.unfired == ()
    assert summary.state_sha256 == runs.healthy("gpt", STEPS).state_sha256


def test_the_text_tells_of_everything_in_its_order(summary, capsys):
    assert main(["inspect", str(summary.run_dir)]) == 0
    text = capsys.readouterr().out
    summary_of_it, picture, story = text.split("\n\n")
    assert re.search(
        r"ended: done at step 40\n40 steps committed, .*\nworker 1\.2 lost in step 2 \(kill at backward\): detected",
        summary_of_it,
    )
    assert " done by " not in story
    rows = dict(line.split(maxsplit=1) for line in picture.splitlines()[2:14])
    assert sorted(rows) == sorted(f"{pipeline}.{stage}" for pipeline in range(3) for stage in range(4))
    assert [letter in rows[worker] for worker, letter in (("1.2", "K"), ("0.1", "H"), ("2.3", "L"))] == [True] * 3
    for pattern in (
        r"FAULT kill strikes worker 1\.2 in step 2 at backward.*worker 1\.2 is lost: .*generation 2: 11 workers, by",
        r"JOIN: worker 1\.2 is offered again.*worker 1\.2 ready .*: \d+ workers, between.*worker 1\.2 has caught up",
        r"FAULT hang strikes worker 0\.1 in step 6 at forward.*worker 0\.1 is lost: no sign of life for \d\.\d s",
        r"FAULT leave strikes worker 2\.3 in step 9 at start.*worker 2\.3 has left before step",
        r"ended: done at step 40\n\d+ lines of every run are left out; --all tells them",
    ):
        assert re.search(pattern, story, re.DOTALL), pattern
    assert main(["inspect", str(summary.run_dir), "--all"]) == 0
    steps = re.findall(r"step (\d+) done by", capsys.readouterr().out)
    assert set(map(int, steps)) == set(range(40))


def test_figures_tell_of_everything(summary, capsys):
    assert main(["metrics", str(summary.run_dir)]) == 0
    families = text_string_to_metric_families(capsys.readouterr().out)
    found = {(sample.name, *sample.labels.values()): sample.value for each in families for sample in each.samples}
    assert found["holdfast_steps_committed_total",] == found["holdfast_steps_done",] == found["holdfast_steps",] == 40
    assert found["holdfast_step_seconds_count",] == 39
    assert (found["holdfast_failures_total", "process"], found["holdfast_failures_total", "silence"]) == (1, 1)
    assert [found["holdfast_recovery_seconds_count", part] for part in ("agree", "rebuild", "resume")] == [2, 2, 2]
    assert found["holdfast_recovery_seconds_sum", "resume"] > 0
    assert found["holdfast_workers", "missing"] == 2, "who was hung, and who left"
    assert found["holdfast_layer_owners_min",] == 2
    assert 0 < found["holdfast_goodput_ratio",] < 1
    assert found["holdfast_running",] == 0


def test_the_picture_shows_who_was_there(summary, capsys):
    assert main(["inspect", str(summary.run_dir), "--format", "svg"]) == 0
    root = ET.fromstring(capsys.readouterr().out)
    marks = [group for group in root.iter("{http://www.w3.org/2000/svg}g") if group.get("class") == "mark"]
    assert len(marks) == len(FAULTS)


def test_the_timeline_says_what_each_worker_lost(summary):
    rows = {row.worker: row for row in run_timeline(read_events(summary.run_dir / "events.jsonl")).rows}
    seen = {worker: [stretch.mode for stretch in row.stretches] for worker, row in rows.items()}
    assert seen["1.2"][-1] is Mode.MEMBER
    assert {Mode.RECOVERING, Mode.LOST, Mode.ARRIVING, Mode.ENTERING} < set(seen["1.2"][1:])
    assert seen["0.1"][-1] is Mode.LOST
    assert seen["2.3"][-1] is Mode.ABSENT
    assert Mode.ENTERING not in seen["0.0"]
    longest = max(s.end - s.start for s in rows["0.0"].stretches if s.mode is Mode.RECOVERING)
    assert longest > 1.0, "the hang is found after two seconds, for most of which the survivors get nothing done"


def test_the_trace_shows_every_operation_beside_its_plan(summary, capsys):
    assert main(["inspect", str(summary.run_dir), "--perfetto"]) == 0
    text = capsys.readouterr().out
    assert trace_faults(text) == []
    events = json.loads(text)["traceEvents"]
    kinds = Counter(event.get("cat", event["ph"]) for event in events)
    assert min(kinds[kind] for kind in ("reduce", "update", "recovery", "message", "C")) > 0, kinds
    spans = [event for event in events if event["ph"] == "X" and event["cat"] in "FIWB"]
    measured = [(e["pid"], e["tid"], e["name"], e["args"]["step"]) for e in spans if e["pid"] < 1000]
    planned = [(e["pid"] - 1000, e["tid"], e["name"], e["args"]["step"]) for e in spans if e["pid"] >= 1000]
    told = [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, StepOps)]
    interrupted = {event.step for event in told if not event.whole}
    measured = [each for each in measured if each[3] not in interrupted]
    assert measured
    assert set(measured) <= set(planned), "nothing ran that was not planned"


def test_the_way_is_decided_at_start_and_gone_and_changes_no_bits(runs, capsys):
    """A pipeline over two nodes, with checkpoints and no profile; then from its checkpoint, with logs switched off."""
    told, overrides = [], ("grid.pipelines=1", "train.steps=5", "checkpoint.every=2", "checkpoint.synchronous=true")
    summary = runs.train("small", "kill:0.1@3:backward", overrides=overrides, on_event=told.append)
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    (chosen,) = [event for event in events if isinstance(event, Chosen)]
    assert chosen in told
    assert (chosen.way, chosen.advised, chosen.logging, chosen.alone) == ("log", "log", True, (0, 1, 2, 3))
    boundary, layers = 4 * 8 * 8, [load_layer(path) for path in (summary.run_dir / "final").glob("layer-*")]
    assert chosen.crossing_bytes == 2 * 2 * boundary, "two micro-batches, there and back"
    assert chosen.state_bytes == sum(layer.num_bytes for layer in layers)
    assert all(layer.optimizer_bytes >= 2 * layer.parameter_bytes > 0 for layer in layers if not layer.tied)
    assert summary.unfired == ()
    assert [event.layers for event in events if isinstance(event, Replaying)] == [(2, 4)], "so it was"
    assert main(["inspect", str(summary.run_dir)]) == 0
    text = "".join(f"{line}\n" for line in ("for the loss of a node: log", *(f"  {each}" for each in chosen.reasons)))
    assert text in capsys.readouterr().out
    assert main(["inspect", str(summary.run_dir), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["recovery"] == json.loads(json.dumps(chosen.figures()))
    assert load_job(summary.run_dir / "job.yaml").logging.use == "auto", "what was asked for, not what was decided"
    overrides = (*overrides, "logging.use=off")
    again = runs.train("small", overrides=overrides, resume=f"{summary.run_dir}@2", on_event=told.append)
    assert (again.resumed_from, again.state_sha256) == (2, summary.state_sha256)
    without = [event for event in told if isinstance(event, Chosen)][-1]
    assert (without.way, without.advised, without.logging) == ("checkpoint", "log", False)
    assert without.why == "logging.use: off"
