"""The events of traces."""

import json

import pytest

from holdfast.drawing.trace_events import Track, arrow, counter, instant, names, slice_of, trace
from holdfast.testing.traces import trace_faults

HERE, THERE = Track(1, 2), Track(3, 4)


def test_one_of_each_makes_a_trace():
    events = [
        *names(HERE, process="here", order=7, thread="one"),
        slice_of("F", "F", HERE, (1.0, 2.0), {"step": 3}),
        counter("loss", HERE, 1.5, {"loss": 0.5}),
        instant("kill", HERE, 1.5),
        slice_of("B", "B", THERE, (1.75, 3.0), {}),
        *arrow(1, "activation", (HERE, 2.0), (THERE, 2.5)),
    ]
    assert trace_faults(trace(events)) == []
    assert json.loads(trace(events))["traceEvents"] == events


def test_seconds_become_microseconds_and_other_units_what_they_are_said_to_be():
    assert [slice_of("F", "F", HERE, (1.0, 3.0), {})[key] for key in ("ts", "dur")] == [1e6, 2e6]
    assert [slice_of("F", "F", HERE, (1.0, 3.0), {}, unit=10.0)[key] for key in ("ts", "dur")] == [10.0, 20.0]


def test_a_track_tells_only_what_it_is_given():
    assert [event["name"] for event in names(HERE, thread="one")] == ["thread_name"]
    assert [event["args"] for event in names(HERE, process="here", order=0)] == [{"name": "here"}, {"sort_index": 0}]


def test_a_number_that_json_cannot_tell_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        trace([counter("loss", HERE, 0.0, {"loss": float("nan")})])
