"""Causal language models of Hugging Face's transformers, which is asked for only where a job has one.

Nothing is fetched from a network, and no code that comes with a model is run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError, installing
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.slots.blocks import find_blocks
from holdfast.runtime.engine.slots.split import split
from holdfast.runtime.engine.slots.whole import check_equal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from holdfast.config.job import HuggingFaceModel
    from holdfast.runtime.engine.model import Loss
    from holdfast.runtime.engine.slots.frames import Way

__all__ = ["causal_layers", "check_whole", "save"]

_BYTES = 256


def causal_layers(model: HuggingFaceModel) -> tuple[nn.Module, ...]:
    """Returns the layers of a model, each of which has its parameters under transformers' names; float32.

    Initial weights are drawn from torch's generator as it stands, unless they are read.

    Raises:
        ConfigError: transformers is not there; or it cannot make the model, or the model cannot be cut.
    """
    whole = _whole(model)
    return _layers(whole, _blocks(whole))


def check_whole(model: HuggingFaceModel, batch: tuple[Tensor, Tensor], loss: Loss) -> None:
    """Checks that the layers of a model give the bits of the whole.

    Raises:
        ConfigError: they do not; or see :func:`causal_layers`.
    """
    whole = _whole(model)
    found = _blocks(whole)
    with theirs(f"model: {type(whole).__name__} failed on a micro-batch"):
        check_equal(whole, _layers(whole, found), found[0], _logits, batch, loss)


def save(model: HuggingFaceModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes a model as transformers reads it, by ``from_pretrained(folder)``.

    Args:
        model: which.
        weights: of it, by transformers' names.
        folder: where to.
    """
    with torch.device("meta"):
        whole: Any = _whole(model, read=False)
    whole.load_state_dict(dict(weights), strict=False, assign=True)
    whole.tie_weights()
    whole.config.use_cache = True
    whole.save_pretrained(folder)


def _layers(whole: nn.Module, found: tuple[str, Way]) -> tuple[nn.Module, ...]:
    return split(whole, *found, _logits, _tokens())


def _blocks(whole: Any) -> tuple[str, Way]:
    with theirs(f"model: {type(whole).__name__} failed on a few tokens"):
        return find_blocks(whole, _logits, _tokens(), getattr(whole.config, "num_hidden_layers", None))


def _tokens() -> Tensor:
    """By which models are cut: any do."""
    return torch.arange(8)[None]


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(input_ids=tokens, use_cache=False).logits
    return found


def _whole(model: HuggingFaceModel, *, read: bool = True) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"model.kind: huggingface: {error}; {installing('hf')}") from None
    library: Any = transformers
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, **({"attn_implementation": model.attention} if model.attention else {})}
    with theirs("model.config"):
        if isinstance(model.config, str):
            config = library.AutoConfig.from_pretrained(model.config, local_files_only=True)
        else:
            named = dict(model.config)
            config = library.AutoConfig.for_model(named.pop("model_type", ""), **named)
        config.use_cache = False
    if config.vocab_size < _BYTES:
        raise ConfigError(
            f"model.config: vocab_size is {config.vocab_size}, and texts are bytes; expected {_BYTES} or more"
        )
    made = library.AutoModelForCausalLM
    if model.weights is None or not read:
        with theirs("model.config"):
            whole = made.from_config(config, **options)
    else:
        with theirs(f"model.weights: {model.weights}"):
            whole = made.from_pretrained(
                model.weights, config=config, local_files_only=True, use_safetensors=True, **options
            )
    trained: nn.Module = whole.train()
    return trained
