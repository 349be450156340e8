"""The coordinator: a gRPC service around :func:`holdfast.control.membership.decide`.

It is not on the path of a healthy step. One method, ``Attach``, is a stream in both directions per worker and agent;
messages are msgpack-encoded typed values (see messages.py). ``Brief`` says what the agent of another machine must know
before it can take part, ``Status`` how the job is, ``Order`` is what people want of it. Every call must carry the
job's token.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import msgspec

from holdfast.control.advice import Adviser
from holdfast.control.chain.leading import Leading
from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.comparing import Comparing
from holdfast.control.decider import Decider, Happening, Remarks
from holdfast.control.doorkeeper import TokenCheck, bounded
from holdfast.control.membership import (
    Closed,
    Membership,
    Output,
    StoredDecision,
    Tell,
    Unadvised,
    plan_recovery,
)
from holdfast.control.messages import (
    LONGEST_PARCEL,
    Command,
    Ended,
    Expel,
    Failure,
    Hello,
    Install,
    Message,
    NodeLeaving,
    Pulse,
    Pulsed,
    StandBy,
    StandingBy,
    decode_message,
    encode,
    may_say,
    pack,
    unpack,
)
from holdfast.control.orders import Answer, Order, consider, decode_order
from holdfast.control.peer_directory import PeerDirectory
from holdfast.control.standbys import Standbys
from holdfast.control.status import JobStatus, Lately, status_of
from holdfast.control.tls import nodes_of
from holdfast.control.token import bearer
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.errors import ConfigError, HoldfastError
from holdfast.recovery.actions import RecoveryPlan
from holdfast.storage.checkpoints import Checkpoints, Facts
from holdfast.telemetry.clocks import this_clock
from holdfast.telemetry.events import CoordinatorReady, Event, Log

__all__ = ["BRIEF", "METHOD", "NO_LEADER", "ORDER", "SERVICE", "STATUS", "Committer", "Coordinator", "serve"]

SERVICE = "holdfast.Control"
METHOD, BRIEF, STATUS, ORDER = "Attach", "Brief", "Status", "Order"
NO_LEADER = "not the leader"
"""What those say who stand by."""
TICK_S = 0.2
STATUS_S = 1.0
"""Between two times that whoever watches is told how the job is."""
RETRY_S = 0.1
"""Between two tries to store a decision."""
DRAIN_S = 1.0
AGENT_S = 5.0
FIRST_S = 10.0
"""How long a peer may take to say who it is."""
_NO_HELLO = "the first message must be Hello or Failure"
_STREAMS = 4
_SILENCE = 0.8
"""The part of the time in which a silent host is to be noticed that the kernel waits (TCP_USER_TIMEOUT)."""
_NEVER_MS = 2**31 - 2
"""For keepalive: one more switches it off, and with it how long a host may be silent."""
_OPTIONS = [
    *bounded(streams=_STREAMS, receive_bytes=LONGEST_PARCEL, send_bytes=-1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # clients ping, see client.py: that is no attack
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", _NEVER_MS),
]


class _End(enum.Enum):
    """Why a stream ends."""

    DONE = enum.auto()
    REPLACED = enum.auto()


_Queue = asyncio.Queue[Command | _End]
_Peer = tuple[WorkerId | None, Process | None]
"""A worker, or an agent (None), and its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """Writes the manifests of a job's checkpoints.

    Attributes:
        checkpoints: where to.
        facts: what every manifest says of the job.
    """

    checkpoints: Checkpoints
    facts: Facts

    def commit(self, commit: WriteManifest) -> Settled:
        """Writes one manifest and returns how that went; never raises because of the store."""
        try:
            best = commit.best[-1] if commit.best else None
            self.checkpoints.commit(commit.step, commit.shards, self.facts, best)
        except HoldfastError as error:
            return Settled(step=commit.step, url=self.checkpoints.url, error=str(error))
        try:
            self.checkpoints.tidy(commit.step, {each.step for each in commit.best})
        except HoldfastError as error:
            return Settled(step=commit.step, url=self.checkpoints.url, untidy=str(error))
        return Settled(step=commit.step, url=self.checkpoints.url)


