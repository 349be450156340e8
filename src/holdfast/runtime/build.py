"""From a job to the things that train: model, data, loss, optimizer, and one worker's stage."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

import holdfast
from holdfast.config.job import ConvnetModel, DigitsData, GptModel, Job, PythonModel, TextData
from holdfast.core.ids import WorkerId
from holdfast.core.lower import Payload
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.core.tensorspec import TensorSpec
from holdfast.data.digits import Digits
from holdfast.data.sampler import load_microbatch
from holdfast.data.text import Text
from holdfast.errors import ConfigError, NotUndoable
from holdfast.models import convnet, gpt
from holdfast.optim.factory import OptimizerFactory, learning_rate_scale, make_optimizer
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.undo import inverse_of
from holdfast.runtime.emulated import WIDTH, EmulatedStage
from holdfast.runtime.life import LifeStage
from holdfast.runtime.model import Loss, Model, infer_boundaries, tie_groups
from holdfast.runtime.processes import Probed
from holdfast.runtime.stage import Stage
from holdfast.storage.checkpoints import Facts

__all__ = [
    "StageParts",
    "build_dataset",
    "build_model",
    "build_scaling",
    "build_stage",
    "checkpointed_layers",
    "fingerprint_data",
    "fingerprint_model",
    "load_target",
    "microbatch_loader",
    "probe",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """A worker's stage, and what the messages that come in hold.

    Attributes:
        stage: the compute engine.
        ties: the layers that share weights, each a tuple of layer indices.
        activation: comes from the stage before; None on the first.
        gradient: comes from the stage behind; None on the last.
        tally: verdicts are made of it.
        emulated_bytes: sizes that incoming messages are to have, where what they hold is a small stand-in.
    """

    stage: LifeStage
    ties: tuple[tuple[int, ...], ...]
    activation: TensorSpec | None
    gradient: TensorSpec | None
    tally: TensorSpec
    emulated_bytes: Mapping[Payload, int] = field(default_factory=dict)

    def spec_of(self, payload: Payload) -> TensorSpec:
        """What an incoming message of this kind holds."""
        if payload in (Payload.TALLY, Payload.VERDICT):
            return self.tally
        spec = self.activation if payload is Payload.ACTIVATION else self.gradient
        assert spec is not None, f"no {payload} can arrive at the end of a pipeline"
        return spec


def load_target(target: str, key: str) -> Callable[..., Any]:
    """Returns the function that ``package.module:name`` or ``path/to/file.py:name`` names.

    Raises:
        ConfigError: there is no such module, file or name; ``key`` says which key named it.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{key}: {target!r} is no target; expected package.module:name or path/to/file.py:name")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{key}: {target!r} cannot be imported: {error}") from error
    except OSError as error:
        raise ConfigError(f"{key}: {place}: {error.strerror or error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {place} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{key}: {place} has no function {name!r}")
    return cast(Callable[..., Any], found)


def _call(target: str, key: str, arguments: dict[str, Any]) -> Any:
    """Calls somebody else's function; whatever it raises is theirs to change."""
    function = load_target(target, key)
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {target} failed: {type(error).__name__}: {error}") from error


def _module_of_file(path: Path) -> ModuleType:
    """Imports a file once, under a name of its own."""
    resolved = path.resolve(strict=True)
    name = f"holdfast_target_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def build_model(job: Job) -> Model:
    """Builds the whole model, the same bits in every process: all layers from the job's seed.

    Raises:
        ConfigError: one's own model cannot be built or is no list of modules.
    """
    torch.manual_seed(job.train.seed)
    match job.model:
        case GptModel(layers=layers, width=width, heads=heads, context=context, dropout=dropout):
            modules = gpt.build(
                layers=layers, width=width, heads=heads, context=context, dropout=dropout, seed=job.train.seed
            )
            return Model.build(modules, gpt.loss)
        case ConvnetModel(width=width):
            return Model.build(convnet.build(width=width, seed=job.train.seed), convnet.loss)
        case PythonModel(target=target, loss=loss, arguments=arguments):
            modules = _layers_of(_call(target, "model.target", arguments), target)
            chosen = gpt.loss if loss is None else cast(Loss, load_target(loss, "model.loss"))
            return Model.build(modules, chosen)


