"""What a failure costs in data-parallel training, by formulas: seconds per failure, and per run, of each strategy.

With t seconds of a mini-batch, N mini-batches of an epoch, of which k were made since it began, W workers with M / W
micro-batches each, B bytes of state, a checkpoint of C seconds at each epoch's end, R seconds to load one, I seconds to
initialise, D seconds until a failure is known of:

    adaptive            D + ceil((M / W) / (W - 1)) t / (M / W)   what one lost worker ran, by the others
    lossy-forward       D                                         survivors go on without a replacement
    skip                D                                         the mini-batch ends as it is
    rollback            D + I + B / bandwidth + t                 new workers are given the state; one mini-batch again
    checkpoint-restart  D + I + R + k t                           k = N / 2 on average

A run of S mini-batches has S t / MTBF failures, and with checkpoint-restart S / N checkpoints of C seconds besides.
What is slower after a failure because a worker is missing does not count here. For ``adaptive`` it is an upper bound: t
holds sums and updates besides the passes, and only these are run once more.

Source: Nicolae et al., sections IV-C and IV-E (which overheads there are; the replay overhead is the number of
mini-batches since the epoch began times the average duration of one, half an epoch on average). There D is not counted,
and restart means both R and the transfer of state; ``adaptive`` is not in that paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from holdfast.errors import ConfigError

__all__ = ["MODELLED", "DataParallel", "FailureCost", "per_failure", "per_run", "work_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What a data-parallel job is like; seconds and bytes.

    Attributes:
        minibatch_s: of a mini-batch, t.
        minibatches_per_epoch: N.
        minibatches: of the whole run, S.
        workers: W, at least 2.
        microbatches: of a mini-batch over all workers, M, at least W.
        state_bytes: of weights and of the optimizer, which a new worker is given, B.
        bandwidth: bytes per second at which it is.
        checkpoint_s: to write a checkpoint, while training stands still, C.
        restart_s: to load one, R.
        init_s: until a process has built model, optimizer and data, I.
        detection_s: until a failure is known of, D.
        mtbf_s: between two failures.

    Raises:
        ConfigError: a number is impossible.
    """

    minibatch_s: float
    minibatches_per_epoch: int
    minibatches: int
    workers: int
    microbatches: int
    state_bytes: int
    bandwidth: float = math.inf
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    init_s: float = 0.0
    detection_s: float = 0.0
    mtbf_s: float = math.inf

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) >= 0:
                raise ConfigError(f"{each.name}: expected 0 or more, got {getattr(self, each.name)}")
        if self.workers < 2 or self.microbatches < self.workers:
            raise ConfigError(
                f"workers, microbatches: expected 2 or more workers with a micro-batch each, got {self.workers} and "
                f"{self.microbatches}"
            )
        if not (self.minibatches_per_epoch and self.bandwidth and self.mtbf_s):
            raise ConfigError(
                "minibatches_per_epoch, bandwidth, mtbf_s: expected above 0, got "
                f"{self.minibatches_per_epoch}, {self.bandwidth}, {self.mtbf_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """Seconds that one failure costs, by what they are spent on."""

    detection_s: float
    start_s: float = 0.0
    replay_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.detection_s + self.start_s + self.replay_s


def per_failure(strategy: str, of: DataParallel, since_epoch: int | None = None) -> FailureCost:
    """Returns what a failure costs.

    Args:
        strategy: one of `MODELLED`.
        of: the job.
        since_epoch: mini-batches made since the epoch began; None: on average.

    Raises:
        ConfigError: there is no formula for the strategy, or an epoch has fewer mini-batches.

    >>> resnet = DataParallel(minibatch_s=0.17, minibatches_per_epoch=390, minibatches=35100, workers=8,
    ...     microbatches=8, state_bytes=91 << 20, checkpoint_s=0.48, restart_s=4.09, init_s=3.0)
    >>> round(per_failure("checkpoint-restart", resnet).replay_s, 2)
    33.15
    """
    if strategy not in MODELLED:
        raise ConfigError(f"strategy: there is no formula for {strategy!r}; known: {', '.join(MODELLED)}")
    if since_epoch is not None and not 0 <= since_epoch <= of.minibatches_per_epoch:
        raise ConfigError(f"since_epoch: expected 0 to {of.minibatches_per_epoch} mini-batches, got {since_epoch}")
    made = of.minibatches_per_epoch / 2 if since_epoch is None else since_epoch
    return MODELLED[strategy](of, made)


def work_again(strategy: str, of: DataParallel, casualties: int = 1, since_epoch: int | None = None) -> float:
    """Returns the processor seconds, over all workers together, of what a failure has computed once more.

    By the clock it is the same where all workers take part. With ``adaptive`` those who are left share whole
    micro-batches, and wait for whoever has most: of that `per_failure` tells.

    Args:
        strategy: one of `MODELLED`.
        of: the job; a mini-batch in processor seconds over all workers, too.
        casualties: workers that are lost.
        since_epoch: as of `per_failure`.
    """
    if strategy == "adaptive":
        return casualties / of.workers * of.minibatch_s
    return per_failure(strategy, of, since_epoch).replay_s


def per_run(strategy: str, of: DataParallel) -> float:
    """Returns the seconds that all failures of a run are expected to cost, and what is done ahead of them."""
    failures = of.minibatches * of.minibatch_s / of.mtbf_s
    ahead = of.checkpoint_s * of.minibatches / of.minibatches_per_epoch if strategy == "checkpoint-restart" else 0.0
    return failures * per_failure(strategy, of).seconds + ahead


def _adaptive(of: DataParallel, made: float) -> FailureCost:
    each = of.microbatches / of.workers
    again = math.ceil(each / (of.workers - 1)) * of.minibatch_s / each
    return FailureCost(detection_s=of.detection_s, replay_s=again)


def _nothing(of: DataParallel, made: float) -> FailureCost:
    return FailureCost(detection_s=of.detection_s)


def _rollback(of: DataParallel, made: float) -> FailureCost:
    given_s = of.state_bytes / of.bandwidth
    return FailureCost(detection_s=of.detection_s, start_s=of.init_s + given_s, replay_s=of.minibatch_s)


def _checkpoint_restart(of: DataParallel, made: float) -> FailureCost:
    return FailureCost(detection_s=of.detection_s, start_s=of.init_s + of.restart_s, replay_s=made * of.minibatch_s)


MODELLED: Mapping[str, Callable[[DataParallel, float], FailureCost]] = MappingProxyType(
    {
        "adaptive": _adaptive,
        "lossy-forward": _nothing,
        "skip": _nothing,
        "rollback": _rollback,
        "checkpoint-restart": _checkpoint_restart,
    }
)
"""The strategies that there is a formula for."""
