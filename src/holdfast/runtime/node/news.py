"""What happens to workers, as lines for people: who is lost or has come, why, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.messages import News, Progress
from holdfast.telemetry.events import Detected, Evaluated, HandingOver, Migrating, Notice, Parted, Seated, Synced

__all__ = ["Reporter"]


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Makes a line of what the coordinator tells.

    Attributes:
        of: how many workers the whole grid has.
    """

    of: int
    _lost_at: dict[str, float] = field(default_factory=dict)
    _asked_at: dict[str, float] = field(default_factory=dict)
    _gets: dict[str, str] = field(default_factory=dict)
    """Of whom it was told last that it moves, or takes layers over: what the state is that it gets."""

    def asked(self, worker: str, now: float) -> None:
        """A process of this worker is being started, at ``now`` in seconds."""
        self._asked_at[worker] = now

    def tell(self, news: News, now: float) -> str:
        """Returns a line."""
        match news:
            case Detected(worker=worker, how=how, spare=True):
                return f"worker {worker}, a spare, is lost: {how}"
            case Detected(worker=worker, how=how):
                self._lost_at.setdefault(worker, now)
                self._gets.pop(worker, None)
                return f"worker {worker} is lost: {how}"
            case Seated(worker=worker, place=place):
                return f"worker {worker} takes the place of {place}, which is lost"
            case Parted(worker=worker, step=step):
                self._gets.pop(worker, None)
                return f"worker {worker} has gone as it was told to, before step {step}"
            case Migrating(moves=moves):
                self._gets |= {worker: "its new place: it computes from step {} on" for worker, _ in moves}
                told = ", ".join(f"{worker} takes that of {place}" for worker, place in moves)
                return f"workers change places, for a better plan: {told}"
            case HandingOver(takes=takes):
                self._gets |= {worker: "the layers that it takes over, before step {}" for worker, _ in takes}
                told = ", ".join(f"{worker} takes {layers}" for worker, layers in takes)
                return f"layers are handed from worker to worker: {told}"
            case Synced(worker=worker, step=step) if worker in self._gets:
                return f"worker {worker} has the state of {self._gets.pop(worker).format(step)}"
            case Synced(worker=worker, step=step):
                since = self._asked_at.pop(worker, None)
                after = "" if since is None else f", {now - since:.2f} s after it was started"
                return f"worker {worker} has come: it takes part from step {step} on{after}"
            case Evaluated():
                return news.told
            case Notice(worker=worker, text=text):
                return f"worker {worker}: {text}"

    def progressed(self, progress: Progress, now: float) -> str | None:
        """Returns a line on how long the workers that were lost have held the others up, once they go on."""
        if not self._lost_at:
            return None
        names, since = ", ".join(sorted(self._lost_at)), min(self._lost_at.values())
        self._lost_at = {}
        some = f"{progress.alive} of {self.of} workers"
        return f"training goes on with {some}, {now - since:.2f} s after the loss of {names}"
