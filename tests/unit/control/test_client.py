"""The client over real gRPC, to a coordinator in a process of its own that is really killed and started again."""

import contextlib
import queue
import socket
import subprocess
import sys

import pytest
from tests.processes import NODE, process_of
from tests.waiting import LIMIT_S

from holdfast.control.client import ControlClient, _listening, _Outbox
from holdfast.control.messages import (
    Attached,
    Dormant,
    Ended,
    Exited,
    Failure,
    Fence,
    Finished,
    Gathered,
    Heartbeat,
    Hello,
    Install,
    Leaving,
    Progress,
    Resume,
    Save,
    Status,
    StepDone,
    Strike,
    Told,
    WorkerOffer,
    decode_message,
    unpack,
)
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(2, split_evenly(2, 1), 1)
A, B = PLAN.workers

SERVER = """
import asyncio, sys, time
from holdfast.control.coordinator import Coordinator, serve
from holdfast.control.membership import GridState, Membership, restore
from holdfast.control.chain.database import DatabaseChain
from holdfast.control.chain.leading import lead
from holdfast.schedule.builders import regular_plan
from holdfast.core.placement import split_evenly
from holdfast.telemetry.events import EventLog
from holdfast.recovery.rules import JobRules

folder, port = sys.argv[1], int(sys.argv[2])
chain = DatabaseChain(folder + "/control.db")
leading, stored = lead(chain, job="", by=16 * "a", alone=True, note=print)
plan = regular_plan(2, split_evenly(2, 1), 1)
state = Membership(grid=GridState(baseline=plan), rules=JobRules(steps=3, directory="out"))
if stored:
    state = restore(state, stored, reattach_until=time.monotonic() + 60)
log = EventLog(folder + "/events")
coordinator = Coordinator(membership=state, leading=leading, log=log, clock=time.monotonic, awake=time.monotonic)
tell = lambda port: print(port, flush=True)
asyncio.run(serve(coordinator, host="127.0.0.1", port=port, token=sys.argv[3], ready=tell))
"""


