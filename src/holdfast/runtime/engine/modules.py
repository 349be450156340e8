"""From a job to the layers of its model, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from holdfast.config.job import (
    BertModel,
    ConvnetModel,
    Data,
    GptModel,
    HuggingFaceModel,
    Job,
    Nt3Data,
    Nt3Model,
    PythonModel,
    ResnetModel,
    ScriptModel,
    TinyImageNetData,
    VitModel,
)
from holdfast.data.images import NUM_CLASSES
from holdfast.data.items import spec_of
from holdfast.data.rows import count_values
from holdfast.errors import ConfigError
from holdfast.models import bert, convnet, gpt, nt3, resnet, vit
from holdfast.models.losses import cross_entropy
from holdfast.runtime.engine.datasets import build_dataset, microbatch_loader
from holdfast.runtime.engine.foreign import call_target, load_target, theirs
from holdfast.runtime.engine.model import Loss, Model
from holdfast.runtime.engine.slots.whole import Whole

__all__ = ["build_model", "is_cut", "whole_of"]

_NOTHING = nullcontext()


def build_model(
    job: Job, data: Callable[[], Any] | None = None, loading: AbstractContextManager[None] = _NOTHING
) -> Model:
    """Builds the whole model, the same bits in every process: all layers from the job's seed.

    Args:
        job: whose model.
        data: opens the job's data, for a model that is cut; None: as :func:`build_dataset` does.
        loading: entered while a micro-batch is loaded.

    Raises:
        ConfigError: one's own model cannot be built, is no list of modules or cannot be cut.
    """
    torch.manual_seed(job.train.seed)
    match job.model:
        case GptModel(layers=layers, width=width, heads=heads, context=context, dropout=dropout):
            modules = gpt.build(
                layers=layers, width=width, heads=heads, context=context, dropout=dropout, seed=job.train.seed
            )
            return Model.build(modules, gpt.loss)
        case BertModel(layers=layers, width=width, heads=heads, context=context, dropout=dropout):
            modules = bert.build(
                layers=layers, width=width, heads=heads, context=context, dropout=dropout, seed=job.train.seed
            )
            return Model.build(modules, bert.loss)
        case VitModel(layers=layers, width=width, heads=heads, patch=patch, dropout=dropout):
            modules = vit.build(
                layers=layers, width=width, heads=heads, patch=patch, dropout=dropout, seed=job.train.seed
            )
            return Model.build(modules, vit.loss)
        case ConvnetModel(width=width):
            return Model.build(convnet.build(width=width, seed=job.train.seed), convnet.loss)
        case ResnetModel():
            return Model.build(_resnet_of(job.model, job.data, job.train.seed), resnet.loss)
        case Nt3Model(width=width):
            values = count_values(job.data.path) if isinstance(job.data, Nt3Data) else 30
            return Model.build(nt3.build(width=width, values=values, seed=job.train.seed), nt3.loss)
        case PythonModel(target=target, arguments=arguments, split=None):
            modules = _layers_of(call_target(target, "model.target", arguments), target)
            return Model.build(modules, _loss_of(job.model))
        case PythonModel() | HuggingFaceModel():
            parts = _layers_of_whole(job, data or (lambda: build_dataset(job)), loading)
            return Model.build(parts, _loss_of(job.model))
        case ScriptModel(path=path):
            raise ConfigError(f"model.kind: script: only {path} itself has this model, whose loop is run as it is")


def _layers_of_whole(job: Job, data: Callable[[], Any], loading: AbstractContextManager[None]) -> tuple[nn.Module, ...]:
    """Builds a module, and returns its layers, for which it is run on the first micro-batch, unless it is one."""
    if not is_cut(job):
        return whole_of(job).one()
    inputs, _ = microbatch_loader(job, data, loading=loading)(0, 0)
    torch.manual_seed(job.train.seed)
    return whole_of(job).layers(inputs)


def whole_of(job: Job) -> Whole:
    """Builds a model that is one module, from torch's generator as it stands.

    Raises:
        ConfigError: it cannot be built, or is none.
    """
    if isinstance(job.model, HuggingFaceModel):
        from holdfast.runtime.engine.slots.hugging_face import whole

        return whole(job.model)
    assert isinstance(job.model, PythonModel), "others are lists"
    target = job.model.target
    built = call_target(target, "model.target", job.model.arguments)
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"model.target: {target} returned a {type(built).__name__}; expected one module, as model.split is "
            f"{job.model.split}"
        )
    return Whole(module=built)


def is_cut(job: Job) -> bool:
    """Returns whether a job's model is one module that is cut at its blocks."""
    return isinstance(job.model, HuggingFaceModel) or (
        isinstance(job.model, PythonModel) and job.model.split == "blocks"
    )


def _resnet_of(model: ResnetModel, data: Data, seed: int) -> list[nn.Module]:
    shape = {"channels": 3, "classes": NUM_CLASSES} if isinstance(data, TinyImageNetData) else {}
    if model.depth == 50:
        return resnet.build_50(**{"channels": 1, "classes": 10, **shape}, seed=seed)
    return resnet.build(width=model.width or 8, **shape, seed=seed)


def _layers_of(built: object, target: str) -> list[nn.Module]:
    if isinstance(built, nn.Module) and not isinstance(built, nn.Sequential | nn.ModuleList):
        parts = ", ".join(name for name, _ in built.named_children())
        raise ConfigError(
            f"model.target: {target} returned one module, a {type(built).__name__}; expected its layers in order, as a "
            "list in which each takes what the one before returned"
            + (f" (its parts: {parts})" if parts else "")
            + "; or model.split: blocks, by which it is cut at its longest ModuleList, or none: it is one layer"
        )
    if isinstance(built, str | Mapping | torch.Tensor) or not isinstance(built, Iterable):
        raise ConfigError(
            f"model.target: {target} returned a {type(built).__name__}; expected an ordered list of modules"
        )
    with theirs(f"model.target: {target} failed"):  # a generator runs only now
        layers = list(built)
    if not layers:
        raise ConfigError(f"model.target: {target} returned no layer; expected at least one")
    return layers


def _loss_of(model: PythonModel | HuggingFaceModel) -> Loss:
    target = model.loss
    if target is None:
        return _default_loss
    loss = load_target(target, "model.loss")
    if not (isinstance(loss, type) and issubclass(loss, nn.Module)):
        return cast(Loss, loss)
    with theirs(f"model.loss: {target} failed"):
        return cast(Loss, loss())


def _default_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For logits and classes only: other shapes might pass through it and mean nothing."""
    if output.dim() < 2 or target.dtype != torch.int64 or output.shape[:-1] != target.shape:
        raise ConfigError(
            f"model.loss: is missing, and the model returns {spec_of(output)} for a target of {spec_of(target)}; "
            "without it the loss is the cross entropy of logits [batch, ..., classes] against int64 [batch, ...]"
        )
    return cross_entropy(output, target)
