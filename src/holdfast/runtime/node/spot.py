"""Machines that a cloud may take away at short notice: what its metadata service says of that.

AWS: "Spot Instance interruption notices" (two minutes); Google: "Spot VMs", ``instance/preempted`` (30 s); Azure:
"Scheduled Events", ``Preempt`` and ``Terminate`` (30 s, or as long as was asked for).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException

from holdfast.errors import ConfigError
from holdfast.plain import one_line

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
        notice: returns what it says of this machine's end, for people; "" while it says nothing.
    """

    name: str
    url: str
    notice: Callable[[Get], str]

    def ask(self) -> str:
        """Returns what it says now; "" while it says nothing.

        Raises:
            OSError: it does not answer.
            ValueError: it answers something else than it should.
        """

        def get(path: str, headers: Mapping[str, str], method: str = "GET") -> str:
            return _text(f"{self.url}{path}", headers, method)

        return self.notice(get)


def _text(url: str, headers: Mapping[str, str], method: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine, behind no proxy
    try:
        with opener.open(urllib.request.Request(url, headers=dict(headers), method=method), timeout=_LIMIT_S) as answer:
            text: str = answer.read(_MOST_BYTES).decode()
            return text
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return ""
        raise OSError(f"{url}: {error.code} {error.reason}") from None
    except HTTPException as error:
        raise OSError(f"{url}: {error!r}") from None


def _aws(get: Get) -> str:
    session = get("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if not session:
        raise ValueError("it gives no token (IMDSv2)")
    said = get("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": session})
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


def _azure(get: Get) -> str:
    headers = {"Metadata": "true"}
    name = get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers).strip()
    events = _mapping(get("/metadata/scheduledevents?api-version=2020-07-01", headers)).get("Events")
    if not isinstance(events, list):
        raise ValueError("it names no Events")
    for event in events:
        if isinstance(event, dict) and event.get("EventType") in _TAKEN and name in (event.get("Resources") or ()):
            return f"{event['EventType']}, not before {event.get('NotBefore') or 'now'}"
    return ""


def _mapping(text: str) -> dict[str, object]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it says something else than a mapping")
    return found


CLOUDS = {
    "aws": Cloud("aws", _LOCAL, _aws),
    "gcp": Cloud("gcp", "http://metadata.google.internal", _gcp),
    "azure": Cloud("azure", _LOCAL, _azure),
}


def find(text: str) -> Cloud:
    """Returns the cloud that this machine is of.

    Args:
        text: its name, with ``=URL`` behind it if its service is elsewhere; ``auto``: the first that answers.

    Raises:
        ConfigError: there is none of that name, or none answers.
    """
    name, equals, url = text.partition("=")
    if name in CLOUDS:
        cloud = CLOUDS[name]
        return Cloud(name, url.rstrip("/"), cloud.notice) if equals else cloud
    if text != "auto":
        raise ConfigError(f"--preempt {text}: expected {', '.join(CLOUDS)} or auto")
    for cloud in CLOUDS.values():
        with contextlib.suppress(OSError, ValueError):
            cloud.ask()
            return cloud
    raise ConfigError(f"--preempt auto: no metadata service answers; expected a machine of {', '.join(CLOUDS)}")


@contextlib.contextmanager
def watched(cloud: Cloud | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Sends this process SIGTERM, once, when its machine is to be taken away; until left.

    Args:
        cloud: that says so; None: none is asked.
        tell: told what it says, and once if it does not answer; in a thread of its own.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(cloud, tell, over), name="spot", daemon=True)
    if cloud is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(cloud: Cloud, tell: Callable[[str], None], over: threading.Event) -> None:
    silent = False
    while not over.is_set():
        try:
            said, silent = cloud.ask(), False
        except (OSError, ValueError) as error:
            said = ""
            if not silent:
                tell(f"{cloud.name} does not say whether this machine is to be taken away: {one_line(str(error))}")
            silent = True
        if said and not over.is_set():
            tell(f"{cloud.name} takes this machine away: {one_line(said)}")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        over.wait(_EVERY_S)
