"""What a system is: one row, and what becomes of a job by it.

Nothing of Holdfast decides here. A row says how long a step takes with the machines that are there, and for how long
training stands still as some are lost or come, and from where it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.sim.clock import Clock
from holdfast.sim.engine import Outcome
from holdfast.sim.ledger import Part
from holdfast.sim.steps import Steps
from holdfast.sim.world import Happening, Kind, World

__all__ = ["Back", "Halt", "Seats", "System", "simulate_system"]


class Back(StrEnum):
    """From where training goes on."""

    STEP = "step"
    """The step that was under way is run again."""
    CHECKPOINT = "checkpoint"
    """All steps since the last checkpoint are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Training stands still for so many seconds, and goes on from somewhere."""

    seconds: float
    back: Back = Back.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Which machines there are, but for those that wait for a place.

    Attributes:
        places: how many the job has; machine 0 has the first workers of the first pipeline.
        vacant: places that nobody has.
    """

    places: int
    vacant: frozenset[int] = frozenset()

    @property
    def taken(self) -> int:
        """How many places somebody has."""
        return self.places - len(self.vacant)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system, as far as it is modelled. Machines that wait for a place take that of a lost one.

    Attributes:
        name: in tables.
        costs: what it does and takes, in a sentence.
        source: who says so.
        assumed: what nobody says, and is assumed.
        step_s: of these machines, seconds of a step, of as many samples as the job's; None: they cannot train. All wait
            for the slowest, which takes as many times as long as it does.
        lost: what it does that somebody is lost who had a place, given who was there before and who is after it.
        come: what it does that a vacant place is taken; None: nothing.
        every: steps between two checkpoints; 0: none are made.
        checkpoint_s: for which training stands still for one.
        at_notice: whether another one is made when machines are about to go, if there is time enough.
    """

    name: str
    costs: str
    source: str
    assumed: str
    step_s: Callable[[Seats], float | None]
    lost: Callable[[Seats, Seats], Halt]
    come: Callable[[Seats, Seats], Halt | None]
    every: int = 0
    checkpoint_s: float = 0.0
    at_notice: bool = False


def simulate_system(system: System, world: World, *, places: int, healthy_s: float) -> Outcome:
    """Return what becomes of a job in a world.

    Args:
        system: by which it trains.
        world: what happens to machines.
        places: how many the job needs.
        healthy_s: of a step of the job as it is trained here, by which it is judged.
    """
    return _Course(system, places, world).run(healthy_s)


class _Course:
    """One job by one system in one world."""

    def __init__(self, system: System, places: int, world: World) -> None:
        self._system, self._world, self._places = system, world, places
        self._place_of: dict[int, int | None] = {
            machine: machine if machine < places else None for machine in range(world.machines)
        }
        self._clock = Clock()
        self._steps = Steps(self._clock.ledger)
        self._saved = self._failures = self._loads = 0
        self._stands_until = 0.0
        self._slow: dict[int, float] = {}
        self._period = self._step_s()
        self._steps.begin(0, self._period or 0.0)
        self._rates: list[tuple[float, float | None]] = [(0.0, self._period)]

    def run(self, healthy_s: float) -> Outcome:
        """Let all of it happen."""
        end = self._world.lasts_s
        gone = [
            replace(each, at_s=each.at_s + each.grace_s, kind=Kind.LOST)
            for each in self._world.happenings
            if each.kind is Kind.LEAVES
        ]
        for each in sorted((*self._world.happenings, *gone), key=lambda each: each.at_s):
            if each.at_s < end:
                self._pass_until(each.at_s)
                self._happen(each)
        self._pass_until(end)
        self._steps.close()
        return Outcome(
            seconds=end,
            steps=self._steps.number,
            healthy_s=healthy_s,
            parts=self._clock.ledger.closed(end),
            failures=self._failures,
            generations=0,
            loads=self._loads,
            restarts=0,
            rates=tuple(self._rates),
        )

    # --- the course of time -------------------------------------------------------------------------------------------

    def _pass_until(self, moment: float) -> None:
        clock = self._clock
        while clock.now < moment:
            left = moment - clock.now
            if clock.owes:
                clock.pay(left)
            elif self._period is None:
                clock.advance(Part.IDLE, left)
            else:
                self._train(left, self._period)

    def _train(self, seconds: float, period: float) -> None:
        """Runs the step that is under way, then as many as fit before the next checkpoint."""
        steps, clock, every = self._steps, self._clock, self._system.every
        rest = steps.lasts_s - steps.into_s
        if seconds < rest:
            steps.into_s += seconds
            clock.now += seconds
            return
        clock.now += rest
        steps.commit(period)
        if steps.is_first_time and not self._is_due:
            fit = int((seconds - rest) / period)
            count = min(fit, every - steps.number % every) if every else fit
            clock.now += count * period
            steps.commit_whole(count)
        if self._is_due:
            self._save()

    @property
    def _is_due(self) -> bool:
        """Whether a checkpoint is to be made before the next step."""
        every, number = self._system.every, self._steps.number
        return bool(every) and number % every == 0 and number > self._saved

    def _save(self) -> None:
        """Training stands still until a checkpoint is there; if somebody is lost before, it is not."""
        self._clock.owe(Part.CHECKPOINT, self._system.checkpoint_s, self._is_saved)

    def _is_saved(self) -> None:
        self._saved = self._steps.number

    # --- what happens to machines -------------------------------------------------------------------------------------

    def _happen(self, each: Happening) -> None:
        before = self._seats()
        match each.kind:
            case Kind.LEAVES:
                trains = self._period is not None and not self._clock.owes
                if self._system.at_notice and self._system.checkpoint_s <= each.grace_s and trains:
                    self._save()
            case Kind.COMES:
                place = min(before.vacant, default=None)
                self._place_of[each.machine] = place
                if place is not None:
                    self._change(self._system.come(before, self._seats()))
            case Kind.SLOWS:
                self._slow[each.machine] = each.factor
                self._change(None)
            case Kind.LOST:
                place = self._place_of.pop(each.machine, None)
                if place is not None:
                    spare = next((other for other, seat in self._place_of.items() if seat is None), None)
                    if spare is not None:
                        self._place_of[spare] = place
                    self._failures += 1
                    self._change(self._system.lost(before, self._seats()))

    def _seats(self) -> Seats:
        return Seats(places=self._places, vacant=frozenset(range(self._places)).difference(self._place_of.values()))

    def _step_s(self) -> float | None:
        """Seconds of a step now; None: there are too few machines."""
        period = self._system.step_s(self._seats())
        seated = (self._slow.get(machine, 1.0) for machine, place in self._place_of.items() if place is not None)
        return None if period is None else period * max(seated, default=1.0)

    def _change(self, halt: Halt | None) -> None:
        """From now on steps take another time."""
        steps, clock = self._steps, self._clock
        self._period = self._step_s()
        if self._rates[-1][1] != self._period:
            self._rates.append((clock.now, self._period))
        if halt is not None:
            self._halt(halt, clock.now + halt.seconds)
        elif steps.into_s:  # it has been run for longer than that, perhaps
            steps.lasts_s = max(steps.into_s, self._period or 0.0)
        else:
            steps.begin(steps.number, self._period or 0.0)

    def _halt(self, halt: Halt, until: float) -> None:
        """The step is given up; who stands still already does so for at least as long."""
        goes_back = halt.back is Back.CHECKPOINT
        self._loads += goes_back
        self._steps.end(self._saved if goes_back else self._steps.number)
        self._steps.begin(self._steps.number, self._period or 0.0)
        self._stands_until = max(self._stands_until, until)
        self._clock.forgive()
        self._clock.owe(Part.RESTART, self._stands_until - self._clock.now)
