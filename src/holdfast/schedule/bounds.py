"""What no schedule can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from holdfast.core.profile import StageCosts

__all__ = [
    "Bound",
    "BoundRules",
    "StageBounds",
    "bound",
    "forced_weights",
    "idle_after_last_forward",
    "most_held",
]


LOOKED_AT = 1 << 12
"""So many numbers of held micro-batches are tried one by one; for more, a bound that is lower by one W will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bounds, in the units of the costs; both are defined as in :class:`holdfast.core.timeline.Timeline`."""

    period: float
    makespan: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRules:
    """What the schedules that a bound is for may do.

    Attributes:
        coupled: every backward is one operation, B.
        staggered: every stage runs its optimizer step as soon as its own workers are done.
        classic: a worker on stage s of p holds at most p - s micro-batches, as in 1F1B.
    """

    coupled: bool = False
    staggered: bool = True
    classic: bool = False


def bound(
    each: Sequence[StageCosts], comm: Sequence[float], loads: Sequence[int], rules: BoundRules | None = None
) -> Bound:
    """Returns lower bounds for every plan of a regular grid in which layers stay where they are.

    Let stage s take f, b and w for F, I and W, and c for a message to the next stage. The living workers of s share all
    micro-batches, so the busiest has at least ``n = ceil(pipelines * microbatches / living)`` of them, its load.

    - *Fill*: between its first F and its first I or B, any worker of s computes nothing but F, of at most k
      micro-batches, which are all that it may hold at once. That takes at least the way to the last stage and back. So
      the worker is idle for that way less k f, if this is positive.
    - *Drain*: between its last F and the I or B of that, it computes nothing but I, W and B of the others that it held
      at that F. That, too, takes at least the way to the last stage and back. If n > k, it comes after the fill.
    - *Load*: the busiest worker computes for n (f + b + w), and is idle as said in both. Of the makespan this lies
      after the first forward has come down to s; of the period of stage s, the optimizer step follows.
    - *Chain*: take any stage r up to s. No F of s starts before some worker of r has started, plus (f + c) of every
      stage from r to just before s. From then on the busiest worker of s computes all its F and I, n (f + b), and W of
      all micro-batches but those that it may still hold at its last F, and is idle as said in both. The last of these
      is an I, as every F has its I after it. Its gradient still goes back over (c + b) of every stage between s and r,
      and r itself then computes its W, w. A full backward takes b + w for I, hence no less. So the time between the
      first start and the last end on stage r, to which r's optimizer step is added in any period, is at least the sum.
      Of the makespan, the way from stage 0 to r comes before it.

    Where every backward is coupled, b + w stands for b, and W is part of it. Where I takes longer apart from W, the
    lesser of that and of b + w stands for b, and what is left of b + w for w, but not in n (f + b + w). Where the
    optimizer is synchronous, the period is the makespan and the longest optimizer step. docs/planner.md has the proofs
    at length.

    Args:
        each: the costs of every stage.
        comm: the time of a message after every stage but the last.
        loads: the micro-batches of the busiest worker of every stage, at least 1.
        rules: what schedules may do; default: everything.
    """
    stages = StageBounds(each, comm, rules)
    found = [stages.of(stage, load) for stage, load in enumerate(loads)]
    return Bound(period=max(each.period for each in found), makespan=max(each.makespan for each in found))


class StageBounds:
    """What the load of each single stage forces; the bound of a grid is the greatest of its stages'.

    Cost: linear in stages to make, constant to ask.
    """

    def __init__(self, each: Sequence[StageCosts], comm: Sequence[float], rules: BoundRules | None = None) -> None:
        """Prepares the ways down the pipeline and back.

        Args:
            each: the costs of every stage.
            comm: the time of a message after every stage but the last.
            rules: what schedules may do; default: everything.
        """
        self._rules = rules = rules or BoundRules()
        self._each = each
        least = [stage.weight if rules.coupled else min(stage.split, stage.weight) for stage in each]
        self._back_op = [stage.input + more for stage, more in zip(each, least, strict=True)]
        self._after = after = [stage.weight - more for stage, more in zip(each, least, strict=True)]
        self._down = list(accumulate((each[s].forward + comm[s] for s in range(len(comm))), initial=0))
        back = list(accumulate((self._back_op[s] + comm[s] for s in range(len(comm))), initial=0))
        self._longest = max(stage.optimizer for stage in each)
        turn = self._down[-1] + each[-1].forward + self._back_op[-1] + back[-1]
        self._until_back = [turn - self._down[s] - back[s] - self._back_op[s] for s in range(len(each))]
        home = list(accumulate((after[r] - back[r] for r in range(len(each))), max))
        self._home = [back[s] + home[s] for s in range(len(each))]
        own = (after[r] - back[r] - self._down[r] + each[r].optimizer for r in range(len(each)))
        self._round = [self._down[s] + back[s] + most for s, most in enumerate(accumulate(own, max))]
        self._drain = [self._drained(stage) for stage in range(len(each))]

    def of(self, stage: int, load: int) -> Bound:
        """Returns the bound if the busiest worker of a stage runs ``load`` micro-batches, at least 1."""
        costs = self._each[stage]
        idle = self._idle(stage, load)
        work = idle + load * costs.total
        through = idle + load * (costs.forward + self._back_op[stage]) + self._forced(stage, load)
        makespan = self._down[stage] + max(work, through + self._home[stage])
        if not self._rules.staggered:
            return Bound(period=makespan + self._longest, makespan=makespan)
        return Bound(period=max(work + costs.optimizer, through + self._round[stage]), makespan=makespan)

    def _idle(self, stage: int, load: int) -> float:
        """Returns how long a worker is idle before its first I or B and between its last F and the I or B of that."""
        costs, held = self._each[stage], self._held(stage)
        fill = max(0, self._until_back[stage] - min(held, load) * costs.forward)
        return fill + self._drain[stage] if load > held else max(fill, self._drain[stage])

    def _held(self, stage: int) -> float:
        """Returns how many micro-batches a worker may hold between F and I or B."""
        by_memory = most_held(self._each[stage])
        return min(by_memory, len(self._each) - stage) if self._rules.classic else by_memory

    def _drained(self, stage: int) -> float:
        costs = self._each[stage]
        way = self._until_back[stage] - costs.forward
        return idle_after_last_forward(costs, self._held(stage), way, coupled=self._rules.coupled)

    def _forced(self, stage: int, load: int) -> float:
        """Returns the time of W that memory does not let wait until the last F has started."""
        return forced_weights(self._each[stage], load) * self._after[stage]


def most_held(costs: StageCosts) -> float:
    """Returns how many micro-batches memory holds between F and I or B; infinite without a limit."""
    return _fit(costs.room, costs.takes)


def forced_weights(costs: StageCosts, load: int) -> float:
    """Returns how many W memory does not let wait until the last F of so many micro-batches has started."""
    if costs.room is None:
        return 0
    waiting = 1 + _fit(costs.room - costs.takes, costs.takes - costs.gives_input)
    return max(0, load - waiting) if waiting < inf else 0


def idle_after_last_forward(costs: StageCosts, held: float, way: float, *, coupled: bool) -> float:
    """Returns how long a worker is idle, at least, between its last F and the I or B of that.

    Meanwhile it runs only I and W, or B, of what it held besides at that F: of x micro-batches both, of others W.

    Args:
        costs: of a micro-batch.
        held: how many it may hold between F and I or B.
        way: the time from the end of an F to the start of its I or B, at least.
        coupled: whether every backward is one operation, B.
    """
    both, kept, room = costs.input_apart + costs.weight, costs.takes - costs.gives_input, costs.room
    if held == inf or room is None:
        return max(0, way - (held - 1) * both) if held < inf else 0
    weight = 0 if coupled else costs.weight
    many = int(min(held, way // both + 2)) if both > 0 else 1  # with more, both of them alone fill the way

    def filled(x: int, more: int) -> float:
        waiting = _fit(room - (x + 1) * costs.takes, kept) + more if weight else 0
        return x * both + waiting * weight

    if many <= LOOKED_AT:
        most = max((filled(x, 0) for x in range(many)), default=0)
    else:  # what is filled rises or falls by the same for every x, but for parts of one W: an end has the most
        most = max(filled(0, 1), filled(many - 1, 1))
    return max(0, way - most)


def _fit(room: float | None, each: float) -> float:
    """Returns how many of what takes ``each`` fit into the room, which may be without a limit."""
    return inf if room is None or each <= 0 else int((room + 1e-12 * abs(room)) // each)
