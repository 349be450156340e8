"""What a real job would have written into its log, with times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from holdfast.core.plan import Plan
from holdfast.telemetry.events import Event, JobEnded, JobStarted, Ran, Timed

__all__ = ["Diary", "attempts"]

_SOON_S = 1e-6


class Diary:
    """The events of a simulated job.

    Args:
        now: tells the time.

    Attributes:
        events: in the order of time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.events: list[Timed] = []
        self._now = now
        self._computing: tuple[Plan | None, tuple[str, ...]] = None, ()

    def note(self, event: Event) -> None:
        """Something happens now."""
        self.events.append((self._now(), event))

    def committed(self, plan: Plan, generation: int, first: int, stop: int, step_s: float) -> None:
        """The last of so many steps of a plan, of which each took ``step_s``, ends now."""
        now = self._now()
        if self.events:
            at, last = self.events[-1]
            follows = isinstance(last, Ran) and (last.generation, last.stop, last.step_s) == (generation, first, step_s)
            if isinstance(last, Ran) and follows and abs(at + (stop - first) * step_s - now) < _SOON_S:
                self.events[-1] = now, msgspec.structs.replace(last, stop=stop)
                return
        if self._computing[0] is not plan:
            self._computing = plan, tuple(str(worker) for worker, row in plan.orders.rows if row)
        ran = Ran(generation=generation, first=first, stop=stop, step_s=step_s, workers=self._computing[1])
        self.events.append((now, ran))


def attempts(events: tuple[Timed, ...], name: str, workers: int, samples: int, lasts_s: float) -> Iterator[list[Timed]]:
    """Yield the events of each attempt: a job that ended for lack of machines begins again once there are some.

    Args:
        events: of the job.
        name: of it.
        workers: of its whole grid.
        samples: of a step.
        lasts_s: how long it was simulated.
    """
    found: list[Timed] = []
    for timed in (*events, (lasts_s, None)):
        at, event = timed
        if event is not None:
            found.append((at, event))
        if found and (event is None or isinstance(event, JobEnded)):
            steps = max((each.stop for _, each in found if isinstance(each, Ran)), default=0)
            began = found[0][0]
            start = JobStarted(name=name, workers=workers, steps=steps, samples_per_step=samples, wall_time=began)
            ended = () if event is not None else ((lasts_s, JobEnded(outcome="simulated", step=steps)),)
            yield [(began, start), *found, *ended]
            found = []
