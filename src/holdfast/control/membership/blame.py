"""Whose fault is an exception: a worker's, or the program's? Judged from what workers reported, as a pure function.

Everybody runs the same program. What is wrong with it shows at the same place wherever it is run: on the same layer
(in loading: with the same item), whatever the micro-batch. What shows on one worker alone is wrong with that worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.control.messages import Raised
from holdfast.core.work import WorkPhase
from holdfast.errors import place_of

__all__ = ["WINDOW_STEPS", "Exceptions", "Program", "described", "judge", "recent"]

WINDOW_STEPS = 100
"""Losses to exceptions are counted over so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """It is the program: the job ends.

    Attributes:
        first: what was reported first of what shows it.
        why: how it shows, for people.
    """

    first: Raised
    why: str

    @property
    def detail(self) -> str:
        """Returns what the user is told: where, what, why it is no worker's fault, and the first traceback."""
        return f"{described(self.first)}; {self.why}\n{self.first.traceback}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceptions:
    """What workers met, and what was made of it. All of it is stored.

    Attributes:
        raised: exceptions in workers that have stopped, of steps that are not committed, the oldest first.
        losses: of the last 100 steps, those that were their worker's loss.
        blame: why the program ends the job, which then only saves what lives; empty unless it does.
    """

    raised: tuple[Raised, ...] = ()
    losses: tuple[Raised, ...] = ()
    blame: str = ""


def judge(reports: Sequence[Raised], losses: Sequence[Raised], tolerate: int) -> Program | None:
    """Returns why it is the program; None if each report is its worker's loss.

    Whatever the order in which reports came, the answer is the same, but for which of them was the first.

    Args:
        reports: of the steps that are not committed yet, those that were judged before included, the oldest first.
        losses: the workers that were lost to exceptions, or will be if it is none of the program; the oldest first.
        tolerate: how many such losses within 100 steps may be chance; at least 1 may.
    """
    for report in reports:
        others = [other for other in reports if _same_place(report, other) and other.process != report.process]
        if others:
            who = ", ".join(dict.fromkeys(str(each.worker) for each in others))
            return Program(first=report, why=f"worker {who} met the same, so it is the program")
    lost = recent(losses)
    if len(lost) > max(1, tolerate):
        text = f"{len(lost)} workers were lost to exceptions within {WINDOW_STEPS} steps, so it is the program"
        return Program(first=lost[0], why=text)
    return None


def recent(losses: Sequence[Raised]) -> tuple[Raised, ...]:
    """Returns the losses that still count: those less than 100 steps before the newest."""
    newest = max((each.step for each in losses), default=0)
    return tuple(each for each in losses if newest - each.step < WINDOW_STEPS)


def described(report: Raised) -> str:
    """Returns where and what, for people."""
    place = place_of(report.phase, report.layer, report.item, report.microbatch)
    return f"worker {report.worker}, step {report.step}, {place}: {report.error}"


def _same_place(one: Raised, other: Raised) -> bool:
    return _place(one) == _place(other)


def _place(report: Raised) -> tuple[int, WorkPhase, str, int | None]:
    loading = report.phase is WorkPhase.LOADING
    return report.step, report.phase, report.kind, report.item if loading else report.layer
