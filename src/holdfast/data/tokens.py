"""Text as tokens: windows over files that a tokenizer has read once, as numbers in a file of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from holdfast.data.text import text_files
from holdfast.errors import ConfigError, installing

__all__ = ["Tokens", "kept_in"]

_PIECE = 1 << 20
"""Characters that are tokenised at a time, and the line that goes on there."""
_NUMBER = numpy.dtype("<u4")


class Tokens:
    """Windows of tokens over files, one behind the other: sample ``i`` starts at token ``i * context``.

    A sample is int64 ``[context]`` and, as its target, the same moved on by one token. Files are tokenised once on each
    machine: what comes of them is kept under a name that goes by all that it depends on. Behind each file is the
    tokenizer's end of text, if it has one; files are cut behind a line about every million characters.

    Attributes:
        context: tokens of a window.
        vocab: all tokens are numbers below this one.

    Args:
        path: as for `text_files`.
        tokenizer: a folder with a ``tokenizer.json``.
        context: tokens of a window, at least 1.

    Raises:
        ConfigError: there is nothing to read, or less than one window and its target; or there is no such tokenizer.
    """

    def __init__(self, path: str, tokenizer: str, context: int) -> None:
        self.context = context
        reader, end, told = _opened(Path(tokenizer))
        self.vocab = 1 + max(reader.get_vocab().values(), default=-1)
        files = text_files(path)
        self._name = _name_of(files, told)
        kept = kept_in() / f"{self._name}.tokens"
        with _alone(kept):
            if not kept.exists():
                _write(kept, (numbers for file in files for numbers in _tokenised(reader, end, file)))
        self._numbers = numpy.memmap(kept, _NUMBER, "r") if kept.stat().st_size else numpy.empty(0, _NUMBER)
        if len(self._numbers) < context + 1:
            raise ConfigError(
                f"data.path: {path!r} holds {len(self._numbers)} tokens, expected at least {context + 1} for one window"
            )

    def fingerprint(self) -> str:
        """Returns a digest of the files' contents and of the tokenizer."""
        return self._name

    def __len__(self) -> int:
        return (len(self._numbers) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.context
        window = torch.from_numpy(self._numbers[start : start + self.context + 1].astype(numpy.int64))
        return window[:-1], window[1:]


def kept_in() -> Path:
    """Returns the folder of what was tokenised: ``holdfast/tokens`` in the user's folder for such files."""
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "holdfast" / "tokens"


def _opened(folder: Path) -> tuple[Any, int | None, bytes]:
    """Returns a tokenizer, the number of its end of text, and what its numbers depend on."""
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(f"data.tokenizer: {error}; {installing('hf')}") from None
    try:
        data = (folder / "tokenizer.json").read_bytes()
        settings = folder / "tokenizer_config.json"
        said = json.loads(settings.read_bytes()).get("eos_token") if settings.exists() else None
        reader = tokenizers.Tokenizer.from_str(data.decode())
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: {folder}: {error.strerror}; expected a folder with tokenizer.json"
        ) from None
    except Exception as error:  # noqa: BLE001 - the library's own have no class in common
        raise ConfigError(f"data.tokenizer: {folder}: no tokenizer can be made of its files: {error}") from None
    text = said.get("content") if isinstance(said, dict) else said
    end = None if text is None else reader.token_to_id(text)
    return reader, end, b"\0".join((data, repr(end).encode(), metadata.version("tokenizers").encode()))


def _name_of(files: tuple[Path, ...], told: bytes) -> str:
    digest = hashlib.sha256(told)
    for file in files:
        with _reading(file), file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _tokenised(reader: Any, end: int | None, file: Path) -> Iterator[numpy.ndarray]:
    with _reading(file), file.open(encoding="utf-8", errors="replace", newline="") as opened:
        while text := opened.read(_PIECE):
            found = reader.encode(text + opened.readline(), add_special_tokens=False).ids
            yield numpy.array(found, _NUMBER)
    if end is not None:
        yield numpy.array([end], _NUMBER)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.path: {file} cannot be read: {error.strerror}") from error


@contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Within it no other process of this machine makes the same file."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(kept.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritten(kept, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(kept: Path, pieces: Iterator[numpy.ndarray]) -> None:
    """Writes numbers, all or nothing."""
    try:
        part = kept.with_suffix(".part")  # nobody else writes it; one that was killed has left it to us
        try:
            with part.open("wb") as file:
                part.chmod(0o600)
                for piece in pieces:
                    file.write(piece.tobytes())
                file.flush()
                os.fsync(file.fileno())
            part.rename(kept)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritten(kept, error) from error


def _unwritten(kept: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.tokenizer: tokens cannot be kept in {kept.parent}: {error.strerror}; XDG_CACHE_HOME names another place"
    )
