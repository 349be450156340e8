"""A worker's or an agent's connection to the coordinator: made anew whenever it breaks."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import msgspec

from holdfast.config.job import Tls
from holdfast.control.coordinator import METHOD, NO_LEADER, SERVICE, STATUS
from holdfast.control.messages import (
    Command,
    CoordinatorsAt,
    Dormant,
    Exited,
    Failure,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    Pulse,
    Pulsed,
    Started,
    Strike,
    WorkerOffer,
    decode_command,
    encode,
    pack,
    parcels,
    unpack,
)
from holdfast.control.reach import Reach
from holdfast.control.tls import Caller, channel_credentials
from holdfast.control.token import TOKEN_KEY
from holdfast.errors import ConfigError, CoordinatorUnavailable, NobodyLeads

__all__ = ["NOBODY", "ControlClient", "ask"]

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel would wait out the back-off of the one before
    ("grpc.min_reconnect_backoff_ms", 1000),  # how long one attempt to connect may take
    # A link that is cut closes no connection: without an answer to a ping for this long, there is no coordinator.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]
_IMPATIENT = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
RETRY_S = 0.05
_CONNECT_S = 1.0
_OTHERS_S = 0.25
"""Once one accepts, so long is waited for the others, from the beginning: longer than a round trip takes."""
_ANSWER_S = 10.0
NOBODY = "nobody listens there"

_OF_THE_LAST = (Heartbeat, Started, Exited, WorkerOffer, Strike, Leaving, Dormant, Pulsed)
"""What a new stream needs not carry: the hello at its beginning says as much, or it was for the coordinator before."""

Problem = ConfigError | CoordinatorUnavailable | None


class ControlClient:
    """One stream to the coordinator, and the next one when it breaks; a thread reads it.

    Every stream begins with a fresh hello, so a coordinator that knows nothing learns where we stand. What was queued
    while there was none is sent after that, except for what the hello says too. What was on its way when a stream broke
    may be lost.

    Args:
        address: ``host:port``; several, joined by commas, are tried in turn until one of them leads. Whoever leads may
            tell of others.
        token: the job's token.
        hello: makes what a stream begins with; called in the reading thread.
        on_command: called in the reading thread with every command.
        on_closed: called in the reading thread once, at the end: with None at a normal end, else with ConfigError (the
            token was refused, and nobody else has answered; or we speak for somebody else) or CoordinatorUnavailable
            (there was no coordinator for ``reattach_s``).
        reattach_s: seconds without a coordinator after which it is given up.
        clock: seconds that this process has run: none are held against the coordinator while we were stopped.
        tls: certificates; None connects in the clear.
        impatient: whether another coordinator may lead, so that one that is silent is soon given up.
        on_pulse: called in the reading thread with every sign of life of whoever leads.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        hello: Callable[[], Hello],
        on_command: Callable[[Command], None],
        on_closed: Callable[[Problem], None],
        reattach_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
        impatient: bool = False,
        on_pulse: Callable[[Pulse], None] = lambda pulse: None,
    ) -> None:
        self._caller = channel_credentials(tls) if tls else None
        self._given = tuple(address.split(","))
        self._addresses = deque(self._given)
        self._told = self._given
        # A leader that is stopped closes no connection either; where another one may lead, we look for it soon.
        impatient = impatient or len(self._addresses) > 1
        self._options = [*{**dict(_OPTIONS), **(_IMPATIENT if impatient else {})}.items()]
        self._on_pulse = on_pulse
        self._token = token
        self._hello = hello
        self._on_command = on_command
        self._on_closed = on_closed
        self._reattach_s = reattach_s
        self._clock = clock
        self._outbox = _Outbox()
        self._closing = threading.Event()
        self._last_words: Failure | None = None
        self._away_since = 0.0
        self._heard = False
        """Whether the last stream said anything, and no new one was tried since."""
        self._strangers: set[str] = set()
        """Where our token was refused since one of ours was heard last."""
        self._reader = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Begins to connect and to read."""
        self._away_since = self._clock()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queues a message; never blocks.

        An offer is to be queued while no hello can be made: one that has it, with the offer to follow, would be two.
        """
        self._outbox.put(message)

    def close(self, drain_s: float = 1.0, last_words: Failure | None = None) -> None:
        """Ends the stream after what is queued was sent.

        Args:
            drain_s: seconds after which it is ended anyway.
            last_words: must be heard if at all possible, also if the coordinator has yet to come (back).
        """
        if last_words is not None:
            self._last_words = last_words
            self._outbox.put(last_words)
            if not self._reader.ident:
                self.start()
        self._closing.set()
        self._outbox.close()
        if self._reader.ident:
            self._reader.join(timeout=drain_s)

    def _run(self) -> None:
        problem = self._attend()
        while problem is not None and not self._is_final(problem) and self._await_listener():
            problem = self._attend()
        self._on_closed(problem)

    def _is_final(self, problem: Problem) -> bool:
        """Whether all have refused our token: where a coordinator was that is dead, a stranger may listen by now.

        Or whether one that has our token has refused us.
        """
        if isinstance(problem, _Denied):
            return True
        if isinstance(problem, ConfigError):
            self._strangers.add(self._address)
        return self._strangers.issuperset(self._addresses)

    def _attend(self) -> Problem:
        """Keeps one stream to its end; returns why it ended, None if the coordinator ended it in good order."""
        with _opened(self._address, self._caller, self._options) as channel:
            attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            outgoing = self._outbox.open(lambda: self._last_words or self._hello())
            self._heard = False
            try:
                for data in attach(outgoing, metadata=((TOKEN_KEY, self._token),)):
                    self._heard = True
                    self._strangers.clear()
                    for command in map(decode_command, unpack(data)):
                        self._take(command)
            except grpc.RpcError as error:
                return _explained(self._address, error)
            except (msgspec.ValidationError, msgspec.DecodeError, OSError) as error:
                return CoordinatorUnavailable(f"coordinator at {self._address}: {type(error).__name__}: {error}")
            finally:
                self._outbox.end()
                if self._heard:
                    self._away_since = self._clock()
        return None

    def _take(self, command: Command) -> None:
        match command:
            case Pulse():
                self._on_pulse(command)
            case CoordinatorsAt(addresses=addresses, leaving=leaving):
                self._told = tuple(address for address in addresses if address not in leaving)
                # Those that we were given may be there again, or have other names.
                self._addresses = deque(dict.fromkeys((self._address, *addresses, *self._given)))
            case _:
                self._on_command(command)

    @property
    def addresses(self) -> str:
        """Where there are coordinators, joined by commas; that which is spoken to, or tried, first."""
        return ",".join(self._addresses)

    @property
    def told(self) -> tuple[str, ...]:
        """Where there are coordinators that are to stay, as was told last; before that, where we were told to look."""
        return self._told

    @property
    def _address(self) -> str:
        return self._addresses[0]

    def _await_listener(self) -> bool:
        """Waits until somebody listens: asked cheaply, as each attempt of gRPC costs milliseconds of processor time."""
        until = self._away_since + self._reattach_s
        while self._clock() < until and (self._last_words or not self._closing.is_set()):
            if self._heard:  # a stream has stood until now: whoever lost its connection alone is back at once
                self._heard = False
            else:
                time.sleep(RETRY_S)
                self._addresses.rotate(-1)
            if listening := sorted(_listening(self._addresses), key=self._strangers.__contains__):  # strangers last
                self._addresses.rotate(-self._addresses.index(listening[0]))
                return True
        return False


