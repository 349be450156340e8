"""Measures what each layer of a job costs on a stage of several GPUs: sharded over processes, as in such a worker.

Every layer is a stage of its own, over all of the processes. Timed are F, I and W on the slowest of them, without what
scatters a micro-batch and gathers what comes of it: in a worker that is done once for all of its layers.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from holdfast.config.job import Job
from holdfast.core.profile import GpuProfile
from holdfast.core.schedule import OpKind
from holdfast.core.tensorspec import TensorSpec
from holdfast.devices.device import HOST
from holdfast.profiling.layers import WARM_UP, JobLayers
from holdfast.runtime.engine.sharded.checks import check_layer, part_spec
from holdfast.runtime.engine.sharded.ranks import Ranks
from holdfast.runtime.engine.sharded.stage import Companion, ShardedStage
from holdfast.runtime.main.companions import fork_companions

__all__ = ["measure_on_gpus"]


def measure_on_gpus(
    job: Job, gpus: int, *, iterations: int, on_iteration: Callable[[int], None], on_lost: Callable[[str], None]
) -> tuple[GpuProfile, ...]:
    """Returns what each layer costs on so many GPUs. Forks: no thread may run yet.

    Args:
        job: whose model, data and size of a micro-batch; with fast numerics.
        gpus: how many; 2 or more.
        iterations: how often everything is timed, after a few times to get warm; at least 1.
        on_iteration: called after every iteration with how many are done.
        on_lost: called from another thread if one of the other processes stops, for which this one waits forever.

    Raises:
        ConfigError: something in the job cannot be used, or a layer cannot be shared by so many.
    """
    companions = fork_companions(gpus, partial(_accompany, job))
    companions.watch(on_lost, on_lost)
    layers = JobLayers(job, HOST)
    for index, (module, spec) in enumerate(zip(layers.model.layers, layers.boundaries, strict=True)):
        check_layer(index, module)
        part_spec(index, spec, gpus, job.grid.microbatch_size)
    ranks = companions.meet()
    stages = [
        layers.stage(index, partial(_make, job, ranks, ranks.next_stage())) for index in range(len(layers.model.layers))
    ]
    samples: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
    for done in range(1 - WARM_UP, iterations + 1):
        if done == 1:
            samples.clear()
        _pass_over(stages, samples)
        if done > 0:
            on_iteration(done)
    return tuple(
        GpuProfile(
            forward_s=statistics.median(samples[index, OpKind.F]),
            backward_input_s=statistics.median(samples[index, OpKind.I]),
            backward_weight_s=statistics.median(samples[index, OpKind.W]),
        )
        for index in range(len(stages))
    )


def _accompany(job: Job, ranks: Ranks) -> None:
    """Runs a companion; ends with the process, or with an exception."""
    layers = JobLayers(job, HOST)

    def make(number: int, owned: tuple[int, ...]) -> ShardedStage:
        return layers.stage(owned[0], partial(_make, job, ranks, number))

    Companion(ranks, make, kept=len(layers.model.layers)).follow()


def _make(job: Job, ranks: Ranks, number: int, **options: Any) -> _TimedStage:
    return _TimedStage(ranks=ranks, number=number, samples=job.grid.microbatch_size, **options)


def _pass_over(stages: list[_TimedStage], samples: dict[tuple[int, OpKind], list[float]]) -> None:
    """Runs one micro-batch through F, I and W of all layers; nothing is trained."""
    for stage in stages:
        stage.begin(0)
    value: Tensor | None = None
    for index, stage in enumerate(stages):
        value, seconds = stage.timed(partial(stage.forward, 0, 0, value))
        samples[index, OpKind.F].append(seconds)
    for kind in (OpKind.I, OpKind.W):
        value = None
        for index, stage in reversed(tuple(enumerate(stages))):
            value, seconds = stage.timed(partial(stage.backward, kind, 0, 0, value))
            samples[index, kind].append(seconds)


class _TimedStage(ShardedStage):
    """A sharded stage that notes when all ranks have their samples, and when all are done with them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._began: float | None = None
        self._ended: float | None = None

    def timed(self, work: Callable[[], Tensor | None]) -> tuple[Tensor | None, float]:
        """Returns what an operation returned, and how long it took but for scattering and gathering."""
        self._began = self._ended = None
        start = time.perf_counter()
        found = work()
        return found, (self._ended or time.perf_counter()) - (self._began or start)

    def _take(self, batch: Tensor | None, spec: TensorSpec) -> Tensor:
        found = super()._take(batch, spec)
        dist.barrier()
        self._began = time.perf_counter()
        return found

    def _give(self, mine: Tensor) -> Tensor | None:
        dist.barrier()
        self._ended = time.perf_counter()
        return super()._give(mine)
