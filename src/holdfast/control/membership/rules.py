"""What the job says once and for all."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.planning.remainder import Keeping
from holdfast.planning.replays import Logging
from holdfast.planning.training import Terms
from holdfast.recovery.audit import Sampling

__all__ = ["Rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the job says once and for all.

    Attributes:
        steps: how many steps the job has; the last committed one is ``steps - 1`` at the end.
        strategy: name of the recovery strategy.
        directory: where the final (or last committed) layers are written.
        terms: what the planner goes by; None if plans keep to 1F1B's rules.
        wait_s: how long to wait for workers when a layer has no owner.
        failure_every_s: how often a failure is to be expected, in seconds; 0: as often as so far.
        tolerate: how many workers may be lost to exceptions within 100 steps, before it is the program; at least 1.
        fewest: with how many workers the strategy is to go on at least; 0: with any that hold all layers.
        weighs: whether an adviser is asked before whoever was told to go does.
        keeping: how an interrupted step is gone on with; None if it is always run again whole.
        logging: how what crosses nodes is logged; None if it is not.
        job: which of all jobs this is; whose decisions are in a store is told by it.
        sampling: what of it is audited; None: nothing.
    """

    steps: int
    strategy: str
    directory: str
    terms: Terms | None = None
    wait_s: float = 0.0
    failure_every_s: float = 0.0
    tolerate: int = 0
    fewest: int = 0
    weighs: bool = False
    keeping: Keeping | None = None
    logging: Logging | None = None
    job: str = ""
    sampling: Sampling | None = None
