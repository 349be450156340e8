"""The coordinator over real gRPC on loopback, with workers that speak the protocol by hand."""

import asyncio
import contextlib
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import grpc
import msgspec
import pytest
from tests.decisions import leading_in, newest_in, taken
from tests.processes import NODE, process_of
from tests.waiting import LIMIT_S, until

from holdfast.control import coordinator as coordinator_module
from holdfast.control.client import ControlClient, ask, watch
from holdfast.control.coordinator import BRIEF, METHOD, ORDER, RETRY_S, SERVICE, STATUS, Coordinator, serve
from holdfast.control.membership import Closed, GridState, Membership, Running, StoredDecision, Tick
from holdfast.control.messages import (
    Attached,
    Blob,
    Ended,
    Exited,
    Expel,
    Failure,
    Fence,
    Finished,
    Gathered,
    Heartbeat,
    Hello,
    Install,
    Joined,
    Leave,
    Leaving,
    NodeLost,
    Preempted,
    Progress,
    Pulse,
    Pulsed,
    Raised,
    Resume,
    Save,
    Saved,
    Shutdown,
    StandBy,
    StandingBy,
    Started,
    StartWorker,
    Status,
    StepDone,
    Strike,
    Told,
    WorkerOffer,
    decode_command,
    encode,
    pack,
    unpack,
)
from holdfast.control.orders import Answer, Drain, Stop
from holdfast.control.reach import Reach
from holdfast.control.status import JobStatus
from holdfast.control.token import TOKEN_KEY, share
from holdfast.core.excerpts import excerpts
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.core.work import WorkPhase
from holdfast.errors import ConfigError, CoordinatorUnavailable, NobodyLeads
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import (
    Agreed,
    ClockCompared,
    CoordinatorReady,
    Detected,
    EventLog,
    Installed,
    Notice,
    Rebuilt,
    read_events,
)

PLAN = regular_plan(2, split_evenly(2, 1), 1)
A, B = PLAN.workers
TOKEN = "a-token-of-a-test"
INVITATION = "an-invitation"
THERE = NodeId(name="there", nonce=16 * "b")
ANOTHER = 12 * "c"
"""A clock."""
LOST_B = Told(news=Detected(worker=str(B), how="process ended: signal 9", generation=1), decision=2)
GONE_B = Told(news=Detected(worker=str(B), how="its node there is gone", generation=1), decision=2)
RAISED = Raised(
    worker=B,
    process=process_of(B, 1),
    generation=1,
    step=0,
    phase=WorkPhase.FORWARD,
    kind="ValueError",
    error="it",
    layer=0,
)


def a_coordinator(leading, log, *, steps=1, clock=time.monotonic, awake=time.monotonic):
    """Of the plan above."""
    membership = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=steps, directory="out"))
    return Coordinator(membership=membership, leading=leading, log=log, clock=clock, awake=awake, job="small")


