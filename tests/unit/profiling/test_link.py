"""A link is measured to its end: whoever answers stays until all that it sent was read."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest
from tests.waiting import LIMIT_S

from holdfast import parse_job
from holdfast.profiling import link
from holdfast.runtime.transport.links.transport import LinkTransport


@pytest.fixture
def job():
    return parse_job(
        {
            "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 8},
            "data": {"kind": "text", "path": "stdlib"},
            "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
            "train": {"steps": 1},
        }
    )


def test_whoever_answers_stays_until_the_last_message_was_read(job, monkeypatch):
    drained, stayed = threading.Event(), []
    drain, receive = LinkTransport.drain, link._receive

    def drain_and_tell(transport):
        drain(transport)
        drained.set()

    def receive_late(transport, end, round_, index):
        if (end, round_, index) == (0, link._WARM_UP, len(link.SIZES) - 1):  # the last one
            assert drained.wait(LIMIT_S)
            answering.join(0.5)
            stayed.append(answering.is_alive())
        receive(transport, end, round_, index)

    monkeypatch.setattr(LinkTransport, "drain", drain_and_tell)
    monkeypatch.setattr(link, "_receive", receive_late)
    ours, theirs = Pipe()
    answering = threading.Thread(target=link.answer_messages, args=(job, theirs, 1))
    answering.start()
    found = link.measure_link(job, ours, 1)
    answering.join(LIMIT_S)
    assert stayed == [True]
    assert not answering.is_alive()
    assert found.bytes_per_s > 0
