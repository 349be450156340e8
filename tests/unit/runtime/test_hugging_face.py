"""Models of transformers, cut at their blocks: family by family the bits of the whole; what cannot be had is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tools.families import small

from holdfast.config.job import DigitsData, Grid, HuggingFaceModel, Job, Lora, Train
from holdfast.core.tensorspec import NO_TARGET
from holdfast.data.items import stack
from holdfast.data.labelled import Labelled
from holdfast.errors import ConfigError
from holdfast.models.losses import cross_entropy
from holdfast.runtime.engine.slots.hugging_face import check_causal, check_words, save, sources, whole

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
FAMILIES = (
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_neox",
    "bloom",
    "falcon",
    "mpt",
    "opt",
    "olmo2",
    "mamba",
    "deepseek_v3",
    "gpt_oss",
    "granite",
)


def batch(size=2, length=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 96, (2, size, length), generator=generator).unbind()


def layers_of(model):
    return whole(model).layers(batch()[0])


def job_of(model):
    return Job(
        name="saved",
        model=model,
        data=DigitsData(),
        grid=Grid(pipelines=1, stages=1, microbatches=1),
        train=Train(steps=1),
    )


def model(family, **options):
    return HuggingFaceModel(config=small(family), **options)


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_bits_of_the_whole(family, precision):
    torch.manual_seed(3)
    whole(model(family)).check(batch(), cross_entropy, precision)


BERT = {**SMALL, "model_type": "bert", "hidden_dropout_prob": 0.1}
OF_TEXTS = {
    "bert": BERT,
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 256,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
    },
    "roberta": {**BERT, "model_type": "roberta", "pad_token_id": 0},
    "electra": {**BERT, "model_type": "electra", "embedding_size": 32},
    "llama": {**GROUPED, "model_type": "llama", "pad_token_id": 0},
    "gpt2": small("gpt2"),
}
OF_IMAGES = {
    kind: {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 8,
        "patch_size": 4,
        "hidden_dropout_prob": 0.1,
    }
    for kind in ("vit", "dinov2", "vit_msn")
}


def padded(size=3, length=12):
    """Texts of three lengths, with what is no text marked."""
    tokens = batch(size, length)[0].clamp(1)
    mask = torch.arange(length)[None] < torch.tensor([length, 5, 7])[:size, None]
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "masked-lm"])
@pytest.mark.parametrize("family", OF_TEXTS)
def test_a_task_of_padded_texts_has_the_bits_of_the_whole(family, task):
    if task == "masked-lm" and family in ("llama", "gpt2"):
        pytest.skip("transformers has no such models of these families")
    torch.manual_seed(3)
    made = HuggingFaceModel(config=OF_TEXTS[family], task=task, labels=None if task == "masked-lm" else 5)
    inputs = padded()
    shape = (3,) if task == "sequence-classification" else (3, 12)
    target = torch.randint(0, 5, shape)
    if len(shape) == 2:
        target = target.masked_fill(inputs["attention_mask"] == 0, NO_TARGET)
    whole(made).check((inputs, target), cross_entropy)


@pytest.mark.parametrize("family", OF_IMAGES)
def test_a_model_of_images_has_the_bits_of_the_whole(family):
    torch.manual_seed(3)
    made = HuggingFaceModel(config=OF_IMAGES[family], task="image-classification", labels=4)
    whole(made).check((torch.rand(2, 3, 8, 8), torch.tensor([1, 3])), cross_entropy)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_padding_changes_nothing_of_a_language_model_but_its_loss_which_is_transformers_own(family):
    """Labels are the tokens, as its datasets have them: what is asked for at a position is the next one."""
    torch.manual_seed(3)
    inputs = padded()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, NO_TARGET)
    rows = [{**{name: each[row] for name, each in inputs.items()}, "labels": labels[row]} for row in range(3)]
    stacked, target = stack(range(3), [Labelled(rows, follows=True)[row] for row in range(3)], None)
    made = whole(model(family))
    made.check((stacked, target), cross_entropy)
    made.module.eval()
    with torch.no_grad():
        ours = cross_entropy(made.call(made.module, stacked), target)
        theirs = made.module(**inputs, labels=labels, use_cache=False).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_weights_of_another_task_begin_a_task_and_what_is_missing_is_told(tmp_path):
    from transformers import AutoModelForMaskedLM, BertConfig

    torch.manual_seed(3)
    AutoModelForMaskedLM.from_config(BertConfig(**BERT)).save_pretrained(tmp_path)
    begun = HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path), task="sequence-classification", labels=3)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(whole(begun))
    assert "classifier.weight" in drawn[0].notes[0]
    assert drawn[0].notes[0].startswith(f"model.weights: drawn from the seed, as {tmp_path} does not have them: ")
    for (name, one), other in zip(drawn[0].module.named_parameters(), drawn[1].module.parameters(), strict=True):
        assert torch.equal(one, other), name
    weights = load_file(tmp_path / "model.safetensors")
    kept = dict(drawn[0].module.named_parameters())
    assert torch.equal(
        kept["bert.encoder.layer.1.output.dense.weight"], weights["bert.encoder.layer.1.output.dense.weight"]
    )
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys, such as bert.encoder.layer.1.output.dense.weight; expected"):
        whole(begun)


def test_weights_of_another_number_of_classes_begin_a_task_but_for_its_head(tmp_path):
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(BertConfig(**BERT, num_labels=2)).save_pretrained(tmp_path)
    begun = HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path), task="sequence-classification", labels=3)
    made = whole(begun)
    assert made.module.classifier.weight.shape == (3, 32)
    assert made.notes[0].endswith(": classifier.bias, classifier.weight")


def test_what_a_model_does_not_take_is_refused_by_name():
    """Its forward pass would take it, and do nothing with it."""
    made = HuggingFaceModel(config=OF_TEXTS["bert"], task="sequence-classification")
    inputs = padded()
    with pytest.raises(ConfigError, match=r"^data: BertForSequenceClassification takes no mask; expected some of at"):
        whole(made).layers({"input_ids": inputs["input_ids"], "mask": inputs["attention_mask"]})
    with pytest.raises(ConfigError, match="takes no idx, labels; expected some of"):
        whole(made).layers({**inputs, "labels": torch.zeros(3), "idx": torch.zeros(3)})


@pytest.mark.parametrize("family", ["llama", "mixtral", "mamba", "gpt2", "bloom"])
def test_a_causal_model_does_not_see_what_it_is_asked_for(family):
    check_causal(whole(model(family)), batch()[0])


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_model_that_sees_what_it_is_asked_for_is_refused(family):
    with pytest.raises(ConfigError, match=r"sees the tokens that it is asked for, those that follow; expected"):
        check_causal(whole(HuggingFaceModel(config=OF_TEXTS[family])), padded())
    check_causal(whole(HuggingFaceModel(config={**OF_TEXTS[family], "is_decoder": True})), padded())


ADAPTED = Lora(r=4, dropout=0.1, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "opt"])
def test_adapters_are_trained_alone_and_have_the_bits_of_the_whole(family):
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    torch.manual_seed(3)
    made = whole(model(family, lora=ADAPTED))
    made.check(batch(), cross_entropy)
    trained = [name for name, each in made.module.named_parameters() if each.requires_grad]
    assert len(trained) == 12
    assert all(".lora_" in name for name in trained)


def test_the_head_of_a_new_task_is_trained_beside_adapters():
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    made = whole(
        HuggingFaceModel(config=OF_TEXTS["bert"], task="sequence-classification", lora=Lora(targets=("query",)))
    )
    trained = {name for name, each in made.module.named_parameters() if each.requires_grad}
    assert {name for name in trained if "lora" not in name} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft calls in transformers
def test_adapters_are_saved_for_peft_and_within_the_weights_for_transformers(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    from transformers import AutoConfig, AutoModelForCausalLM

    base, tokens = tmp_path / "base", batch()[0]
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **GROUPED)).save_pretrained(base)
    begun = HuggingFaceModel(config=str(base), weights=str(base), lora=ADAPTED)
    made = whole(begun)
    for name, each in made.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each.data)  # as after some training; it begins with zeros
    save(job_of(begun), dict(made.module.named_parameters()), tmp_path / "made")
    made.module.eval()
    with torch.no_grad():
        expected = made.call(made.module, tokens)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "made")(tokens).logits
        ours = AutoModelForCausalLM.from_pretrained(base)
        adapted = peft.PeftModel.from_pretrained(ours, tmp_path / "made" / "adapter")(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted, expected, rtol=0, atol=0)
    assert "peft" in sources(begun)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft calls in transformers
def test_a_head_that_was_trained_is_within_the_weights_and_peft_is_given_none_without_it(tmp_path):
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    begun = HuggingFaceModel(config=OF_TEXTS["bert"], task="sequence-classification", lora=Lora(targets=("query",)))
    parameters = dict(whole(begun).module.named_parameters())
    save(job_of(begun), parameters, tmp_path / "made")
    assert not (tmp_path / "made" / "adapter").exists()
    saved = load_file(tmp_path / "made" / "model.safetensors")
    assert torch.equal(saved["classifier.weight"], parameters["classifier.weight"])


def test_layers_that_a_model_does_not_have_are_told():
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    with pytest.raises(ConfigError, match=r"^model.lora: .*: Target modules .*none.* not found in the base"):
        whole(model("llama", lora=Lora(targets=("none",))))


def test_attention_is_computed_as_it_is_told():
    whole(model("llama", attention="eager")).check(batch(), cross_entropy)


def test_nothing_is_fetched_though_the_library_was_there_before(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    layers_of(model("llama"))
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
        drawn.append(layers_of(model("llama"))[1].get_parameter("model.layers.0.self_attn.q_proj.weight"))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_what_is_saved_is_read_again_by_transformers_and_by_us(family, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    layers = layers_of(model(family))
    save(job_of(model(family)), {name: each for layer in layers for name, each in layer.named_parameters()}, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = {name: each for layer in layers for name, each in layer.named_parameters()}
    assert {name for name, _ in theirs.named_parameters()} <= ours.keys()
    assert all(torch.equal(each, ours[name]) for name, each in theirs.named_parameters())
    again = layers_of(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))
    for layer, other in zip(layers, again, strict=True):
        assert all(torch.equal(each, other.get_parameter(name)) for name, each in layer.named_parameters())
    weights = load_file(tmp_path / "model.safetensors")
    told = sources(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))
    assert told.keys() == {"transformers", "model.config", "model.weights"}
    value = weights.pop(min(weights))
    save_file({**weights, "other": value}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert sources(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path))) != told
    with pytest.raises(ConfigError, match=r"missing keys, such as .*; expected all weights of a model of that config"):
        layers_of(HuggingFaceModel(config=str(tmp_path), weights=str(tmp_path)))


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
        layers_of(HuggingFaceModel(**options))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)
