"""Machines that a cloud may take away at short notice: what its metadata service says of that.

AWS: "Spot Instance interruption notices" (two minutes); Google: "Spot VMs", ``instance/preempted`` (30 s); Azure:
"Scheduled Events", ``Preempt`` and ``Terminate`` (30 s, or as long as was asked for).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from holdfast.errors import ConfigError
from holdfast.plain import one_line
from holdfast.runtime.node.signals import notice_from_cloud

__all__ = ["CLOUDS", "Cloud", "find", "watched"]

_LIMIT_S = 2.0
_EVERY_S = 2.0
_MOST_BYTES = 65_536
_LOCAL = "http://169.254.169.254"
_TAKEN = ("Preempt", "Terminate")

Get = Callable[..., str]
"""Given a path, headers and a method, returns the answer; "": there is nothing of that name."""


@dataclass(frozen=True, slots=True)
class Cloud:
    """A cloud's service.

    Attributes:
        name: of the cloud.
        url: where its metadata is.
        here: asks what only this cloud answers so, soon; raises as :meth:`ask` does.
        notice: returns what it says of this machine's end, for people; "" while it says nothing.
    """

    name: str
    url: str
    here: Callable[[Get], object]
    notice: Callable[[Get], str]

    def ask(self) -> str:
        """Returns what it says now; "" while it says nothing.

        Raises:
            OSError: it does not answer.
            ValueError: it answers something else than it should.
        """
        return self.notice(self.get)

    def get(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        """Returns what it answers; "": there is nothing of that name."""
        return _text(f"{self.url}{path}", headers, method)


def _text(url: str, headers: Mapping[str, str], method: str) -> str:
    where = urlsplit(url)
    with contextlib.closing(HTTPConnection(where.netloc, timeout=_LIMIT_S)) as connection:
        try:
            connection.request(method, f"{where.path}?{where.query}" if where.query else where.path, headers=headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode()
        except HTTPException as error:
            raise OSError(f"{url}: {error!r}") from None
    if answer.status == HTTPStatus.NOT_FOUND:
        return ""
    if answer.status != HTTPStatus.OK:
        raise OSError(f"{url}: {answer.status} {answer.reason}")
    return text


def _aws_session(get: Get) -> str:
    session = get("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if not session:
        raise ValueError("it gives no token (IMDSv2)")
    return session


def _aws(get: Get) -> str:
    said = get("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": _aws_session(get)})
    if not said:
        return ""
    found = _mapping(said)
    if "action" not in found:
        raise ValueError("it names no action")
    return f"it is to {found['action']} at {found.get('time', 'once')}"


def _gcp(get: Get) -> str:
    said = get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
    if said not in ("TRUE", "FALSE"):
        raise ValueError(f"it says {said!r}, neither TRUE nor FALSE")
    return "it is preempted" if said == "TRUE" else ""


def _azure_name(get: Get) -> str:
    name = get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}).strip()
    if not name:
        raise ValueError("it names no machine")
    return name


def _azure(get: Get) -> str:
    name = _azure_name(get)
    said = get("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = _mapping(said).get("Events")
    if not isinstance(events, list):
        raise ValueError("it names no Events")
    for event in events:
        if not isinstance(event, dict) or event.get("EventType") not in _TAKEN:
            continue
        if isinstance(named := event.get("Resources"), list) and name in named:
            return f"{event['EventType']}, not before {event.get('NotBefore') or 'now'}"
    return ""


def _mapping(text: str) -> dict[str, object]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it says something else than a mapping")
    return found


CLOUDS = {
    "aws": Cloud("aws", _LOCAL, _aws_session, _aws),
    "gcp": Cloud("gcp", "http://metadata.google.internal", _gcp, _gcp),
    "azure": Cloud("azure", _LOCAL, _azure_name, _azure),
}


def find(text: str) -> Cloud:
    """Returns the cloud that this machine is of.

    Args:
        text: its name, with ``=URL`` behind it if its service is elsewhere; ``auto``: the first that answers.

    Raises:
        ConfigError: there is none of that name, or at such a URL, or none answers.
    """
    name, equals, url = text.partition("=")
    if name in CLOUDS:
        if equals and not _is_url(url):
            raise ConfigError(f"--preempt {text}: expected {name}=http://HOST[:PORT]")
        cloud = CLOUDS[name]
        return replace(cloud, url=url.rstrip("/")) if equals else cloud
    if text != "auto":
        raise ConfigError(f"--preempt {text}: expected {', '.join(CLOUDS)} or auto")
    for cloud in CLOUDS.values():
        with contextlib.suppress(OSError, ValueError):
            cloud.here(cloud.get)
            return cloud
    raise ConfigError(f"--preempt auto: no metadata service answers; expected a machine of {', '.join(CLOUDS)}")


def _is_url(text: str) -> bool:
    with contextlib.suppress(ValueError):  # of a port that is no number
        found = urlsplit(text)
        return found.scheme == "http" and bool(found.hostname) and (found.port is None or found.port > 0)
    return False


@contextlib.contextmanager
def watched(cloud: Cloud | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Gives this process notice, once, when its machine is to be taken away; until left.

    Args:
        cloud: that says so; None: none is asked.
        tell: told what it says, and once if it does not answer; in a thread of its own.
    """
    watch = _Watch(cloud, tell) if cloud is not None else None
    if watch is not None:
        threading.Thread(target=watch.go_on, name="spot", daemon=True).start()
    try:
        yield
    finally:
        if watch is not None:
            watch.end()


class _Watch:
    """Asks again and again, in a thread of its own."""

    def __init__(self, cloud: Cloud, tell: Callable[[str], None]) -> None:
        self._cloud, self._tell = cloud, tell
        self._over = threading.Event()
        self._lock = threading.Lock()

    def end(self) -> None:
        """From now on nobody is given notice."""
        with self._lock:
            self._over.set()

    def go_on(self) -> None:
        """Asks until there is a notice, or nobody is interested any more."""
        silent = False
        while not self._over.is_set():
            try:
                said, silent = self._cloud.ask(), False
            except Exception as error:  # noqa: BLE001  whatever it may answer, it is to be asked again
                said = ""
                if not silent:
                    self._say(f"does not say whether this machine is to be taken away: {error}")
                silent = True
            if said:
                with self._lock:
                    if not self._over.is_set():
                        notice_from_cloud()
                self._say(f"takes this machine away: {said}")
                return
            self._over.wait(_EVERY_S)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or the disk is full
            self._tell(one_line(f"{self._cloud.name} {text}"))