class Coordinator:
    """Lets workers and the agent speak with a decider.

    Args:
        membership: the state so far.
        recorded: the events that the decision in force is told by.
        leading: where decisions go before they are sent; None if that cannot be used, and nothing is to be stored.
        log: where events go.
        clock: seconds, monotonic; of the log.
        awake: seconds that this process has run; by them everybody is judged.
        committer: writes the manifests of checkpoints.
        advisers: who may know of better plans than those made at once.
        remarks: passed on to the agent; None: nobody makes any.
        directory: tells workers of each other; None: they find each other without us.
        standbys: which other coordinators there are, and are to be.
        job: its name, for people.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        recorded: tuple[Event, ...] = (),
        leading: Leading | None,
        log: Log,
        clock: Callable[[], float],
        awake: Callable[[], float],
        committer: Committer | None = None,
        advisers: tuple[Adviser, ...] = (),
        remarks: Remarks | None = None,
        directory: PeerDirectory | None = None,
        standbys: Standbys | None = None,
        job: str = "",
    ) -> None:
        self.decider = Decider(
            membership=membership,
            log=log,
            clock=clock,
            awake=awake,
            outside=self,
            remarks=Remarks() if remarks is None else remarks,
        )
        self._recorded = recorded
        self._leading = leading
        self._began_at = membership.generation
        self._committer = committer
        self._advisers = advisers
        self._directory = directory
        self._standbys = Standbys(1) if standbys is None else standbys
        self._comparing = Comparing(this_clock())
        self._job = job
        self._lately = Lately()
        self._queues: dict[_Peer, _Queue] = {}
        self._agents: dict[Process, bool] = {}
        """Those that have attached, and whether they have a stream now."""
        self._early: list[Tell] = []
        """What agents are to be told, from before there has been any."""
        self._agents_here = asyncio.Event()
        self._looking: asyncio.TimerHandle | None = None
        self._goodbye = asyncio.Event()
        self._dying: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing = asyncio.Lock()
        self._planning: asyncio.Task[None] | None = None

    def send(self, outputs: Sequence[Output]) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        self._lately.told(outputs, self.decider.awake())
        for output in outputs:
            if isinstance(output, Tell):
                if isinstance(output.command, Install):
                    self._introduce(output)
                if output.to is None and not self._agents:
                    self._early.append(output)
                for peer in self._peers_of(output):
                    self._tell(peer, output.command)
            elif isinstance(output, WriteManifest):
                self._begin(self._commit(output))

    def store(self, decision: StoredDecision) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        self._begin(self._store(decision))

    async def _store(self, decision: StoredDecision) -> None:
        """Puts a decision in a thread, since a store may take its time; again and again while that is away."""
        assert self._leading is not None, "only what follows upon a known past is stored"
        stored = await asyncio.to_thread(self._leading.put, decision)
        while stored.away and self.decider.waits:
            self._take([stored])
            await asyncio.sleep(RETRY_S)
            stored = await asyncio.to_thread(self._leading.put, decision)
        self._take([stored])

    def _introduce(self, output: Tell) -> None:
        """Tells a worker of those it will meet, before it is told where."""
        if self._directory is None or output.to is None:
            return
        if (meet := self._directory.news_for(output.to, self.decider.membership.roster.processes)) is not None:
            for peer in self._peers_of(output):
                self._tell(peer, meet)

    def send_last(self, outputs: Sequence[Output], die: Callable[[], None]) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        peers = [peer for output in outputs if isinstance(output, Tell) for peer in self._peers_of(output)]
        self.send(outputs)
        queues = [self._queues[peer] for peer in peers if peer in self._queues]
        self._dying = asyncio.get_running_loop().create_task(self._die_when_sent(queues, die))

    async def _die_when_sent(self, queues: Sequence[_Queue], die: Callable[[], None]) -> None:
        with contextlib.suppress(TimeoutError):  # a worker may have died meanwhile
            await asyncio.wait_for(asyncio.gather(*(queue.join() for queue in queues)), DRAIN_S)
        die()

    def _peers_of(self, tell: Tell) -> Sequence[_Peer]:
        """Whoever is to be told, of those that have attached."""
        if tell.to is not None:
            return [(tell.to, tell.process or self.decider.membership.roster.processes.get(tell.to))]
        return [(None, process) for process in self._agents if _is_for(tell, process)]

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, commit: WriteManifest) -> None:
        """Writes a manifest in a thread, since a store may take its time; one after another, in order."""
        assert self._committer is not None
        async with self._committing:
            self._take([await asyncio.to_thread(self._committer.commit, commit)])

    async def begin(self) -> None:
        """Tells and writes what the coordinator before us was to tell and to write, before anybody is heard."""
        self.decider.tell_again(self._recorded)
        self._lately = Lately()  # whoever was lost then was not lost now
        for commit in self.decider.membership.unsettled:
            await self._commit(commit)

    def _tell(self, to: _Peer, command: Command) -> None:
        queue = self._queues.get(to)
        if queue is None:
            return
        if isinstance(command, Ended):
            command = msgspec.structs.replace(command, leader=self.decider.membership.contact.home)
        queue.put_nowait(command)
        if isinstance(command, Ended | Expel):
            queue.put_nowait(_End.DONE)
        if isinstance(command, Expel):
            del self._queues[to]  # what it still says is not heard

    def _queue_of(self, peer: _Peer) -> _Queue:
        """The queue of a new stream; the stream before it, if it still stands, ends.

        While an agent is away, what it is to be told waits for it.
        """
        worker, process = peer
        before = self._queues.get(peer)
        if worker is None and process is not None:
            back, self._agents[process] = self._agents.get(process) is False, True
            self._know_agents()
            if back and before is not None:
                return before
        if before is not None:
            before.put_nowait(_End.REPLACED)
        queue = self._queues[peer] = asyncio.Queue()
        if worker is None and process is not None:
            for tell in self._early:
                if _is_for(tell, process):
                    queue.put_nowait(tell.command)
            self._early = [tell for tell in self._early if not _is_for(tell, process)]
        return queue

    def _forget_agents(self) -> None:
        """Nothing waits any more for agents that are held to be gone; one that is back meanwhile has a stream."""
        if self._agents_here.is_set() or self.decider.waits:
            return
        known = self.decider.membership.contact.agents
        for process in [each for each, here in self._agents.items() if not here and each.node not in known]:
            del self._agents[process], self._queues[None, process]
        self._know_agents()
        self._standbys.only(self._agents)

    def _know_agents(self) -> None:
        """Notes whether all agents that have attached have a stream, if there are any."""
        if self._agents and all(self._agents.values()):
            self._agents_here.set()
        else:
            self._agents_here.clear()

    async def attach(
        self,
        request: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
        name: str = "",
        nodes: frozenset[str] = frozenset(),
    ) -> AsyncIterator[bytes]:
        """Serves one worker or agent until either end closes.

        Args:
            request: what it sends.
            context: of the call.
            name: of the worker that it may be; "": any, or an agent.
            nodes: on which of them it may be; none: on any.
        """
        first, why = await _first_parcel(request)
        if not first or not isinstance(first[0], Hello | Failure):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        hello = first[0]
        assert isinstance(hello, Hello | Failure)
        peer: _Peer = (hello.worker, hello.process)
        if (
            (name and str(hello.worker) != name)
            or not self._is_there(hello.process.node, nodes)
            or not self._all_its_own(peer, first)
        ):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "it speaks for somebody else")
        queue = self._queue_of(peer)
        if self._directory is not None and isinstance(hello, Hello):
            self._directory.heard(hello)
        if self._standbys.at.addresses:
            queue.put_nowait(self._standbys.at)
        self._hear(first)
        reader = asyncio.create_task(self._read(request, peer, queue))
        try:
            end: _End | None = None
            while end is None:
                waiting = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                end = next((each for each in waiting if isinstance(each, _End)), None)
                if commands := [encode(each) for each in waiting if not isinstance(each, _End)]:
                    yield pack(commands)
                for _ in waiting:
                    queue.task_done()
            if end is _End.REPLACED:  # an end in good order would mean that the job is over
                await context.abort(grpc.StatusCode.UNAVAILABLE, "replaced by a newer connection")
        finally:
            reader.cancel()

    async def _read(self, request: AsyncIterator[bytes], peer: _Peer, queue: _Queue) -> None:
        """Takes what one peer sends, until it closes or says what cannot be read."""
        try:
            async for data in request:
                messages = [decode_message(each) for each in unpack(data)]
                if self._queues.get(peer) is not queue or not self._all_its_own(peer, messages):
                    return
                self._hear(messages)
        except (grpc.RpcError, grpc.aio.UsageError, msgspec.ValidationError, msgspec.DecodeError):
            pass
        finally:  # also when gRPC ends the call from its side
            queue.put_nowait(_End.DONE)
            if self._queues.get(peer) is queue:  # no newer stream
                self._on_gone(peer)

    def _hear(self, messages: Sequence[Message]) -> None:
        for each in messages:
            match each:
                case StandingBy() | Hello(worker=None):
                    self._standbys.heard(each)
                    self._tell_where()
                case Pulsed() if (told := self._comparing.heard(each, self.decider.clock())) is not None:
                    self.decider.log.write(*told)
        self._lately.heard(messages, self.decider.awake())
        self._take([each for each in messages if not isinstance(each, StandingBy | Pulsed)])
        if any(isinstance(each, NodeLeaving) for each in messages):  # before its workers have left
            self._keep_standbys()

    def _tell_where(self) -> None:
        """Tells everybody where all coordinators are, once all agents have said where theirs are."""
        if self._all_back() and (news := self._standbys.news()) is not None:
            for queue in self._queues.values():
                queue.put_nowait(news)

    def _is_there(self, node: NodeId, nodes: frozenset[str]) -> bool:
        """Whether somebody who may be on these nodes alone is on one of them, and goes by no other node's nonce."""
        if not nodes:
            return True
        membership = self.decider.membership
        known = {each.node for each in (*self._agents, *membership.roster.processes.values())}
        others = any(each.shares_agent(node) and each != node for each in (*known, *membership.contact.agents))
        if others or node.name not in nodes:
            self.decider.note(f"somebody with the certificate of {', '.join(sorted(nodes))} spoke for {node}: refused")
            return False
        return True

    def _all_its_own(self, peer: _Peer, messages: Sequence[Message]) -> bool:
        """Whether a peer speaks for nobody but itself; says so in the log if not."""
        foreign = next((each for each in messages if not may_say(*peer, each)), None)
        if foreign is not None:
            who = "an agent" if peer[0] is None else f"worker {peer[0]} (process {peer[1]})"
            self.decider.note(f"{who} sent a {type(foreign).__name__} that is not its own: its connection ends")
        return foreign is None

    def _on_gone(self, peer: _Peer) -> None:
        worker, process = peer
        if worker is None and process is not None:
            self._queues[peer], self._agents[process] = asyncio.Queue(), False
            self._know_agents()
        else:
            del self._queues[peer]
        self._take([Closed(worker=worker, process=process)])

    def _take(self, events: Sequence[Happening]) -> None:
        self.decider.take(events)
        self._part_if_over()
        self._forget_agents()

    def _part_if_over(self) -> None:
        if self.decider.over:
            self._goodbye.set()

    def look_at(self, awake_s: float | None) -> None:
        """See :class:`holdfast.control.decider.Outside`."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if awake_s is not None:
            after_s = max(0.0, awake_s - self.decider.awake())
            self._looking = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        self.decider.pass_time()
        self._part_if_over()
        self._forget_agents()

    @property
    def status(self) -> JobStatus:
        """How the job is."""
        return status_of(self._job, self.decider.membership, self._lately, self.decider.awake())

    def obey(self, order: Order) -> Answer:
        """Does what people want of the job, if that can be; returns what is said to them."""
        answer, event, told = consider(order, self.decider.membership)
        self.send(told)
        if event is not None:
            self._take([event])
        return answer

    @property
    def _node(self) -> str:
        """The name of the node where we run; "" if nobody else could lead."""
        contact = self.decider.membership.contact
        return contact.home.name if contact.home is not None and contact.others_lead else ""

    async def goes_on(self, limit_s: float) -> bool:
        """Waits for so long, or until there is nothing left to decide; returns whether there is."""
        await _set_within(self._goodbye, limit_s)
        return not self._goodbye.is_set()

    async def run(self) -> bool:
        """Lets time pass until the job has ended and everyone was told; returns False if another one leads now.

        To be called once connections are accepted.
        """
        decider = self.decider
        decider.log.write(
            decider.clock(), CoordinatorReady(pid=os.getpid(), generation=self._began_at, node=self._node)
        )
        decider.pass_remarks_on()  # before anybody is heard: the job may end before the first tick
        self._part_if_over()  # we may have been started again after the end
        while not self._goodbye.is_set():
            await _set_within(self._goodbye, TICK_S)
            self._pulse()
            self._keep_standbys()
            decider.pass_time()
            self._part_if_over()
            self._keep_planning()
        if decider.resigned:
            return False
        until = decider.awake() + AGENT_S  # one may still be on its way, and waits to hear how the job ended
        while not (self._agents_here.is_set() and self._all_back()) and decider.awake() < until:
            await (_set_within(self._agents_here, TICK_S) if self._all_back() else asyncio.sleep(RETRY_S))
        return True

    def _pulse(self) -> None:
        """Sends agents something, so that the host of one that acknowledges nothing is noticed, as ours is by them."""
        home = self.decider.membership.contact.home
        for process, here in self._agents.items():
            queue = self._queues[None, process]
            if here and queue.empty() and not (home is not None and process.node.shares_agent(home)):
                queue.put_nowait(self._new_pulse())

    def _new_pulse(self) -> Pulse:
        return Pulse(seen=self._leading is None or self._leading.is_seen, sent_s=self.decider.clock())

    def _keep_standbys(self) -> None:
        """Has coordinators started where there are none, as many as there are to be; behind a loss, too."""
        if self._all_back():
            leaving = self.decider.membership.contact.leaving
            self._standbys.leaving = frozenset(process for process in self._agents if process.node in leaving)
            for process in self._standbys.to_ask([process for process, here in self._agents.items() if here]):
                self._tell((None, process), StandBy())
        self._tell_where()

    def _all_back(self) -> bool:
        """Whether all agents have attached that the coordinator before us knew of, if they are not held to be gone."""
        nodes = {process.node.nonce for process in self._agents}
        return all(node.nonce in nodes for node in self.decider.membership.contact.agents)

    def _keep_planning(self) -> None:
        """Plans ahead beside everything else: time passes, and messages come, however long a plan takes."""
        if self._planning is not None:
            if not self._planning.done():
                return
            self._planning.result()  # a bug in it is none to be silent about
        self._planning = asyncio.get_running_loop().create_task(self._plan_ahead())

    async def _plan_ahead(self) -> None:
        """Prepares the answers to the losses that could come next, while nothing else is to be done."""
        for lost in self.decider.unanswered():
            before = self.decider.membership
            recovery: RecoveryPlan | HoldfastError
            try:
                recovery = await asyncio.to_thread(plan_recovery, before, lost)
            except HoldfastError as error:
                recovery = error
            if not self.decider.answer(before, lost, recovery):
                return
            self._part_if_over()
        if not self.decider.waits:
            await self._look_up()

    async def _look_up(self) -> None:
        """Looks for better plans; they may be late, and then change nothing."""
        for adviser in self._advisers:
            before = self.decider.membership
            try:
                news = await asyncio.to_thread(adviser.news, before)
            except Exception as error:  # noqa: BLE001 - it was advice: whatever is wrong is not worth a coordinator
                self.decider.note(f"{type(adviser).__name__} is not asked any more: {type(error).__name__}: {error}")
                self._advisers = tuple(other for other in self._advisers if other is not adviser)
                self._take([Unadvised()])
                continue
            if self.decider.membership.generation == before.generation and not self.decider.waits:
                self._take(news)


def _is_for(tell: Tell, agent: Process) -> bool:
    """Whether an agent is to be told this, which is for agents."""
    return tell.node is None or agent.node.shares_agent(tell.node)


async def _set_within(event: asyncio.Event, limit_s: float) -> None:
    """Returns when an event is set, or time is up."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)


