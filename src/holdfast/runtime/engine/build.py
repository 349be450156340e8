"""From a job to the things that train: model, data, loss, optimizer, and one worker's stage."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from holdfast.config.job import (
    BYTES,
    BertModel,
    BreastCancerData,
    ConvnetModel,
    Data,
    DigitsData,
    GptModel,
    HuggingFaceModel,
    Job,
    Nt3Data,
    Nt3Model,
    PythonData,
    PythonModel,
    ResnetModel,
    ScriptData,
    ScriptModel,
    TextData,
    TinyImageNetData,
    VitModel,
)
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Receive
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile
from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.data.digits import Digits
from holdfast.data.images import NUM_CLASSES, TinyImageNet
from holdfast.data.items import Inputs, of_each, pair_of, spec_of, tensors_of
from holdfast.data.labelled import Labelled
from holdfast.data.randomness import seed_host
from holdfast.data.rows import BreastCancer, Expressions, count_values
from holdfast.data.sampler import load_microbatch, sample_indices
from holdfast.data.text import MaskedText, Text
from holdfast.data.tokens import Tokens
from holdfast.devices.device import HOST, Device
from holdfast.devices.named import is_target
from holdfast.errors import ConfigError, NotUndoable
from holdfast.models import bert, convnet, gpt, nt3, resnet, vit
from holdfast.models.losses import cross_entropy
from holdfast.optim.digest import tensor_sha256
from holdfast.optim.factory import OptimizerFactory, learning_rate_scale, make_optimizer
from holdfast.optim.loss_scale import LossScaling
from holdfast.optim.schedules import Tabulated
from holdfast.optim.undo import inverse_of
from holdfast.protocol.worker import Engine
from holdfast.recovery.choice import Sizes
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.runtime.engine.evaluated import EvaluationData, check_evaluation, load_evaluated
from holdfast.runtime.engine.foreign import call_target, load_target, theirs
from holdfast.runtime.engine.model import Loss, Model, WithContext, name_of, tie_groups
from holdfast.runtime.engine.precision import PRECISIONS, check_cast
from holdfast.runtime.engine.sharded.checks import check_layer, part_spec
from holdfast.runtime.engine.slots.whole import Whole
from holdfast.runtime.engine.stage import Loader, Stage, layer_seed
from holdfast.runtime.engine.stepped import BEFORE_ALL
from holdfast.runtime.engine.trial import try_items, try_model
from holdfast.runtime.specs import Probed, facts_of
from holdfast.runtime.tensors import num_bytes
from holdfast.storage.checkpoints import Facts

__all__ = [
    "StageParts",
    "build_dataset",
    "build_evaluated",
    "build_model",
    "build_scaling",
    "build_stage",
    "checkpointed_layers",
    "evaluation_data",
    "fingerprint_data",
    "fingerprint_model",
    "learning_rate_of",
    "microbatch_loader",
    "probe",
    "sources_of",
    "stage_options",
]

_log = logging.getLogger(__name__)
_NOTHING = nullcontext()
_TRIED_STEPS = 100_000
"""Of a scheduler; more would take seconds."""
_DATA = -1
"""Loading is seeded as if it were the layer before the first."""


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
    if not _is_cut(job):
        return _whole_of(job).one()
    inputs, _ = microbatch_loader(job, data, loading=loading)(0, 0)
    torch.manual_seed(job.train.seed)
    return _whole_of(job).layers(inputs)


def _whole_of(job: Job) -> Whole:
    """Builds a model that is one module."""
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


def _is_cut(job: Job) -> bool:
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


def build_dataset(job: Job) -> Any:
    """Opens the data: map-style, each item a pair of inputs and a target, see ``holdfast.data.items``.

    Raises:
        ConfigError: the data is missing or too small.
    """
    match job.data:
        case TextData(path=path, context=context, tokenizer=tokenizer):
            if isinstance(job.model, GptModel | BertModel):
                kind = MaskedText if isinstance(job.model, BertModel) else Text
                return kind(path, context=job.model.context)
            if context is None:
                raise ConfigError(
                    "data.context: this model does not say how many bytes or tokens a sample has; expected the number"
                )
            return Text(path, context=context) if tokenizer == BYTES else Tokens(path, tokenizer, context)
        case DigitsData():
            return Digits()
        case TinyImageNetData(path=path):
            return TinyImageNet(path)
        case BreastCancerData():
            return BreastCancer()
        case Nt3Data(path=path):
            return Expressions(path)
        case ScriptData():
            raise ConfigError("data.kind: script: only the script itself has this data")
        case python:
            dataset = call_target(python.target, "data.target", python.arguments)
            _check_dataset(dataset, f"data.target: {python.target}")
            if isinstance(job.model, HuggingFaceModel):
                return Labelled(dataset, follows=job.model.task == "causal-lm")
            return dataset


def in_steps(job: Job) -> Job:
    """Returns the job with the number of steps that its epochs are, if it is said by these.

    Raises:
        ConfigError: the data is missing or too small; or it says a number of steps, too, and that is another one.
    """
    epochs, told = job.train.epochs, job.train.steps
    if epochs is None:
        return job
    samples = len(build_dataset(job))
    steps = -(-epochs * samples // job.samples_per_step)
    if told not in (0, steps):
        raise ConfigError(
            f"train.steps: {told}, but train.epochs: {epochs} are {steps} steps of {job.samples_per_step} samples, as "
            f"an epoch has {samples}; expected one of them"
        )
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=steps))


def _check_dataset(dataset: Any, what: str) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{what} returned a {kind}; expected its dataset: grid.microbatch_size makes the batches")
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not by_index or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{what} returned a {kind}; expected a map-style dataset: a length, and items by index")
    with theirs(f"{what} returned a {kind} whose length cannot be told"):
        length = len(dataset)
    if not length:
        raise ConfigError(f"{what} returned a {kind} of length 0; expected at least one item")


def build_optimizer(job: Job) -> OptimizerFactory:
    """Returns what makes one layer's optimizer."""
    options = job.optimizer
    if ":" in options.kind:
        return _own_optimizer(options.kind)
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


