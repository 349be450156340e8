import json
import xml.etree.ElementTree as ElementTree

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.drawing.axis import ticks
from holdfast.drawing.schedule import schedule_to_svg
from holdfast.drawing.schedule_trace import schedule_to_trace
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.planner import Technique, make_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.testing.traces import trace_faults

COSTS = parse_costs(3, costs="3:5:4,2:6:4,4:1:3", comm="1:2", memory="2,1,1,6")
GRID = CostedGrid(pipelines=2, stages=split_evenly(3, 3), microbatches=3, costs=COSTS)
LOST = WorkerId(1, 2)
PLAN = make_plan(GRID, [LOST], Technique.DECOUPLED, time_limit_s=0.0).plan
TIMELINE = evaluate(PLAN, COSTS)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_every_operation_every_worker_and_what_failed():
    root = ElementTree.fromstring(schedule_to_svg(PLAN, COSTS, TIMELINE, failed=[LOST]))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert sorted(titles) == sorted(f"{span.op} {span.start:g} to {span.end:g}" for span in TIMELINE.spans)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert texts >= {f"{p}.{s}" for p in range(2) for s in range(3)}
    assert sum(rect.get("fill") == "url(#gone)" for rect in root.iter(f"{SVG}rect")) == 1
    assert len(list(root.iter(f"{SVG}polygon"))) == 5
    thick = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke-width") == "1.6"]
    guests = [span for span in TIMELINE.spans if span.op.microbatch.pipeline != span.worker.pipeline]
    assert len(thick) == len(guests) == 9


def test_time_has_an_axis_with_round_numbers_and_the_borders_of_the_step():
    root = ElementTree.fromstring(schedule_to_svg(PLAN, COSTS, TIMELINE, width=1000))
    scale = (1000 - 52 - 10) / TIMELINE.makespan
    lines = [line for line in root.iter(f"{SVG}line") if line.get("class") in ("tick", "border")]
    places = {kind: [float(x.get("x1")) for x in lines if x.get("class") == kind] for kind in ("tick", "border")}
    assert places["tick"] == pytest.approx([52 + time * scale for time in ticks(TIMELINE.makespan)], abs=0.01)
    assert places["border"] == pytest.approx([52, 52 + TIMELINE.period * scale], abs=0.01)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if "step begins" in text] == ["the step begins", "the next step begins"]
    assert {f"{time:g}" for time in ticks(TIMELINE.makespan)} <= set(texts)
    assert any(text.startswith("time in the units of the costs") for text in texts)
    assert max(float(text.get("y")) for text in root.iter(f"{SVG}text")) < float(root.get("height"))


def test_a_long_step_gets_a_wide_picture_in_which_it_can_be_read():
    grid = CostedGrid(pipelines=1, stages=split_evenly(3, 3), microbatches=60, costs=COSTS)
    plan = make_plan(grid, [], Technique.DECOUPLED, time_limit_s=0.0).plan
    timeline = evaluate(plan, COSTS)
    root = ElementTree.fromstring(schedule_to_svg(plan, COSTS, timeline))
    assert 960 < int(root.get("width")) <= 4000
    labels = [
        text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "middle" and text.get("font-size")
    ]
    assert len(labels) > len(timeline.spans) / 2
    assert ElementTree.fromstring(schedule_to_svg(plan, COSTS, timeline, width=500)).get("width") == "500"


def test_the_trace_has_every_operation_at_its_time():
    assert trace_faults(schedule_to_trace(TIMELINE, microseconds=2)) == []
    events = json.loads(schedule_to_trace(TIMELINE, microseconds=2))["traceEvents"]
    found = {(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert found == {
        (span.worker.stage, span.worker.pipeline, str(span.op), span.start * 2, (span.end - span.start) * 2)
        for span in TIMELINE.spans
    }
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {f"worker {w}" for w in PLAN.workers}
