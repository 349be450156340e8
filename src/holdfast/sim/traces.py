"""Reads what happened to real machines, or spot instances, from a file.

Two forms are known by their first line: events, ``t_ms,add|remove|slow=FACTOR,NAME``, and numbers of machines that
there were, ``t_ms,available``. Where only numbers are known it is drawn who was lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.sim.world import Happening, Kind, World

__all__ = ["MOST_ROWS", "number_above_0", "read_trace"]

MOST_ROWS = 1_000_000
_HEADER = "t_ms,available"
_EVENTS = "t_ms,add|remove|slow=FACTOR,NAME"


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


def _by_names(path: Path, rows: Sequence[tuple[int, str]]) -> Iterator[Happening]:
    """Who comes, goes and is slow, by numbers in the order of coming."""
    there: dict[str, int] = {}
    known, before = 0, -math.inf
    for number, line in rows:
        fields = [field.strip() for field in line.split(",")]
        what, _, by = fields[1].partition("=") if len(fields) == 3 else ("", "", "")
        if what not in ("add", "remove", "slow") or (what == "slow") != bool(by) or not fields[2]:
            raise ConfigError(f"{path}:{number}: expected {_EVENTS}, got {line!r}")
        at, name = _milliseconds(path, number, fields[0], before), fields[2]
        if what == "add":
            if name in there:
                raise ConfigError(f"{path}:{number}: adds {name} again")
            there[name], known = known, known + 1
            yield Happening(at_s=at / 1e3, kind=Kind.COMES, machine=there[name])
        elif name not in there:
            raise ConfigError(f"{path}:{number}: {what}s {name}, which is not there")
        elif what == "remove":
            yield Happening(at_s=at / 1e3, kind=Kind.LOST, machine=there.pop(name))
        else:
            factor = number_above_0(by, f"{path}:{number}: slow=")
            yield Happening(at_s=at / 1e3, kind=Kind.SLOWS, machine=there[name], factor=factor)
        before = at


def _by_numbers(path: Path, rows: Sequence[tuple[int, str]], drawn: random.Random) -> Iterator[Happening]:
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
            yield Happening(at_s=at / 1e3, kind=Kind.COMES, machine=known)
            known += 1
        while len(there) > wanted:
            yield Happening(at_s=at / 1e3, kind=Kind.LOST, machine=there.pop(drawn.randrange(len(there))))
        before = at


def number_above_0(text: str, where: str) -> float:
    """Return what a text says; ``where`` begins the message if that is no number, or none above 0.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e6:
        raise ConfigError(f"{where}: expected a number above 0, got {text!r}")
    return found


def _milliseconds(path: Path, number: int, text: str, before: float) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise ConfigError(f"{path}:{number}: expected milliseconds, a whole number from 0, got {text!r}")
    at = int(text)
    if at < before:
        raise ConfigError(f"{path}:{number}: time goes back from {before:.0f} to {at}")
    return at


def _as_world(path: Path, rows: Iterator[Happening], lasts_s: float | None) -> World:
    found = list(rows)
    if not found:
        raise ConfigError(f"{path}: expected machines, got none")
    began = found[0].at_s
    after = [each for each in found if not (each.at_s == began and each.kind is Kind.COMES)]
    end = max(found[-1].at_s - began, 1.0) if lasts_s is None else lasts_s
    happenings = (replace(each, at_s=each.at_s - began) for each in after)
    return World(
        machines=len(found) - len(after), happenings=tuple(each for each in happenings if each.at_s < end), lasts_s=end
    )
