"""Pages that Prometheus reads over HTTP, or whatever probes that something lives."""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.config.load import is_loopback
from holdfast.errors import ConfigError

__all__ = ["Page", "Served", "served"]

_PLAIN = "text/plain; charset=utf-8"
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered; ``ok``: else it is said that the service is unavailable."""

    text: str | bytes
    kind: str = _PLAIN
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is read, and who may.

    Attributes:
        pages: by path; what makes one is told what the caller accepts (of its ``Accept`` header).
        secret: the paths for which callers show the token.
        token: that they show; "": none is needed, which is for this machine alone.
        certs: a folder with ``cert.pem`` and ``key.pem``; None: connections are in the clear.
        insecure: whether that may be so beyond this machine.
    """

    pages: Mapping[str, Callable[[str], Page]]
    secret: frozenset[str]
    token: str = field(default="", repr=False)
    certs: Path | None = None
    insecure: bool = False


@contextmanager
def served(what: Served, address: str) -> Iterator[str]:
    """Serves pages until left; gives the address at which they are.

    Raises:
        ConfigError: it cannot be listened there, or not like this.
    """
    host, _, port = address.rpartition(":")
    if not is_loopback(host):
        if not what.token:
            raise ConfigError(f"--listen {address}: others reach it; expected --token-file, with what they are to show")
        if what.certs is None and not what.insecure:
            raise ConfigError(
                f"--listen {address}: the token would travel in the clear; expected --certs DIR (holdfast certs makes "
                "it), or --insecure if that is meant"
            )
    context = None if what.certs is None else _context(what.certs)
    try:
        server = _Server((host, int(port)), what, context)
    except OSError as error:
        raise ConfigError(f"--listen {address}: cannot be listened on: {error.strerror or error}") from None
    thread = threading.Thread(target=server.serve_forever, name="pages", daemon=True)
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _context(certs: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certs / "cert.pem", certs / "key.pem")
    except OSError as error:  # ssl's own are some of these
        raise ConfigError(f"--certs {certs}: cannot be used: {error.strerror or error}") from None
    return context


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], what: Served, context: ssl.SSLContext | None) -> None:
        super().__init__(address, _Answering)
        self.what, self._context = what, context

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """Talks with a caller, in a thread of its own: one that says nothing keeps nobody waiting."""
        assert isinstance(request, socket.socket)
        request.settimeout(_PATIENCE_S)
        if self._context is not None:
            request = self._context.wrap_socket(request, server_side=True)
        try:
            super().finish_request(request, client)
        finally:
            if self._context is not None:
                request.close()

    def handle_error(self, request: object, client: object) -> None:
        """Whoever hangs up, or speaks otherwise, has nothing to be told, nor has anybody else."""


class _Answering(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        """Answers with a page."""
        what, path = self.server.what, urlsplit(self.path).path
        page = what.pages.get(path)
        if page is None:
            self._say(HTTPStatus.NOT_FOUND, Page(f"there are {', '.join(what.pages)}\n"))
        elif path in what.secret and not self._may(what.token):
            self._say(HTTPStatus.UNAUTHORIZED, Page("expected Authorization: Bearer, with the token\n"))
        else:
            found = page(self.headers.get("Accept", ""))
            self._say(HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE, found)

    def _may(self, token: str) -> bool:
        shown = self.headers.get("Authorization", "").encode(errors="replace")
        return not token or hmac.compare_digest(shown, f"Bearer {token}".encode())

    def _say(self, status: HTTPStatus, page: Page) -> None:
        body = page.text if isinstance(page.text, bytes) else page.text.encode()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads who has asked."""
