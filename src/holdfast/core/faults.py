"""Faults as data: what is to happen to whom, at which step, at which point of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError

__all__ = ["OF_A_STEP", "Fault", "FaultKind", "Point"]


class FaultKind(StrEnum):
    """What happens to the target.

    ``kill`` SIGKILL; ``hang`` SIGSTOP; ``stall`` the computing thread stops, the process's heartbeats go on; ``slow``
    every operation takes a multiple of its time from then on; ``leave`` SIGTERM, a notice to go; ``suspend`` SIGUSR1, a
    notice to compute nothing, ``wake`` SIGUSR2, to compute again; ``join`` a worker comes: a lost one's id again, or
    ``new``; ``partition`` the node's network link goes down; ``kill-node`` SIGKILL to all workers of a node at once;
    ``kill-coordinator`` SIGKILL to the coordinator.
    """

    KILL = "kill"
    HANG = "hang"
    STALL = "stall"
    SLOW = "slow"
    LEAVE = "leave"
    SUSPEND = "suspend"
    WAKE = "wake"
    JOIN = "join"
    PARTITION = "partition"
    KILL_NODE = "kill-node"
    KILL_COORDINATOR = "kill-coordinator"


class Point(StrEnum):
    """A named place in a step, or in a recovery, where a fault can be injected.

    Of a step, in which all other workers are by then, too: ``start`` before its first operation; ``forward`` /
    ``backward`` half-way through the worker's forward / backward operations, before the send; ``reduce`` its first
    contribution submitted, the result unread; ``verdict`` it knows the verdict and has told nobody (so that others may
    commit, and must go back); ``update`` the next state is prepared (``shadow``: the optimizer ran on the copy), before
    the swap; ``commit`` after its first layer's swap, before its last; ``gradients:50`` it has contributed to half of
    the step's reductions (rounded down), in the order in which they are made, all others that live through this step
    hold these sums, and it contributes to no further one.
    Of an evaluation, and of the step behind it: ``evaluate`` half-way through what the worker runs of it.
    Of a checkpoint, and not of the step with its number: ``checkpoint`` the worker's first shard is written, nothing is
    reported, the rest is not written.
    Of a recovery: ``detect`` when the target learns of the failure; ``persist`` before the coordinator stores its
    decision; ``broadcast`` stored, nothing sent; ``install`` before the new transport is built (of the coordinator:
    sent to half of the workers); ``copy`` in the middle of giving, or taking, the state of a worker that joins, changes
    places or takes layers over (of the coordinator: while it knows of one that has not caught up yet); ``replay`` when
    the interrupted step is about to be redone.
    """

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    GRADIENTS = "gradients"
    VERDICT = "verdict"
    UPDATE = "update"
    COMMIT = "commit"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    DETECT = "detect"
    PERSIST = "persist"
    BROADCAST = "broadcast"
    INSTALL = "install"
    COPY = "copy"
    REPLAY = "replay"


OF_A_STEP = (
    *(Point.START, Point.FORWARD, Point.BACKWARD, Point.REDUCE),
    *(Point.GRADIENTS, Point.VERDICT, Point.UPDATE, Point.COMMIT),
)
"""The points of steps: a fault there waits until all others have begun the step, too."""

_E = TypeVar("_E", bound=StrEnum)
_SPEC = re.compile(r"(?P<kind>[a-z-]+)(?::(?P<target>[^@:]+))?@(?P<step>[^:]+)(?::(?P<point>.+))?")
_FACTOR = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)x", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
_AFTER = re.compile(r"\+(\d{1,9}(?:\.\d{1,9})?)s", re.ASCII)
_EXAMPLES = {
    FaultKind.SLOW: "slow:1.2@5:3x",
    FaultKind.JOIN: "join:1.2@30 or join:new@30",
    FaultKind.KILL_NODE: "kill-node:2@5",
    FaultKind.KILL_COORDINATOR: "kill-coordinator@10",
}
_BY_TIME = (FaultKind.KILL, FaultKind.KILL_NODE, FaultKind.JOIN)
"""What the agent can do by itself."""
_OF_COORDINATOR: list[Point] = [Point.START, Point.DETECT, Point.PERSIST, Point.BROADCAST, Point.INSTALL, Point.COPY]
_OF_WORKERS_ALONE = (FaultKind.KILL, FaultKind.HANG)
"""What can strike a worker in the middle of its sums."""
_OF_WORKERS: list[Point] = [point for point in Point if point not in (Point.PERSIST, Point.BROADCAST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, written ``KIND[:TARGET]@STEP[:POINT]``, for example ``kill:1.2@5:backward``; or ``kill:1.2@+12.5s``.

    Attributes:
        kind: what happens.
        step: when.
        worker: to whom; None if the target is no worker, or any (``join:new``).
        node: to which node (``kill-node``); counts from 0.
        point: where in the step, or in a recovery.
        factor: of ``slow``, how many times longer operations take.
        percent: of ``gradients``, of how many reductions the sums are there.
        after_s: seconds after the job's first step is over, whatever anybody does then; None: at the point.

    Example:
        >>> [str(Fault.parse(text)) for text in ("kill:1.2@5", "slow:0.1@3:2.5x", "kill-coordinator@7:persist")]
        ['kill:1.2@5:start', 'slow:0.1@3:2.5x', 'kill-coordinator@7:persist']
        >>> str(Fault.parse("join:new@+30.0s"))
        'join:new@+30s'
    """

    kind: FaultKind
    step: int
    worker: WorkerId | None = None
    node: int | None = None
    point: Point = Point.START
    factor: float = 1.0
    percent: int = 0
    after_s: float | None = None

    def __str__(self) -> str:
        when = f"{self.step}{self._tail()}" if self.after_s is None else f"+{self.after_s:g}s"
        return f"{self.kind}{self._target()}@{when}"

    def _target(self) -> str:
        if self.kind is FaultKind.KILL_COORDINATOR:
            return ""
        if self.kind is FaultKind.KILL_NODE:
            return f":{self.node}"
        return f":{self.worker or 'new'}"

    def _tail(self) -> str:
        if self.kind is FaultKind.SLOW:
            return f":{self.factor:g}x"
        if self.kind is FaultKind.JOIN:
            return ""
        return f":{self.point}:{self.percent}" if self.point is Point.GRADIENTS else f":{self.point}"

    @property
    def in_a_step(self) -> bool:
        """Whether it strikes a worker at a point of its step."""
        elsewhere = self.kind in (FaultKind.SLOW, FaultKind.JOIN, FaultKind.KILL_COORDINATOR)
        return not elsewhere and self.after_s is None and self.point in OF_A_STEP

    def reductions(self, of: int) -> int:
        """Returns how many sums are there when it strikes, of all."""
        return of * self.percent // 100

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
        if match["step"].startswith("+"):
            return cls._by_time(kind, match["target"], match["step"], match["point"], text)
        if not _is_number(match["step"]):
            raise ConfigError(f"--fault {text}: step {match['step']!r} is not a whole number from 0")
        step = int(match["step"])
        worker, node = _read_target(kind, match["target"], text)
        if kind is FaultKind.SLOW:
            return cls(kind=kind, step=step, worker=worker, factor=_read_factor(match["point"], text))
        name, colon, percent = (match["point"] or "").partition(":")
        point = _read_point(kind, name or None, text)
        if (point is Point.GRADIENTS) != bool(colon) or (colon and not _is_percent(percent)):
            raise ConfigError(
                f"--fault {text}: expected such as {kind}:2.0@5:gradients:50, with a number from 0 to 100"
            )
        return cls(kind=kind, step=step, worker=worker, node=node, point=point, percent=int(percent or 0))

    @classmethod
    def _by_time(cls, kind: FaultKind, target: str | None, after: str, point: str | None, text: str) -> Fault:
        """One that strikes at a time, not at a point."""
        after_s = _read_after(after, text)
        if kind not in _BY_TIME or point is not None:
            known = ", ".join(_BY_TIME)
            raise ConfigError(f"--fault {text}: expected one of {known} at a time, and no point")
        worker, node = _read_target(kind, target, text)
        return cls(kind=kind, step=0, worker=worker, node=node, after_s=after_s)


