"""Which faults a coordinator that was started again is still to be struck by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.core.faults import Fault
from holdfast.runtime.main.coordinator import _still_due
from holdfast.telemetry.events import EventLog, FaultInjected, Notice, read_events

FIRST, SECOND = (Fault.parse(text) for text in ("kill-coordinator@3", "kill-coordinator@5:persist"))


@pytest.fixture
def told(tmp_path):
    """A log in which the first has struck."""
    log = EventLog(tmp_path / "events.jsonl")
    log.write(
        0.0,
        FaultInjected(worker="coordinator", kind="kill-coordinator", step=3, point="start", spec=str(FIRST)),
    )
    log.close()
    return tmp_path / "events.jsonl"


def due(path, tmp_path):
    log = EventLog(tmp_path / "own.jsonl")
    found = _still_due(SimpleNamespace(faults=(FIRST, SECOND), events=str(path)), log)
    log.close()
    return found


def test_those_that_have_struck_do_not_strike_again(told, tmp_path):
    assert due(told, tmp_path) == (SECOND,)


@pytest.mark.parametrize("damage", [b"no event\n", b'{"time":0.0,"more":' + b"[" * 5000 + b"\n", b"\xff\n", None])
def test_of_a_log_that_cannot_be_read_none_is_due_and_that_is_told(told, tmp_path, damage):
    """Else each coordinator would be struck by the first one anew, or die of the log."""
    if damage is None:
        told.unlink()
    else:
        told.write_bytes(told.read_bytes() + damage)
    assert due(told, tmp_path) == ()
    ((_, notice),) = read_events(tmp_path / "own.jsonl")
    assert isinstance(notice, Notice)
    assert notice.text.startswith(f"faults of the coordinator are left out: {told}: ")
