"""One line that tells how much is done, and the time left."""

from __future__ import annotations

import sys
import time

from holdfast.cli.arguments import hours

__all__ = ["CountingLine"]

_SHOWN_EVERY_S = 10.0


class CountingLine:
    """Written over again on a terminal; elsewhere a new line at most every ten seconds.

    Args:
        what: is counted.
        quiet: nothing is shown.
    """

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what, self._quiet = what, quiet
        self._terminal = sys.stderr.isatty()
        self._begin: tuple[int, float] | None = None
        self._shown: float | None = None
        self._open = False

    def show(self, done: int, of: int) -> None:
        """Shows that so many are done."""
        now = time.monotonic()
        first, since = self._begin = self._begin or (done, now)
        due = self._shown is None or now - self._shown >= _SHOWN_EVERY_S
        if self._quiet or not (self._terminal or done == of or due):
            return
        self._shown = now
        text = f"{self._what} {done}/{of}"
        if done > first:
            text += f"  left {hours(round((of - done) * (now - since) / (done - first)))}"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        self._open = self._terminal
        sys.stderr.flush()

    def end(self) -> None:
        """Ends the line."""
        if self._open:
            print(file=sys.stderr)
            self._open = False