def _own_optimizer(target: str) -> OptimizerFactory:
    function = load_target(target, "optimizer.kind")

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        with theirs(f"optimizer.kind: {target} failed"):
            made = function(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer.kind: {target} returned a {type(made).__name__}; expected a torch.optim.Optimizer"
            )
        return made

    return make


def build_scaling(job: Job) -> LossScaling | None:
    """Returns how the scale of the loss changes; None where the job scales no loss."""
    options = job.train.loss_scale
    return None if options is None else LossScaling(initial=options.initial, growth_every=options.growth_every)


def probe(job: Job, device: Device = HOST) -> Probed:
    """Builds everything and tries it out, all of it twice, and throws it away; returns what was found.

    Args:
        job: the job.
        device: where its layers are tried.

    Raises:
        ConfigError: something in the job cannot be used, or is not the same the second time.
    """
    precision = PRECISIONS[job.train.precision]
    check_cast(precision, device.torch)
    dataset = build_dataset(job)
    _check_step(job, len(dataset))  # before that many are read
    _check_words(job, dataset)
    item, unsteady = _try_items(job, dataset)
    initial = _initial_weights(job, lambda: dataset)
    model = build_model(job, lambda: dataset)
    _check_inputs(model, item)
    if initial is not None:
        _check_initial(job, model, initial)
    _check_commit(job, model, build_optimizer(job))
    checkpointed_layers(job, len(model.layers))
    learning_rate_of(job)(min(job.train.steps, _TRIED_STEPS) - 1)
    batch = microbatch_loader(job, lambda: dataset, item)(0, 0)
    inputs, targets = of_each(device.brought, batch[0]), device.brought(batch[1])
    stage_of = partial(
        _stage_to_try, job, model, lambda step, microbatch: (of_each(torch.clone, inputs), targets), device
    )
    trial = try_model(model, stage_of, (inputs, targets), job.train.seed, device, precision)
    _check_sharing(job, model, trial.boundaries)
    notes = _check_cut(job, batch, model.loss, precision if device.torch.type == "cpu" else None)
    return Probed(
        boundaries=trial.boundaries,
        evaluated=_try_evaluation(job, model, item, trial.boundaries, device),
        sizes=Sizes(
            boundary_bytes=tuple(map(num_bytes, trial.boundaries)),
            state_bytes=trial.state_bytes,
        ),
        item=item,
        facts=_facts(job, model, dataset),
        ties=tie_groups(model.ties),
        warnings=(*notes, *_judge(job, (*unsteady, *trial.differences))),
    )


