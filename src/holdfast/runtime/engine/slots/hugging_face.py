"""Models of Hugging Face's transformers, which is asked for only where a job has one.

Nothing is fetched from a network, and no code that comes with a model is run.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from holdfast.config.job import BYTES, HuggingFaceModel, TextData
from holdfast.data.items import Inputs
from holdfast.errors import ConfigError, installing
from holdfast.runtime.engine.evaluated import as_evaluated
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.slots.whole import Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.config.job import Job

__all__ = ["check_causal", "check_words", "save", "sources", "whole"]

_NO_CODE = {"trust_remote_code": False}
_END_BYTES = 1 << 20
_A_FEW = 8
_MAKE_INPUTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
}
"""Transformers' classes, by task."""


def whole(model: HuggingFaceModel) -> Whole:
    """Returns a model that is to be cut; float32.

    Initial weights are drawn from torch's generator as it stands, unless they are read.

    Raises:
        ConfigError: transformers is not there; or it cannot make the model.
    """
    made, drawn = _made(model)
    if model.lora is not None:
        with theirs("model.lora"):
            _peft().inject_adapter_in_model(_adapters(model), made)
            _train_head(model, made)
    named = {
        name
        for name, each in inspect.signature(made.forward).parameters.items()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    options = {"use_cache": False} if "use_cache" in named else {}
    return Whole(
        module=made,
        call=partial(_logits, options),
        count=getattr(made.config, "num_hidden_layers", None),
        takes=frozenset(named - {"labels", "use_cache"}),
        notes=(f"model.weights: drawn from the seed, as {model.weights} does not have them: {', '.join(drawn)}",)
        if drawn
        else (),
    )


def check_causal(model: Whole, inputs: Inputs) -> None:
    """Checks that a language model does not see what it is asked for: the tokens that follow.

    Args:
        model: the model.
        inputs: of some micro-batch.

    Raises:
        ConfigError: what it says at some position depends on a later token.
    """
    batch = inputs[cast(str, model.module.main_input_name)] if isinstance(inputs, dict) else inputs
    tokens = batch[:1, :_A_FEW]
    other = tokens.clone()
    other[:, -1] = torch.where(tokens[:, -1] > 0, tokens[:, -1] - 1, 1)
    kind = type(model.module).__name__
    said: list[Tensor] = []
    for each in (tokens, other):
        torch.manual_seed(0)
        with theirs(f"model: {kind} failed on a few tokens"), torch.no_grad(), as_evaluated(model.module):
            said.append(model.call(model.module, each)[:, :-1])
    one, two = said
    if not one.numel():
        return
    # Experts may add up in another order, which is no more than some of the last bits.
    if (one - two).abs().max() > 1e-4 * one.abs().max():
        raise ConfigError(
            f"model.config: {kind} sees the tokens that it is asked for, those that follow; expected a causal model, "
            "such as with is_decoder: true, or another model.task"
        )


def check_words(model: HuggingFaceModel, words: int) -> None:
    """Checks that a model knows as many words as there may be in the data.

    Raises:
        ConfigError: it does not.
    """
    known = _configured(model)[1].get_text_config().vocab_size
    if known < words:
        raise ConfigError(f"model.config: vocab_size is {known}, and the data have {words} tokens; expected no fewer")


def save(job: Job, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes a job's model as transformers reads it, by ``from_pretrained(folder)``.

    So it does what makes inputs of texts and images, where the job names a folder that has it.

    Args:
        job: whose model.
        weights: of it, by transformers' names.
        folder: where to.

    Raises:
        ConfigError: transformers is not there, or another version of it than the one that has trained the model.
        OSError: it cannot be written.
    """
    model = job.model
    assert isinstance(model, HuggingFaceModel), "others are not transformers'"
    with torch.device("meta"):
        made, _ = _made(model, read=False)
        adapted = None if model.lora is None else _adapted(model, made)
    named = {name: each.detach() for name, each in weights.items()}
    found = made.load_state_dict(named, strict=False, assign=True)
    made.tie_weights()
    missing = [name for name, parameter in made.named_parameters() if parameter.is_meta]
    if missing or found.unexpected_keys:
        names = ", ".join([*missing, *found.unexpected_keys][:3])
        raise ConfigError(f"{names}: another version of transformers has trained it, which names weights otherwise")
    made.config.use_cache = True
    if adapted is not None:
        if model.task == "causal-lm":  # of all others more was trained than peft would write
            adapted.save_pretrained(folder / "adapter")
        made = adapted.merge_and_unload(safe_merge=True)  # the weights that were given stay as they are
    made.save_pretrained(folder)
    for path in _beside(job):
        shutil.copyfile(path, folder / path.name)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora: {error}; {installing('lora')}") from None
    return peft


def _adapted(model: HuggingFaceModel, made: nn.Module) -> Any:
    """Returns a model with adapters as peft wraps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what peft calls in transformers
        return _peft().get_peft_model(made, _adapters(model))


def _adapters(model: HuggingFaceModel) -> Any:
    """Returns the adapters of a model, as peft's config says it."""
    lora = model.lora
    assert lora is not None, "it has some"
    return _peft().LoraConfig(
        base_model_name_or_path=model.weights,
        r=lora.r,
        lora_alpha=lora.alpha or 2 * lora.r,
        lora_dropout=lora.dropout,
        target_modules=None if lora.targets is None else list(lora.targets),
    )


def _train_head(model: HuggingFaceModel, made: Any) -> None:
    """What a model has for its task alone is trained, too, but for a causal language model's, which it has already."""
    if model.task != "causal-lm":
        of_the_task = _of_a_task(made)
        for name, parameter in made.named_parameters():
            if of_the_task(name):
                parameter.requires_grad_()


def _beside(job: Job) -> Iterator[Path]:
    """The files that make inputs of texts and images, of one folder; and those that say how to generate."""
    model = job.model
    assert isinstance(model, HuggingFaceModel), "others are not transformers'"
    if isinstance(job.data, TextData):
        places = [] if job.data.tokenizer == BYTES else [job.data.tokenizer]
    else:
        places = [place for place in (model.weights, model.config) if isinstance(place, str)]
    for place in places:
        if found := [path for path in (Path(place) / name for name in _MAKE_INPUTS) if path.is_file()]:
            yield from found
            break
    if model.weights is not None and (path := Path(model.weights) / "generation_config.json").is_file():
        yield path


def sources(model: HuggingFaceModel) -> dict[str, str]:
    """Returns digests of what is read of a model, by key, and the version of transformers: all workers have the same.

    Of weights the beginning and the end of each file count, and how long it is: all of them may take minutes to read.

    Raises:
        ConfigError: something cannot be read.
    """
    found = {"transformers": hashlib.sha256(metadata.version("transformers").encode()).hexdigest()}
    if model.lora is not None:
        with theirs("model.lora"):
            found["peft"] = hashlib.sha256(_peft().__version__.encode()).hexdigest()
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


def _logits(options: Mapping[str, bool], module: nn.Module, inputs: Inputs) -> Tensor:
    named = inputs if isinstance(inputs, dict) else {cast(str, module.main_input_name): inputs}
    found: Tensor = module(**named, **options).logits
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
        if model.labels is not None:
            config.num_labels = model.labels
    return library, config


def _made(model: HuggingFaceModel, *, read: bool = True) -> tuple[Any, tuple[str, ...]]:
    """Returns the model, and the names of the weights that are drawn though others are read."""
    library, config = _configured(model)
    options = {"dtype": torch.float32, **({"attn_implementation": model.attention} if model.attention else {})}
    kind = getattr(library, _CLASSES[model.task])
    if model.weights is None or not read:
        with theirs("model.config"):
            return kind.from_config(config, **_NO_CODE, **options).train(), ()
    with theirs(f"model.weights: {model.weights}"):
        files = {
            "local_files_only": True,
            "use_safetensors": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # they are looked at here
        }
        made, told = kind.from_pretrained(model.weights, config=config, **files, **_NO_CODE, **options)
    of_others = (lambda _: False) if model.task == "causal-lm" else _of_a_task(made)
    names = {
        what: sorted(each[0] if isinstance(each, tuple) else str(each) for each in told.get(what) or ())
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    for what, found in names.items():
        if wrong := [name for name in found if not of_others(name)]:
            raise ConfigError(
                f"model.weights: {model.weights}: {what.replace('_', ' ')}, such as {min(wrong)}; expected all weights "
                "of a model of that config, and no others"
            )
    return made.train(), tuple(sorted({*names["missing_keys"], *names["mismatched_keys"]}))


def _of_a_task(made: Any) -> Callable[[str], bool]:
    """Says of names of weights whether they are of what a model has for its task alone: those may be of another."""
    base = made.base_model_prefix
    return lambda name: not name.startswith(f"{base}.") or name.startswith(f"{base}.pooler.")
