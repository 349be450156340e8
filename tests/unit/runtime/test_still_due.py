"""Which faults a coordinator that was started again is still to be struck by."""

from __future__ import annotations

import pytest

from holdfast.core.faults import Fault
from holdfast.runtime.injection.coordinator import still_due
from holdfast.telemetry.events import EventLog, FaultInjected

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


def due(path):
    noted = []
    return still_due((FIRST, SECOND), path, noted.append), noted


def test_those_that_have_struck_do_not_strike_again(told):
    assert due(told) == ((SECOND,), [])


@pytest.mark.parametrize("damage", [b"no event\n", b'{"time":0.0,"more":' + b"[" * 5000 + b"\n", b"\xff\n", None])
def test_of_a_log_that_cannot_be_read_none_is_due_and_that_is_told(told, damage):
    """Else each coordinator would be struck by the first one anew, or die of the log."""
    if damage is None:
        told.unlink()
    else:
        told.write_bytes(told.read_bytes() + damage)
    found, (noted,) = due(told)
    assert found == ()
    assert noted.startswith(f"faults of the coordinator are left out: {told}: ")