def ask(what: str, reach: Reach, says: bytes = b"") -> bytes:
    """Returns what the coordinators of a job say to whoever people have given its token, unread.

    Args:
        what: :data:`BRIEF`, for agents; or, which only the one that leads can answer, :data:`STATUS` or :data:`ORDER`.
        reach: how they are reached.
        says: what they are told; empty: nothing.

    Raises:
        ConfigError: the token was refused, where none can be a stranger; or a certificate cannot be read.
        NobodyLeads: only such answer as stand by.
        CoordinatorUnavailable: none answers.
    """
    return b"".join(_answers(what, reach, says=(says,) if says else (), limit_s=_ANSWER_S))


def watch(reach: Reach) -> Iterator[bytes]:
    """Yields how the job is, unread, again and again, until it has ended or whoever leads leads no more.

    Args and errors are as for :func:`ask`; what was said before an error was yielded.
    """
    return _answers(STATUS, reach, says=(b"watch",), limit_s=None)


def _answers(what: str, reach: Reach, *, says: tuple[bytes, ...], limit_s: float | None) -> Iterator[bytes]:
    caller = channel_credentials(reach.tls) if reach.tls else None
    problems: list[ConfigError | CoordinatorUnavailable] = []
    for each in reach.addresses.split(","):
        if not _listening((each,)):
            problems.append(CoordinatorUnavailable(f"coordinator at {each}: {NOBODY}"))
            continue
        with _opened(each, caller, _OPTIONS) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{what}")
            try:
                yield from call(iter(says), metadata=((TOKEN_KEY, reach.token),), timeout=limit_s)
            except grpc.RpcError as error:
                problems.append(_explained(each, error))
            else:
                return
    refused = next((each for each in problems if isinstance(each, ConfigError)), None)
    stands_by = next((each for each in problems if isinstance(each, NobodyLeads)), None)
    if stands_by or refused is None or not reach.read:
        raise stands_by or refused or problems[-1]
    raise CoordinatorUnavailable(f"{refused}; another job listens there by now, or the token is not this job's")


