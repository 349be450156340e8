"""Who is hung: judged from heartbeats, as a pure function of what was heard and when.

A worker is silent (stopped, partitioned) when no heartbeat came for too long. It is stuck when its heartbeats come, but
say that one thing has kept it busy for much longer than anything ever did: for longer than the limit while it computes,
while it loads data or compiles for longer than limits of their own. A worker that waits for others is neither. One that
is on its way to be stuck is slow.

Whoever is busy lives. So nobody is held for stuck whose layers would be left to workers that are slow themselves, or to
nobody: what makes all of them slow, such as storage that stands still, is no fault of theirs, and they come back.

In its first step, and the first in which it computes, when libraries load and warm up, a worker may take 15 times as
long before it counts as either.
When nobody is busy and nobody moves, the workers wait for each other: something was lost between them.
A pause of everybody is nobody's fault: after one, all have as much time as if they had just been heard.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.control.messages import Heartbeat
from holdfast.core.ids import WorkerId
from holdfast.core.work import Busy

__all__ = [
    "PATIENCE",
    "Vital",
    "Watch",
    "deadlocked",
    "forget",
    "hear",
    "interrupted",
    "needed",
    "overdue",
    "pass_time",
    "slow",
]

STALL_S = 1.0
PATIENCE = 15.0
"""What cannot be told from a fault is borne for at most so many times the limit."""
_SLOWER = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vital:
    """The last sign of one worker; times in seconds of the coordinator's clock.

    Attributes:
        heard_at: when it was heard last, or began to be listened for; or when a pause of everybody ended after that.
        moved_at: when it was first heard to have done all that it has done; or when such a pause ended.
        spoke_at: as ``heard_at``, but for the pauses; of our own, what was more than a moment does not count.
        beat: what it said last; None if nothing yet.
        slow_at: when it was last heard to be slow; None if it never was.
    """

    heard_at: float
    moved_at: float
    spoke_at: float
    beat: Heartbeat | None = None
    slow_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is known of all workers.

    Attributes:
        limit_s: how long a worker may be silent or stuck.
        load_s: how long it may load an item's data, if that is more.
        compile_s: how long it may compile, if that is more.
        beat_s: how long it is from one heartbeat of a worker to the next.
        vitals: the last sign of each worker.
        now: when time was last seen to pass; None before the first time.
        anyone_at: when anybody was heard last; None if nobody was.
    """

    limit_s: float = 2.0
    load_s: float = 300.0
    compile_s: float = 600.0
    beat_s: float = 0.25
    vitals: Mapping[WorkerId, Vital] = field(default_factory=dict)
    now: float | None = None
    anyone_at: float | None = None


def hear(watch: Watch, beat: Heartbeat, now: float) -> Watch:
    """Returns the watch after a heartbeat."""
    before = watch.vitals.get(beat.worker)
    moved = before is None or before.beat is None or _place(before.beat) != _place(beat)
    moved_at = now if moved or before is None else before.moved_at
    slow_at = now if _is_slow(watch, beat) else None if before is None else before.slow_at
    vital = Vital(heard_at=now, moved_at=moved_at, spoke_at=now, beat=beat, slow_at=slow_at)
    return replace(watch, vitals={**watch.vitals, beat.worker: vital}, anyone_at=now)


def forget(watch: Watch, workers: Iterable[WorkerId]) -> Watch:
    """Returns the watch without these workers: they are gone, or their new process starts afresh."""
    gone = frozenset(workers)
    return replace(watch, vitals={worker: vital for worker, vital in watch.vitals.items() if worker not in gone})


def interrupted(watch: Watch) -> Watch:
    """Returns the watch once all were told to begin anew: that they waited for one another until then is over."""
    if watch.now is None:
        return watch
    return replace(watch, vitals={who: replace(vital, moved_at=watch.now) for who, vital in watch.vitals.items()})


def pass_time(watch: Watch, members: Iterable[WorkerId], now: float, *, gap_s: float = 0.0) -> Watch:
    """Returns the watch at ``now``: members never heard of are listened for from now on.

    If more than a moment has passed between two looks, we ourselves were stopped (or the whole machine was), and what
    was sent meanwhile has not been read yet. If nobody at all is heard for as long, they were stopped, or the machine
    is too busy for everyone. Either is held against nobody: everybody's time begins anew, until it has gone on for as
    long as a first step may take.

    Args:
        watch: the watch before.
        members: whom to listen for.
        now: seconds of the coordinator's clock.
        gap_s: seconds since the look before by a clock that does not stop with us, if they are more than by ours.
    """
    gap = 0.0 if watch.now is None else now - watch.now
    quiet_s = 0.0 if watch.anyone_at is None else now - watch.anyone_at
    moment_s = _moment_s(watch.limit_s)
    vitals = watch.vitals
    if max(gap, gap_s) > moment_s or quiet_s > _moment_s(watch.limit_s, 2 * watch.beat_s):
        ours = max(0.0, gap - moment_s)
        vitals = {worker: _begun_anew(vital, now, ours, watch.limit_s) for worker, vital in vitals.items()}
    unheard = {worker: Vital(heard_at=now, moved_at=now, spoke_at=now) for worker in members if worker not in vitals}
    return replace(watch, vitals={**vitals, **unheard}, now=now)


def _moment_s(limit_s: float, usual_s: float = 0.0) -> float:
    """For how long everything may stand still before it is a pause: less than it takes to hold anybody for lost.

    ``usual_s``: what nothing can be told from.
    """
    return min(max(STALL_S, usual_s), limit_s / 2)