class Service:
    """A coordinator in a thread of its own; ``leads``: it stands by until this is set."""

    def __init__(self, folder, leads=None):
        self._leads = leads
        self.store = folder / "control.db"
        self.events = folder / "events.jsonl"
        self.error = None
        self._port = queue.SimpleQueue()
        self._loop = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self.port = self._port.get(timeout=LIMIT_S)
        self.address = f"127.0.0.1:{self.port}"

    def _main(self):
        leading, log = leading_in(self.store), EventLog(self.events)
        self.coordinator = a_coordinator(leading, log, steps=3)

        async def run():
            self._loop = asyncio.get_running_loop()
            known = {"ready": self._port.put, "brief": b"a brief", "invitation": INVITATION}
            what = self.coordinator if self._leads is None else self._wait_to_lead
            await serve(what, host="127.0.0.1", port=0, token=TOKEN, **known)

        asyncio.run(run())
        leading.chain.close()
        log.close()

    def _wait_to_lead(self):
        assert self._leads.wait(LIMIT_S)
        return self.coordinator

    def await_stream(self, worker):
        """Waits until a stream of this worker, or of the agent, is there."""
        here = self.coordinator._agents_here
        until(lambda: (worker, process_of(worker, 1)) in self.coordinator._queues if worker else here.is_set())

    def await_agents(self, number):
        """Waits until so many agents have a stream."""
        until(lambda: [*self.coordinator._agents.values()] == [True] * number)

    def standing(self):
        """The processes that have a stream."""
        away = {process for process, here in self.coordinator._agents.items() if not here}
        return {process for _, process in self.coordinator._queues} - away

    def await_tick(self):
        """Waits until time passes, which it does when this is over, and then not before a new TICK_S has."""
        looked = self.coordinator.decider._looked_at
        until(lambda: self.coordinator.decider._looked_at != looked)

    def join(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def end(self):
        """Ends whatever is still going."""
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self._loop.call_soon_threadsafe(self.coordinator._agents_here.set)  # else it is waited for
            self._loop.call_soon_threadsafe(self.coordinator._goodbye.set)
        self.join()


class Client:
    """A worker, or the agent, spoken by the test."""

    def __init__(self, address, worker, token=TOKEN, reattach_s=10.0, node=NODE, coordinators=()):
        self.worker = worker
        self._commands, self._shown = queue.SimpleQueue(), queue.SimpleQueue()
        self._closed = queue.SimpleQueue()
        process = replace(process_of(worker, 1), node=node)
        self.standing = Hello(worker=worker, process=process, coordinators=coordinators)
        self._client = ControlClient(
            address,
            token,
            hello=lambda: self.standing,
            on_command=self._on_command,
            on_closed=self._closed.put,
            reattach_s=reattach_s,
        )
        self._client.start()

    def _on_command(self, command):
        (self._shown if isinstance(command, Gathered | Told) else self._commands).put(command)

    def send(self, message):
        self._client.send(message)

    def expect(self, kind):
        """The next command; what is only for the user's eyes waits by itself."""
        command = (self._shown if issubclass(kind, Gathered | Told) else self._commands).get(timeout=LIMIT_S)
        assert isinstance(command, kind), command
        return command

    def news(self):
        """What it is told next for the user's eyes, besides who is awaited."""
        while isinstance(told := self._shown.get(timeout=LIMIT_S), Gathered):
            pass
        return told

    def got_nothing(self):
        return self._commands.empty()

    @property
    def addresses(self):
        return self._client.addresses

    @property
    def told(self):
        return self._client.told

    def closed(self):
        return self._closed.get(timeout=LIMIT_S)

    def close(self):
        self._client.close()


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path)
    yield made
    made.end()


@pytest.fixture
def connect(service):
    clients = []

    def make(worker, token=TOKEN, **more):
        clients.append(Client(service.address, worker, token, **more))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def status(worker, generation, step=0):
    return Status(worker=worker, generation=generation, layer_steps=((0, step), (1, step)), executed=())


def test_a_wrong_token_is_refused_and_nothing_is_answered(service, connect):
    client = connect(A, token="wrong")
    error = client.closed()
    assert isinstance(error, ConfigError)
    assert str(error) == f"coordinator at {service.address}: wrong or missing job token"
    assert client.got_nothing()
    assert service.coordinator.decider.membership.roster.processes == {}


