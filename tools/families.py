"""Which causal language models of transformers can be cut: each family, tiny and random, beside its layers.

::

    python -m tools.families          # all, with a table for docs/families.md
    python -m tools.families llama    # one

A family is a kind of config for which transformers has a causal language model. Sizes are made small by the names that
configs have for them; where that is not enough, ``SIZES`` says what else.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from holdfast.config.job import HuggingFaceModel
from holdfast.errors import HoldfastError
from holdfast.models.losses import cross_entropy
from holdfast.runtime.engine.slots.hugging_face import check_causal, whole

__all__ = ["Found", "families", "main", "page", "small", "try_family"]

TARGET = Path(__file__).resolve().parents[1] / "docs" / "families.md"
_MOST_PARAMETERS = 20_000_000
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_layers": 3,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "d_model": 32,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "state_size": 16,
    "lru_width": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
    "is_decoder": True,
}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
"""Of attention whose keys and values are made of one latent vector: as many heads of each."""
_DECODER: dict[str, Any] = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "diffllama": {"attention_dropout": 0.0},
    "falcon": {"head_dim": None},
    "kimi_linear": {"num_experts_per_token": 2},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    **dict.fromkeys(("blenderbot", "plbart"), _DECODER),
    "whisper": {**_DECODER, "max_target_positions": 64},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 3, "num_encoder_layers": 3},
    "xlm": {"emb_dim": 32, "n_words": 96},
    "xlstm": {"v_head_dim": None},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a family's sizes need; None: not the common one."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of a family.

    Attributes:
        family: its name, ``model_type`` of its config.
        why: why it cannot be cut; empty: it has the bits of the whole.
        seconds: that it took.
    """

    family: str
    why: str
    seconds: float


def families() -> list[str]:
    """Returns the names of all that have no model of another kind within, as those of images have."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [each for each in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if not CONFIG_MAPPING[each].sub_configs]


def small(family: str) -> dict[str, Any]:
    """Returns a small config of a family: of what is named in ``_COMMON``, what such a config has."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]()
    renamed = {*getattr(known, "attribute_map", {})}
    common = {name: value for name, value in _COMMON.items() if hasattr(known, name) and name not in renamed}
    sizes = {**common, **SIZES.get(family, {})}
    return {"model_type": family, **{name: value for name, value in sizes.items() if value is not None}}


def try_family(family: str) -> Found:
    """Makes a family's model and compares it with its layers."""
    began = time.monotonic()
    try:
        config = small(family)
        _check_size(config)
        torch.manual_seed(0)
        made = whole(HuggingFaceModel(config=config))
        tokens = torch.randint(3, 96, (2, 2, 12))
        made.check((tokens[0], tokens[1]), cross_entropy)
        check_causal(made, tokens[0])
        why = ""
    except HoldfastError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - whatever a config's class raises
        why = f"no small config: {type(error).__name__}: {error}"
    return Found(family, " ".join(why.split())[:200], time.monotonic() - began)


def _check_size(config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    named = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(named.pop("model_type"), **named))
    count = sum(each.numel() for each in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")


def page(found: Sequence[Found]) -> str:
    """Returns docs/families.md."""
    cut = [each.family for each in found if not each.why]
    rows = "\n".join(f"| {each.family} | {each.why.replace('|', '/')} |" for each in found if each.why)
    return f"""# Families of transformers

Of {len(found)} kinds of causal language models that transformers {metadata.version("transformers")} has (without those
that have a model of another kind within), {len(cut)} can be [cut at their blocks](hugging_face.md#how-it-is-cut): tiny
and random, in float32, their layers give the bits of the whole, output and every gradient. `make families` makes this
page.

{", ".join(cut)}.

| cannot | why |
|---|---|
{rows}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Tries families; writes the page when all were tried."""
    parser = argparse.ArgumentParser(prog="python -m tools.families", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("families", nargs="*", help="some; without any, all, and the page is written")
    named = parser.parse_args(argv).families
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = []
    for number, family in enumerate(chosen := named or families(), 1):
        found.append(try_family(family))
        what = found[-1].why or "the bits of the whole"
        print(f"{number}/{len(chosen)} {family}: {what} ({found[-1].seconds:.1f} s)", flush=True)
    print(f"{sum(not each.why for each in found)} of {len(found)} can be cut")
    if not named:
        TARGET.write_text(page(found))
        print(f"written: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
