"""A worker's or an agent's connection to the coordinator."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import msgspec

from holdfast.control.coordinator import METHOD, SERVICE
from holdfast.control.messages import Command, Message, decode_command, encode, pack, unpack
from holdfast.control.token import TOKEN_KEY
from holdfast.errors import ConfigError, CoordinatorUnavailable

__all__ = ["ControlClient"]

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A link that is cut closes no connection: without an answer to a ping for this long, there is no coordinator.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]


class ControlClient:
    """One stream to the coordinator; a thread reads it.

    Args:
        address: ``host:port``.
        token: the job's token.
        on_command: called in the reading thread with every command.
        on_closed: called in the reading thread when the stream ends: with None at a normal end, else with
            ConfigError (the token was refused) or CoordinatorUnavailable.
    """

    def __init__(
        self,
        address: str,
        token: str,
        on_command: Callable[[Command], None],
        on_closed: Callable[[ConfigError | CoordinatorUnavailable | None], None],
    ) -> None:
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._on_command = on_command
        self._on_closed = on_closed
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        attach = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._stream = attach(self._outgoing(), metadata=((TOKEN_KEY, token),))
        self._reader = threading.Thread(target=self._read, name="control", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queues a message; never blocks."""
        self._outbox.put(message)

    def close(self, drain_s: float = 1.0) -> None:
        """Ends the stream after what is queued was sent, or after ``drain_s``."""
        self._outbox.put(None)
        self._reader.join(timeout=drain_s)
        self._channel.close()

    def _outgoing(self) -> Iterator[bytes]:
        """Parcels of what waits to be sent: under load few calls carry many messages."""
        open_ = True
        while open_:
            waiting = [self._outbox.get()]
            with contextlib.suppress(queue.Empty):
                while waiting[-1] is not None:
                    waiting.append(self._outbox.get_nowait())
            open_ = waiting[-1] is not None
            if messages := [encode(message) for message in waiting if message is not None]:
                yield pack(messages)

    def _read(self) -> None:
        try:
            for data in self._stream:
                for each in unpack(data):
                    self._on_command(decode_command(each))
        except grpc.RpcError as error:
            self._on_closed(self._explain(error))
        except (msgspec.ValidationError, msgspec.DecodeError, OSError) as error:
            self._on_closed(CoordinatorUnavailable(f"coordinator at {self._address}: {type(error).__name__}: {error}"))
        else:
            self._on_closed(None)

    def _explain(self, error: grpc.RpcError) -> ConfigError | CoordinatorUnavailable:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigError(f"coordinator at {self._address}: {details}")
        return CoordinatorUnavailable(f"coordinator at {self._address}: {code.name.lower()}: {details}")