def test_no_token_is_refused(service):
    with grpc.insecure_channel(service.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(
            iter([pack([encode(Hello(worker=A, process=process_of(A, 1)))])])
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.coordinator.decider.membership.roster.processes == {}


def test_nobody_there_is_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = Client(f"127.0.0.1:{free.getsockname()[1]}", A, reattach_s=0.3)
        assert isinstance(client.closed(), CoordinatorUnavailable)
        client.close()


def led(reach):
    with contextlib.suppress(NobodyLeads):
        return ask(STATUS, reach)


def test_who_stands_by_says_so_to_those_who_ask_how_the_job_is(tmp_path):
    leads = threading.Event()
    service = Service(tmp_path, leads)
    reach = Reach(addresses=service.address, token=INVITATION)
    try:
        with pytest.raises(NobodyLeads, match=f"coordinator at {service.address}: not the leader"):
            ask(STATUS, reach)
        assert ask(BRIEF, reach) == b"a brief"
        leads.set()
        until(partial(led, reach))
    finally:
        leads.set()
        service.end()


def test_a_whole_job(service, connect):
    agent, a, b = connect(None), connect(A), connect(B)
    for client in (a, b):
        client.expect(Attached)
        assert client.expect(Install) == Install(generation=1, plan=excerpts(PLAN, [client.worker])[client.worker])
        client.send(status(client.worker, 1))
    for client in (a, b):
        assert client.expect(Resume) == Resume(generation=1, step=0)
    blob = Blob(worker=A, generation=1, key="address", value=b"\x00\xff", to=(B,))
    a.send(blob)
    assert b.expect(Blob) == blob
    for client in (a, b):
        client.send(Joined(worker=client.worker, generation=1))
    a.send(StepDone(worker=A, generation=1, step=0, loss=0.5, omitted=False))
    assert agent.expect(Progress) == Progress(step=0, loss=0.5, omitted=False, alive=2, generation=1)
    for client in (a, b):
        client.send(Finished(worker=client.worker, generation=1, step=3))
    for client, layers in ((a, (0, 1)), (b, ())):
        assert client.expect(Save) == Save(generation=1, step=3, layers=layers, directory="out")
        client.send(Saved(worker=client.worker, generation=1, digests=((0, "x"), (1, "y"))))
    for client in (a, b):
        assert client.expect(Shutdown).reason == "done"
    assert agent.expect(Ended).outcome == "done"
    assert agent.closed() is None
    for client in (a, b):
        client.close()
    service.join()
    kinds = [type(event) for _, event in read_events(service.events)]
    assert kinds == [CoordinatorReady, Installed, Agreed, Rebuilt]


def attached(connect):
    agent, a, b = connect(None), connect(A), connect(B)
    for client in (a, b):
        client.expect(Attached)
        client.expect(Install)
        client.send(status(client.worker, 1))
        client.expect(Resume) if client is b else None
    a.expect(Resume)
    return agent, a, b


@pytest.mark.parametrize("worker", [A, None])
def test_a_stream_that_is_replaced_does_not_look_like_the_end_of_the_job(service, connect, worker):
    """Whoever sees it end in good order does not come again."""
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        told = queue.SimpleQueue()
        told.put(pack([encode(Hello(worker=worker, process=process_of(worker, 1)))]))
        call = attach(iter(told.get, None), metadata=((TOKEN_KEY, TOKEN),), timeout=LIMIT_S)
        service.await_stream(worker)
        newer = connect(worker)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "replaced by a newer connection"
        told.put(None)
    assert service.coordinator.decider.membership.roster.lost == frozenset()
    newer.close()
    assert newer.closed() is None, "one that goes by itself still ends in good order"


def test_a_closed_stream_is_a_lost_worker_and_the_decision_is_stored_first(service, connect):
    agent, a, b = attached(connect)
    a.close()
    assert agent.expect(Fence) == Fence(worker=A, process=process_of(A, 1))
    install = b.expect(Install)
    assert (install.generation, install.plan.workers) == (2, (B,))
    stored = newest_in(service.store)
    assert (stored.generation, stored.roster.lost) == (2, {A})
    assert excerpts(stored.running.plan, [B]) == {B: install.plan}
    agent.send(Exited(worker=A, process=process_of(A, 1), status=-9))
    b.send(status(B, 2))
    b.expect(Resume)
    assert agent.got_nothing()
    detected = [event for _, event in read_events(service.events) if isinstance(event, Detected)]
    assert detected == [Detected(worker="0.0", how="connection closed for 2 s", generation=1)]


KILLED = f"""
import sys, threading
from holdfast.control.client import ControlClient
from holdfast.control.messages import Hello
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
client = ControlClient(
    sys.argv[1],
    sys.argv[2],
    hello=lambda: Hello(worker={A!r}, process={process_of(A, 1)!r}),
    on_command=lambda command: print(type(command).__name__, flush=True),
    on_closed=lambda error: None,
)
client.start()
threading.Event().wait()
"""


def test_the_stream_of_a_killed_process_is_closed(service, connect):
    agent, b = connect(None), connect(B)
    command = [sys.executable, "-c", KILLED, service.address, TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert [process.stdout.readline().strip() for _ in range(2)] == ["Attached", "Install"]
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert agent.expect(Fence) == Fence(worker=A, process=process_of(A, 1))
    b.expect(Attached)
    b.expect(Install)
    assert b.expect(Install).generation == 2


@pytest.mark.parametrize("nonsense", [b"\xc1", b"\x01", pack([b"\x01"])], ids=["no msgpack", "no parcel", "no message"])
def test_a_worker_that_talks_nonsense_is_lost(service, connect, nonsense):
    """Unreadable messages end the stream, and what cannot be understood is no member."""
    agent, b = connect(None), connect(B)
    b.expect(Attached)
    outbox = queue.SimpleQueue()
    outbox.put(pack([encode(Hello(worker=A, process=process_of(A, 1)))]))
    with grpc.insecure_channel(service.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        answers = attach(iter(outbox.get, None), metadata=(("holdfast-token", TOKEN),))
        next(answers)
        outbox.put(nonsense)
        assert agent.expect(Fence) == Fence(worker=A, process=process_of(A, 1))
        outbox.put(None)


@pytest.mark.parametrize(
    "forged",
    [
        Exited(worker=B, process=process_of(B, 1), status=-9),
        Exited(worker=A, process=process_of(A, 1), status=-9),
        NodeLost(node=0, workers=(B,)),
        WorkerOffer(worker=None, node=NODE),
        Preempted(),
        Leaving(worker=B),
        Failure(worker=B, process=process_of(B, 1), error="no such data", user_fault=True),
        Failure(worker=A, process=process_of(A, 2), error="no such data", user_fault=True),
        Hello(worker=B, process=process_of(B, 1)),
        Hello(worker=None, process=process_of(None, 1)),
        Heartbeat(worker=B, generation=1, step=0, op=0),
        Hello(worker=A, process=process_of(A, 1), raised=RAISED),
        Hello(
            worker=A,
            process=process_of(A, 1),
            raised=msgspec.structs.replace(RAISED, worker=A, process=process_of(A, 2)),
        ),
        RAISED,
    ],
    ids=lambda message: f"{type(message).__name__}-{getattr(message, 'worker', '')}",
)
def test_who_speaks_for_somebody_else_is_not_heard(service, connect, forged):
    """Its connection ends, and nothing else happens."""
    agent, a, b = attached(connect)
    before = service.coordinator.decider.membership
    a.send(forged)
    assert a.closed() is None
    after = service.coordinator.decider.membership
    assert (after.roster.lost, after.roster.processes, after.phase) == (
        before.roster.lost,
        before.roster.processes,
        before.phase,
    )
    assert (after.roster.leaving, after.vacancies.offers, after.exceptions.raised) == (frozenset(), (), ())
    assert agent.got_nothing()
    assert b.got_nothing()
    text = f"worker 0.0 (process 7) sent a {type(forged).__name__} that is not its own: its connection ends"
    assert text in {event.text for _, event in read_events(service.events) if isinstance(event, Notice)}


def test_the_agent_does_not_speak_for_workers(service, connect):
    agent, a, b = attached(connect)
    agent.send(Leaving(worker=B))
    assert agent.closed() is None
    assert service.coordinator.decider.membership.roster.leaving == frozenset()
    assert b.got_nothing()
    assert a.got_nothing()


@pytest.mark.parametrize(
    "forged",
    [
        Exited(worker=A, process=process_of(A, 1), status=-9),
        Started(worker=A, process=process_of(A, 2)),
        WorkerOffer(worker=None, node=NODE),
        Hello(worker=None, process=process_of(None, 1)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_agent_does_not_speak_for_another_node(service, connect, forged):
    attached(connect)
    other = connect(None, node=THERE)
    other.send(forged)
    assert other.closed() is None
    state = service.coordinator.decider.membership
    assert (state.roster.lost, state.vacancies.offers, dict(state.vacancies.starting.since)) == (frozenset(), (), {})


def test_an_agent_that_comes_with_news_of_another_node_is_refused(service):
    exits = (Exited(worker=A, process=process_of(A, 1), status=-9),)
    first = Hello(worker=None, process=replace(process_of(None, 1), node=THERE), exits=exits)
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as caught:
            list(attach(iter([pack([encode(first)])]), metadata=((TOKEN_KEY, TOKEN),), timeout=LIMIT_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not service.coordinator._agents_here.is_set()


def test_each_agent_is_told_of_its_own_node_and_all_of_what_concerns_everybody(service, connect):
    agent, other, a, b = connect(None), connect(None, node=THERE), connect(A), connect(B, node=THERE)
    for client in (a, b):
        client.expect(Attached)
    service.await_agents(2)
    other.send(Exited(worker=B, process=replace(process_of(B, 1), node=THERE), status=-9))
    assert other.expect(Fence).worker == B
    a.send(status(A, 1))
    for each in (agent, other):
        assert each.news() == LOST_B
    assert agent.got_nothing()


@pytest.mark.parametrize("workers_first", [True, False])
def test_a_node_whose_connections_have_closed_is_gone_sooner_than_time_passes_otherwise(
    service, connect, monkeypatch, workers_first
):
    """And what waits for its agent is not told any more."""
    agent, other, a, b = connect(None), connect(None, node=THERE), connect(A), connect(B, node=THERE)
    for client in (a, b):
        client.expect(Attached)
    service.await_agents(2)
    monkeypatch.setattr(coordinator_module, "TICK_S", 10 * LIMIT_S)
    service.await_tick()
    first, second = (b, other) if workers_first else (other, b)
    first.close()
    until(lambda: first.standing.process not in service.standing())
    second.close()
    assert agent.news() == GONE_B
    assert set(service.coordinator._agents) == {agent.standing.process}


def test_an_agent_that_is_back_while_it_is_being_held_to_be_gone_is_here(service, connect, monkeypatch):
    """Its hello waits for that decision to be stored: it is none to be thrown out, nor to be believed to be gone."""
    agent, other, a, b = connect(None), connect(None, node=THERE), connect(A), connect(B, node=THERE)
    for client in (a, b):
        client.expect(Attached)
    service.await_agents(2)
    put, held, begun = service.coordinator._leading.put, threading.Event(), threading.Event()

    def slow(decision):
        begun.set()
        assert held.wait(LIMIT_S)
        return put(decision)

    monkeypatch.setattr(type(service.coordinator._leading), "put", lambda leading, decision: slow(decision))
    b.close()
    other.close()
    assert begun.wait(LIMIT_S)
    again = connect(None, node=THERE)
    service.await_agents(2)
    held.set()
    assert agent.news() == GONE_B
    until(lambda: not service.coordinator.decider.waits)
    assert service.coordinator.decider.membership.contact.here == tuple(sorted([NODE, THERE]))
    again.send(WorkerOffer(worker=B, node=THERE))
    while not isinstance(command := again.expect(object), StartWorker):
        assert isinstance(command, Fence)


def test_what_is_to_be_told_before_there_is_an_agent_waits_for_the_one_it_is_for(service, connect):
    a, b = connect(A), connect(B, node=THERE)
    for client in (a, b):
        client.expect(Attached)
    b.send(Strike(worker=B, spec="kill-node:1@0:start"))
    until(lambda: any(isinstance(tell.command, Strike) for tell in service.coordinator._early))
    agent = connect(None)
    service.await_agents(1)
    assert connect(None, node=THERE).expect(Strike).worker == B
    assert agent.got_nothing()


def test_what_an_agent_is_to_be_told_waits_while_it_is_away(service, connect):
    agent, a, b = connect(None), connect(A), connect(B)
    for client in (a, b):
        client.expect(Attached)
    agent.close()
    until(lambda: not service.coordinator._agents_here.is_set())
    b.close()
    a.send(StepDone(worker=A, generation=1, step=0, loss=0.5, omitted=False))
    again = connect(None)
    assert again.expect(Progress).step == 0


def test_a_first_message_for_two_is_refused(service):
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        parcel = pack(
            [
                encode(Hello(worker=A, process=process_of(A, 1))),
                encode(Exited(worker=B, process=process_of(B, 1), status=-9)),
            ]
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(attach(iter([parcel]), metadata=((TOKEN_KEY, TOKEN),), timeout=LIMIT_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert service.coordinator.decider.membership.roster.processes == {}


def test_who_is_expelled_is_not_heard_any_more(service, connect):
    """Its stream ends, whether it leaves or not."""
    _agent, _a, b = attached(connect)
    told = queue.SimpleQueue()
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        told.put(pack([encode(Hello(worker=A, process=process_of(A, 666)))]))  # another process has its place
        call = attach(iter(told.get, None), metadata=((TOKEN_KEY, TOKEN),), timeout=LIMIT_S)
        commands = [decode_command(each) for parcel in call for each in unpack(parcel)]
        assert [type(command) for command in commands] == [Expel]
        assert call.code() is grpc.StatusCode.OK, "the stream has ended, in good order"
        told.put(None)
    assert b.got_nothing()


@pytest.mark.parametrize("worker", [None, B], ids=["the agent", "another worker"])
def test_the_share_of_one_worker_is_good_for_no_other_name(service, worker):
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        parcel = pack([encode(Hello(worker=worker, process=process_of(worker, 1)))])
        with pytest.raises(grpc.RpcError) as caught:
            list(attach(iter([parcel]), metadata=((TOKEN_KEY, share(TOKEN, str(A))),), timeout=LIMIT_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert service.coordinator.decider.membership.roster.processes == {}
    assert not service.coordinator._agents_here.is_set()


def test_with_its_own_share_a_worker_is_let_in(service, connect):
    connect(A, token=share(TOKEN, str(A))).expect(Attached)


@pytest.mark.parametrize(
    "token", [share("another", str(A)), f"{A}:", str(A), share(TOKEN, str(A)).upper(), f"{B}:{'0' * 64}"]
)
def test_a_share_that_was_made_up_is_refused(service, connect, token):
    assert isinstance(connect(A, token=token).closed(), ConfigError)


SEND = """
import sys, grpc
from holdfast.control.coordinator import METHOD, SERVICE
from holdfast.control.token import TOKEN_KEY
with grpc.insecure_channel(sys.argv[1], options=[("grpc.max_send_message_length", -1)]) as channel:
    attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    try:
        list(attach(iter([bytes(int(sys.argv[3]))]), metadata=((TOKEN_KEY, sys.argv[2]),), timeout=30))
    except grpc.RpcError as error:
        print(error.code().name)
"""


@pytest.mark.parametrize(("token", "code"), [(TOKEN, "RESOURCE_EXHAUSTED"), ("wrong", "UNAUTHENTICATED")])
def test_a_parcel_beyond_the_limit_ends_its_stream_and_is_never_held(service, token, code):
    before, size = memory(), 300 << 20
    command = [sys.executable, "-c", SEND, service.address, token, str(size)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == code
    assert memory() - before < size // 10


def memory():
    """Bytes that this process, and so the coordinator in it, has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_one_connection_has_four_calls_at_a_time(service, monkeypatch, has_four_calls):
    monkeypatch.setattr(coordinator_module, "FIRST_S", 10 * LIMIT_S)
    with grpc.insecure_channel(service.address) as channel:
        has_four_calls(channel, f"/{SERVICE}/{METHOD}", ((TOKEN_KEY, TOKEN),))


def test_who_does_not_say_who_it_is_is_sent_away_and_told_why(service, monkeypatch):
    monkeypatch.setattr(coordinator_module, "FIRST_S", 0.2)
    never = threading.Event()
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        call = attach(iter(never.wait, True), metadata=((TOKEN_KEY, TOKEN),), timeout=LIMIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "nothing was said within 0.2 s"
        never.set()


def test_an_agent_that_comes_late_still_hears_how_the_job_ended(service, connect):
    """The job has ended before the agent's call arrives: a worker that fails at once can be that fast."""
    a = connect(A)
    a.expect(Attached)
    a.send(Failure(worker=A, process=process_of(A, 1), error="no such data", user_fault=True))
    a.expect(Shutdown)
    assert connect(None).expect(Ended).detail == "no such data"


def test_a_bug_of_ours_ends_the_job_instead_of_leaving_it_waiting(service, connect):
    agent, a, b = connect(None), connect(A), connect(B)
    for client in (a, b):
        client.expect(Attached)
        client.expect(Install)
    a.send(status(A, 1, step=0))
    b.send(status(B, 1, step=5))
    assert agent.expect(Ended).outcome == "error"


def test_everything_is_timed_by_the_clock_that_stands_still_with_us_and_logged_by_the_other(tmp_path):
    leading, log = leading_in(tmp_path / "control.db"), EventLog(tmp_path / "events.jsonl")
    coordinator = a_coordinator(leading, log, clock=lambda: 1000.0, awake=lambda: 7.0)
    events = (
        Hello(worker=A, process=process_of(A, 1)),
        Hello(worker=B, process=process_of(B, 1)),
        Closed(worker=A, process=process_of(A, 1)),
        Tick(gap_s=5.0),
    )
    asyncio.run(taken(coordinator, *events))
    assert (coordinator.decider.membership.contact.detached, coordinator.decider.membership.watch.now) == (
        {A: 7.0},
        7.0,
    )
    assert {at for at, _ in read_events(tmp_path / "events.jsonl")} == {1000.0}
    leading.chain.close()
    log.close()


def test_a_port_in_use_is_named(tmp_path):
    coordinator = a_coordinator(None, EventLog(tmp_path / "events.jsonl"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"control\.port: cannot listen on 127\.0\.0\.1:{port}"):
            asyncio.run(serve(coordinator, host="127.0.0.1", port=port, token=TOKEN, ready=pytest.fail))
    coordinator.decider.log.close()


def test_a_socket_that_cannot_be_listened_on_is_named(tmp_path):
    coordinator = a_coordinator(None, EventLog(tmp_path / "events.jsonl"))
    path = f"unix:{tmp_path}/{'long' * 40}"
    with pytest.raises(ConfigError) as caught:
        asyncio.run(serve(coordinator, host="127.0.0.1", port=0, token=TOKEN, ready=pytest.fail, also=path))
    assert str(caught.value) == f"cannot listen on {path}: its folder cannot be used, or its name is too long"
    coordinator.decider.log.close()


def test_what_waits_for_the_store_is_told_and_whether_training_does_too(tmp_path, make_disk):
    """First it is told that one leaves, which holds nobody up; then one dies, and all wait for the answer to that."""
    disk = make_disk("256k")
    leading, log = leading_in(disk / "control.db"), EventLog(tmp_path / "events.jsonl")
    coordinator = a_coordinator(leading, log, steps=9)
    decider, filler = coordinator.decider, disk / "filler"
    statuses = [Status(worker=w, generation=1, layer_steps=((0, 0), (1, 0)), executed=()) for w in (A, B)]
    joined = [Joined(worker=w, generation=1) for w in (A, B)]

    async def said():
        while decider.remarks.empty():
            await asyncio.sleep(0.001)
        return decider.remarks.get_nowait()

    async def run():
        hellos = [Hello(worker=w, process=process_of(w, 1)) for w in (A, B)]
        await taken(coordinator, *hellos, *statuses, *joined)
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * (1 << 18))
        more = StoredDecision(revision=1, generation=1, grid=GridState(baseline=PLAN), running=Running(plan=PLAN))
        while not leading.put(more).away:  # its last page has room yet
            pass
        decider.take([Leaving(worker=A)])
        kind, text = await said()
        assert kind == "store"
        assert text.endswith(
            "control.db: database or disk is full; decisions wait until it can be written, training goes on"
        )
        decider.take([Exited(worker=B, process=process_of(B, 1), status=-9)])
        kind, text = await said()
        assert kind == "store-all", "told although another line was"
        assert text.endswith(
            f"full; the answer to the loss of {B} waits until it can be written: training stands still"
        )
        await asyncio.sleep(3 * RETRY_S)
        assert (decider.membership.generation, decider.remarks.empty()) == (1, True), "it is told once"
        filler.unlink()
        await taken(coordinator)
        assert (decider.membership.roster.lost, decider.membership.generation > 1) == ({B}, True)

    async def in_time():
        async with asyncio.timeout(LIMIT_S):
            await run()

    asyncio.run(in_time())
    leading.chain.close()
    log.close()


def test_the_agent_is_told_who_is_awaited_and_who_is_lost(service, connect):
    agent, a = connect(None), connect(A)
    assert agent.expect(Gathered) == Gathered(missing=(B,), of=2, unplaced=1)
    b = connect(B)
    assert agent.expect(Gathered) == Gathered(missing=(), of=2)
    for client in (a, b):
        client.expect(Attached)
    agent.send(Exited(worker=B, process=process_of(B, 1), status=-9))
    assert agent.expect(Told).news == Detected(worker=str(B), how="process ended: signal 9", generation=1)


def test_an_agent_is_told_what_the_job_is_before_it_takes_part(service):
    """By what people were given; not whoever has the token of this attempt, or a share of either."""
    assert ask(BRIEF, Reach(addresses=service.address, token=INVITATION)) == b"a brief"
    assert ask(BRIEF, Reach(addresses=f"127.0.0.1:1,{service.address}", token=INVITATION)) == b"a brief"
    for token in ("wrong", TOKEN, share(TOKEN, str(A)), share(INVITATION, str(A)), ""):
        with pytest.raises(ConfigError, match="wrong or missing job token"):
            ask(BRIEF, Reach(addresses=service.address, token=token))
    with pytest.raises(CoordinatorUnavailable, match="nobody listens there"):
        ask(BRIEF, Reach(addresses="127.0.0.1:1", token=INVITATION))
    with pytest.raises(CoordinatorUnavailable, match="another job listens there by now"):
        ask(BRIEF, Reach(addresses=service.address, token="wrong", read=True))


def test_whoever_has_the_jobs_token_is_told_how_the_job_is(service, connect):
    """It is what people were given; no worker's share of the token of this attempt will do."""
    connect(None)
    for client in [connect(A), connect(B)]:
        client.expect(Attached)
    status = msgspec.json.decode(ask(STATUS, Reach(addresses=service.address, token=INVITATION)), type=JobStatus)
    assert (status.job, status.phase, status.steps, status.workers) == ("small", "forming", 3, 2)
    assert [(node.name, node.workers) for node in status.nodes] == [(NODE.name, ("0.0", "1.0"))]
    for token in ("wrong", TOKEN, share(TOKEN, str(A))):
        with pytest.raises(ConfigError, match="wrong or missing job token"):
            ask(STATUS, Reach(addresses=service.address, token=token))


def test_whoever_has_the_jobs_token_may_say_what_is_to_become_of_it(service, connect):
    agent = connect(None)
    for client in [connect(A), connect(B)]:
        client.expect(Attached)
    reach = Reach(addresses=service.address, token=INVITATION)

    def told(order):
        return msgspec.json.decode(ask(ORDER, reach, msgspec.msgpack.encode(order)), type=Answer)

    assert told(Drain(node="nowhere")) == Answer(text=f"there is no node nowhere; nodes: {NODE.name}", refused=True)
    assert told(Drain(node=NODE.name)).text == f"node {NODE.name} is told that its workers are to leave: 0.0, 1.0"
    assert agent.expect(Leave) == Leave()
    with pytest.raises(CoordinatorUnavailable, match="invalid_argument: no order"):
        ask(ORDER, reach, b"nonsense")
    with pytest.raises(ConfigError, match="wrong or missing job token"):
        ask(ORDER, Reach(addresses=service.address, token=TOKEN), msgspec.msgpack.encode(Stop(at_once=True)))
    assert told(Stop(at_once=True)).text == "it ends at once"
    assert agent.expect(Ended).detail == "it was told to end at once"


def test_whoever_watches_is_told_again_and_again_and_sees_the_end(service, connect):
    agent, a = connect(None), connect(A)
    a.expect(Attached)
    watching = watch(Reach(addresses=service.address, token=INVITATION))
    phases = [msgspec.json.decode(next(watching), type=JobStatus).phase for _ in range(2)]
    assert phases == ["gathering"] * 2
    a.send(Failure(worker=A, process=process_of(A, 1), error="it", traceback="", user_fault=True))
    assert agent.expect(Ended).outcome == "user-error"
    assert [msgspec.json.decode(each, type=JobStatus).phase for each in watching][-1] == "ended"


def test_agents_are_sent_something_as_long_as_they_are_here(service, connect):
    """Its host acknowledges that, or is known to be gone; a worker is not. What time it is there goes into the log."""
    says = queue.SimpleQueue()
    with grpc.insecure_channel(service.address) as channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        heard = attach(iter(says.get, None), metadata=((TOKEN_KEY, TOKEN),))
        agent = process_of(None, 1)
        says.put(pack([encode(Hello(worker=None, process=agent))]))
        pulses = (command for parcel in heard for command in map(decode_command, unpack(parcel)))
        for ahead_s in (math.nan, 3600.0):
            sent_s = next(pulses).sent_s
            says.put(pack([encode(Pulsed(process=agent, clock=ANOTHER, sent_s=sent_s, now_s=sent_s + ahead_s))]))
        assert isinstance(next(pulses), Pulse)
        says.put(pack([encode(Pulsed(process=process_of(None, 2), clock=12 * "d", sent_s=sent_s, now_s=sent_s))]))
        assert all(isinstance(command, Pulse) for command in pulses), "it ends: who speaks for another is sent away"
    assert connect(A).expect(Attached)
    ((at, compared),) = [line for line in read_events(service.events) if isinstance(line[1], ClockCompared)]
    assert (compared.mine, compared.other) == (this_clock(), ANOTHER)
    assert at + compared.ahead_s == pytest.approx(sent_s + 3600.0)
    assert 0 < compared.within_s < LIMIT_S


def test_an_agent_is_asked_for_a_coordinator_and_all_are_told_where_it_is(service, connect):
    """Whoever attaches later, too; of one that is gone nobody is told any more, and another agent is asked."""
    service.coordinator._standbys.wanted = 2
    head, other, third = (NodeId(name=name, nonce=16 * name) for name in "def")
    first = connect(None, node=head, coordinators=(service.address,))
    a = connect(A)
    second = connect(None, node=other)
    second.expect(StandBy)
    second.send(StandingBy(process=second.standing.process, address="127.0.0.2:7000"))
    b = connect(B)
    both = f"{service.address},127.0.0.2:7000"
    until(lambda: {each.addresses for each in (first, second, a, b)} == {both})
    late = connect(None, node=third)
    second.close()
    late.expect(StandBy)
    until(lambda: (a.addresses, first.told) == (service.address, (service.address,)))
