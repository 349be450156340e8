"""One value for all that decisions go by and that does not change while a job runs."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.evaluation import Evaluating
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Costs
from holdfast.planning.replays import Logging
from holdfast.planning.reshaping import Shapes
from holdfast.planning.training import Terms
from holdfast.recovery.audit import Sampling
from holdfast.recovery.rates import Rates

__all__ = ["JobRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRules:
    """What a job says once and for all: made once, before its first process starts, and told to each of them whole.

    Attributes:
        steps: how many steps the job has; the last committed one is ``steps - 1`` at the end.
        strategy: name of the recovery strategy.
        directory: where the final (or last committed) layers are written.
        job: which of all jobs this is; whose decisions are in a store, and whose logs those are, is told by it.
        first_spares: workers beside those of the grid, with which the job begins where there is room for them.
        ties: the layers that share a weight, each a tuple of layer indices.
        staggered: whether updates are made ahead of the verdict.
        terms: what the planner goes by; None if plans keep to 1F1B's rules.
        keeping: costs per layer, by which an interrupted step is gone on with; None if it is always run again whole.
        step_log_bytes: how much of it each worker keeps at most; None: no limit.
        logging: how what crosses nodes is logged; None if it is not.
        checkpoint_every: a checkpoint after so many steps; 0 for none.
        sets_interval: whether that changes with what checkpoints are seen to cost.
        follows_failures: whether it changes with how often failures are seen to come, too.
        synchronous: whether training stands still until a worker's part of a checkpoint is written.
        snapshot_every: a snapshot in each worker's memory after so many steps; 0 for none.
        sampling: what is audited; None: nothing.
        evaluating: when it is evaluated; None: never.
        wait_s: how long to wait for workers when a layer has no owner.
        failure_every_s: how often a failure is to be expected, in seconds; 0: as often as so far.
        tolerate: how many workers may be lost to exceptions within 100 steps, before it is the program; 0 counts as 1.
        fewest: with how many workers the job is to go on at least, so that it survives what it is to tolerate; 0: with
            any that hold all layers.
        rates: how fast the cluster is; None: that is not known, so answers are taken in an order, not by their prices.
        shapes: what other pipelines are made by; None if none are.
        weighs: whether an adviser is asked before whoever was told to go does.
    """

    steps: int
    strategy: str = "auto"
    directory: str = ""
    job: str = ""
    first_spares: tuple[WorkerId, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    staggered: bool = False
    terms: Terms | None = None
    keeping: Costs | None = None
    step_log_bytes: int | None = None
    logging: Logging | None = None
    checkpoint_every: int = 0
    sets_interval: bool = False
    follows_failures: bool = False
    synchronous: bool = False
    snapshot_every: int = 0
    sampling: Sampling | None = None
    evaluating: Evaluating | None = None
    wait_s: float = 0.0
    failure_every_s: float = 0.0
    tolerate: int = 0
    fewest: int = 0
    rates: Rates | None = None
    shapes: Shapes | None = None
    weighs: bool = False
