"""Text as tokens: what a tokenizer makes of files, once on each machine, and what is told where that cannot be."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -e '.[hf]'")

import tokenizers

from holdfast.data import tokens
from holdfast.data.tokens import Tokens, kept_in
from holdfast.errors import ConfigError

END = "<end>"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "text"
    made.mkdir()
    for number in range(3):
        (made / f"{number}.txt").write_text("".join(f"line {n} of {number}: so and so, äöü\n" for n in range(50)))
    (made / "empty.txt").touch()
    return made


def trained(place, folder, end=END):
    """A tokenizer of a few hundred words, as a folder of transformers has it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet)
    made.train([str(path) for path in sorted(folder.glob("*.txt"))], trainer)
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    if end is not None:
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return made


@pytest.fixture
def tokenizer(tmp_path, folder):
    trained(tmp_path / "tokenizer", folder)
    return str(tmp_path / "tokenizer")


def whole(data):
    return [int(each) for each in data._numbers]


def test_samples_are_windows_over_all_files_each_with_an_end(folder, tokenizer, tmp_path):
    reader = tokenizers.Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    data = Tokens(str(folder), tokenizer, context=16)
    expected = []
    for path in sorted(folder.glob("*.txt")):
        expected += [*reader.encode(path.read_text(), add_special_tokens=False).ids, reader.token_to_id(END)]
    assert whole(data) == expected
    assert (data.vocab, len(data)) == (reader.get_vocab_size(), (len(expected) - 1) // 16)
    inputs, targets = data[3]
    assert (inputs.dtype, inputs.tolist()) == (torch.int64, expected[48:64])
    assert targets.tolist() == expected[49:65]
    with pytest.raises(IndexError):
        data[len(data)]


def test_files_are_read_in_pieces_that_end_with_a_line(folder, tokenizer, monkeypatch):
    expected = whole(Tokens(str(folder), tokenizer, context=4))
    monkeypatch.setattr(tokens, "_PIECE", 100)
    (kept,) = kept_in().glob("*.tokens")
    kept.unlink()
    assert whole(Tokens(str(folder), tokenizer, context=4)) == expected


def test_a_tokenizer_without_an_end_of_text_puts_none(folder, tmp_path):
    trained(tmp_path / "other", folder, end=None)
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "other" / "tokenizer.json"))
    assert reader.token_to_id(END) not in whole(Tokens(str(folder), str(tmp_path / "other"), context=4))


def test_files_are_tokenised_once_and_again_when_anything_changes(folder, tokenizer, monkeypatch):
    first = Tokens(str(folder), tokenizer, context=8)
    calls = []
    monkeypatch.setattr(tokens, "_write", lambda kept, pieces: calls.append(kept))
    again = Tokens(str(folder), tokenizer, context=4)
    assert (whole(again), calls, again.fingerprint()) == (whole(first), [], first.fingerprint())
    (folder / "0.txt").write_text((folder / "0.txt").read_text().replace("so and so", "so or such"))
    with pytest.raises(FileNotFoundError):
        Tokens(str(folder), tokenizer, context=8)
    assert len(calls) == 1
    assert calls[0].stem != first.fingerprint()


def _made(path, tokenizer, numbers):
    numbers.put(whole(Tokens(path, tokenizer, context=8)))


def test_processes_that_begin_at_once_read_the_same(folder, tokenizer):
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    started = [context.Process(target=_made, args=(str(folder), tokenizer, numbers)) for _ in range(3)]
    for each in started:
        each.start()
    found = [numbers.get(timeout=120) for _ in started]
    for each in started:
        each.join(120)
    assert found[0] == found[1] == found[2]
    assert [path.suffix for path in sorted(kept_in().iterdir())] == [".lock", ".tokens"]


def test_what_is_half_written_is_not_there(folder, tokenizer, monkeypatch):
    def breaks(reader, end, file):
        yield from ()
        raise ConfigError("no more")

    monkeypatch.setattr(tokens, "_tokenised", breaks)
    with pytest.raises(ConfigError, match="no more"):
        Tokens(str(folder), tokenizer, context=8)
    assert [path.suffix for path in kept_in().iterdir()] == [".lock"]


def test_only_their_owner_can_read_tokens(folder, tokenizer):
    Tokens(str(folder), tokenizer, context=8)
    assert [path.stat().st_mode & 0o077 for path in (kept_in(), *kept_in().iterdir())] == [0, 0, 0]


def test_bytes_that_are_no_text_are_replaced(folder, tokenizer):
    (folder / "3.txt").write_bytes(b"\xff\xfe\x00 and so")
    assert len(whole(Tokens(str(folder), tokenizer, context=8))) > 0


REFUSED = [
    (lambda text, made: (str(text / "nothing"), made), r"^data.path: .* names no file"),
    (lambda text, made: (str(text / "empty.txt"), made), r"^data.path: .* holds 1 tokens, expected at least 9"),
    (
        lambda text, made: (str(text), "/nowhere"),
        r"^data.tokenizer: /nowhere: No such file .*; expected a folder with tok",
    ),
    (lambda text, made: (str(text), str(text)), r"^data.tokenizer: .*: no tokenizer can be made of its files: "),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=["nothing", "too little", "no folder", "no tokenizer"])
def test_what_cannot_be_read_is_told(given, said, folder, tokenizer):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        Tokens(*given(folder, tokenizer), context=8)


def test_a_place_that_cannot_be_written_is_named(folder, tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(ConfigError, match=r"tokens cannot be kept in /proc/holdfast/tokens: .*; XDG_CACHE_HOME names"):
        Tokens(str(folder), tokenizer, context=8)