def _layers_of(built: object, target: str) -> list[nn.Module]:
    if isinstance(built, nn.Sequential | nn.ModuleList):
        return list(built)
    if isinstance(built, list | tuple):
        return list(built)
    raise ConfigError(f"model.target: {target} returned a {type(built).__name__}; expected an ordered list of modules")


def build_dataset(job: Job) -> Any:
    """Opens the data: map-style, each item a pair of input and target tensors.

    Raises:
        ConfigError: the data is missing or too small.
    """
    match job.data:
        case TextData(path=path):
            context = job.model.context if isinstance(job.model, GptModel) else 128
            return Text(path, context=context)
        case DigitsData():
            return Digits()
        case python:
            dataset = _call(python.target, "data.target", python.arguments)
            if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__") or not len(dataset):
                raise ConfigError(f"data.target: {python.target} returned no map-style dataset with items")
            return dataset


def build_optimizer(job: Job) -> OptimizerFactory:
    """Returns what makes one layer's optimizer."""
    options = job.optimizer
    if ":" in options.kind:
        return cast(OptimizerFactory, load_target(options.kind, "optimizer.kind"))
    return make_optimizer(
        options.kind,
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        nesterov=options.nesterov,
        dampening=options.dampening,
        betas=options.betas,
        eps=options.eps,
        amsgrad=options.amsgrad,
    )


def build_scaling(job: Job) -> LossScaling | None:
    """Returns how the scale of the loss changes; None where the job scales no loss."""
    options = job.train.loss_scale
    return None if options is None else LossScaling(initial=options.initial, growth_every=options.growth_every)


def probe(job: Job) -> Probed:
    """Builds everything once and throws it away; returns what flows between the layers.

    Raises:
        ConfigError: something in the job cannot be used.
    """
    model = build_model(job)
    _check_commit(job, model, build_optimizer(job))
    checkpointed_layers(job, len(model.layers))
    _lr_scale(job)(0)
    dataset = build_dataset(job)
    sample, _ = microbatch_loader(job, lambda: dataset)(0, 0)
    return Probed(
        boundaries=infer_boundaries(model.layers, sample),
        facts=_facts(job, model, dataset),
        ties=tie_groups(model.ties),
    )


def _facts(job: Job, model: Model, dataset: Any) -> Facts:
    """Returns what a checkpoint of this job says, and what one must say for this job to go on from it."""
    return Facts(
        job=job.name,
        holdfast=holdfast.__version__,
        seed=job.train.seed,
        layers=len(model.layers),
        microbatches=job.global_microbatches,
        microbatch_size=job.grid.microbatch_size,
        optimizer=job.optimizer.kind,
        model=fingerprint_model(model),
        data=fingerprint_data(dataset),
    )


def fingerprint_model(model: Model) -> str:
    """Returns a digest of the names, shapes and types of all parameters and buffers, and of what is tied."""
    layers = [
        [(name, tuple(value.shape), str(value.dtype)) for name, value in (*m.named_parameters(), *m.named_buffers())]
        for m in model.layers
    ]
    ties = [tie.places for tie in model.ties]
    return hashlib.sha256(repr((layers, ties)).encode()).hexdigest()


