"""What the user of a job is told while it begins, trains and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Event, EventLog, Notice, Preparing

__all__ = ["Teller"]

_TELL_S = 1.0


@dataclass(slots=True, kw_only=True)
class Teller:
    """Tells the user what is worth a line.

    Attributes:
        on_event: called with each.
    """

    on_event: Callable[[Event], None]
    _told: set[str] = field(default_factory=set)
    _preparing: Preparing | None = None
    _since: float = 0.0
    _last: float = 0.0

    def say(self, line: str) -> None:
        """Tells a line."""
        self.on_event(Notice(worker="agent", text=line))

    def say_once(self, kind: str, text: str) -> None:
        """Says what is wrong, and that training goes on; once for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            self.say(text)

    def tell(self, log: EventLog, *events: Event) -> None:
        """Tells of events and writes them down."""
        for event in events:
            log.write(time.monotonic(), event)
            self.on_event(event)

    def prepare(self, text: str, missing: tuple[WorkerId, ...] = (), of: int = 0) -> None:
        """Something begins, or has made progress, that has to be done before the first step."""
        now = time.monotonic()
        if self._preparing is None or self._preparing.text != text:
            self._since = now
        names = tuple(str(worker) for worker in missing)
        self._preparing = Preparing(text=text, done=of - len(names), of=of, missing=names)
        self._tell_preparing(self._preparing, now)

    def prepare_quietly(self, text: str) -> None:
        """Something begins that is worth a line only if it takes longer than a moment."""
        self._preparing = Preparing(text=text)
        self._since = self._last = time.monotonic()

    def prepared(self) -> None:
        """Nobody waits any more."""
        self._preparing = None

    def remind(self) -> None:
        """To be called while something is waited for: every second it is told what."""
        now = time.monotonic()
        if self._preparing is not None and now - self._last >= _TELL_S:
            self._tell_preparing(self._preparing, now)

    def _tell_preparing(self, preparing: Preparing, now: float) -> None:
        self._last = now
        self.on_event(replace(preparing, waited_s=now - self._since))
