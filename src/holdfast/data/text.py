"""Text as bytes: windows over files that are read as if they were one, without loading them."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from holdfast.core.tensorspec import NO_TARGET
from holdfast.errors import ConfigError

__all__ = ["MASK", "MaskedText", "Text", "text_files"]

MASK = 256
"""The token in the place of a byte that is to be guessed."""

_BLOCK, _BLOCKS = 4096, 64
_MASKED = 0.15


def text_files(path: str) -> tuple[Path, ...]:
    """Return the files that a path names, sorted.

    Args:
        path: ``stdlib`` (the Python sources of this interpreter's standard library), a file, a folder (all files below
            it) or a glob (``**`` for any depth).

    Raises:
        ConfigError: nothing is there.
    """
    found = sorted(_stdlib() if path == "stdlib" else _matching(path))
    if not found:
        raise ConfigError(f"data.path: {path!r} names no file")
    return tuple(found)


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in left_out]  # not even entered: they can hold far more files
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return found


def _matching(path: str) -> list[Path]:
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        return [file for file in place.rglob("*") if file.is_file()]
    return [Path(file) for file in glob.glob(path, recursive=True) if Path(file).is_file()]


class Text:
    """Windows of bytes over the concatenation of files: sample ``i`` starts at byte ``i * context``.

    A sample is int64 ``[context]`` of bytes 0..255 and, as its target, the same moved on by one byte. Only the files'
    sizes are read at first; they must not change afterwards.

    Args:
        path: as for `text_files`.
        context: bytes of a window, at least 1.

    Raises:
        ConfigError: there is nothing to read, or less than one window and its target.
    """

    vocab = 256

    def __init__(self, path: str, context: int) -> None:
        if context < 1:
            raise ConfigError(f"model.context: {context} is too small, expected at least 1")
        self.context = context
        sized = [(file, file.stat().st_size) for file in text_files(path)]
        self._files: Sequence[Path] = [file for file, size in sized if size]
        self._starts = [0, *accumulate(size for _, size in sized if size)]
        if self._starts[-1] < context + 1:
            raise ConfigError(
                f"data.path: {path!r} holds {self._starts[-1]} bytes, expected at least {context + 1} for one window"
            )

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return self._starts[-1]

    def fingerprint(self) -> str:
        """Return a digest of the files' sizes and of blocks of 4 KiB, spread evenly over all of them.

        Cost: 64 reads, however much text there is.
        """
        digest = hashlib.sha256(repr(self._starts).encode())
        length = min(_BLOCK, self.num_bytes)
        for number in range(_BLOCKS):
            digest.update(self._read(number * (self.num_bytes - length) // (_BLOCKS - 1), length))
        return digest.hexdigest()

    def __len__(self) -> int:
        return (self.num_bytes - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        data = bytearray(self._read(index * self.context, self.context + 1))
        window = torch.frombuffer(data, dtype=torch.uint8).to(torch.int64)
        return window[:-1], window[1:]

    def _read(self, start: int, length: int) -> bytes:
        pieces = []
        number = bisect_right(self._starts, start) - 1
        while length:
            offset = start - self._starts[number]
            wanted = min(length, self._starts[number + 1] - start)
            piece = _read_file(self._files[number], offset, wanted)
            if len(piece) < wanted:
                raise ConfigError(f"data.path: {self._files[number]} became shorter while it was used")
            pieces.append(piece)
            start, length, number = start + wanted, length - wanted, number + 1
        return b"".join(pieces)


class MaskedText(Text):
    """Windows of bytes in which some are to be guessed: a sample is what is left, and what was there.

    Of every window 15 % of the positions, at least one, are drawn: four in five become ``MASK``, one in ten a byte that
    is drawn, too, and the others stay as they are. The target is the byte that was there; -100 everywhere else. All is
    drawn from torch's default generator, so a window that comes again is masked otherwise.

    Source: Devlin et al., "BERT", section 3.1. There the number of positions varies; here every micro-batch has some.
    """

    vocab = 257

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, _ = super().__getitem__(index)
        places = torch.randperm(self.context)[: max(1, round(_MASKED * self.context))]
        target = torch.full_like(tokens, NO_TARGET)
        target[places] = tokens[places]
        chance = torch.rand(len(places))
        others = torch.where(chance < 0.9, torch.randint(MASK, (len(places),)), tokens[places])
        tokens[places] = torch.where(chance < 0.8, MASK, others)
        return tokens, target


def _read_file(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)
