"""The page of transformers' families says what was found of each."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tools.families import TARGET, Found, families, page, small, try_family


def test_a_family_is_tried_with_a_small_model():
    assert "llama" in families()
    assert small("gpt2") == {**small("gpt2"), "model_type": "gpt2", "n_embd": 32, "vocab_size": 96}
    assert try_family("gpt2").why == ""
    assert "block 0 runs more than once" in try_family("dory").why


def test_the_page_tells_which_can_be_cut_and_why_others_cannot():
    text = page([Found("llama", "", 0.1), Found("other", "says a | b", 0.1)])
    assert "Of 2 kinds of causal language models" in text
    assert "1 can be" in text
    assert "| other | says a / b |" in text
    assert "\nllama.\n" in text


def test_the_page_is_there_and_of_all_families():
    told = TARGET.read_text()
    assert all(f" {each}" in told or f"\n{each}" in told for each in families())
