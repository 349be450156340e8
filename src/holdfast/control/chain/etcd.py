"""A chain in etcd, for coordinators on several machines.

Over etcd's own JSON gateway and the standard library's HTTP client: two calls are needed, see docs/adr/0013.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.control.chain.entry import packed, unpacked
from holdfast.control.chain.port import Numbered
from holdfast.errors import ConfigError, StorageError, StoreAway

__all__ = ["Etcd", "EtcdChain", "parse_etcd_url"]

_CALL_S = 1.0

_AWAY_STATUS = (408, 502, 503, 504)
_AWAY_CODES = (1, 4, 14)
"""gRPC's CANCELLED, DEADLINE_EXCEEDED and UNAVAILABLE, which the gateway hands on."""
_BUSY = "too many requests"
_HELPS = (
    ("request is too large", "; start etcd with a larger --max-request-bytes, or use control.store: sqlite"),
    ("database space exceeded", "; compact and defragment etcd, then disarm its alarm (etcdctl alarm disarm)"),
    ("HTTP status 404", "; its JSON gateway is needed (--enable-grpc-gateway)"),
)


def parse_etcd_url(url: str) -> tuple[str, int, str]:
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
    """

    host: str
    port: int

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


class EtcdChain:
    """See :class:`holdfast.control.chain.port.Chain`; it keeps the newest entry alone.

    The entry is the value of one key, ``PREFIX/newest``, and its number is what etcd counts anyhow: how often that key
    was written since it was made, its version. So a transaction "the version is one less" puts an entry once, and
    nothing is left to be cleared away. Values are compressed: etcd takes requests of 1.5 MiB, unless told otherwise.

    Args:
        etcd: where.
        prefix: of the job.
    """

    beat_s = 0.4

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._newest = f"{prefix}/newest"
        self._sign = f"{prefix}/sign"

    def __str__(self) -> str:
        return f"{self._etcd}, {self._newest}"

    def put(self, number: int, body: bytes) -> bool:
        """See Chain.put."""
        key, value = _text(self._newest), _text(packed(body))
        transaction = {
            "compare": [{"key": key, "target": "VERSION", "result": "EQUAL", "version": str(number - 1)}],
            "success": [{"request_put": {"key": key, "value": value}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answer = self._etcd.call("kv/txn", transaction)
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        return bool(found) and int(found[0]["version"]) == number and found[0]["value"] == value

    def newest(self) -> Numbered | None:
        """See Chain.newest."""
        found = self._etcd.call("kv/range", {"key": _text(self._newest)}).get("kvs", [])
        if not found:
            return None
        data = base64.b64decode(found[0].get("value", ""))
        return Numbered(int(found[0]["version"]), unpacked(data, str(self)))

    def bodies(self) -> Iterator[bytes]:
        """See Chain.bodies."""
        if (found := self.newest()) is not None:
            yield found.body

    def say(self, sign: bytes) -> None:
        """See Chain.say."""
        self._etcd.call("kv/put", {"key": _text(self._sign), "value": _text(sign)})

    def said(self) -> bytes | None:
        """See Chain.said."""
        found = self._etcd.call("kv/range", {"key": _text(self._sign)}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def close(self) -> None:
        """Nothing is kept open."""
