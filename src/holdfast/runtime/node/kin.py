"""The processes that a job's processes have started in their turn, found in /proc (Linux): stopped, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Kin", "below", "end_all", "in_session", "look_at", "send", "stop_below"]

_LIMIT_S, _STOPPING_S = 2.0, 10.0
_LOOK_S = 0.002
_DEAD = ("Z", "X")
_ENDING = 0x4  # PF_EXITING, of the flags in proc(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """A process, as it was when it was looked at.

    Attributes:
        pid: its number.
        state: the letter for what it does, as in proc(5).
        parent: the number of the process that is its parent now.
        session: the number of the process that has begun its session.
        started: when it was started, in ticks since the machine was; with ``pid`` it names a process for good.
        ending: whether it runs no code any more, though nobody may be able to take note of its end yet.
    """

    pid: int
    state: str
    parent: int
    session: int
    started: int
    ending: bool = False

    @property
    def gone(self) -> bool:
        """Whether nothing of it can run any more, though its parent may not have taken note of its end."""
        return self.state in _DEAD


def look_at(pid: int) -> Kin | None:
    """Returns the process of a number; None if there is none."""
    return next(_of(pid), None)


def below(root: int) -> tuple[Kin, ...]:
    """Returns all that descend from a process and live, each behind its parent."""
    children: dict[int, list[Kin]] = {}
    for each in _everybody():
        children.setdefault(each.parent, []).append(each)
    found = list(children.get(root, ()))
    for each in found:  # it grows meanwhile
        found += children.get(each.pid, ())
    return tuple(each for each in found if not each.gone)


def in_session(leader: int) -> tuple[Kin, ...]:
    """Returns all that live in the session that a process has begun, which may have ended itself."""
    return tuple(each for each in _everybody() if each.session == leader and not each.gone)


def end_all(find: Callable[[], Collection[Kin]], limit_s: float = _LIMIT_S) -> tuple[Kin, ...]:
    """Kills what is found, and what these may have started before they were, until nothing is found any more.

    Returns:
        Those that not even the kernel could end within the limit.
    """
    until = time.monotonic() + limit_s
    while (left := tuple(find())) and time.monotonic() < until:
        for each in left:
            send(each, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return left


def stop_below(root: int, limit_s: float = _STOPPING_S) -> tuple[Kin, ...]:
    """Stops a process and all that descend from it; returns those that ran, which are to go on.

    One that is told to stop in the middle of a fork has a child then that nobody has told: so all are looked at until
    each thread of each has stopped, as long as ``limit_s``; and once more, as whoever was forked while they were looked
    at is in no list that had been begun before.
    """
    stopped: dict[Kin, None] = {}
    until, looks = time.monotonic() + limit_s, 2
    while looks and time.monotonic() < until:
        running = [each for each in (*_of(root), *below(root)) if not _stands(each)]
        for each in running:
            if _named(each) not in stopped:
                send(each, signal.SIGSTOP)
                stopped[_named(each)] = None
        looks = 2 if running else looks - 1
        time.sleep(_LOOK_S)
    return tuple(stopped)


def send(to: Kin, number: signal.Signals) -> None:
    """Signals a process, unless it has ended and its number may be another's."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(to.pid)
        try:
            if any(_named(now) == _named(to) for now in _of(to.pid)):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _stands(process: Kin) -> bool:
    """Whether none of its threads runs, each of which may be the one that forks; its own state is the first one's."""
    states = {process.state}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            states |= {each.state for each in _read(thread / "stat", process.pid)}
    return states <= {"T", *_DEAD}


def _named(process: Kin) -> Kin:
    """What stays the same of it."""
    return Kin(pid=process.pid, state="", parent=0, session=0, started=process.started)


def _everybody() -> Iterator[Kin]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield from _of(int(name))


def _of(pid: int) -> Iterator[Kin]:
    """The process of a number, if there is one."""
    return _read(Path(f"/proc/{pid}/stat"), pid)


def _read(stat: Path, pid: int) -> Iterator[Kin]:
    """What the kernel says of a process, or of one of its threads, if there is one."""
    with contextlib.suppress(OSError):
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        parent, session, started = int(fields[1]), int(fields[3]), int(fields[19])
        ending = bool(int(fields[6]) & _ENDING)
        yield Kin(pid=pid, state=fields[0], parent=parent, session=session, started=started, ending=ending)
