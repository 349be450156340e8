"""From a job to its data: what is trained on, and what it is evaluated by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.config.job import (
    BYTES,
    BertModel,
    BreastCancerData,
    DigitsData,
    GptModel,
    HuggingFaceModel,
    Job,
    Nt3Data,
    ScriptData,
    TextData,
    TinyImageNetData,
)
from holdfast.core.tensorspec import ItemSpec
from holdfast.data.digits import Digits
from holdfast.data.images import TinyImageNet
from holdfast.data.items import Inputs
from holdfast.data.labelled import Labelled
from holdfast.data.randomness import seed_host
from holdfast.data.rows import BreastCancer, Expressions
from holdfast.data.sampler import load_microbatch
from holdfast.data.text import MaskedText, Text
from holdfast.data.tokens import Tokens
from holdfast.errors import ConfigError
from holdfast.runtime.engine.evaluated import EvaluationData, load_evaluated
from holdfast.runtime.engine.foreign import call_target, load_target, theirs
from holdfast.runtime.engine.stage import Loader, layer_seed
from holdfast.runtime.engine.stepped import BEFORE_ALL

__all__ = ["build_dataset", "build_evaluated", "evaluation_data", "in_steps", "microbatch_loader", "of_evaluation"]

_NOTHING = nullcontext()
_DATA = -1
"""Loading is seeded as if it were the layer before the first."""


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


def build_evaluated(job: Job) -> Any:
    """Opens the data that a job is evaluated by.

    Raises:
        ConfigError: it is missing, or too small for one micro-batch.
    """
    assert job.evaluate is not None, "else there is none"
    with of_evaluation():
        dataset = build_dataset(msgspec.structs.replace(job, data=job.evaluate.data))
    if len(dataset) < job.grid.microbatch_size:
        raise ConfigError(
            f"evaluate.data: {len(dataset)} samples are fewer than a micro-batch has, {job.grid.microbatch_size}"
        )
    return dataset


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


@contextmanager
def of_evaluation() -> Iterator[None]:
    """What is wrong with data is told of those that the job is evaluated by."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"evaluate.{error}" if str(error).startswith(("data.", "data:")) else str(error)) from error
