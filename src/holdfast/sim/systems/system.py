"""What a system is: one row, and what becomes of a job by it.

Nothing of Holdfast decides here. A row says how long a step takes with the machines that are there, and for how long
training stands still as some are lost or come, and from where it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.sim.engine import Outcome
from holdfast.sim.ledger import Ledger, Part
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
    """Which machines there are.

    Attributes:
        places: how many the job has; machine 0 has the first workers of the first pipeline.
        vacant: places that nobody has.
        spares: machines without a place.
    """

    places: int
    vacant: frozenset[int] = frozenset()
    spares: int = 0

    @property
    def taken(self) -> int:
        """How many places somebody has."""
        return self.places - len(self.vacant)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system, as far as it is modelled.

    Attributes:
        name: in tables.
        costs: what it does and takes, in a sentence.
        source: who says so.
        assumed: what nobody says, and is assumed.
        step_s: of these machines, seconds of a step, of as many samples as the job's; None: they cannot train.
        lost: what the loss of some does, given who was there before and who is after it.
        come: what it does that one comes; None: nothing, it waits.
        every: steps between two checkpoints; 0: none are made.
        checkpoint_s: for which training stands still for one.
        at_notice: whether another one is made when machines are about to go, if there is time enough.
        fills: whether spares take vacant places.
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
    fills: bool = True


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
        self._system, self._world, self._ledger = system, world, Ledger()
        self._seats = Seats(places=places, vacant=frozenset(range(world.machines, places)))
        self._seats = replace(self._seats, spares=max(0, world.machines - places))
        self._place_of: dict[int, int | None] = {
            machine: machine if machine < places else None for machine in range(world.machines)
        }
        self._now = self._into_s = self._halted_s = self._saving_s = 0.0
        self._done = self._saved = self._most = self._failures = self._loads = 0
        self._period = system.step_s(self._seats)
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
        self._book_step()
        return Outcome(
            seconds=end,
            steps=self._done,
            healthy_s=healthy_s,
            parts=self._ledger.closed(end),
            failures=self._failures,
            generations=0,
            loads=self._loads,
            restarts=0,
            rates=tuple(self._rates),
        )

    # --- the course of time -------------------------------------------------------------------------------------------

    def _pass_until(self, moment: float) -> None:
        while self._now < moment:
            left = moment - self._now
            if self._halted_s > 0:
                self._advance(Part.RESTART, min(left, self._halted_s))
                self._halted_s = max(0.0, self._halted_s - left)
            elif self._saving_s > 0:
                self._save(min(left, self._saving_s))
            elif self._period is None:
                self._advance(Part.IDLE, left)
            else:
                self._train(left, self._period)

    def _train(self, seconds: float, period: float) -> None:
        """Runs the step that is under way, then as many as fit before the next checkpoint."""
        rest = period - self._into_s
        if seconds < rest:
            self._into_s += seconds
            self._now += seconds
            return
        self._into_s = period
        self._now += rest
        self._commit()
        every, seconds = self._system.every, seconds - rest
        until = every - self._done % every if every else self._done + int(seconds / period)
        if self._done < self._most:
            until = min(until, self._most - self._done)
        count = 0 if every and self._done % every == 0 else min(until, int(seconds / period))
        if count > 0:
            self._ledger.book(Part.USEFUL if self._done >= self._most else Part.REDO, count * period)
            self._now += count * period
            self._done += count
            self._most = max(self._most, self._done)
        if every and self._done % every == 0 and self._done > self._saved:
            self._begin_to_save()

    def _commit(self) -> None:
        self._book_step()
        self._done += 1
        self._most = max(self._most, self._done)

    def _book_step(self) -> None:
        self._ledger.book(Part.USEFUL if self._done >= self._most else Part.REDO, self._into_s)
        self._into_s = 0.0

    def _begin_to_save(self) -> None:
        """Training stands still until it is there; if somebody is lost before, it is not."""
        self._saving_s = self._system.checkpoint_s
        if not self._saving_s:
            self._saved = self._done

    def _save(self, seconds: float) -> None:
        self._advance(Part.CHECKPOINT, seconds)
        if seconds >= self._saving_s:
            self._saved = self._done
        self._saving_s = max(0.0, self._saving_s - seconds)

    def _advance(self, part: Part, seconds: float) -> None:
        self._ledger.book(part, seconds)
        self._now += seconds

    # --- what happens to machines -------------------------------------------------------------------------------------

    def _happen(self, each: Happening) -> None:
        before = self._seats
        if each.kind is Kind.LEAVES:
            if self._system.at_notice and self._system.checkpoint_s <= each.grace_s and self._trains:
                self._begin_to_save()
            return
        if each.kind is Kind.LOST:
            self._lose(each.machine)
        else:
            self._seat(each.machine)
        if self._seats == before:
            return
        self._period = self._system.step_s(self._seats)
        if each.kind is Kind.LOST and self._seats.vacant != before.vacant:
            self._failures += 1
            self._halt(self._system.lost(before, self._seats))
        elif each.kind is Kind.COMES and (halt := self._system.come(before, self._seats)) is not None:
            self._halt(halt)
        if self._rates[-1][1] != self._period:
            self._rates.append((self._now, self._period))

    @property
    def _trains(self) -> bool:
        return self._period is not None and self._halted_s <= 0 and self._saving_s <= 0

    def _lose(self, machine: int) -> None:
        place = self._place_of.pop(machine, None)
        if place is None:
            self._seats = replace(self._seats, spares=max(0, self._seats.spares - 1))
            return
        spare = next((other for other, seat in self._place_of.items() if seat is None), None)
        if spare is not None and self._system.fills:
            self._place_of[spare] = place
            self._seats = replace(self._seats, spares=self._seats.spares - 1)
            self._failures += 1
            self._halt(self._system.lost(self._seats, self._seats))
        else:
            self._seats = replace(self._seats, vacant=self._seats.vacant | {place})

    def _seat(self, machine: int) -> None:
        place = min(self._seats.vacant, default=None)
        self._place_of[machine] = place
        if place is None:
            self._seats = replace(self._seats, spares=self._seats.spares + 1)
        else:
            self._seats = replace(self._seats, vacant=self._seats.vacant - {place})

    def _halt(self, halt: Halt) -> None:
        """What is under way is given up; who stands still already stands still for at least so long."""
        self._ledger.book(Part.REDO, self._into_s)
        self._into_s = self._saving_s = 0.0
        if halt.back is Back.CHECKPOINT:
            self._loads += 1
            self._done = self._saved
        self._halted_s = max(self._halted_s, halt.seconds)
