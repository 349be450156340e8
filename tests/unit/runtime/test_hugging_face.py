"""Models of transformers, cut at their blocks: family by family the bits of the whole; what cannot be had is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from holdfast.config.job import HuggingFaceModel
from holdfast.errors import ConfigError
from holdfast.models import gpt
from holdfast.runtime.engine.slots.hugging_face import causal_layers, check_whole, check_words, save, sources

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MIXTURE, "num_experts": 4, "head_dim": 8},
    "gpt_neox": SMALL,
    "bloom": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mpt": {"vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": GROUPED,
    "mamba": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granite": GROUPED,
}


def batch(size=2, length=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2, size, length), generator=generator).unbind()


def model(family, **options):
    return HuggingFaceModel(config={"model_type": family, **FAMILIES[family]}, **options)


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_bits_of_the_whole(family, precision):
    torch.manual_seed(3)
    check_whole(model(family), batch(), gpt.loss, precision)


def test_attention_is_computed_as_it_is_told():
    check_whole(model("llama", attention="eager"), batch(), gpt.loss)


def test_nothing_is_fetched_though_the_library_was_there_before(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    causal_layers(model("llama"))
    assert huggingface_hub.is_offline_mode()


def test_what_a_server_loads_for_such_models_is_there_and_fetches_nothing():
    code = (
        "import sys; import holdfast.runtime.preload_transformers, threading; import huggingface_hub; "
        "print('transformers.modeling_utils' in sys.modules, huggingface_hub.is_offline_mode(), "
        "threading.active_count())"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True", "1"]


def test_a_library_that_is_broken_is_no_end_of_the_server(tmp_path):
    """It is told where the library is used."""
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator nms does not exist')")
    code = "import holdfast.runtime.preload_transformers; print('goes on')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["goes", "on"]


def test_initial_weights_are_drawn_from_the_seed():
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(causal_layers(model("llama"))[1].get_parameter("model.layers.0.self_attn.q_proj.weight"))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_what_is_saved_is_read_again_by_transformers_and_by_us(family, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    layers = causal_layers(model(family))
    save(model(family), {name: each for layer in layers for name, each in layer.named_parameters()}, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = {name: each for layer in layers for name, each in layer.named_parameters()}
    assert {name for name, _ in theirs.named_parameters()} <= ours.keys()
    assert all(torch.equal(each, ours[name]) for name, each in theirs.named_parameters())
    again = causal_layers(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))
    for layer, other in zip(layers, again, strict=True):
        assert all(torch.equal(each, other.get_parameter(name)) for name, each in layer.named_parameters())
    weights = load_file(tmp_path / "model.safetensors")
    told = sources(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))
    assert told.keys() == {"transformers", "model.config", "model.weights"}
    value = weights.pop(min(weights))
    save_file({**weights, "other": value}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert sources(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path))) != told
    with pytest.raises(ConfigError, match=r"missing keys, such as .*; expected all weights of a model of that config"):
        causal_layers(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))


def test_a_model_knows_all_words_of_the_data():
    small = HuggingFaceModel(config={"model_type": "llama", **GROUPED, "vocab_size": 100})
    check_words(small, 100)
    with pytest.raises(ConfigError, match=r"^model.config: vocab_size is 100, and the data have 256 tokens; expected"):
        check_words(small, 256)


REFUSED = [
    ({"config": {"model_type": "llana"}}, "model.config: ValueError: Unrecognized model identifier: llana"),
    ({"config": {**GROUPED}}, "model.config: ValueError: Unrecognized model identifier"),
    ({"config": "/nowhere"}, "model.config: "),
    ({"config": {"model_type": "llama", **GROUPED}, "weights": "/nowhere"}, "model.weights: /nowhere: "),
    (
        {"config": {"model_type": "llama", **GROUPED, "num_hidden_layers": 1}},
        "LlamaForCausalLM has no torch.nn.ModuleList of 1 b",
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_cannot_be_had_is_told_in_one_line(options, said):
    with pytest.raises(ConfigError) as error:
        causal_layers(HuggingFaceModel(**options))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)
