"""Runs a script as far as its loop, to learn what it will train: everything else is planned by that."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from holdfast.config.job import LOSSY, Grid, Job, PipelineLayout, ScriptModel
from holdfast.errors import ConfigError
from holdfast.optim.digest import tensors_sha256
from holdfast.recovery.choice import Sizes
from holdfast.runtime.loop.alone import whole_stage
from holdfast.runtime.loop.hosting import Loop, hosted
from holdfast.runtime.loop.script import print_trace, quiet, run_script, told
from holdfast.runtime.loop.stage import HANDED_ON, LoopStage
from holdfast.runtime.loop.turns import Item, LoopAbandoned, Turns
from holdfast.runtime.specs import Probed, facts_of
from holdfast.runtime.tensors import num_bytes

__all__ = ["fingerprint", "probe_script", "sums_gradients"]


class _Reached(BaseException):
    """The loop is reached: the script must not go on, whatever it catches."""


class _Probing:
    """Carries a script as far as its loop; or, where its model is compiled, behind its first item."""

    def __init__(self, job: Job) -> None:
        self.per_gradient = sums_gradients(job)
        self.worker = "0.0"
        self.loop: Loop | None = None
        self.first_item = ""

    def is_first(self) -> bool:
        """As far as the loop nobody knows who is; nothing is to be printed or saved."""
        return False

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """This is as far as it goes, unless it is to be known what comes of an item."""
        self.loop = loop
        if not loop.prepared.compiled:
            raise _Reached
        stage = whole_stage(loop, turns)
        threading.Thread(target=self._run_first, args=(loop, turns), name="driver", daemon=True).start()
        return lambda: stage

    def _run_first(self, loop: Loop, turns: Turns) -> None:
        scaling = loop.prepared.scaling
        turns.between(0)
        item = Item(step=0, shown=0, number=0, loss_scale=None if scaling is None else scaling.initial)
        self.first_item = turns.run(item).digest
        turns.end(finished=False)


def probe_script(job: Job) -> Probed:
    """Returns what a script is going to train, and the job as it says.

    Raises:
        ConfigError: it cannot be trained, or the script raised; it has printed where.
    """
    assert isinstance(job.model, ScriptModel), "only a script is run"
    probing = _reached(job.model, job)
    loop = probing.loop
    assert loop is not None, "it was reached"
    if loop.prepared.failing is not None and loop.prepared.failing.replays:
        raise ConfigError("SimulatedFailure: recovery: rollback is simulated in one process only: python SCRIPT")
    job = _as_told(job, loop)
    buckets = loop.prepared.buckets
    sizes = Sizes(
        boundary_bytes=(num_bytes(HANDED_ON),) * len(buckets),
        state_bytes=tuple(sum(p.nbytes for p in bucket.parameters()) for bucket in buckets),
    )
    return Probed(
        boundaries=(HANDED_ON,) * len(buckets),
        facts=facts_of(job, layers=len(buckets), model=fingerprint(loop.prepared.model), data=_data(loop.dataset)),
        sizes=sizes,
        job=job,
        first_item=probing.first_item,
    )


def sums_gradients(job: Job) -> bool:
    """Returns whether each gradient is summed by itself: where a failure may come between any two of them."""
    return job.resilience.strategy in LOSSY


def _reached(script: ScriptModel, job: Job) -> _Probing:
    torch.set_num_threads(1)
    probing = _Probing(job)
    hosted(probing)
    try:
        with quiet():
            run_script(script)
    except (_Reached, LoopAbandoned):
        return probing
    except ConfigError as error:
        raise ConfigError(told(script, error)) from None
    except BaseException as error:  # noqa: BLE001 - nobody can know what somebody else's script raises
        print_trace(error)
        raise ConfigError(f"{told(script, error)} (above is where)") from None
    raise ConfigError(
        f"{script.path}: came to its end without a loop over hf.steps(...) of hf = holdfast.session(): there is "
        "nothing that workers could share"
    )


def _as_told(job: Job, loop: Loop) -> Job:
    workers, number = job.num_workers, loop.microbatches
    if number < workers:
        raise ConfigError(
            f"hf.steps: microbatches: {number} are too few for {workers} workers; expected at least one for each"
        )
    base, more = divmod(number, workers)
    size, per_node = loop.size, job.grid.workers_per_node
    if more:
        stages = (len(loop.prepared.buckets),)
        rows = tuple(PipelineLayout(stages=stages, microbatches=base + (i < more)) for i in range(workers))
        grid = Grid(layout=rows, microbatch_size=size, workers_per_node=per_node)
    else:
        grid = Grid(pipelines=workers, stages=1, microbatches=base, microbatch_size=size, workers_per_node=per_node)
    return replace(job, grid=grid, train=replace(job.train, steps=loop.steps, seed=loop.seed))


def fingerprint(model: nn.Module) -> str:
    """Returns a digest of a model's parameters and buffers, by name: types, shapes and bits."""
    return tensors_sha256({name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())})


def _data(dataset: Any) -> str:
    return hashlib.sha256(f"{type(dataset).__name__} {len(dataset)}".encode()).hexdigest()