async def _first_parcel(request: AsyncIterator[bytes]) -> tuple[list[Message], str]:
    """What a peer sends first; nothing if that cannot be read, or nothing came. And why it may be sent away."""
    try:
        async with asyncio.timeout(FIRST_S):
            async for data in request:
                return [decode_message(each) for each in unpack(data)], _NO_HELLO
    except TimeoutError:
        return [], f"nothing was said within {FIRST_S:g} s"
    except (grpc.RpcError, grpc.aio.UsageError, msgspec.ValidationError, msgspec.DecodeError):
        pass
    return [], _NO_HELLO


def _try_address(host: str, port: int) -> None:
    """Binds and lets go: an address that is taken is one error of ours, instead of lines of gRPC's own on stderr."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


async def serve(
    coordinator: Coordinator | Callable[[], Coordinator],
    *,
    host: str,
    port: int,
    token: str,
    ready: Callable[[int], None],
    credentials: grpc.ServerCredentials | None = None,
    also: str | None = None,
    waits_for: Callable[[], str] = lambda: "",
    brief: bytes = b"",
    invitation: str = "",
    silent_s: float = 1.0,
) -> bool:
    """Serves until the job has ended; returns False if another one leads now.

    Args:
        coordinator: what to serve; or what waits until we lead, in a thread of its own: callers are sent away before.
        host: the address to listen on.
        port: the port; 0 picks a free one.
        token: what callers must present.
        ready: called with the actual port once connections are accepted.
        credentials: for TLS; None listens in the clear.
        also: one more address to listen on, such as ``unix:PATH``; the folder must keep others out.
        waits_for: says what keeps us from leading, for those that are sent away; "" if only that another leads.
        brief: what agents of other machines are told, whether or not we lead, if they present ``invitation``.
        invitation: another token, by which people may ask how the job is, too, and what is to become of it; "": nobody
            may.
        silent_s: how long a host may leave what we send to it without acknowledging anything, with what it takes to see
            that: then its connections end. Agents are sent something always.

    Raises:
        ConfigError: an address cannot be listened on.
    """
    door = _Door(token, waits_for, brief)
    silence = ("grpc.keepalive_timeout_ms", math.ceil(_SILENCE * silent_s * 1000))
    check = TokenCheck(token, shares=True, others={f"/{SERVICE}/{each}": invitation for each in (BRIEF, STATUS, ORDER)})
    server = grpc.aio.server(interceptors=[check], options=[*_OPTIONS, silence])
    methods = {METHOD: door.attach, BRIEF: door.tell, STATUS: door.status, ORDER: door.order}
    handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    try:
        _try_address(host, port)
        address = f"{host}:{port}"
        actual = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"control.port: cannot listen on {host}:{port}, it is in use or not ours; choose another, or 0"
        ) from error
    _listen_also(server, also)
    await server.start()
    ready(actual)
    if not isinstance(coordinator, Coordinator):
        coordinator = await asyncio.to_thread(coordinator)
    await coordinator.begin()
    door.coordinator = coordinator
    leads = await coordinator.run()
    await server.stop(DRAIN_S if leads else 0.0)
    return leads


def _listen_also(server: grpc.aio.Server, address: str | None) -> None:
    try:
        if address is not None:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: its folder cannot be used, or its name is too long") from error


class _Door:
    """Sends callers away until there is a coordinator behind it."""

    coordinator: Coordinator | None = None

    def __init__(self, token: str, waits_for: Callable[[], str], brief: bytes) -> None:
        self._token = token
        self._waits_for = waits_for
        self._brief = brief

    async def tell(self, request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Says what an agent must know."""
        yield self._brief

    async def attach(self, request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """See Coordinator.attach."""
        if self.coordinator is None:
            await self._send_away(context)
            return
        name = bearer(context.invocation_metadata(), self._token) or ""  # whoever carries nothing was sent away before
        nodes = nodes_of(context.auth_context())
        async for parcel in self.coordinator.attach(request, context, name, nodes):
            yield parcel

    async def status(self, request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Says how the job is, as JSON; to whoever has said anything, again and again until it has ended."""
        if self.coordinator is None:
            await self._send_away(context)
            return
        yield msgspec.json.encode(self.coordinator.status)
        async for _ in request:
            while await self.coordinator.goes_on(STATUS_S):
                yield msgspec.json.encode(self.coordinator.status)
            if not self.coordinator.decider.resigned:
                yield msgspec.json.encode(self.coordinator.status)
            return

    async def order(self, request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Does what people want, and says so, as JSON."""
        if self.coordinator is None:
            await self._send_away(context)
            return
        try:
            async with asyncio.timeout(FIRST_S):
                async for data in request:
                    yield msgspec.json.encode(self.coordinator.obey(decode_order(data)))
                    return
        except (TimeoutError, msgspec.ValidationError, msgspec.DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no order: {error}")

    async def _send_away(self, context: grpc.aio.ServicerContext) -> None:
        why = self._waits_for()
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"{NO_LEADER}{why and ': '}{why}")
