"""When, and how often, a coordinator that dies is started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from holdfast.errors import ConfigError, CoordinatorUnavailable, InternalError, describe_exit
from holdfast.telemetry.events import CoordinatorLost, Log, Notice

__all__ = ["RestartLimit", "StartAgain", "Supervisor"]

RETRY_S = 0.5
_Spec = TypeVar("_Spec")


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
            now: seconds that this process has run.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain(Generic[_Spec]):
    """It is time to start a coordinator again; ``since``: when that first could not be done, None at first."""

    spec: _Spec
    since: float | None = None


@dataclass(slots=True, kw_only=True)
class Supervisor(Generic[_Spec]):
    """Starts dead coordinators again.

    Attributes:
        start: starts one, as its spec says; raises ConfigError if it cannot listen, InternalError if it dies before.
        later: hands what it is given to :meth:`again` after so many seconds.
        clock: seconds, monotonic; of the log.
        awake: seconds that this process has run; by them deaths are near each other, and patience ends.
        log: the job's events.
        delay_s: between a death and the next start.
        patience_s: how long a start may fail because something is in its way, such as a port that is taken.
        limit: of deaths.
        deaths: how many there were.
    """

    start: Callable[[_Spec], object]
    later: Callable[[float, StartAgain[_Spec]], None]
    clock: Callable[[], float]
    awake: Callable[[], float]
    log: Log
    delay_s: float
    patience_s: float
    limit: RestartLimit
    deaths: int = 0
    _obstacle: str = ""

    def on_ended(self, spec: _Spec, status: int | None) -> None:
        """One has ended; ``status`` is its exit code, or minus the signal's number.

        Raises:
            InternalError: they die too often.
        """
        if status != 0:
            self._on_death(StartAgain(spec=spec), describe_exit(status))

    def again(self, wanted: StartAgain[_Spec]) -> None:
        """Starts one again, or tries later.

        Raises:
            InternalError: they die too often.
            ConfigError: it cannot be started for longer than ``patience_s``.
        """
        try:
            self.start(wanted.spec)
        except InternalError as error:
            self._on_death(wanted, f"could not be started again: {error}")
        except ConfigError as error:  # that is no death
            self._on_obstacle(wanted, str(error))
        else:
            self._obstacle = ""

    def gone(self, why: CoordinatorUnavailable) -> ConfigError | InternalError:
        """The error to end the job with when there was none for too long."""
        if self._obstacle:
            return ConfigError(f"the coordinator died and cannot be started again: {self._obstacle}")
        return InternalError(f"the coordinator is gone, the job cannot go on: {why}")

    def _on_death(self, wanted: StartAgain[_Spec], how: str) -> None:
        self.deaths += 1
        self.log.write(self.clock(), CoordinatorLost(how=how))
        self.limit.note(self.awake(), how)
        self.later(self.delay_s, wanted)

    def _on_obstacle(self, wanted: StartAgain[_Spec], why: str) -> None:
        now, self._obstacle = self.awake(), why
        if wanted.since is None:
            wanted = replace(wanted, since=now)
            text = f"the dead coordinator cannot be started again yet, it is tried every {RETRY_S:g} s: {why}"
            self.log.write(self.clock(), Notice(worker="agent", text=text))
        assert wanted.since is not None
        if now - wanted.since >= self.patience_s:
            raise ConfigError(f"the coordinator died and could not be started again for {self.patience_s:g} s: {why}")
        self.later(RETRY_S, wanted)