class Server:
    """A coordinator that can be killed and started again, on the same port and with the same store."""

    def __init__(self, folder, token="t"):
        self.folder, self.port, self.token = folder, 0, token
        self.start()

    def start(self):
        command = [sys.executable, "-c", SERVER, str(self.folder), str(self.port), self.token]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Peer:
    """A worker, or the agent, that says what the test lets it say."""

    def __init__(self, port, worker, reattach_s=20.0, hello=None, address=""):
        self.hello = hello or Hello(worker=worker, process=process_of(worker, 1))
        self.commands, self.closed = queue.SimpleQueue(), queue.SimpleQueue()
        self.client = ControlClient(
            address or f"127.0.0.1:{port}",
            "t",
            hello=lambda: self.hello,
            on_command=self.commands.put,
            on_closed=self.closed.put,
            reattach_s=reattach_s,
        )
        self.client.start()

    def expect(self, kind):
        command = self.commands.get(timeout=LIMIT_S)
        while isinstance(command, Gathered | Told):  # for the user
            command = self.commands.get(timeout=LIMIT_S)
        assert isinstance(command, kind), command
        return command


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def peers(server):
    made = []

    def make(worker, **options):
        made.append(Peer(server.port, worker, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.client.close(drain_s=0.1)


@pytest.fixture
def running(peers):
    agent, a, b = peers(None), peers(A), peers(B)
    for peer in (a, b):
        peer.expect(Attached)
        peer.expect(Install)
        layers = ((0, 0), (1, 0))
        peer.client.send(Status(worker=peer.hello.worker, generation=1, layer_steps=layers, executed=()))
    for peer in (a, b):
        peer.expect(Resume)
        peer.hello = Hello(
            worker=peer.hello.worker, process=process_of(peer.hello.worker, 1), generation=1, activity="running", step=1
        )
    return agent, a, b


def test_they_come_back_by_themselves_and_nobody_is_interrupted(server, running):
    agent, a, b = running
    server.kill()
    server.start()
    for peer in (a, b):
        assert peer.expect(Attached)
    a.client.send(StepDone(worker=A, generation=1, step=1, loss=0.5, omitted=False))
    assert agent.expect(Progress).step == 1
    assert a.commands.empty()
    assert b.commands.empty()


def test_what_was_said_while_it_was_away_is_heard_after_the_hello(server, running, peers):
    _, a, b = running
    server.kill()
    a.client.close()
    again = peers(A, hello=a.hello)
    again.client.send(Heartbeat(worker=A, generation=1, step=1, op=0))
    again.client.send(Finished(worker=A, generation=1, step=3))
    b.hello = Hello(worker=B, process=process_of(B, 1), generation=1, activity="finished", step=3)
    server.start()
    b.expect(Attached)
    assert b.expect(Save).step == 3


def test_a_death_that_the_agent_saw_meanwhile_is_handled(server, running):
    agent, a, b = running
    server.kill()
    agent.hello = Hello(
        worker=None, process=process_of(None, 1), exits=(Exited(worker=A, process=process_of(A, 1), status=-9),)
    )
    a.client.close(drain_s=0.1)
    server.start()
    assert agent.expect(Fence) == Fence(worker=A, process=process_of(A, 1))
    b.expect(Attached)
    install = b.expect(Install)
    assert (install.generation, install.plan.workers) == (2, (B,))


def test_last_words_are_heard_by_the_next_coordinator(server, running):
    agent, a, _ = running
    server.kill()
    a.client.close(
        drain_s=0.0, last_words=Failure(worker=A, process=process_of(A, 1), error="no such data", user_fault=True)
    )
    server.start()
    assert agent.expect(Ended).detail == "no such data"


def test_last_words_of_one_that_never_attached(server, peers):
    agent = peers(None)
    unborn = ControlClient(
        f"127.0.0.1:{server.port}",
        "t",
        hello=lambda: pytest.fail("it has nothing to say but its last words"),
        on_command=lambda command: None,
        on_closed=lambda error: None,
    )
    unborn.close(
        drain_s=LIMIT_S, last_words=Failure(worker=A, process=process_of(A, 1), error="bad shape", user_fault=False)
    )
    assert agent.expect(Ended).detail == "worker 0.0: bad shape"


def test_without_a_coordinator_it_gives_up_in_the_end(server, peers):
    peer = peers(A, reattach_s=0.5)
    peer.expect(Attached)
    server.kill()
    assert isinstance(peer.closed.get(timeout=LIMIT_S), CoordinatorUnavailable)
    server.start()


@pytest.mark.parametrize("first", [True, False])
def test_a_stranger_at_the_port_of_one_that_is_dead_does_not_end_it(server, tmp_path, first):
    """As where ports are free ones: another job's coordinator may be given it. Two that refuse are strangers both."""
    with contextlib.ExitStack() as stack:
        strangers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            strangers.append(Server(tmp_path / name, token="another"))
            stack.callback(strangers[-1].kill)
        where = [f"127.0.0.1:{each.port}" for each in ((strangers[0], server) if first else (server, strangers[0]))]
        peer = Peer(server.port, A, address=",".join(where))
        peer.expect(Attached)
        server.kill()
        server.start()
        peer.expect(Attached)
        peer.client.close()
        lost = Peer(server.port, A, address=",".join(f"127.0.0.1:{each.port}" for each in strangers))
        assert "wrong or missing job token" in str(lost.closed.get(timeout=LIMIT_S))


def test_closing_does_not_wait_for_one_that_is_away(server, peers):
    peer = peers(A)
    peer.expect(Attached)
    server.kill()
    peer.client.close(drain_s=100 * LIMIT_S)
    assert isinstance(peer.closed.get(timeout=LIMIT_S), CoordinatorUnavailable)
    server.start()


# What waits for the next stream.


def beat(step):
    return Heartbeat(worker=A, generation=1, step=step, op=0)


FINISHED = Finished(worker=A, generation=1, step=3)
IN_HELLO = [
    beat(1),
    Exited(worker=A, process=process_of(A, 1), status=-9),
    WorkerOffer(worker=None, node=NODE),
    Strike(worker=A, spec="kill-node:0@1"),
    Leaving(worker=A),
    Dormant(worker=A, dormant=True),
]


def parcel(stream):
    """What a stream carries next."""
    return [decode_message(each) for each in unpack(next(stream))]


@pytest.mark.parametrize("message", IN_HELLO, ids=lambda message: type(message).__name__)
def test_what_the_hello_says_is_not_sent_after_it(message):
    outbox, hello = _Outbox(), Hello(worker=None, process=process_of(None, 1))
    for each in (message, FINISHED, message):
        outbox.put(each)
    stream = outbox.open(lambda: hello)
    assert parcel(stream) == [hello]
    assert parcel(stream) == [FINISHED]


def test_what_is_queued_while_the_hello_is_made_is_in_the_next_hello_or_sent_after_it_not_both():
    outbox, offers = _Outbox(), []

    def hello():
        made = Hello(worker=None, process=process_of(None, 1), offers=tuple(offers))
        if not offers:  # it comes just too late for this hello
            offers.append(A)
            outbox.put(WorkerOffer(worker=A, node=NODE))
        return made

    stream = outbox.open(hello)
    outbox.put(WorkerOffer(worker=B, node=NODE))
    assert parcel(stream) == [Hello(worker=None, process=process_of(None, 1), offers=(A,))]
    assert parcel(stream) == [WorkerOffer(worker=B, node=NODE)]


def test_what_comes_after_the_hello_is_sent_and_the_stream_before_gets_nothing():
    outbox, hello = _Outbox(), Hello(worker=A, process=process_of(A, 1))
    before = outbox.open(lambda: hello)
    stream = outbox.open(lambda: hello)
    outbox.put(beat(2))
    assert [parcel(before), parcel(stream)] == [[hello], [hello]]
    assert next(before, None) is None
    assert parcel(stream) == [beat(2)]
    outbox.close()
    assert next(stream, None) is None


def test_time_in_which_we_were_stopped_is_not_held_against_the_coordinator():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        awake_s, closed = [0.0], queue.SimpleQueue()
        client = ControlClient(
            f"127.0.0.1:{free.getsockname()[1]}",
            "token",
            hello=lambda: Hello(worker=None, process=process_of(None, 1)),
            on_command=lambda command: None,
            on_closed=closed.put,
            reattach_s=0.2,
            clock=lambda: awake_s[0],
        )
        client.start()
        with pytest.raises(queue.Empty):
            closed.get(timeout=1.0)
        awake_s[0] = 0.3
        assert isinstance(closed.get(timeout=LIMIT_S), CoordinatorUnavailable)
        client.close()


def test_all_coordinators_that_accept_are_found_whatever_the_others_do(tmp_path):
    """One accepts by a name, one by a path; one refuses; one is silent, as its queue is full."""
    path = tmp_path / "door"
    with contextlib.ExitStack() as stack:
        here, silent, closed = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)) for _ in range(3)
        )
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        door.listen()
        ports = {each: each.getsockname()[1] for each in (here, silent, closed)}
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", ports[silent]))
        closed.close()
        asked = [f"127.0.0.1:{ports[each]}" for each in (silent, closed)]
        found = _listening([*asked, f"localhost:{ports[here]}", f"unix:{path}"])
    assert found == [f"localhost:{ports[here]}", f"unix:{path}"]
