"""Runs a script as far as its first item, to learn what it will train: everything else is planned by that."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from msgspec.structs import replace as replace_struct
from torch import nn

from holdfast.config.job import Grid, Job, PipelineLayout, ScriptModel
from holdfast.devices.device import Device
from holdfast.devices.named import arithmetic
from holdfast.errors import ConfigError
from holdfast.recovery.choice import Sizes
from holdfast.runtime.loop.facts import data_facts, source_files
from holdfast.runtime.loop.feeding import sampling
from holdfast.runtime.loop.hosting import Loop, hosted
from holdfast.runtime.loop.script import print_trace, quiet, run_script, told
from holdfast.runtime.loop.stage import HANDED_ON, LoopStage
from holdfast.runtime.loop.trying import ItemTrial
from holdfast.runtime.loop.turns import Turns
from holdfast.runtime.specs import Probed, facts_of
from holdfast.runtime.tensors import num_bytes, settle_thread

__all__ = ["probe_script", "script_facts", "sums_gradients"]


COMPARING = 0.005
"""The part of the time of steps that comparing may take."""
_Answer = Callable[[Callable[[], Probed]], None]
"""Calls what it is given, tells what that returns or raises, and ends the process."""


class _Probing:
    """Carries a script through the first item of its loop; the process ends there, whatever the script is in."""

    def __init__(self, job: Job, answer: _Answer, device: Device, gpus: tuple[str, ...]) -> None:
        self.device = device
        self.per_gradient = sums_gradients(job)
        self.worker, self.untried, self.deadline = "0.0", True, math.inf
        self.reached = False
        self._job, self._answer, self._gpus = job, answer, gpus

    def is_first(self) -> bool:
        """Nobody is: nothing is to be printed or saved."""
        return False

    def ended(self) -> None:
        """It never is: the process ends in the first step."""

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """What there is to know of the loop is known before anything of it runs; then it is tried."""
        self.reached = True
        if self._job.train.numerics == "exact":
            self.device.settle()  # whatever the script has set since
        probed = replace(_probed(self._job, loop), gpus=self._gpus, arithmetic=arithmetic(self.device))
        trial = ItemTrial(loop, turns, self.device)
        finish = partial(self._answer, partial(_tried, self._job, probed, trial))
        threading.Thread(target=finish, name="driver", daemon=True).start()
        return lambda: trial.stage


def probe_script(job: Job, answer: _Answer, device: Device, gpus: tuple[str, ...]) -> NoReturn:
    """Runs a script as far as the first item of its loop, twice; ``answer`` is called by another thread with the rest.

    Args:
        job: names the script, and the device.
        answer: see _Answer.
        device: what it computes on.
        gpus: the names of those that are visible, if the job uses any.

    Raises:
        ConfigError: it cannot be trained, or the script raised; it has printed where.
    """
    script = job.model
    assert isinstance(script, ScriptModel), "only a script is run"
    torch.set_num_threads(1)
    probing = _Probing(job, answer, device, gpus)
    hosted(probing)
    try:
        with quiet():
            run_script(script)
    except ConfigError as error:
        raise ConfigError(told(script, error)) from None
    except BaseException as error:  # noqa: BLE001 - nobody can know what somebody else's script raises
        print_trace(error)
        raise ConfigError(f"{told(script, error)} (above is where)") from None
    if probing.reached:
        raise ConfigError(
            f"{script.path}: left its loop over hf.steps(...) in the first step; expected it to its end, or hf.stop(), "
            "with which all workers end behind the same step"
        )
    raise ConfigError(
        f"{script.path}: came to its end without a loop over hf.steps(...) of hf = holdfast.session(): there is "
        "nothing that workers could share"
    )


def _probed(job: Job, loop: Loop) -> Probed:
    """Returns what a script is going to train, and the job as it says.

    Raises:
        ConfigError: it cannot be trained.
    """
    assert isinstance(job.model, ScriptModel), "only a script is run"
    if loop.prepared.failing is not None and loop.prepared.failing.replays:
        raise ConfigError("SimulatedFailure: recovery: rollback is simulated in one process only: python SCRIPT")
    script, job = job.model.path, _as_told(job, loop)
    buckets = loop.prepared.buckets
    sizes = Sizes(
        boundary_bytes=(num_bytes(HANDED_ON),) * len(buckets),
        state_bytes=tuple(sum(p.nbytes for p in bucket.parameters()) for bucket in buckets),
    )
    return Probed(
        boundaries=(HANDED_ON,) * len(buckets),
        facts=facts_of(
            job,
            layers=len(buckets),
            model=_form(loop.prepared.model),
            data=_data(loop.dataset),
            sources=source_files(script),
            script=script_facts(loop),
            first=loop.prepared.fingerprint(),
        ),
        sizes=sizes,
        warnings=_warnings(loop.prepared.model),
        job=job,
    )


def _tried(job: Job, probed: Probed, trial: ItemTrial) -> Probed:
    """Returns what was found, with what a trial finds.

    Raises:
        ConfigError: something would not be the same another time, and the job's numerics are exact.
    """
    assert isinstance(job.model, ScriptModel), "only a script is run"
    settle_thread()
    try:
        trial()
        if trial.differences and job.train.numerics == "exact":
            raise ConfigError(f"{trial.differences[0]} (or numerics: fast, where a recovery may end in other weights)")
    except ConfigError as error:
        raise ConfigError(f"{job.model.path}: {error}") from None
    told = probed.job
    assert told is not None, "a script says what its job is like"
    if told.train.compare_every is None:
        told = replace_struct(told, train=replace_struct(told.train, compare_every=_compares_every(told, trial)))
    return replace(probed, warnings=(*probed.warnings, *trial.differences), first_item=trial.first_item, job=told)


def _compares_every(job: Job, trial: ItemTrial) -> int:
    """Returns in how many steps workers compare what they have, so that it costs no more than COMPARING of their time.

    One of them runs an item more then, two digest what came of it, and all digest their state.
    """
    if job.train.numerics == "fast" or job.num_workers < 2:
        return 0
    item_s, digest_s = trial.seconds()
    step_s = item_s * max(1, job.global_microbatches // job.num_workers)
    return max(1, math.ceil((item_s + 2 * digest_s) / (COMPARING * step_s)))


def sums_gradients(job: Job) -> bool:
    """Returns whether each gradient is summed by itself: where a failure may come between any two of them."""
    return not job.strategy.exact


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
    train = replace_struct(job.train, steps=loop.steps, seed=loop.seed, sum_chunks=loop.sum_chunks)
    return replace_struct(job, grid=grid, train=train)


def script_facts(loop: Loop) -> dict[str, Any]:
    """Returns what a script says of its optimizers, schedulers and data, by key."""
    with sampling(loop) as sample:
        return {**loop.prepared.facts, **data_facts(loop.feed.source, sample)}


def _warnings(model: nn.Module) -> tuple[str, ...]:
    double = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float64]
    text = f"{len(double)} parameters are float64 ({', '.join(double[:1])}): their gradients are summed as float32"
    return (text,) if double else ()


def _form(model: nn.Module) -> str:
    """A digest of the names, shapes and types of a model's parameters and buffers."""
    named = (*model.named_parameters(), *model.named_buffers())
    rows = [(name, tuple(value.shape), str(value.dtype)) for name, value in named]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _data(dataset: Any) -> str:
    return hashlib.sha256(f"{type(dataset).__name__} {len(dataset)}".encode()).hexdigest()