def _check_cut(
    job: Job, batch: tuple[Inputs, torch.Tensor], loss: Loss, precision: torch.dtype | None
) -> tuple[str, ...]:
    """Checks, on the host, that a module that is cut has its own bits; returns what a person should know of it."""
    if not _is_cut(job):
        return ()
    torch.manual_seed(job.train.seed)
    whole = _whole_of(job)
    whole.check(batch, loss, precision)
    if isinstance(job.model, HuggingFaceModel) and job.model.task == "causal-lm":
        from holdfast.runtime.engine.slots.hugging_face import check_causal

        check_causal(whole, batch[0])
    return whole.notes


def _check_inputs(model: Model, item: ItemSpec) -> None:
    """Checks that there is a layer that takes several inputs, if there are several."""
    names = [name for name, _ in item.inputs if name]
    if names and not any(isinstance(layer, WithContext) for layer in model.layers):
        raise ConfigError(
            f"data: the input of an item is {', '.join(names)}, by name; layers of a list take one tensor; expected "
            "that, or model.split: blocks, by which a module is called with all of them"
        )


def _check_words(job: Job, dataset: Any) -> None:
    """Checks that a model of transformers knows all words of texts."""
    if isinstance(job.model, HuggingFaceModel) and isinstance(dataset, Text | Tokens):
        from holdfast.runtime.engine.slots.hugging_face import check_words

        check_words(job.model, dataset.vocab)


