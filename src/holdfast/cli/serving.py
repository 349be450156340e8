"""Pages of a run, over HTTP: for people, for Prometheus, or for whatever probes that something lives."""

from __future__ import annotations

import argparse
import contextlib
import hmac
import signal
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
from types import MappingProxyType
from urllib.parse import parse_qsl, urlsplit

from holdfast.cli.arguments import check_address, token_from
from holdfast.config.load import is_loopback
from holdfast.errors import ConfigError

__all__ = ["Asked", "Page", "Served", "add_serving_arguments", "serve", "served"]

_PLAIN = "text/plain; charset=utf-8"
_PATIENCE_S = 10.0
_AT_ONCE = 32
"""So many callers, each for so long at most."""
_LOOK_S = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer: what a page may load is here, and nothing of it is told to others or kept."""
_NONE: Mapping[str, Page] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller says beside the path: which kinds of answer it accepts (its ``Accept``), and what it asks for."""

    accept: str = ""
    query: Mapping[str, str] = field(default_factory=dict)


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
        pages: by path; what makes one is told what is asked.
        public: the paths of which anybody may know whether all is well, though not more.
        files: by path; they tell nothing of the run, and are anybody's.
        token: that callers show; "": none is needed, which is for this machine alone.
        certs: a folder with ``cert.pem`` and ``key.pem``; None: connections are in the clear.
        insecure: whether that may be so beyond this machine.
    """

    pages: Mapping[str, Callable[[Asked], Page]]
    public: frozenset[str] = frozenset()
    files: Mapping[str, Page] = field(default_factory=dict)
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


def add_serving_arguments(parser: argparse.ArgumentParser, listen: str, path: str, default: str | None = None) -> None:
    """Adds what says where pages are served, and to whom.

    Args:
        parser: of the command.
        listen: what ``--listen`` is for, for people.
        path: of what only those may read who show the token.
        default: of ``--listen``.
    """
    parser.add_argument("--listen", metavar="HOST:PORT", default=default, help=listen)
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds what callers show to read {path}, as `Authorization: Bearer TOKEN`: a token of yours, not the "
        "job's; needed unless --listen is an address of this machine alone",
    )
    parser.add_argument("--certs", metavar="DIR", help="serve HTTPS with DIR/cert.pem and DIR/key.pem")
    parser.add_argument("--insecure", action="store_true", help="--listen beyond this machine may do without --certs")


def serve(
    args: argparse.Namespace,
    pages: Mapping[str, Callable[[Asked], Page]],
    *,
    public: frozenset[str] = frozenset(),
    files: Mapping[str, Page] = _NONE,
    look: Callable[[], None],
    tell: Callable[[str], str],
    at_once: bool = False,
) -> int:
    """Serves pages until SIGTERM or Ctrl-C, as :func:`add_serving_arguments` has it; returns 130.

    Args:
        args: of the command.
        pages: see :class:`Served`.
        public: likewise.
        files: likewise.
        look: called before pages are served, and then each second.
        tell: what to print, of the address at which they are.
        at_once: whether pages are served before the first look, which may take long.

    Raises:
        ConfigError: it cannot be listened there, or not like this.
    """
    check_address(f"--listen {args.listen}", args.listen)
    what = Served(
        pages=pages,
        public=public,
        files=files,
        token=token_from(args.token_file) if args.token_file is not None else "",
        certs=None if args.certs is None else Path(args.certs),
        insecure=args.insecure,
    )
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not at_once:  # counters that jump from 0 to what they are would be taken for new failures
        look()
    with served(what, args.listen) as address:
        print(tell(address), flush=True)
        while True:
            look()
            time.sleep(_LOOK_S)


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


_ELSEWHERE = "expected Host: localhost, or the address of it; by other names it is served with --token-file\n"


class _Answering(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        """Answers with a page."""
        what, url = self.server.what, urlsplit(self.path)
        path, make = url.path, what.pages.get(url.path)
        if not (what.token or path in what.public or self._names_us()):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, Page(_ELSEWHERE))
            return
        if path in what.files:
            self._say(HTTPStatus.OK, what.files[path])
            return
        if make is None:
            self._say(HTTPStatus.NOT_FOUND, Page(f"there are {', '.join((*what.files, *what.pages))}\n"))
            return
        may = self._may(what.token)
        if not may and path not in what.public:
            self._say(HTTPStatus.UNAUTHORIZED, Page("expected Authorization: Bearer, with the token\n"))
            return
        try:
            page = make(Asked(self.headers.get("Accept", ""), dict(parse_qsl(url.query))))
        except Exception as error:  # noqa: BLE001
            print(f"holdfast: {path} cannot be made: {error!r}", file=sys.stderr, flush=True)
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, Page("it cannot be made\n"))
            return
        status = HTTPStatus.OK if page.ok else HTTPStatus.SERVICE_UNAVAILABLE
        self._say(status, page if may else Page("ok\n" if page.ok else "not ok\n"))

    def _names_us(self) -> bool:
        """Whether the caller names this machine: a page of elsewhere, whose name was made to lead here, does not."""
        named = self.headers.get("Host")
        if named is None:  # no browser
            return True
        with contextlib.suppress(ValueError):
            return is_loopback(urlsplit(f"//{named}").hostname or "")
        return False

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
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads who has asked."""
