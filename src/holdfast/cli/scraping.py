"""Pages that Prometheus reads over HTTP, or whatever probes that something lives."""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from urllib.parse import urlsplit

from holdfast.config.load import is_loopback
from holdfast.errors import ConfigError

__all__ = ["Page", "Served", "served"]

_PLAIN = "text/plain; charset=utf-8"
_PATIENCE_S = 10.0
_AT_ONCE = 32
"""So many callers, each for so long at most."""


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered; ``ok``: else it is said that the service is unavailable."""

    text: str
    kind: str = _PLAIN
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is read, and who may.

    Attributes:
        pages: by path; what makes one is told what the caller accepts (of its ``Accept`` header).
        public: the paths of which anybody may know whether all is well, though not more.
        token: that callers show; "": none is needed, which is for this machine alone.
        certs: a folder with ``cert.pem`` and ``key.pem``; None: connections are in the clear.
        insecure: whether that may be so beyond this machine.
    """

    pages: Mapping[str, Callable[[str], Page]]
    public: frozenset[str]
    token: str = field(default="", repr=False)
    certs: Path | None = None
    insecure: bool = False


@contextlib.contextmanager
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
        self._callers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Binds; who we are called by nobody is asked, which may take long."""
        TCPServer.server_bind(self)
        host, port = self.socket.getsockname()[:2]
        self.server_name, self.server_port = str(host), int(port)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """Talks with a caller in a thread of its own; with so many at once that nothing runs short."""
        assert isinstance(request, socket.socket)
        with self._lock:
            if admitted := len(self._callers) < _AT_ONCE:
                self._callers[request] = time.monotonic()
        if admitted:
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """Talks with a caller."""
        assert isinstance(request, socket.socket)
        request.settimeout(_PATIENCE_S)
        if self._context is None:
            super().finish_request(request, client)
            return
        with self._context.wrap_socket(request.dup(), server_side=True) as sealed:
            super().finish_request(sealed, client)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """A caller has gone, or is sent away."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hangs up on who takes too long, however slowly it speaks; called twice a second."""
        with self._lock:
            late = [caller for caller, since in self._callers.items() if time.monotonic() > since + _PATIENCE_S]
            for caller in late:
                with contextlib.suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client: object) -> None:
        """Whoever hangs up, or speaks otherwise, has nothing to be told, nor has anybody else."""


class _Answering(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        """Answers with a page."""
        what, path = self.server.what, urlsplit(self.path).path
        make = what.pages.get(path)
        if make is None:
            self._say(HTTPStatus.NOT_FOUND, Page(f"there are {', '.join(what.pages)}\n"))
            return
        may = self._may(what.token)
        if not may and path not in what.public:
            self._say(HTTPStatus.UNAUTHORIZED, Page("expected Authorization: Bearer, with the token\n"))
            return
        try:
            page = make(self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001
            print(f"holdfast: {path} cannot be made: {error!r}", file=sys.stderr, flush=True)
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, Page("it cannot be made\n"))
            return
        status = HTTPStatus.OK if page.ok else HTTPStatus.SERVICE_UNAVAILABLE
        self._say(status, page if may else Page("ok\n" if page.ok else "not ok\n"))

    def _may(self, token: str) -> bool:
        shown = self.headers.get("Authorization", "").encode(errors="replace")
        return not token or hmac.compare_digest(shown, f"Bearer {token}".encode())

    def _say(self, status: HTTPStatus, page: Page) -> None:
        body = page.text.encode()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads who has asked."""