def _try_evaluation(job: Job, model: Model, item: ItemSpec, boundaries: tuple[TensorSpec, ...], device: Device) -> int:
    """Evaluates by a micro-batch; returns by how many the job is evaluated."""
    if job.evaluate is None:
        return 0
    dataset = build_evaluated(job)
    with _of_evaluation():
        _check_words(job, dataset)
        data = evaluation_data(job, lambda: dataset, item)
        assert data is not None, "the job has said so"
        torch.manual_seed(job.train.seed)
        scores = check_evaluation(model, data, boundaries, device, PRECISIONS[job.train.precision])
    if job.evaluate.best is not None and job.evaluate.best not in scores:
        raise ConfigError(
            f"evaluate.best: there is no score {job.evaluate.best!r}; expected one of {', '.join(scores)}"
        )
    return min(job.evaluate.microbatches, len(dataset) // job.grid.microbatch_size)


def _check_sharing(job: Job, model: Model, boundaries: tuple[TensorSpec, ...]) -> None:
    """Checks that several GPUs can share any layers, where stages have several with numerics fast."""
    for gpus in sorted({gpus for row in job.shards for gpus in row if gpus > 1}):
        for index, (module, spec) in enumerate(zip(model.layers, boundaries, strict=True)):
            check_layer(index, module)
            part_spec(index, spec, gpus, job.grid.microbatch_size)


def _stage_to_try(job: Job, model: Model, load: Loader, device: Device, index: int) -> Stage:
    """One layer alone, as it were in the middle: it computes no loss, and shares no weight."""
    num_layers = len(model.layers)
    return Stage(
        layers=[model.layers[index]],
        owned=(index,),
        num_layers=num_layers + 1,
        ties=(),
        loss=model.loss,
        optimizer=build_optimizer(job),
        lr_scale=learning_rate_of(job),
        seed=job.train.seed,
        num_microbatches=1,
        load=load,
        device=device,
        checkpointed=checkpointed_layers(job, num_layers),
        precision=PRECISIONS[job.train.precision],
    )


def _judge(job: Job, differences: tuple[str, ...]) -> tuple[str, ...]:
    """What is not repeatable refutes what ``exact`` promises; with ``fast`` a person should know of it.

    Raises:
        ConfigError: numerics are exact, and something differed.
    """
    if differences and job.train.numerics == "exact":
        raise ConfigError(
            f"{differences[0]}; train.numerics exact needs the same bits every time: draw from torch's default "
            "generator, which is seeded, or use fast"
        )
    return differences


def _initial_weights(job: Job, data: Callable[[], Any]) -> list[dict[str, str]] | None:
    """Digests of one's own model's weights, per layer and name; None for the models that are here."""
    return _digests(build_model(job, data)) if isinstance(job.model, PythonModel) else None


def _digests(model: Model) -> list[dict[str, str]]:
    return [
        {name: tensor_sha256(value) for name, value in (*layer.named_parameters(), *layer.named_buffers())}
        for layer in model.layers
    ]


def _check_initial(job: Job, model: Model, initial: list[dict[str, str]]) -> None:
    again = _digests(model)
    if again == initial:
        return
    differ = [
        f"{name} of {name_of(index, model.layers[index])}"
        for index, (one, other) in enumerate(zip(initial, again, strict=False))
        for name in one
        if one[name] != other.get(name)
    ]
    raise ConfigError(
        f"model.target: {job.model.target} does not give the same model every time"  # type: ignore[union-attr]
        f" ({differ[0] if differ else 'other layers'}), as every worker needs: draw initial weights from torch's "
        "default generator, which is seeded"
    )


def _try_items(job: Job, dataset: Any) -> tuple[ItemSpec, tuple[str, ...]]:
    """The items of the first micro-batch, and some of the others."""
    size = len(dataset)
    grid, seed = job.grid, job.train.seed
    first = sample_indices(seed, 0, 0, job.global_microbatches, grid.microbatch_size, size)
    return try_items(dataset, (*first, *_spread(size)), seed)


def _check_step(job: Job, size: int) -> None:
    if job.samples_per_step > size:
        raise ConfigError(
            f"data: {size} samples are fewer than a step has, {job.global_microbatches} micro-batches of "
            f"{job.grid.microbatch_size} (grid.pipelines x grid.microbatches, grid.microbatch_size)"
        )


def _spread(size: int) -> tuple[int, ...]:
    return (0, size // 2, size - 1)


def _facts(job: Job, model: Model, dataset: Any) -> Facts:
    return facts_of(
        job,
        layers=len(model.layers),
        model=fingerprint_model(model),
        data=fingerprint_data(dataset),
        contents=dataset.fingerprint() if isinstance(dataset, Text | Tokens) else "",
        sources=sources_of(job),
    )


def sources_of(job: Job) -> dict[str, str]:
    """Returns a digest of the file of every function that the job names, by the key that names it.

    Of modules that are loaded: nothing is said of others.
    """
    named = {
        "optimizer.kind": job.optimizer.kind if ":" in job.optimizer.kind else None,
        "optimizer.schedule": job.optimizer.schedule if ":" in job.optimizer.schedule else None,
        "train.device": job.train.device if is_target(job.train.device) else None,
    }
    if isinstance(job.model, PythonModel):
        named["model.target"] = job.model.target
    if isinstance(job.model, PythonModel | HuggingFaceModel):
        named["model.loss"] = job.model.loss
    if isinstance(job.data, PythonData):
        named["data.target"] = job.data.target
    if job.evaluate is not None:
        named["evaluate.metrics"] = job.evaluate.metrics
        if isinstance(job.evaluate.data, PythonData):
            named["evaluate.data.target"] = job.evaluate.data.target
    files = {key: _source_of(target) for key, target in named.items() if target is not None}
    found = {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in files.items() if path is not None}
    if isinstance(job.model, HuggingFaceModel):
        from holdfast.runtime.engine.slots.hugging_face import sources

        found |= sources(job.model)
    return found


def _source_of(target: str) -> Path | None:
    """The file in which a target is looked for; None if it is built in, or not loaded."""
    place = target.rpartition(":")[0]
    path = Path(place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None) or "")
    return path if path.is_file() else None


def fingerprint_model(model: Model) -> str:
    """Returns a digest of the names, shapes and types of all parameters and buffers, and of what is tied."""
    layers = [
        [(name, tuple(value.shape), str(value.dtype)) for name, value in (*m.named_parameters(), *m.named_buffers())]
        for m in model.layers
    ]
    ties = [tie.places for tie in model.ties]
    return hashlib.sha256(repr((layers, ties)).encode()).hexdigest()


def fingerprint_data(dataset: Any) -> str:
    """Returns a digest of the number of samples, and of the first, the middle and the last of them.

    Of a sample that is another one every time, as when a generator of its own augments it, shapes and types count.
    """
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for index in _spread(size):
        once, again = _bytes_of_item(dataset, index), _bytes_of_item(dataset, index)
        for (form, data), other in zip(once, again, strict=False):
            digest.update(form)
            if (form, data) == other:
                digest.update(data)
    return digest.hexdigest()


def _bytes_of_item(dataset: Any, index: int) -> list[tuple[bytes, bytes]]:
    """Shape and type, and the bits, of an item's tensors."""
    seed_host(index)
    inputs, target = pair_of(index, dataset[index])
    names = [f"{name} " for name in inputs] if isinstance(inputs, dict) else [""]
    return [
        (
            f"{name}{tuple(each.shape)} {each.dtype}".encode(),
            each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, each in zip([*names, ""], (*tensors_of(inputs), target), strict=True)
    ]


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
    chosen = False if isinstance(job.model, ScriptModel) else job.model.checkpoint_activations
    layers = frozenset(range(num_layers) if chosen is True else chosen or ())
    if beyond := [layer for layer in layers if layer >= num_layers]:
        raise ConfigError(
            f"model.checkpoint_activations: there is no layer {min(beyond)}; layers are 0 to {num_layers - 1}"
        )
    return layers


def learning_rate_of(job: Job) -> Callable[[int], float]:
    """Returns the factor on the learning rate, as a function of the step.

    Raises:
        ConfigError: its scheduler cannot be made, or goes by more than the step.
    """
    options = job.optimizer
    if ":" not in options.schedule:
        return partial(
            learning_rate_scale,
            warmup_steps=options.warmup_steps,
            total_steps=job.train.steps,
            schedule=options.schedule,
        )
    make = load_target(options.schedule, "optimizer.schedule")
    failed = f"optimizer.schedule: {options.schedule} failed"
    with theirs(failed):
        scale = Tabulated(partial(make, **options.schedule_arguments), options.lr)

    def behind_warmup(step: int) -> float:
        if step < options.warmup_steps:
            return learning_rate_scale(step, warmup_steps=options.warmup_steps)
        with theirs(failed):
            return scale(step - options.warmup_steps)

    return behind_warmup


def microbatch_loader(
    job: Job,
    dataset: Callable[[], Any],
    expected: ItemSpec | None = None,
    loading: AbstractContextManager[None] = _NOTHING,
) -> Loader:
    """Loads a micro-batch as a pure function of seed, step and its global number; opens the data when first asked.

    A dataset may draw random numbers from torch, numpy and random: all are seeded for every micro-batch.

    Args:
        job: whose data.
        dataset: opens it.
        expected: what every item is like; None: all of a micro-batch are alike.
        loading: entered meanwhile, again and again.
    """

    def load(step: int, microbatch: int) -> tuple[Inputs, torch.Tensor]:
        with loading:
            opened = dataset()
            seed_host(layer_seed(job.train.seed, step, microbatch, _DATA))
            return load_microbatch(
                opened,
                seed=job.train.seed,
                step=step,
                microbatch=microbatch,
                num_microbatches=job.global_microbatches,
                microbatch_size=job.grid.microbatch_size,
                expected=expected,
            )

    return load


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


def evaluation_data(
    job: Job,
    dataset: Callable[[], Any],
    item: ItemSpec | None,
    loading: AbstractContextManager[None] = _NOTHING,
) -> EvaluationData | None:
    """Returns what a job is evaluated by; None if it is not.

    Args:
        job: the job.
        dataset: opens the data, when first asked.
        item: what every item is like; None: all of a micro-batch are alike.
        loading: entered while one is loaded.
    """
    if job.evaluate is None:
        return None
    target, size, seed = job.evaluate.metrics, job.grid.microbatch_size, job.train.seed

    def load(number: int) -> tuple[Inputs, torch.Tensor]:
        with loading:
            opened = dataset()
            seed_host(layer_seed(seed, BEFORE_ALL, number, _DATA))
            return load_evaluated(opened, number, size, item)

    return EvaluationData(load=load, metrics=None if target is None else load_target(target, "evaluate.metrics"))


def build_evaluated(job: Job) -> Any:
    """Opens the data that a job is evaluated by.

    Raises:
        ConfigError: it is missing, or too small for one micro-batch.
    """
    assert job.evaluate is not None, "else there is none"
    with _of_evaluation():
        dataset = build_dataset(msgspec.structs.replace(job, data=job.evaluate.data))
    if len(dataset) < job.grid.microbatch_size:
        raise ConfigError(
            f"evaluate.data: {len(dataset)} samples are fewer than a micro-batch has, {job.grid.microbatch_size}"
        )
    return dataset


@contextmanager
def _of_evaluation() -> Iterator[None]:
    """What is wrong with data is told of those that the job is evaluated by."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"evaluate.{error}" if str(error).startswith(("data.", "data:")) else str(error)) from error


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
