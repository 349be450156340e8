"""Causal language models of Hugging Face's transformers, which is asked for only where a job has one.

Nothing is fetched from a network, and no code that comes with a model is run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.slots.split import split

if TYPE_CHECKING:
    from holdfast.config.job import HuggingFaceModel

__all__ = ["causal_layers"]

_TRIED = 8
"""Tokens of what the model is cut by: any number does."""
_BYTES = 256


def causal_layers(model: HuggingFaceModel) -> tuple[nn.Module, ...]:
    """Returns the layers of a model, each of which has the parameters under transformers' names; float32.

    Initial weights are drawn from torch's generator as it stands, unless they are read.

    Raises:
        ConfigError: transformers is not there; it cannot make the model; or the model cannot be cut.
    """
    whole = _whole(model)
    config: Any = whole.config
    if config.vocab_size < _BYTES:
        raise ConfigError(
            f"model.config: vocab_size is {config.vocab_size}, and texts are bytes: expected {_BYTES} or more"
        )
    tokens = torch.arange(_TRIED).remainder(_BYTES)[None]
    with theirs(f"model: {type(whole).__name__} failed on {_TRIED} tokens"):
        return split(whole, _logits, tokens, getattr(config, "num_hidden_layers", None))


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(input_ids=tokens, use_cache=False).logits
    return found


def _whole(model: HuggingFaceModel) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
    except ImportError as error:
        raise ConfigError(f"model.kind: huggingface: {error}; expected pip install 'holdfast[hf]'") from None
    logging.set_verbosity_error()
    options = {"attn_implementation": model.attention, "dtype": torch.float32}
    with theirs(f"model.config: {model.config}"):
        if isinstance(model.config, str):
            config = AutoConfig.from_pretrained(model.config, local_files_only=True)
        else:
            kind = model.config.get("model_type", "")
            config = AutoConfig.for_model(kind, **{k: v for k, v in model.config.items() if k != "model_type"})
        config.use_cache = False
        if model.weights is None:
            whole = AutoModelForCausalLM.from_config(config, **options)
        else:
            whole = AutoModelForCausalLM.from_pretrained(
                model.weights, config=config, local_files_only=True, use_safetensors=True, **options
            )
    made: nn.Module = whole.train()
    return made
