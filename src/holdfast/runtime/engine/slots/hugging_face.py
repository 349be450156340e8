"""Causal language models of Hugging Face's transformers, which is asked for only where a job has one.

Nothing is fetched from a network, and no code that comes with a model is run.
"""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path
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

    from holdfast.config.job import HuggingFaceModel
    from holdfast.runtime.engine.model import Loss
    from holdfast.runtime.engine.slots.frames import Way

__all__ = ["causal_layers", "check_whole", "check_words", "save", "sources"]

_NO_CODE = {"trust_remote_code": False}
_END_BYTES = 1 << 20


def causal_layers(model: HuggingFaceModel) -> tuple[nn.Module, ...]:
    """Returns the layers of a model, each of which has its parameters under transformers' names; float32.

    Initial weights are drawn from torch's generator as it stands, unless they are read.

    Raises:
        ConfigError: transformers is not there; or it cannot make the model, or the model cannot be cut.
    """
    whole = _whole(model)
    with theirs(f"model: {type(whole).__name__} cannot be cut"):
        return _layers(whole, _blocks(whole))


def check_whole(
    model: HuggingFaceModel, batch: tuple[Tensor, Tensor], loss: Loss, precision: torch.dtype | None = None
) -> None:
    """Checks that the layers of a model give the bits of the whole, in such numbers.

    Raises:
        ConfigError: they do not; or see :func:`causal_layers`.
    """
    whole = _whole(model)
    found = _blocks(whole)
    with theirs(f"model: {type(whole).__name__} failed on a micro-batch"):
        check_equal(whole, _layers(whole, found), found[0], _logits, batch, loss, precision)


def check_words(model: HuggingFaceModel, words: int) -> None:
    """Checks that a model knows as many words as there may be in the data.

    Raises:
        ConfigError: it does not.
    """
    known = _configured(model)[1].get_text_config().vocab_size
    if known < words:
        raise ConfigError(f"model.config: vocab_size is {known}, and the data have {words} tokens; expected no fewer")


def save(model: HuggingFaceModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes a model as transformers reads it, by ``from_pretrained(folder)``.

    Args:
        model: which.
        weights: of it, by transformers' names.
        folder: where to.
    """
    with torch.device("meta"):
        whole: Any = _whole(model, read=False)
    found = whole.load_state_dict(dict(weights), strict=False, assign=True)
    whole.tie_weights()
    missing = [name for name, parameter in whole.named_parameters() if parameter.is_meta]
    if missing or found.unexpected_keys:
        names = ", ".join([*missing, *found.unexpected_keys][:3])
        raise ConfigError(f"{names}: another version of transformers has trained it, which names weights otherwise")
    whole.config.use_cache = True
    whole.save_pretrained(folder)


def sources(model: HuggingFaceModel) -> dict[str, str]:
    """Returns digests of what is read of a model, by key, and the version of transformers: all workers have the same.

    Of weights the beginning and the end of each file count, and how long it is: all of them may take minutes to read.

    Raises:
        ConfigError: something cannot be read.
    """
    found = {"transformers": hashlib.sha256(metadata.version("transformers").encode()).hexdigest()}
    folders = {"model.config": model.config, "model.weights": model.weights}
    for key, place in folders.items():
        if isinstance(place, str):
            with theirs(f"{key}: {place}"):
                found[key] = _digest(Path(place), ("*.json",) if key == "model.config" else ("*.json", "*.safetensors"))
    return found


def _digest(folder: Path, patterns: tuple[str, ...]) -> str:
    """Of the names, lengths and both ends of files."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name}\0{length}\0".encode())
            for start in (0, max(0, length - _END_BYTES)):
                file.seek(start)
                digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def _layers(whole: nn.Module, found: tuple[str, Way]) -> tuple[nn.Module, ...]:
    return split(whole, *found, _logits, _tokens())


def _blocks(whole: Any) -> tuple[str, Way]:
    with theirs(f"model: {type(whole).__name__} failed on a few tokens"):
        return find_blocks(whole, _logits, _tokens(), getattr(whole.config, "num_hidden_layers", None))


def _tokens() -> Tensor:
    """By which models are cut: any do, and all models have these."""
    return torch.arange(8).remainder(4)[None]


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(input_ids=tokens, use_cache=False).logits
    return found


def _configured(model: HuggingFaceModel) -> tuple[Any, Any]:
    """Returns the library, and the model's config."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub.constants
        import transformers
    except ImportError as error:
        raise ConfigError(f"model.kind: huggingface: {error}; {installing('hf')}") from None
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # should somebody's code have imported it before
    library: Any = transformers
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    with theirs("model.config"):
        if isinstance(model.config, str):
            config = library.AutoConfig.from_pretrained(model.config, local_files_only=True, **_NO_CODE)
        else:
            named = dict(model.config)
            config = library.AutoConfig.for_model(named.pop("model_type", ""), **named)
        config.use_cache = False
    return library, config


def _whole(model: HuggingFaceModel, *, read: bool = True) -> nn.Module:
    library, config = _configured(model)
    options = {"dtype": torch.float32, **({"attn_implementation": model.attention} if model.attention else {})}
    made = library.AutoModelForCausalLM
    if model.weights is None or not read:
        with theirs("model.config"):
            whole = made.from_config(config, **_NO_CODE, **options)
    else:
        with theirs(f"model.weights: {model.weights}"):
            files = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
            whole, told = made.from_pretrained(model.weights, config=config, **files, **_NO_CODE, **options)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if told.get(what):
                first, kind = min(map(str, told[what])), what.replace("_", " ")
                raise ConfigError(
                    f"model.weights: {model.weights}: {kind}, such as {first}; expected all weights of a model of that "
                    "config, and no others"
                )
    trained: nn.Module = whole.train()
    return trained
