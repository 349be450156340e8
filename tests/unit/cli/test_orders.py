"""``holdfast drain`` and ``holdfast stop``: what is told, what is waited for, and what is said."""

from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.cli.test_status import NODES, STATUS, changed

from holdfast.cli import orders as at_orders
from holdfast.cli.main import main
from holdfast.control.orders import Answer, Drain, Stop
from holdfast.control.reach import Reach
from holdfast.errors import CoordinatorUnavailable

NONCE = 16 * "a"
TOLD = Answer(text="node n1 is told that its workers are to leave: 0.0, 0.1", nodes=(NONCE,))
N1 = msgspec.structs.replace(NODES[0], nonce=NONCE, leaving=True)
NODE_2 = NODES[1]
HERE, GONE = changed(nodes=(N1, NODE_2)), changed(nodes=(NODE_2,))
ENDED = changed(phase="ended", step=130, checkpoint=130, ended="preempted")
AWAY = CoordinatorUnavailable("coordinator at h:7000: unavailable: it is gone")


def with_workers(*workers):
    return changed(nodes=(msgspec.structs.replace(N1, workers=workers), NODE_2))


@dataclass
class Coordinators:
    """Each answers, and tells how the job is until it leads no more; a second passes between two times."""

    lives: list
    orders: list = field(default_factory=list)
    now: float = 0.0

    def ask(self, what, reach, says):
        assert (what, reach) == ("Order", Reach(addresses="h:7000", token="a-token-of-the-job"))
        self.orders.append(msgspec.msgpack.decode(says, type=Drain | Stop))
        answer = self.lives[0][0] if self.lives else AWAY
        if isinstance(answer, Exception):
            self.lives[:1] = []
            raise answer
        return msgspec.json.encode(answer)

    def watch(self, reach):
        for status in self.lives.pop(0)[1:]:
            yield msgspec.json.encode(status)
            self.now += 1
        raise AWAY

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def told(monkeypatch):
    """Runs a command, with these coordinators, one after another; returns its exit code and what they were told."""

    def run(*words, lives):
        coordinators = Coordinators([*lives])
        monkeypatch.setenv("HOLDFAST_TOKEN", "a-token-of-the-job")
        monkeypatch.setattr(at_orders, "ask", coordinators.ask)
        monkeypatch.setattr(at_orders, "watch", coordinators.watch)
        monkeypatch.setattr(at_orders.time, "sleep", coordinators.sleep)
        monkeypatch.setattr(at_orders.time, "monotonic", lambda: coordinators.now)
        return main([words[0], "h:7000", *words[1:]]), coordinators.orders

    return run


def test_a_node_is_drained_and_that_is_waited_for(told, capsys):
    """Another one of its name comes."""
    again = msgspec.structs.replace(N1, nonce=16 * "b", leaving=False)
    gone = changed(nodes=(again, NODE_2))
    life = (TOLD, STATUS_BEFORE, HERE, with_workers("0.1"), with_workers(), gone, gone, gone)
    assert told("drain", "n1", lives=[life]) == (0, [Drain(node="n1")])
    assert capsys.readouterr().out.splitlines() == [
        "the job is told: node n1 is told that its workers are to leave: 0.0, 0.1",
        "node n1 has yet to be left by 0.0, 0.1",
        "node n1 has yet to be left by 0.1",
        "node n1 has left",
    ]


STATUS_BEFORE = changed(nodes=(msgspec.structs.replace(N1, leaving=False), NODE_2))
"""It has not heard of it yet."""


def test_who_leads_next_is_told_again_and_may_hear_of_the_node_later(told, capsys):
    lives = [(TOLD, HERE), (AWAY,), (Answer(text="there is no node n1", refused=True), GONE, HERE, *[GONE] * 3)]
    code, orders = told("drain", "n1", lives=lives)
    assert (code, orders) == (0, [Drain(node="n1"), *[Drain(node="n1", only=(NONCE,))] * 2])
    assert capsys.readouterr().out.endswith("node n1 has left\n")


def test_an_order_that_was_lost_is_given_again(told):
    lives = [(TOLD, *[STATUS_BEFORE] * 4), (TOLD, HERE, *[GONE] * 3)]
    assert len(told("drain", "n1", lives=lives)[1]) == 2


def test_who_is_needed_is_named_once_that_is_known(told, capsys):
    needed = msgspec.structs.replace(HERE, needed=("0.1", "7.7"))
    assert told("drain", "n1", lives=[(TOLD, HERE, needed, ENDED)])[0] == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "node n1 has yet to be left by 0.0, 0.1",
        "node n1 has yet to be left by 0.0, 0.1; nobody else holds all layers of 0.1",
        "the job has ended: preempted; the newest checkpoint is of step 130",
    ]


def test_a_process_that_stays_without_workers_is_not_waited_for(told, capsys):
    assert told("drain", "n1", lives=[(TOLD, *[with_workers()] * 16)])[0] == 0
    assert "node n1 has no workers any more, and its process is still there" in capsys.readouterr().out


def test_what_is_refused_is_one_line(told, capsys):
    refusal = Answer(text="there is no node n9; nodes: n1,\nnode-2", refused=True)
    assert told("drain", "n9", lives=[(refusal,)])[0] == 2
    assert capsys.readouterr().err == "holdfast: h:7000: there is no node n9; nodes: n1, node-2\n"


@pytest.mark.parametrize(
    ("words", "order", "ended", "code"),
    [
        ((), Stop(), "preempted", 0),
        ((), Stop(), "preempted, no space left", 1),
        ((), Stop(), "lost, no living worker holds layer(s) 0", 1),
        (("--at-once",), Stop(at_once=True), "preempted, it was told to end at once", 0),
    ],
)
def test_a_job_is_stopped(told, capsys, words, order, ended, code):
    life = (Answer(text="it makes a checkpoint, and ends"), STATUS, msgspec.structs.replace(ENDED, ended=ended))
    assert told("stop", *words, lives=[life]) == (code, [order])
    assert capsys.readouterr().out.splitlines() == [
        "the job is told: it makes a checkpoint, and ends",
        f"the job has ended: {ended}; the newest checkpoint is of step 130",
    ]


def test_nothing_is_waited_for_if_it_is_to_be_so(told, capsys):
    assert told("stop", "--no-wait", lives=[(Answer(text="it ends"),)])[0] == 0
    assert capsys.readouterr().out == "the job is told: it ends\n"


def test_an_end_that_nobody_has_seen_is_no_success(told, capsys):
    assert told("stop", lives=[(Answer(text="it ends"), STATUS)])[0] == 1
    assert "it is gone: the job has ended, or its coordinators are gone" in capsys.readouterr().err


def test_nobody_to_tell_is_one_line(told, capsys):
    assert told("stop", lives=[(AWAY,)])[0] == 2
    assert capsys.readouterr().err.startswith("holdfast: coordinator at h:7000: unavailable: it is gone; expected")
