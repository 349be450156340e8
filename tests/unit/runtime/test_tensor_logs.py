"""A worker's logs as a whole: several replays of one worker, what cannot be opened, and what comes out otherwise."""

from __future__ import annotations

import pytest
import torch
from tests.waiting import LIMIT_S, until

from holdfast.config.job import Logging
from holdfast.core.instructions import Payload
from holdfast.errors import LogGap, ReplicaDiverged
from holdfast.protocol.effects import Consult
from holdfast.protocol.executor import Keep
from holdfast.runtime.tensor_logs import TensorLogs, node_folder
from holdfast.storage.tensorlog.records import LogOf


def logs_of(tmp_path, worker, node, notes=None):
    told = notes.append if notes is not None else lambda text: None
    return TensorLogs(Logging(when="at-once"), tmp_path, node, LogOf(job="j", job_id="0" * 32, worker=worker), told)


def keep(payload, step, boundary, value):
    return Keep(payload, step, boundary, 0, torch.full((4,), float(value)))


def consult(*wanted, ends=(), start=0, stop=1, generation=2):
    return Consult(generation, frozenset(wanted), frozenset(ends), start, stop)


def read(logs, step):
    found = []
    until(lambda: found.append(logs.consulted(step, 0.05)) or found[-1] is not None)
    return found[-1]


def test_two_replays_of_one_worker_in_one_generation_keep_what_each_has_logged(tmp_path):
    logs = logs_of(tmp_path, "0.1", 1)
    for boundary in (3, 5):
        logs.consult(consult(ends=[(Payload.ACTIVATION, boundary)]))
        logs.keep(keep(Payload.ACTIVATION, 0, boundary, boundary))
        logs.kept(0)
    other = logs_of(tmp_path, "0.2", 2)
    other.consult(consult((Payload.ACTIVATION, 3, 0), (Payload.ACTIVATION, 5, 0), generation=3))
    found = read(other, 0)
    assert {boundary: value.tolist()[0] for (_, boundary, _), value in found.items()} == {3: 3.0, 5: 5.0}


def test_what_was_dropped_is_in_no_log(tmp_path):
    logs = logs_of(tmp_path, "0.1", 1)
    logs.keep(keep(Payload.ACTIVATION, 0, 3, 1))
    logs.kept(0)
    logs.kept(0, "it is run again")
    assert logs.flush(LIMIT_S)
    other = logs_of(tmp_path, "0.2", 2)
    other.consult(consult((Payload.ACTIVATION, 3, 0)))
    with pytest.raises(LogGap, match="it is run again"):
        read(other, 0)


def test_what_comes_out_otherwise_is_told_by_its_place(tmp_path):
    lost = logs_of(tmp_path, "0.1", 1)
    lost.keep(keep(Payload.ACTIVATION, 0, 3, 1))
    lost.kept(0)
    neighbour = logs_of(tmp_path, "0.0", 0)
    neighbour.keep(keep(Payload.ACTIVATION, 0, 1, 2))
    neighbour.kept(0)
    assert lost.flush(LIMIT_S)
    assert neighbour.flush(LIMIT_S)
    logs = logs_of(tmp_path, "1.0", 3)
    logs.consult(consult((Payload.ACTIVATION, 1, 0), ends=[(Payload.ACTIVATION, 3)]))
    assert read(logs, 0)
    logs.keep(keep(Payload.ACTIVATION, 0, 3, 1))
    with pytest.raises(ReplicaDiverged, match="activation at boundary 3, micro-batch 0"):
        logs.keep(keep(Payload.ACTIVATION, 0, 3, 1.5))


def test_a_log_that_cannot_be_opened_is_told_once_and_stops_nobody(tmp_path):
    node_folder(tmp_path, 1).write_text("no folder")
    notes: list[str] = []
    logs = logs_of(tmp_path, "0.1", 1, notes)
    for step in range(3):
        logs.keep(keep(Payload.ACTIVATION, step, 3, 1))
        logs.kept(step)
    logs.flush(LIMIT_S)
    assert notes
    assert len([text for text in notes if "logs nothing" in text or "log failed" in text]) == 1, notes