def fingerprint_data(dataset: Any) -> str:
    """Returns a digest of the number of samples, and of the first, the middle and the last of them."""
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for index in (0, size // 2, size - 1):
        for value in dataset[index]:
            tensor = torch.as_tensor(value)
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_commit(job: Job, model: Model, optimizer: OptimizerFactory) -> None:
    if job.resilience.commit != "undo":
        return
    for layer in model.layers:
        trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        try:
            if trainable:
                inverse_of(optimizer(trainable))
        except NotUndoable as error:
            raise ConfigError(f"resilience.commit: undo is impossible: {error}; use shadow") from error


def checkpointed_layers(job: Job, num_layers: int) -> frozenset[int]:
    """Returns the layers that keep only their input and are run again for their backward pass.

    Raises:
        ConfigError: the job names one that the model does not have.
    """
    chosen = job.model.checkpoint_activations
    layers = frozenset(range(num_layers) if chosen is True else chosen or ())
    if beyond := [layer for layer in layers if layer >= num_layers]:
        raise ConfigError(
            f"model.checkpoint_activations: there is no layer {min(beyond)}; layers are 0 to {num_layers - 1}"
        )
    return layers


def _lr_scale(job: Job) -> Callable[[int], float]:
    return partial(
        learning_rate_scale,
        warmup_steps=job.optimizer.warmup_steps,
        total_steps=job.train.steps,
        schedule=job.optimizer.schedule,
    )


def microbatch_loader(job: Job, dataset: Callable[[], Any]) -> Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Loads a micro-batch as a pure function of seed, step and its global number; opens the data when first asked."""

    def load(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return load_microbatch(
            dataset(),
            seed=job.train.seed,
            step=step,
            microbatch=microbatch,
            num_microbatches=job.global_microbatches,
            microbatch_size=job.grid.microbatch_size,
        )

    return load


def build_stage(
    job: Job,
    plan: Plan,
    worker: WorkerId,
    boundaries: tuple[TensorSpec, ...] = (),
    emulate: Profile | None = None,
    note: Callable[[str], None] = _log.warning,
) -> StageParts:
    """Builds one worker's stage.

    Args:
        job: the job.
        plan: a plan that tells which layers are the worker's.
        worker: whose stage.
        boundaries: what every layer hands on, see :func:`probe`; not needed to emulate.
        emulate: sleep as long as it says instead of computing; None to compute.
        note: takes what a person should know of a fall-back.
    """
    owned = plan.placement.layers_of(worker)
    if emulate is not None:
        return _emulated(job, owned, emulate)
    model = build_model(job)
    stage = Stage(
        layers=model.layers,
        layer_range=owned,
        ties=model.ties,
        loss=model.loss,
        optimizer=build_optimizer(job),
        lr_scale=_lr_scale(job),
        numerics=job.train.numerics,
        seed=job.train.seed,
        num_microbatches=job.global_microbatches,
        load=microbatch_loader(job, cache(lambda: build_dataset(job))),
        clip_norm=job.train.clip_norm,
        commit=job.resilience.commit,
        scaling=build_scaling(job),
        checkpointed=checkpointed_layers(job, len(model.layers)),
        note=note,
    )
    groups = tie_groups(model.ties)
    return StageParts(
        stage=stage,
        ties=groups,
        activation=boundaries[owned.start - 1] if owned.start else None,
        gradient=boundaries[owned.stop - 1] if owned.stop < len(model.layers) else None,
        tally=TensorSpec(shape=(len(model.layers) + len(groups), 3), dtype="float64"),
    )


def _emulated(job: Job, owned: LayerRange, profile: Profile) -> StageParts:
    layers = profile.layers
    stage = EmulatedStage(
        layers=owned, num_layers=len(layers), num_microbatches=job.global_microbatches, profile=profile
    )
    words = TensorSpec(shape=(WIDTH,), dtype="int64")
    return StageParts(
        stage=stage,
        ties=(),
        activation=words,
        gradient=words,
        tally=TensorSpec(shape=(len(layers), 3), dtype="float64"),
        emulated_bytes={
            Payload.ACTIVATION: layers[owned.start - 1].boundary_bytes if owned.start else 0,
            Payload.GRADIENT: layers[owned.stop - 1].boundary_bytes,
        },
    )
