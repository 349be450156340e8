"""How often a process that dies is started again."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.errors import InternalError

__all__ = ["RestartLimit", "describe_exit"]


@dataclass(slots=True, kw_only=True)
class RestartLimit:
    """Tells deaths that happen from a process that cannot live.

    Attributes:
        num_restarts: so many are allowed within ``within_s``.
        within_s: seconds.
    """

    num_restarts: int = 5
    within_s: float = 10.0
    _deaths: list[float] = field(default_factory=list)

    def note(self, now: float, how: str) -> None:
        """Counts one death.

        Args:
            now: seconds, monotonic.
            how: the process died, for the message.

        Raises:
            InternalError: one more than are allowed.
        """
        self._deaths = [*(at for at in self._deaths if now - at < self.within_s), now]
        if len(self._deaths) > self.num_restarts:
            raise InternalError(
                f"the coordinator died {len(self._deaths)} times within {self.within_s:g} s, it is not started again; "
                f"the last time: {how}"
            )


def describe_exit(status: int | None) -> str:
    """Says how a process ended; ``status`` is its exit code, or minus the signal's number."""
    return f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