def _begun_anew(vital: Vital, now: float, ours: float, limit_s: float) -> Vital:
    """One worker's sign once its time has begun anew, unless it has for too long; ``ours``: we could not hear it."""
    spoke_at = min(now, vital.spoke_at + ours)
    if now - spoke_at > PATIENCE * limit_s:
        return replace(vital, spoke_at=spoke_at)
    return replace(vital, heard_at=now, moved_at=now, spoke_at=spoke_at)


def overdue(
    watch: Watch,
    members: Iterable[WorkerId],
    *,
    running: bool,
    owners: Iterable[Collection[WorkerId]] = (),
    suspected: Container[WorkerId] = (),
) -> dict[WorkerId, str]:
    """Returns the members that are hung, or out of reach, and how that shows.

    Args:
        watch: after :func:`pass_time`.
        members: whom to judge.
        running: whether steps, or the way to them, are being run; saving, for example, may take any time.
        owners: per layer, who holds it and can be talked to; see :func:`needed`.
        suspected: with whom another worker cannot talk: of these half as long without a sign of life is enough.
    """
    members = tuple(members)
    silent = _silent(watch, members, suspected)
    if not running:
        return silent
    kept = needed(watch, members, owners)
    stuck = {worker: beat for worker, beat in _stuck(watch, members).items() if worker not in kept}
    return {worker: f"stuck in step {beat.step}{_for_how_long(beat)}" for worker, beat in stuck.items()} | silent


def needed(watch: Watch, members: Iterable[WorkerId], owners: Iterable[Collection[WorkerId]]) -> dict[WorkerId, str]:
    """Returns the members that are stuck and must not be given up for that, and what each of them is busy with.

    These are all owners of a layer of which no owner would be left that surely works: has been heard of late, and was
    not slow for as long as the limit. What ends for one of them a moment ago may end for the others now.

    Args:
        watch: after :func:`pass_time`.
        members: whom to judge.
        owners: per layer, who holds it and can be talked to.
    """
    members = tuple(members)
    stuck = _stuck(watch, members)
    if not stuck:
        return {}
    doubtful = {worker for worker in members if _is_doubtful(watch, worker)}
    alone = [each for each in owners if doubtful.issuperset(each)]
    return {worker: _doing(beat) for worker, beat in stuck.items() if any(worker in each for each in alone)}


def slow(watch: Watch, members: Iterable[WorkerId]) -> dict[WorkerId, str]:
    """Returns the members that are busy with one thing for suspiciously long, and with what."""
    beats = ((worker, watch.vitals[worker].beat) for worker in members)
    return {worker: _doing(beat) for worker, beat in beats if beat is not None and _is_slow(watch, beat)}


def _silent(watch: Watch, members: Iterable[WorkerId], suspected: Container[WorkerId]) -> dict[WorkerId, str]:
    found = {}
    for worker in members:
        beat, quiet_s = watch.vitals[worker].beat, _quiet_s(watch, worker)
        warm = beat is not None and beat.slowest_s > 0
        limit_s = watch.limit_s * (1.0 if warm else PATIENCE)
        if quiet_s > (limit_s / 2 if worker in suspected else limit_s):
            also = ", and others cannot reach it" if worker in suspected else ""
            found[worker] = f"no sign of life for {quiet_s:.1f} s{also}"
    return found


def _quiet_s(watch: Watch, worker: WorkerId) -> float:
    heard_at = watch.vitals[worker].heard_at
    return 0.0 if watch.now is None else watch.now - heard_at


def _is_doubtful(watch: Watch, worker: WorkerId) -> bool:
    slow_at = watch.vitals[worker].slow_at
    was_slow = slow_at is not None and watch.now is not None and watch.now - slow_at <= watch.limit_s
    return was_slow or _quiet_s(watch, worker) > watch.limit_s / 2


def _stuck(watch: Watch, members: Iterable[WorkerId]) -> dict[WorkerId, Heartbeat]:
    beats = ((worker, watch.vitals[worker].beat) for worker in members)
    return {worker: beat for worker, beat in beats if beat is not None and beat.busy_s > _allowance(watch, beat)}


def _doing(beat: Heartbeat) -> str:
    return f"{beat.doing} in step {beat.step} for {beat.busy_s:.1f} s"


def _for_how_long(beat: Heartbeat) -> str:
    what = "" if beat.doing is Busy.COMPUTING else f", {beat.doing}"
    return f"{what} for {beat.busy_s:.1f} s"


def deadlocked(watch: Watch, members: Iterable[WorkerId]) -> bool:
    """Whether every member says that it waits, and none has moved for twice the limit; a silent one says nothing."""
    now, vitals = watch.now, [watch.vitals[worker] for worker in members]
    if now is None or any(vital.beat is None or vital.beat.busy_s > 0 for vital in vitals):
        return False
    return all(now - vital.heard_at <= watch.limit_s < (now - vital.moved_at) / 2 for vital in vitals)


def _allowance(watch: Watch, beat: Heartbeat) -> float:
    """How long one thing may take."""
    match beat.doing:
        case Busy.LOADING:
            return max(watch.load_s, watch.limit_s)
        case Busy.COMPILING:
            return max(watch.compile_s, watch.limit_s)
        case Busy.COMPUTING:
            return _unusual_s(watch, beat)


def _is_slow(watch: Watch, beat: Heartbeat) -> bool:
    """Whether one thing takes suspiciously long."""
    return beat.busy_s > min(_unusual_s(watch, beat), _allowance(watch, beat) / 2)


def _unusual_s(watch: Watch, beat: Heartbeat) -> float:
    """A multiple of the slowest of its kind so far, and plenty in a worker's first step."""
    return max(watch.limit_s, _SLOWER * beat.slowest_s) if beat.slowest_s > 0 else PATIENCE * watch.limit_s


def _place(beat: Heartbeat) -> tuple[int, int, int, int]:
    return (beat.generation, beat.step, beat.op, beat.moves)
