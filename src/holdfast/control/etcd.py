"""Decisions and leadership in etcd, for several coordinators of which one leads.

Over etcd's own JSON gateway and the standard library's HTTP client: four calls are needed, see docs/adr/0013.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.control.store import StoredDecision
from holdfast.errors import ConfigError, CoordinatorUnavailable, StorageError

__all__ = ["Etcd", "EtcdStore", "Leadership", "parse_store_url"]

LEASE_S = 2
_RENEW_S = 0.4
_POLL_S = 0.05
_CALL_S = 1.0


def parse_store_url(url: str) -> tuple[str, int, str]:
    """Returns host, port and prefix of ``etcd://HOST:PORT[/PREFIX]``.

    Raises:
        ConfigError: it has another form.
    """
    rest = url.removeprefix("etcd://")
    place, _, prefix = rest.partition("/")
    host, _, port = place.rpartition(":")
    if rest == url or not host or not (port.isascii() and port.isdecimal()):
        raise ConfigError(f"control.store: expected etcd://HOST:PORT[/PREFIX], got {url!r}")
    return host, int(port), prefix.strip("/") or "holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Etcd:
    """Calls to one etcd server; each is a connection of its own, so nothing is to be repaired when it comes back."""

    host: str
    port: int

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns etcd's answer.

        Raises:
            StorageError: it does not answer, or refuses. The call may have taken effect.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_CALL_S)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StorageError(f"etcd at {self.host}:{self.port}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise StorageError(f"etcd at {self.host}:{self.port}: {answer.get('error', answer)}")
        return dict(answer)

    def patiently(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`call`, however long etcd is away."""
        while True:
            try:
                return self.call(path, body)
            except StorageError:
                time.sleep(_POLL_S)


def _text(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else value
    return base64.b64encode(data).decode()


def _is_new(key: str) -> dict[str, Any]:
    return _created(key, 0)


def _created(key: str, revision: int) -> dict[str, Any]:
    """A condition: the key was created in this revision; 0: it is not there."""
    return {"key": _text(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


class Leadership:
    """One of several processes leads, for as long as it renews its lease.

    Args:
        etcd: where.
        prefix: of the job; the key ``PREFIX/leader`` is the leader's.
        on_lost: called in another thread when the lease has run out: somebody else may lead now.
    """

    def __init__(self, etcd: Etcd, prefix: str, on_lost: Callable[[], None]) -> None:
        self._etcd = etcd
        self._on_lost = on_lost
        self.key = f"{prefix}/leader"
        self.revision = 0

    def win(self) -> None:
        """Returns when we lead; :attr:`revision` tells our leadership from all others."""
        while not (lease := self._try()):
            time.sleep(_POLL_S)
        threading.Thread(target=self._renew, args=(lease,), name="lease", daemon=True).start()

    def _try(self) -> str | None:
        if self._etcd.patiently("kv/range", {"key": _text(self.key)}).get("kvs"):
            return None
        lease = str(self._etcd.patiently("lease/grant", {"TTL": LEASE_S})["ID"])
        put = {"request_put": {"key": _text(self.key), "lease": lease}}
        won = self._etcd.patiently("kv/txn", {"compare": [_is_new(self.key)], "success": [put]})
        if won.get("succeeded"):
            self.revision = int(won["header"]["revision"])
            return lease
        return None  # somebody was faster, or the answer to a call that had worked was lost: that lease runs out

    def _renew(self, lease: str) -> None:
        while True:
            time.sleep(_RENEW_S)
            answer = self._etcd.patiently("lease/keepalive", {"ID": lease})
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                return self._on_lost()


class EtcdStore:
    """Decisions of the one who leads; see :class:`holdfast.control.store.DecisionStore`.

    Args:
        etcd: where.
        prefix: of the job.
        leadership: under which decisions are stored: etcd itself refuses those of a leader that leads no more.
    """

    def __init__(self, etcd: Etcd, prefix: str, leadership: Leadership) -> None:
        self._etcd = etcd
        self._folder = f"{prefix}/decisions/"
        self._leadership = leadership

    def put(self, decision: StoredDecision) -> None:
        """Stores a decision; waits while etcd is away.

        Raises:
            CoordinatorUnavailable: we do not lead any more; nothing was stored.
            StorageError: another decision has this number.
        """
        key, body = f"{self._folder}{decision.revision:012d}", msgspec.json.encode(decision)
        ours = _created(self._leadership.key, self._leadership.revision)
        look = {"request_range": {"key": _text(key)}}
        transaction = {
            "compare": [ours, _is_new(key)],
            "success": [{"request_put": {"key": _text(key), "value": _text(body)}}],
            "failure": [{"request_range": {"key": _text(self._leadership.key)}}, look],
        }
        answer = self._etcd.patiently("kv/txn", transaction)
        if not answer.get("succeeded"):
            self._explain(answer, body, decision.revision)

    def _explain(self, answer: dict[str, Any], body: bytes, number: int) -> None:
        """Why nothing was stored; that it was stored by the call before, whose answer was lost, is fine."""
        leader, there = (part["response_range"].get("kvs", []) for part in answer["responses"])
        if not leader or int(leader[0]["create_revision"]) != self._leadership.revision:
            raise CoordinatorUnavailable("this coordinator does not lead any more; its decision was not stored")
        if there[0]["value"] != _text(body):
            raise StorageError(f"decision {number} is stored already, with other contents")

    def latest(self) -> StoredDecision | None:
        """Returns the newest decision; None if there is none. Waits while etcd is away."""
        first, end = self._folder, self._folder[:-1] + "0"  # "0" follows "/"
        query = {
            "key": _text(first),
            "range_end": _text(end),
            "sort_order": "DESCEND",
            "sort_target": "KEY",
            "limit": 1,
        }
        found = self._etcd.patiently("kv/range", query).get("kvs", [])
        return msgspec.json.decode(base64.b64decode(found[0]["value"]), type=StoredDecision) if found else None

    def close(self) -> None:
        """Nothing is kept open."""
