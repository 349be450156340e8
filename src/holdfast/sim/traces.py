"""Reads what happened to real machines, or spot instances, from a file.

Two forms are known by their first line: events, ``t_ms,add|remove,NAME``, and numbers of machines that there were,
``t_ms,available``. Where only numbers are known it is drawn who was lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.sim.world import Happening, Kind, World

__all__ = ["MOST_ROWS", "read_trace"]

MOST_ROWS = 1_000_000
_HEADER = "t_ms,available"
_EVENTS = "t_ms,add|remove,NAME"


def read_trace(path: Path, *, lasts_s: float | None = None, seed: int = 0) -> World:
    """Return the world that a trace tells of, from the first instant on at which a machine is there.

    Args:
        path: of the file.
        lasts_s: of which time it is to tell; None: as far as the trace does.
        seed: by which it is drawn who is lost, where a trace has only numbers.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: expected lines such as {_EVENTS}, or {_HEADER} and numbers, got none")
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"{path}: expected at most {MOST_ROWS} lines, got {len(rows)}")
    if rows[0][1] == _HEADER:
        found = _by_numbers(path, rows[1:], random.Random(f"{seed}:who is lost"))
    else:
        found = _by_names(path, rows)
    return _as_world(path, found, lasts_s)


def _by_names(path: Path, rows: Sequence[tuple[int, str]]) -> Iterator[tuple[float, Kind, int]]:
    """Who comes and goes, by numbers in the order of coming."""
    there: dict[str, int] = {}
    known, before = 0, -math.inf
    for number, line in rows:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or fields[1] not in ("add", "remove") or not fields[2]:
            raise ConfigError(f"{path}:{number}: expected {_EVENTS}, got {line!r}")
        at, name = _milliseconds(path, number, fields[0], before), fields[2]
        if fields[1] == "add":
            if name in there:
                raise ConfigError(f"{path}:{number}: adds {name} again")
            there[name], known = known, known + 1
            yield at / 1e3, Kind.COMES, there[name]
        else:
            if name not in there:
                raise ConfigError(f"{path}:{number}: removes {name}, which is not there")
            yield at / 1e3, Kind.LOST, there.pop(name)
        before = at


def _by_numbers(path: Path, rows: Sequence[tuple[int, str]], drawn: random.Random) -> Iterator[tuple[float, Kind, int]]:
    """So many come, or somebody of those there is lost."""
    there: list[int] = []
    known, before = 0, -math.inf
    for number, line in rows:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2 or not fields[1].isdecimal() or int(fields[1]) > MOST_ROWS:
            raise ConfigError(f"{path}:{number}: expected {_HEADER}, two whole numbers, got {line!r}")
        at, wanted = _milliseconds(path, number, fields[0], before), int(fields[1])
        while len(there) < wanted:
            there.append(known)
            yield at / 1e3, Kind.COMES, known
            known += 1
        while len(there) > wanted:
            yield at / 1e3, Kind.LOST, there.pop(drawn.randrange(len(there)))
        before = at


def _milliseconds(path: Path, number: int, text: str, before: float) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise ConfigError(f"{path}:{number}: expected milliseconds, a whole number from 0, got {text!r}")
    at = int(text)
    if at < before:
        raise ConfigError(f"{path}:{number}: time goes back from {before:.0f} to {at}")
    return at


def _as_world(path: Path, rows: Iterator[tuple[float, Kind, int]], lasts_s: float | None) -> World:
    found = list(rows)
    if not found:
        raise ConfigError(f"{path}: expected machines, got none")
    began = found[0][0]
    first = [machine for at, kind, machine in found if at == began and kind is Kind.COMES]
    after = [row for row in found if not (row[0] == began and row[1] is Kind.COMES)]
    end = max(found[-1][0] - began, 1.0) if lasts_s is None else lasts_s
    happenings = (Happening(at_s=at - began, kind=kind, machine=machine) for at, kind, machine in after)
    return World(machines=len(first), happenings=tuple(each for each in happenings if each.at_s < end), lasts_s=end)
