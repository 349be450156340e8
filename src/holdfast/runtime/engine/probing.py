"""A job tried out where it begins: all of it is built twice and run, and told of in one line where it cannot be."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.config.job import (
    HuggingFaceModel,
    Job,
    PythonData,
    PythonModel,
)
from holdfast.core.tensorspec import ItemSpec, TensorSpec
from holdfast.data.items import Inputs, of_each, pair_of, tensors_of
from holdfast.data.randomness import seed_host
from holdfast.data.sampler import sample_indices
from holdfast.data.text import Text
from holdfast.data.tokens import Tokens
from holdfast.devices.device import HOST, Device
from holdfast.devices.named import is_target
from holdfast.errors import ConfigError, NotUndoable
from holdfast.optim.digest import tensor_sha256
from holdfast.optim.factory import OptimizerFactory
from holdfast.optim.undo import inverse_of
from holdfast.recovery.choice import Sizes
from holdfast.runtime.engine.build import checkpointed_layers
from holdfast.runtime.engine.datasets import (
    build_dataset,
    build_evaluated,
    evaluation_data,
    microbatch_loader,
    of_evaluation,
)
from holdfast.runtime.engine.evaluated import check_evaluation
from holdfast.runtime.engine.model import Loss, Model, WithContext, name_of, tie_groups
from holdfast.runtime.engine.modules import build_model, is_cut, whole_of
from holdfast.runtime.engine.optimizing import build_optimizer, learning_rate_of
from holdfast.runtime.engine.precision import PRECISIONS, check_cast
from holdfast.runtime.engine.sharded.checks import check_layer, part_spec
from holdfast.runtime.engine.stage import Loader, Stage
from holdfast.runtime.engine.trial import try_items, try_model
from holdfast.runtime.specs import Probed, facts_of
from holdfast.runtime.tensors import num_bytes
from holdfast.storage.checkpoints import Facts

__all__ = ["fingerprint_data", "fingerprint_model", "probe", "sources_of"]

_TRIED_STEPS = 100_000
"""Of a scheduler; more would take seconds."""


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
    if not is_cut(job):
        return ()
    torch.manual_seed(job.train.seed)
    whole = whole_of(job)
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
    with of_evaluation():
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
