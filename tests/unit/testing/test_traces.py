"""The oracle of traces finds what breaks the rules of their format."""

import json

import pytest

from holdfast.testing.traces import trace_faults

X = {"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0}
F = {**X, "ph": "f", "id": 1, "bp": "e"}
BROKEN = {
    "is no trace": "[",
    "NaN is not JSON": '{"traceEvents": [{"ts": NaN}]}',
    "unknown phase": [{**X, "ph": "Z"}],
    "no process": [{**X, "pid": "0"}],
    "no time": [{**X, "ts": -1}],
    "no length": [{key: value for key, value in X.items() if key != "dur"}],
    "no values": [{**X, "ph": "C", "args": {"loss": "2"}}],
    "no id": [X, {**X, "ph": "s"}],
    "comes after": [{**X, "ts": 9.0}, X],
    "ends after the slice": [X, {**X, "ts": 2.0}],
    "lies in no slice": [X, {**X, "ph": "s", "id": 1, "ts": 4.0}, {**F, "ts": 5.0}],
    "begins 1 times and ends 0": [X, {**X, "ph": "s", "id": 1}],
    "ends before it begins": [X, F, {**X, "ph": "s", "id": 1, "ts": 2.0}],
    "binds to the next slice": [X, {**X, "ph": "s", "id": 1}, {**X, "ph": "f", "id": 1, "ts": 2.0}],
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_check_finds_what_is_wrong(what):
    text = BROKEN[what] if isinstance(BROKEN[what], str) else json.dumps({"traceEvents": BROKEN[what]})
    assert any(what in fault for fault in trace_faults(text)), trace_faults(text)
