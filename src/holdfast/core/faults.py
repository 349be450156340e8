"""Faults as data: what is to happen to whom, at which step, at which point of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError

__all__ = ["Fault", "FaultKind", "Point"]


class FaultKind(StrEnum):
    """What happens to the target."""

    KILL = "kill"


class Point(StrEnum):
    """A named place in a step, or in a recovery, where a fault can be injected.

    Of a step: ``start`` before its first operation; ``forward`` / ``backward`` half-way through the worker's forward /
    backward operations, before the send; ``reduce`` its first contribution submitted, the result unread; ``update`` the
    optimizer ran on the copy, before the swap; ``commit`` after its first layer's swap, before its last.
    Of a recovery: ``detect`` when the worker learns of the new generation; ``install`` before its new transport is
    built; ``replay`` when it is about to redo the interrupted step.
    """

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    COMMIT = "commit"
    DETECT = "detect"
    INSTALL = "install"
    REPLAY = "replay"

    @property
    def in_recovery(self) -> bool:
        """Whether the point lies in a recovery instead of in a step."""
        return self in (Point.DETECT, Point.INSTALL, Point.REPLAY)


_E = TypeVar("_E", bound=StrEnum)
_SPEC = re.compile(r"(?P<kind>[a-z-]+):(?P<target>[^@:]+)@(?P<step>[^:]+)(?::(?P<point>.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, written ``KIND:TARGET@STEP[:POINT]``, for example ``kill:1.2@5:backward``.

    Example:
        >>> str(Fault.parse("kill:1.2@5"))
        'kill:1.2@5:start'
    """

    kind: FaultKind
    worker: WorkerId
    step: int
    point: Point = Point.START

    def __str__(self) -> str:
        return f"{self.kind}:{self.worker}@{self.step}:{self.point}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads a fault from its text form.

        Raises:
            ConfigError: the text is no fault; says which part, and what would be right.
        """
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigError(f"--fault {text}: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward")
        kind = _member(FaultKind, match["kind"], text, "kind")
        point = _member(Point, match["point"] or Point.START.value, text, "point")
        if not (match["step"].isascii() and match["step"].isdecimal()):
            raise ConfigError(f"--fault {text}: step {match['step']!r} is not a whole number from 0")
        try:
            worker = WorkerId.parse(match["target"])
        except ConfigError as error:
            raise ConfigError(f"--fault {text}: {error}") from None
        return cls(kind=kind, worker=worker, step=int(match["step"]), point=point)


def _member(choices: type[_E], value: str, text: str, what: str) -> _E:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise ConfigError(f"--fault {text}: unknown {what} {value!r}; known: {known}") from None
