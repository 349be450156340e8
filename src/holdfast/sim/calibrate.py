"""How fast a cluster is, and how soon it notices a loss, by what real runs on it have written down.

Each speed is the median of all that the runs show of it: a run in which nobody is lost shows nothing of losses.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from holdfast.config.job import Cluster
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.sim.prepare import speeds_of
from holdfast.sim.replies import writers_of
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    FaultInjected,
    Installed,
    Loaded,
    Pinned,
    Rebuilt,
    StepOps,
    Synced,
    Timed,
    WorkerReady,
)
from holdfast.telemetry.report import report

__all__ = ["Layers", "Shown", "medians", "shown_by"]

Shown = Mapping[str, Sequence[float]]
"""By the names of :class:`holdfast.config.job.Cluster`, each value that was seen."""

_LEAST_S = 1e-4
"""Nobody connects in less: who was late to report is told, and connects, the sooner."""
_NO_TIME = Cluster(control_s=0.0, message_s=0.0, connect_s=0.0)


def medians(runs: Iterable[Shown]) -> Mapping[str, float]:
    """Return what several runs show together; a speed of which none shows anything is left out."""
    found = defaultdict[str, list[float]](list)
    for shown in runs:
        for name, values in shown.items():
            found[name] += values
    return MappingProxyType({name: statistics.median(values) for name, values in found.items() if values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What is known of the layers of a run.

    Attributes:
        plan: of its whole grid.
        profile: how long they take, and how large they are.
        ahead: whether updates were made ahead of the verdict.
        sums: as :func:`holdfast.sim.prepare.speeds_of` takes it.
    """

    plan: Plan
    profile: Profile
    ahead: bool = False
    sums: int = 0

    @property
    def rates(self) -> Rates:
        """How fast they are, where messages take no time."""
        return speeds_of(self.profile, _NO_TIME, sums=self.sums).rates


def shown_by(events: Sequence[Timed], layers: Layers | None = None) -> Shown:
    """Return what the events of a run show.

    Args:
        events: in the order of time.
        layers: what is known of its layers; None: only what does not depend on them is told.
    """
    found, told_of = defaultdict[str, list[float]](list), report(events)
    told = [("detect_s", each.detected_s or 0.0) for each in told_of.failures]
    told += [*_of_recoveries(events), *_of_starts(events)]
    if layers is not None:
        told += [*_of_steps(events, told_of.commits, layers), *_of_states(events, layers)]
    for name, value in told:
        if value > 0:
            found[name].append(value)
    return found


def _of_starts(events: Sequence[Timed]) -> Iterator[tuple[str, float]]:
    """From an offer, or from the order to wait for somebody, until a new process is there."""
    offers, waits = deque[float](), math.nan
    for at, event in events:
        match event:
            case FaultInjected(kind="join"):
                offers.append(at)
            case Installed(strategy=strategy):
                waits = at if strategy else math.nan
            case Agreed() | StepOps():
                waits = math.nan
            case WorkerReady() if offers:
                yield "start_s", at - offers.popleft()
            case WorkerReady():
                yield "start_s", at - waits


def _of_recoveries(events: Sequence[Timed]) -> Iterator[tuple[str, float]]:
    """Who computes hears an order at the end of its operation, then says where it is; then all connect, and say so."""
    ends = [(op[3], op[4]) for _, event in events if isinstance(event, StepOps) for op in event.ops]
    answers, read, ordered, agreed = False, False, math.nan, math.nan
    for at, event in events:
        match event:
            case Installed(strategy=strategy):
                answers, read, ordered, agreed = bool(strategy), False, at, math.nan
            case Loaded():
                read = True  # which takes longer than to report
            case Agreed(goes_on=goes_on) if answers:
                agreed = at
                if not read:
                    last = max((end for start, end in ends if start <= ordered < end <= at), default=math.nan)
                    control_s = (at - ordered) / 2 if math.isnan(last) else at - last
                    agreed += 2 * control_s if goes_on else 0.0  # only then they are told with whom to connect
                    yield "control_s", control_s
            case Rebuilt() if not math.isnan(agreed):
                yield "connect_s", max(_LEAST_S, at - agreed)
                agreed = math.nan


def _of_steps(
    events: Sequence[Timed], commits: Iterable[tuple[int, float]], layers: Layers
) -> Iterator[tuple[str, float]]:
    """What a step takes beyond what its operations do, until somebody is lost, or comes; if no checkpoint is near."""
    computed = step_seconds(layers.plan, layers.rates, updates_ahead=layers.ahead)
    changed = min((at for at, event in events if isinstance(event, Detected | FaultInjected)), default=math.inf)
    pinned = {event.step for _, event in events if isinstance(event, Pinned)}
    undisturbed = ((step, at) for step, at in commits if at < changed)
    for (before, began), (step, ended) in pairwise(undisturbed):
        if step == before + 1 and before > 0 and pinned.isdisjoint({before, step, step + 1}):
            yield "message_s", ended - began - computed


def _of_states(events: Sequence[Timed], of: Layers) -> Iterator[tuple[str, float]]:
    """Bytes per second at which the slowest worker copies, writes, reads and is given state."""
    plan, size = of.plan, of.rates.state_bytes
    held = max(size(plan.placement.held_layers(worker)) for worker in plan.workers)
    written = max(map(size, writers_of(plan).values()))
    stalls, last = defaultdict[int, float](float), dict[int, float]()
    here, entered_at = set[str](), dict[str, float]()
    given = {str(worker): size(layers.indices) for worker, layers in plan.placement.ranges}
    for at, event in events:
        match event:
            case Pinned(step=step, seconds=seconds):
                stalls[step], last[step] = max(stalls[step], seconds), at
            case Checkpointed(step=step) if step in last and at > last[step]:
                yield "save", written / (at - last[step])
            case Loaded(layers=layers, seconds=seconds) if seconds > 0:
                yield "load", size(layers) / seconds
            case Installed(workers=workers):
                entered_at |= dict.fromkeys(here.symmetric_difference(workers), at)
                here = set(workers)
            case Synced(worker=worker, entered=entered, step=step) if worker in given and step > entered + 1:
                yield "copy", given[worker] / (at - entered_at[worker])
    yield from (("pin", held / stall) for stall in stalls.values() if stall > 0)
