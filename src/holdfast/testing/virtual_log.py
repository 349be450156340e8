"""What has happened in a simulated job."""

from __future__ import annotations

from holdfast.telemetry.events import Event, FaultInjected, Retold

__all__ = ["VirtualLog"]


class VirtualLog:
    """Its events, and the faults that struck.

    Attributes:
        events: (virtual time, event), in order.
        fired: specs of the faults, in order; each that is noted as an event once, however many it struck.
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.fired: list[str] = []
        self._retold = Retold()

    def write(self, time: float, event: Event, decision: int = 0, /) -> bool:
        """See :class:`holdfast.telemetry.events.Log`."""
        if self._retold.knows(event, decision):
            return True
        self.events.append((time, event))
        if isinstance(event, FaultInjected):
            self.fire_once(event.spec)
        return True

    def fire(self, spec: str) -> None:
        """Something has struck."""
        self.fired.append(spec)

    def fire_once(self, spec: str) -> None:
        """Something has struck, which may go on for a while."""
        if spec not in self.fired:
            self.fired.append(spec)
