"""The baseline: torch's own pipeline schedules and an all-reduce of gradients; same grid, layers, data and optimizer.

One process per worker, Gloo on the loopback, one compute thread each. It is meant to be as fast as plain torch gets:
gradients are accumulated in one flat buffer that is reduced in place, in one all-reduce over the peers of a rank. The
weight that embedding and head share is reduced over both of its uses, as Holdfast does. By Schedule1F1B a rank has one
stage of the model; by ScheduleInterleaved1F1B two, of the first half and the second; by ScheduleZBVZeroBubble two as
well, along a V: the first rank has the first and the last one.

Run alone it prints the time of every step; ``healthy_step.py`` runs it next to Holdfast.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.core.placement import split_evenly
from measure import print_table, progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

__all__ = ["SCHEDULES", "BaselineFailed", "BaselineRun", "run_baseline"]

SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")

_PRELOAD = ["torch", "torch.distributed", "torch.distributed.pipelining", "holdfast.runtime.main.worker"]


class BaselineFailed(Exception):
    """A worker of the baseline ended before its time, or nothing was heard of any for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """What a run of the baseline tells.

    Attributes:
        ends: per step, when the last worker had updated its weights (monotonic seconds).
        losses: per step, the mean over all micro-batches.
        weights: per worker, the sum over its parameters: equal among peers.
    """

    ends: tuple[float, ...]
    losses: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    job: Job
    rank: int
    store: str
    schedule: str

    @property
    def pipeline(self) -> int:
        return self.rank // self.job.grid.stages

    @property
    def place(self) -> int:
        """In its pipeline."""
        return self.rank % self.job.grid.stages

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return self.job.grid.stages * (1 if self.schedule == "Schedule1F1B" else 2)

    def stages_of(self, place: int) -> tuple[int, ...]:
        """The stages that the rank at a place of a pipeline has."""
        second = (
            self.num_stages - 1 - place if self.schedule == "ScheduleZBVZeroBubble" else place + self.job.grid.stages
        )
        return (place,) if self.num_stages == self.job.grid.stages else (place, second)

    @property
    def stages(self) -> tuple[int, ...]:
        return self.stages_of(self.place)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks that have the first or the last stage, in any pipeline."""
        depth, last = self.job.grid.stages, self.num_stages - 1
        return tuple(rank for rank in range(self.world) if {0, last} & set(self.stages_of(rank % depth)))

    @property
    def world(self) -> int:
        return self.job.grid.pipelines * self.job.grid.stages


def run_baseline(
    job: Job,
    *,
    schedule: str = SCHEDULES[0],
    limit_s: float = 300.0,
    on_step: Callable[[int, list[int]], None] = lambda step, pids: None,
) -> BaselineRun:
    """Trains a job's GPT with torch's own schedule.

    Args:
        job: what to train; at least two stages, no dropout that would need equal seeds.
        schedule: one of ``SCHEDULES``; the last two have two stages per rank.
        limit_s: longest silence that is no failure.
        on_step: called after every step with its number and the process ids of all workers.

    Raises:
        BaselineFailed: a worker ended early or nothing was heard; every process is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-baseline-") as directory:
        try:
            for rank in range(job.grid.pipelines * job.grid.stages):
                ours, theirs = context.Pipe(duplex=False)
                spec = _Spec(job=job, rank=rank, store=str(Path(directory) / "store"), schedule=schedule)
                process = context.Process(target=_worker_main, args=(spec, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _follow(pipes, [process.pid or 0 for process in processes], limit_s, on_step)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _follow(
    pipes: list[Connection], pids: list[int], limit_s: float, on_step: Callable[[int, list[int]], None]
) -> BaselineRun:
    results: dict[int, dict[str, Any]] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=limit_s)
        if not ready:
            raise BaselineFailed(f"nothing heard of ranks {sorted(waiting)} for {limit_s:.0f} s")
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                message = waiting[rank].recv()
            except EOFError:
                raise BaselineFailed(f"rank {rank} ended without a result") from None
            if "error" in message:
                raise BaselineFailed(f"rank {rank}: {message['error']}")
            if "step" in message:
                on_step(message["step"], pids)
            else:
                results[rank] = message
                del waiting[rank]
    ends = zip(*(results[rank]["ends"] for rank in sorted(results)), strict=True)
    last = [result["losses"] for result in results.values() if result["losses"]]
    return BaselineRun(
        ends=tuple(max(row) for row in ends),
        losses=tuple(sum(map(sum, rows)) / sum(map(len, rows)) for rows in zip(*last, strict=True)),
        weights=tuple(results[rank]["weights"] for rank in sorted(results)),
    )


def _worker_main(spec: _Spec, answer: Connection) -> None:
    try:
        answer.send(_Worker(spec).train(answer))
    except Exception as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
        answer.send({"error": f"{type(error).__name__}: {error}"})
    answer.close()
    os._exit(0)


class _Worker:
    """One rank: rank = pipeline x stages + stage."""

    def __init__(self, spec: _Spec) -> None:
        import torch
        from torch.distributed import pipelining

        from holdfast.models import gpt
        from holdfast.runtime.engine.datasets import build_dataset
        from holdfast.runtime.engine.optimizing import build_optimizer

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.spec, grid = spec, spec.job.grid
        self.dataset = build_dataset(spec.job)
        modules = _stage_modules(spec)
        self.peers, chain, self.ends = _groups(spec)
        self.buffers = _Gradients.of(modules, spec)
        self.parameters = _parameters(modules)
        stages = [
            pipelining.PipelineStage(module, number, spec.num_stages, torch.device("cpu"), group=chain)
            for number, module in zip(spec.stages, modules, strict=True)
        ]
        made = getattr(pipelining, spec.schedule)
        told = stages if len(stages) > 1 else stages[0]
        self.schedule = made(told, grid.microbatches, loss_fn=gpt.loss, scale_grads=False)
        self.optimizer = build_optimizer(spec.job)(self.parameters)

    def train(self, answer: Connection) -> dict[str, Any]:
        """Runs all steps; the last stage of the first pipeline tells of each."""
        gc.collect()
        gc.freeze()
        ends, losses = [], []
        for step in range(self.spec.job.train.steps):
            found = self._step(step)
            ends.append(time.monotonic())
            losses.append([float(loss.detach()) for loss in found])
            if self.spec.pipeline == 0 and self.spec.num_stages - 1 in self.spec.stages:
                answer.send({"step": step})
        total = sum(float(parameter.detach().double().sum()) for parameter in self.parameters)
        return {"ends": ends, "losses": losses if any(losses) else [], "weights": total}

    def _step(self, step: int) -> list[Tensor]:
        losses: list[Tensor] = []
        self.buffers.flat.zero_()
        inputs = [self._batch(step, 0)] if 0 in self.spec.stages else []
        last = self.spec.num_stages - 1 in self.spec.stages
        told = {"target": self._batch(step, 1), "losses": losses} if last else {}
        self.schedule.step(*inputs, **told, return_outputs=False)
        self._reduce()
        self.optimizer.step()
        return losses

    def _batch(self, step: int, part: int) -> Tensor:
        """Inputs (0) or targets (1) of the pipeline's micro-batches, loaded as Holdfast loads them."""
        import torch

        from holdfast.data.items import first_of
        from holdfast.data.sampler import load_microbatch

        job, grid = self.spec.job, self.spec.job.grid
        first = self.spec.pipeline * grid.microbatches
        return torch.cat(
            [
                first_of(
                    load_microbatch(
                        self.dataset,
                        seed=job.train.seed,
                        step=step,
                        microbatch=number,
                        num_microbatches=job.global_microbatches,
                        microbatch_size=grid.microbatch_size,
                    )[part]
                )
                for number in range(first, first + grid.microbatches)
            ]
        )

    def _reduce(self) -> None:
        """Mean over all micro-batches of all pipelines; the tied weight's over both of its uses."""
        import torch.distributed as dist

        works = []
        if self.spec.job.grid.pipelines > 1 and self.buffers.own.numel():
            works.append(dist.all_reduce(self.buffers.own, group=self.peers, async_op=True))
        if self.buffers.tied.numel() and len(self.spec.ends) > 1:
            works.append(dist.all_reduce(self.buffers.tied, group=self.ends, async_op=True))
        for work in works:
            work.wait()
        self.buffers.flat.div_(self.spec.job.global_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """All gradients of a rank as one buffer: its own ones, then that of the weight that is tied."""

    flat: torch.Tensor
    own: torch.Tensor
    tied: torch.Tensor

    @classmethod
    def of(cls, modules: list[nn.Module], spec: _Spec) -> _Gradients:
        """Makes every parameter's gradient a view of the buffer."""
        import torch

        parameters = _parameters(modules)
        ends = [
            _tied_weight(module, stage)
            for module, stage in zip(modules, spec.stages, strict=True)
            if stage in (0, spec.num_stages - 1)
        ]
        tied = ends[:1]  # who has both ends has one weight, into whose gradient both go
        own = [parameter for parameter in parameters if all(parameter is not other for other in tied)]
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        start = 0
        for parameter in [*own, *tied]:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        border = sum(parameter.numel() for parameter in own)
        return cls(flat=flat, own=flat[:border], tied=flat[border:])


def _stage_modules(spec: _Spec) -> list[nn.Module]:
    """The layers of the rank's stages, of the same model, with the same first weights, as Holdfast builds it."""
    from torch import nn

    from holdfast.config.job import GptModel
    from holdfast.models import gpt

    model = spec.job.model
    assert isinstance(model, GptModel)
    layers = gpt.build(
        layers=model.layers, width=model.width, heads=model.heads, context=model.context, dropout=model.dropout
    )
    cuts = split_evenly(len(layers), spec.num_stages)
    return [nn.Sequential(*layers[cuts[stage].start : cuts[stage].stop]) for stage in spec.stages]


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def _tied_weight(module: nn.Module, stage: int) -> nn.Parameter:
    return module.get_parameter("0.token.weight" if stage == 0 else f"{len(list(module.children())) - 1}.weight")


def _groups(spec: _Spec) -> tuple[ProcessGroup, ProcessGroup, ProcessGroup]:
    """The peers that have our stages, our pipeline, and all who have a first or a last stage."""
    import torch.distributed as dist

    grid = spec.job.grid
    dist.init_process_group("gloo", store=dist.FileStore(spec.store, spec.world), rank=spec.rank, world_size=spec.world)
    peers = [list(range(stage, spec.world, grid.stages)) for stage in range(grid.stages)]
    chains = [list(range(first, first + grid.stages)) for first in range(0, spec.world, grid.stages)]
    made = [[dist.new_group(ranks) for ranks in kind] for kind in (peers, chains, [list(spec.ends)])]
    return made[0][spec.place], made[1][spec.pipeline], made[2][0]


def main() -> int:
    """Runs the baseline of a job file alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("job", help="a job file with a gpt model")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="overrides a key of the job file")
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0])
    options = parser.parse_args()
    job = load_job(options.job, options.set)
    start = time.monotonic()
    try:
        run = run_baseline(
            job, schedule=options.schedule, on_step=lambda step, pids: progress(f"step {step + 1}/{job.train.steps}")
        )
    except BaselineFailed as error:
        progress(f"FAILED: {error}")
        return 1
    starts = (start, *run.ends[:-1])
    rows = zip(starts, run.ends, run.losses, strict=True)
    cells = [[str(step), f"{end - begin:.3f}", f"{loss:.6f}"] for step, (begin, end, loss) in enumerate(rows)]
    print_table(f"torch's {options.schedule} and all-reduce (step 0 includes the start)", ["step", "s", "loss"], cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
