"""From a job to one worker's stage, and what its messages hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from holdfast.config.job import (
    Job,
    ScriptModel,
)
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Receive
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError
from holdfast.protocol.worker import Engine
from holdfast.runtime.engine.datasets import build_dataset, build_evaluated, evaluation_data, microbatch_loader
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.runtime.engine.model import Model, tie_groups
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.optimizing import build_optimizer, build_scaling, learning_rate_of
from holdfast.runtime.engine.precision import PRECISIONS
from holdfast.runtime.engine.stage import Stage

__all__ = ["StageParts", "build_stage", "checkpointed_layers", "stage_options"]

_log = logging.getLogger(__name__)
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """A worker's stage, and what the messages that come in hold.

    Attributes:
        stage: the compute engine.
        boundaries: what every layer hands on, and so what the gradient of that is like.
        vote: verdicts are made of it.
        emulated_bytes: how large that is to be, where what is handed on is a small stand-in; empty: as large as it is.
        unused: the whole model, where the stage has none of its layers; else None.
    """

    stage: Engine
    boundaries: tuple[TensorSpec, ...]
    vote: TensorSpec
    emulated_bytes: tuple[int, ...] = ()
    unused: Model | None = None

    def spec_of(self, receive: Receive) -> TensorSpec:
        """What an incoming message holds."""
        if receive.payload in (Payload.VOTE, Payload.VERDICT):
            return self.vote
        return self.boundaries[receive.boundary - 1]


def build_stage(
    job: Job,
    plan: Plan,
    worker: WorkerId,
    boundaries: tuple[TensorSpec, ...] = (),
    emulate: Profile | None = None,
    note: Callable[[str], None] = _log.warning,
    item: ItemSpec | None = None,
    model: Model | None = None,
    data: Callable[[], Any] | None = None,
    evaluated: Callable[[], Any] | None = None,
    sharded: Callable[..., Stage] | None = None,
    loading: AbstractContextManager[None] = _NOTHING,
    device: Device = HOST,
) -> StageParts:
    """Builds one worker's stage.

    Args:
        job: the job.
        plan: a plan that tells which layers are the worker's; none, if it is not in it.
        worker: whose stage.
        boundaries: what every layer hands on, see :func:`probe`; not needed to emulate.
        emulate: sleep as long as it says instead of computing; None to compute.
        note: takes what a person should know of a fall-back.
        item: what every item of the data is like; None: it is not known.
        model: the job's, fresh, which the stage takes over; None: it is built.
        data: opens the job's data, when it is needed; None: as :func:`build_dataset` does.
        evaluated: opens those that it is evaluated by; None: as :func:`build_evaluated` does.
        sharded: makes the stage of a worker of several GPUs; None: it has one.
        loading: entered while a micro-batch is loaded.
        device: where to compute.
    """
    owned = plan.placement.layers_of(worker)
    if emulate is not None:
        return _emulated(job, owned, emulate)
    data, evaluated = data or cache(lambda: build_dataset(job)), evaluated or cache(lambda: build_evaluated(job))
    model = model or build_model(job, data, loading)
    options = stage_options(job, model, owned, boundaries, item, data, evaluated, loading)
    stage = Stage(**options, device=device, note=note) if sharded is None else sharded(**options, note=note)
    return StageParts(
        stage=stage,
        boundaries=boundaries,
        vote=TensorSpec(shape=(len(model.layers) + len(tie_groups(model.ties)), 3), dtype="float64"),
        unused=None if owned else model,
    )


def stage_options(
    job: Job,
    model: Model,
    owned: tuple[int, ...],
    boundaries: tuple[TensorSpec, ...],
    item: ItemSpec | None,
    data: Callable[[], Any],
    evaluated: Callable[[], Any] | None = None,
    loading: AbstractContextManager[None] = _NOTHING,
) -> dict[str, Any]:
    """Returns what a job's stage is made of, by the names that :class:`Stage` has for it.

    Args:
        job: the job.
        model: its model, fresh, which the stage takes over.
        owned: the layers that the stage has.
        boundaries: what every layer hands on.
        item: what every item of the data is like; None: it is not known.
        data: opens the job's data, when it is needed.
        evaluated: opens those that it is evaluated by, when they are needed; None: it is not evaluated.
        loading: entered while a micro-batch is loaded.
    """
    return {
        "layers": model.layers,
        "owned": owned,
        "ties": model.ties,
        "loss": model.loss,
        "optimizer": build_optimizer(job),
        "lr_scale": learning_rate_of(job),
        "seed": job.train.seed,
        "num_microbatches": job.global_microbatches,
        "chunks": job.train.sum_chunks,
        "load": microbatch_loader(job, data, item, loading),
        "clip_norm": job.train.clip_norm,
        "commit": job.resilience.commit,
        "scaling": build_scaling(job),
        "checkpointed": checkpointed_layers(job, len(model.layers)),
        "outputs": boundaries,
        "evaluation": None if evaluated is None else evaluation_data(job, evaluated, item, loading),
        "precision": PRECISIONS[job.train.precision],
    }


def checkpointed_layers(job: Job, num_layers: int) -> frozenset[int]:
    """Returns the layers that keep only their input and are run again for their backward pass.

    Raises:
        ConfigError: the job names one that the model does not have.
    """
    chosen = False if isinstance(job.model, ScriptModel) else job.model.checkpoint_activations
    layers = frozenset(range(num_layers) if chosen is True else chosen or ())
    if beyond := [layer for layer in layers if layer >= num_layers]:
        raise ConfigError(
            f"model.checkpoint_activations: there is no layer {min(beyond)}; layers are 0 to {num_layers - 1}"
        )
    return layers


def _emulated(job: Job, owned: tuple[int, ...], profile: Profile) -> StageParts:
    layers = profile.layers
    stage = EmulatedStage(
        layers=owned,
        num_layers=len(layers),
        num_microbatches=job.global_microbatches,
        profile=profile,
        sends=torch.from_numpy,
        receives=torch.Tensor.numpy,
    )
    words = TensorSpec(shape=(WIDTH,), dtype="int64")
    return StageParts(
        stage=stage,
        boundaries=(words,) * len(layers),
        vote=TensorSpec(shape=(len(layers), 3), dtype="float64"),
        emulated_bytes=tuple(layer.boundary_bytes for layer in layers),
    )