def _read_after(text_of_time: str, text: str) -> float:
    match = _AFTER.fullmatch(text_of_time)
    if match is None:
        raise ConfigError(f"--fault {text}: {text_of_time!r} is no time: expected such as +12.5s")
    return float(match[1])


def _read_target(kind: FaultKind, target: str | None, text: str) -> tuple[WorkerId | None, int | None]:
    if kind is FaultKind.KILL_COORDINATOR and target is None:
        return None, None
    if kind is FaultKind.KILL_NODE and target is not None and _is_number(target):
        return None, int(target)
    if kind in (FaultKind.KILL_COORDINATOR, FaultKind.KILL_NODE) or target is None:
        raise ConfigError(f"--fault {text}: expected such as {_EXAMPLES.get(kind, f'{kind}:1.2@5:backward')}")
    if kind is FaultKind.JOIN and target == "new":
        return None, None
    try:
        return WorkerId.parse(target), None
    except ConfigError as error:
        raise ConfigError(f"--fault {text}: {error}") from None


def _is_number(text: str) -> bool:
    """Whether it is a whole number from 0 that a step or a node can have."""
    return _NUMBER.fullmatch(text) is not None


def _is_percent(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) <= 100


def _read_factor(point: str | None, text: str) -> float:
    match = _FACTOR.fullmatch(point or "")
    if match is None or float(match[1]) < 1.0:
        raise ConfigError(f"--fault {text}: expected such as {_EXAMPLES[FaultKind.SLOW]}, with a factor of at least 1")
    return float(match[1])


def _read_point(kind: FaultKind, text_of_point: str | None, text: str) -> Point:
    point = _member(Point, text_of_point or Point.START.value, text, "point")
    allowed: list[Point] = _OF_COORDINATOR if kind is FaultKind.KILL_COORDINATOR else _OF_WORKERS
    if kind is FaultKind.JOIN:
        allowed = [Point.START]
    elif kind is FaultKind.WAKE:  # whoever computes nothing is at no other
        allowed = [Point.START, Point.REDUCE, Point.VERDICT, Point.UPDATE, Point.COMMIT]
    elif kind not in _OF_WORKERS_ALONE:
        allowed = [each for each in allowed if each is not Point.GRADIENTS]
    if point not in allowed:
        raise ConfigError(f"--fault {text}: {kind} has no point {point}; it has {', '.join(allowed)}")
    return point


def _member(choices: type[_E], value: str, text: str, what: str) -> _E:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise ConfigError(f"--fault {text}: unknown {what} {value!r}; known: {known}") from None