def _opened(
    address: str,
    caller: Caller | None,
    options: Sequence[tuple[str, int]],
) -> grpc.Channel:
    """Opens a channel; a socket in a folder that keeps others out is in the clear."""
    if caller is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, caller.credentials, options=[*options, *caller.options])


def _explained(address: str, error: grpc.RpcError) -> ConfigError | CoordinatorUnavailable:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(f"coordinator at {address}: {details}")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return _Denied(f"coordinator at {address}: {details}")
    if code is grpc.StatusCode.UNAVAILABLE and (details or "").startswith(NO_LEADER):
        return NobodyLeads(f"coordinator at {address}: {details}")
    return CoordinatorUnavailable(f"coordinator at {address}: {code.name.lower()}: {details}")


class _Denied(ConfigError):
    """Whoever leads does not take us for whom we say we are: by our share, our certificate or our words."""


class _Outbox:
    """What waits to be sent, over whichever stream is the current one."""

    def __init__(self) -> None:
        # Under `_changed`: any thread puts, gRPC's takes; `_stream` tells one that is over that it is.
        self._messages: deque[Message] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        self._stream = 0
        self._closed = False

    def put(self, message: Message) -> None:
        """Queues a message."""
        with self._changed:
            self._messages.append(message)
            self._queued += 1
            self._changed.notify_all()

    def open(self, make_first: Callable[[], Message]) -> Iterator[bytes]:
        """Begins a stream; returns its parcels: under load few of them carry many messages.

        Drops what waits and is in the first message. That is made again if something was queued meanwhile, since nobody
        knows then whether it is in it. (It cannot be made under our lock: making it takes locks of its own.)
        """
        while True:
            with self._changed:
                queued = self._queued
            first = make_first()
            with self._changed:
                if self._queued == queued:
                    self._stream += 1
                    self._messages = deque(each for each in self._messages if not isinstance(each, _OF_THE_LAST))
                    return self._parcels(self._stream, first)

    def end(self) -> None:
        """The current stream is over: nothing more is taken for it."""
        with self._changed:
            self._stream += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the current stream after what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _parcels(self, stream: int, first: Message) -> Iterator[bytes]:
        yield pack([encode(first)])
        while waiting := self._take(stream):
            yield from parcels([encode(message) for message in waiting])

    def _take(self, stream: int) -> list[Message]:
        """All that waits; nothing once the stream is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed or self._stream != stream)
            if self._stream != stream:
                return []
            waiting = list(self._messages)
            self._messages.clear()
            return waiting


def _listening(addresses: Iterable[str]) -> list[str]:
    """Where connections are accepted, in the order of these addresses; who is silent holds up others for a moment.

    Not where the kernel has made a connection between the two ends of one socket.
    """
    began, ways = time.monotonic(), list(addresses)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as pending:
        found = {way for way in ways if _dialled(way, pending, stack)}
        while pending.get_map() and (left_s := began + (_OTHERS_S if found else _CONNECT_S) - time.monotonic()) > 0:
            for key, _ in pending.select(left_s):
                pending.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket), "as it was registered"
                if _is_open(key.fileobj):
                    found.add(key.data)
    return [way for way in ways if way in found]


def _dialled(address: str, pending: selectors.BaseSelector, stack: contextlib.ExitStack) -> bool:
    """Begins to connect; returns whether that is done already. If it is still to be known, it is pending."""
    local = address.startswith("unix:")
    host, _, port = address.rpartition(":")
    try:
        family, target = (socket.AF_UNIX, address.removeprefix("unix:")) if local else _resolved(host, int(port))
        probe = stack.enter_context(socket.socket(family))
        probe.setblocking(False)
        code = probe.connect_ex(target)
    except OSError:  # such as a name that is not known
        return False
    if code == errno.EINPROGRESS:
        pending.register(probe, selectors.EVENT_WRITE, address)
    return code == 0 and (local or _is_open(probe))


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, target


def _is_open(probe: socket.socket) -> bool:
    try:
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and probe.getsockname() != probe.getpeername()
    except OSError:
        return False
