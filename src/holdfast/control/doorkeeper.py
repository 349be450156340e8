"""What every server of a job does about callers before it listens to them: the token is checked, all is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import grpc
import grpc.aio

from holdfast.control.token import REFUSAL, bearer, carries

__all__ = ["TokenCheck", "bounded"]

_NONE: Mapping[str, str] = {}
_HANDSHAKE_MS = 5_000
_IDLE_MS = 10_000


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call that does not carry the token: by its headers, so nobody waits for the rest of it.

    Args:
        token: what calls must carry.
        shares: a share of it, for whatever name, will do.
        others: methods, by their full names, whose calls must carry another one, and no share of it.
    """

    def __init__(self, token: str, *, shares: bool = False, others: Mapping[str, str] = _NONE) -> None:
        self._token = token
        self._shares = shares
        self._others = others

        async def refuse(request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
            yield b""

        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Lets a call through if its token is right."""
        metadata = details.invocation_metadata
        if details.method in self._others:
            token = self._others[details.method]
            return await continuation(details) if token and carries(metadata, token) else self._refusal
        known = bearer(metadata, self._token) is not None if self._shares else carries(metadata, self._token)
        return await continuation(details) if known else self._refusal


def bounded(*, streams: int, receive_bytes: int, send_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of a server that whoever connects can make do little.

    Connections that do not begin to speak, or that have no call, are closed after a while.

    Args:
        streams: calls of one connection at a time.
        receive_bytes: the longest message that is taken; a longer one ends its call, unread. -1: any.
        send_bytes: the longest message that is sent. -1: any.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", send_bytes),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]
