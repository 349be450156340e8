"""What becomes of what people want of a job."""

from dataclasses import replace

import msgspec
import pytest
from tests.unit.control.test_agents import NODE, THERE, begun_on_three_nodes, gone

from holdfast.control.membership import Tell
from holdfast.control.messages import Leave, Preempted
from holdfast.control.orders import Answer, Drain, Stop, consider, decode_order


@pytest.fixture
def job():
    return begun_on_three_nodes()


@pytest.mark.parametrize("order", [Drain(node="there"), Stop(), Stop(at_once=True)])
def test_an_order_is_read_as_it_was_meant(order):
    assert decode_order(msgspec.msgpack.encode(order)) == order


@pytest.mark.parametrize("said", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Drain"})])
def test_nothing_else_is_an_order(said):
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode_order(said)


def test_the_agent_of_a_node_is_told_that_its_workers_are_to_leave(job):
    text = "node there is told that its workers are to leave: 1.0, 1.1"
    told = (Answer(text=text, nodes=(THERE.nonce,)), None, (Tell(to=None, node=THERE, command=Leave()),))
    assert consider(Drain(node="there"), job.state) == told
    assert consider(Drain(node="there", only=(THERE.nonce,)), job.state) == told
    assert consider(Drain(node="there", only=(NODE.nonce,)), job.state)[0].refused, "it is another one of that name"


def test_a_node_that_is_not_there_is_not_drained(job):
    answer, event, told = consider(Drain(node="nowhere"), job.state)
    assert (answer.refused, event, told) == (True, None, ())
    assert answer.text == f"there is no node nowhere; nodes: elsewhere, {NODE.name}, there"
    answer, event, told = consider(Drain(node="there"), job.give(gone(THERE)).state)
    assert (answer, event, told) == (Answer(text="node there has no connection just now", refused=True), None, ())


def test_a_job_without_checkpoints_is_not_stopped_but_at_once(job):
    answer, event, _ = consider(Stop(), job.state)
    assert (answer.refused, event) == (True, None)
    assert "it makes no checkpoints (checkpoint.every), so all that it has done would be lost" in answer.text
    assert consider(Stop(at_once=True), job.state)[:2] == (Answer(text="it ends at once"), Preempted(at_once=True))


def test_a_job_with_checkpoints_makes_one_more(job):
    state = replace(job.state, rules=replace(job.state.rules, checkpoint_every=5))
    assert consider(Stop(), state) == (Answer(text="it makes a checkpoint, and ends"), Preempted(), ())
