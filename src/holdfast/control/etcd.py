"""Decisions and leadership in etcd, for several coordinators of which one leads.

Over etcd's own JSON gateway and the standard library's HTTP client: four calls are needed, see docs/adr/0013.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.control.store import StoredDecision, reading
from holdfast.errors import ConfigError, CoordinatorUnavailable, CorruptBlob, StorageError, StoreAway

__all__ = ["Etcd", "EtcdStore", "Leadership", "parse_store_url"]

LEASE_S = 2
_RENEW_S = 0.4
_POLL_S = 0.05
_CALL_S = 1.0

_AWAY_STATUS = (408, 502, 503, 504)
_AWAY_CODES = (1, 4, 14)
"""gRPC's CANCELLED, DEADLINE_EXCEEDED and UNAVAILABLE, which the gateway hands on."""
_BUSY = "too many requests"
_NO_LEASE = "requested lease not found"
_HELPS = (
    ("request is too large", "; start etcd with a larger --max-request-bytes, or use control.store: sqlite"),
    ("database space exceeded", "; compact and defragment etcd, then disarm its alarm (etcdctl alarm disarm)"),
    ("HTTP status 404", "; its JSON gateway is needed (--enable-grpc-gateway)"),
)


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


@dataclass(slots=True, kw_only=True)
class Etcd:
    """Calls to one etcd server; each is a connection of its own, so nothing is to be repaired when it comes back.

    Attributes:
        host: name or address.
        port: of etcd's clients.
        note: told when etcd is waited for, and when it is back; may be called in any thread.
    """

    host: str
    port: int
    note: Callable[[str], None] = lambda text: None
    _away: bool = False
    _turns: int = 0  # how often it went away or came back
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns etcd's answer.

        Raises:
            StoreAway: it does not answer now. The call may have taken effect.
            StorageError: it refuses, and would again.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_CALL_S)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise StoreAway(f"{self}: {type(error).__name__}: {error}") from None
        except ValueError as error:  # such as a name that no host can have
            raise StorageError(f"{self}: {error}") from None
        finally:
            connection.close()
        answer = _parsed(data)
        if response.status != 200 or answer is None:
            raise _refusal(str(self), response.status, answer)
        return answer

    def __str__(self) -> str:
        return f"etcd at {self.host}:{self.port}"

    def patiently(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`call`, however long etcd is away.

        Raises:
            StorageError: it refuses, and would again.
        """
        while True:
            known = self._turns
            try:
                answer = self.call(path, body)
            except StoreAway as error:
                self._tell(f"{error}; waiting for it", known, away=True)
                time.sleep(_POLL_S)
            else:
                self._tell(f"{self}: it answers again", known, away=False)
                return answer

    def _tell(self, text: str, known: int, *, away: bool) -> None:
        """Once each time that it goes away or comes back, whoever notices.

        What a call met counts only if nobody has seen it go or come since the call began (``known``): of several
        threads' calls, one may fail before etcd is back and be told of after another's success. Nothing is missed by
        that: whoever saw it go calls again until it is back.
        """
        with self._lock:
            news = away != self._away and known == self._turns
            if news:
                self._away, self._turns = away, known + 1
        if news:
            self.note(text)


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The answer; None if it is not one of etcd's."""
    try:
        answer = json.loads(data)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _refusal(who: str, status: int, answer: dict[str, Any] | None) -> StorageError:
    """What an answer other than success means: whether to ask again, or what would help."""
    code, text = (answer.get("code"), answer.get("error")) if answer else (None, None)
    words = f"{who}: {text or f'HTTP status {status}, and no answer of etcd'}"
    if status in _AWAY_STATUS or code in _AWAY_CODES or _BUSY in words:
        return StoreAway(words)
    helps = next((helps for part, helps in _HELPS if part in words), "")
    return StorageError(words + helps)


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
        """Returns when we lead; :attr:`revision` tells our leadership from all others.

        Raises:
            StorageError: etcd refuses what is needed for that.
        """
        while not (lease := self._try()):
            time.sleep(_POLL_S)
        threading.Thread(target=self._renew, args=(lease,), name="lease", daemon=True).start()

    def _try(self) -> str | None:
        if self._etcd.patiently("kv/range", {"key": _text(self.key)}).get("kvs"):
            return None
        lease = str(self._etcd.patiently("lease/grant", {"TTL": LEASE_S})["ID"])
        put = {"request_put": {"key": _text(self.key), "lease": lease}}
        try:
            won = self._etcd.patiently("kv/txn", {"compare": [_is_new(self.key)], "success": [put]})
        except StorageError as error:
            if _NO_LEASE not in str(error):
                raise
            return None  # we were stopped for so long that it ran out
        if won.get("succeeded"):
            self.revision = int(won["header"]["revision"])
            return lease
        return None  # somebody was faster, or the answer to a call that had worked was lost: that lease runs out

    def _renew(self, lease: str) -> None:
        while True:
            time.sleep(_RENEW_S)
            if not self._renewed(lease):
                return self._on_lost()

    def _renewed(self, lease: str) -> bool:
        try:
            answer = self._etcd.patiently("lease/keepalive", {"ID": lease})
        except StorageError as error:
            self._etcd.note(str(error))
            return False
        return int(answer.get("result", {}).get("TTL", 0)) > 0


class EtcdStore:
    """The newest decision of the one who leads; see :class:`holdfast.control.store.DecisionStore`.

    Compressed, and without those before it: etcd takes requests of 1.5 MiB and holds few GiB, unless told otherwise.

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
        """Stores a decision and deletes those before it; waits while etcd is away.

        Raises:
            CoordinatorUnavailable: we do not lead any more; nothing was stored.
            StorageError: another decision has this number, or etcd refuses it, as too large for example.
        """
        key, body = f"{self._folder}{decision.revision:012d}", zlib.compress(decision.encoded)
        older = {"request_delete_range": {"key": _text(self._folder), "range_end": _text(key)}}
        ours = _created(self._leadership.key, self._leadership.revision)
        look = {"request_range": {"key": _text(key)}}
        transaction = {
            "compare": [ours, _is_new(key)],
            "success": [{"request_put": {"key": _text(key), "value": _text(body)}}, older],
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
        """Returns the newest decision; None if there is none.

        Waits while etcd is away. Raises CorruptBlob if what is there is no decision.
        """
        first, end = self._folder, self._folder[:-1] + "0"  # "0" follows "/"
        query = {
            "key": _text(first),
            "range_end": _text(end),
            "sort_order": "DESCEND",
            "sort_target": "KEY",
            "limit": 1,
        }
        found = self._etcd.patiently("kv/range", query).get("kvs", [])
        if not found:
            return None
        with reading(lambda text: CorruptBlob(f"{self._etcd}, {self._folder}", "a decision", text), zlib.error):
            return StoredDecision.decoded(zlib.decompress(base64.b64decode(found[0]["value"])))

    def close(self) -> None:
        """Nothing is kept open."""
