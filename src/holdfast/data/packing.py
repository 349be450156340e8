"""Batches between two processes of our own: tensors and arrays as raw bytes in a file of memory, the rest pickled.

What comes out has the bits, strides and alignment of what went in: kernels may compute otherwise by any of these.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["bits_of", "receive", "send"]

_Parts = Sequence[tuple[int, bytes | memoryview]]

_INLINE = 16 << 10
"""What is shorter goes through the socket; a file of memory costs some system calls."""
_ALIGN = 64
"""As torch aligns what it allocates."""
_HEADER = struct.Struct("<2q")


class _Pickler(pickle.Pickler):
    """Leaves the bytes of plain tensors out, as pickle does those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        extent = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        flat = value.as_strided((extent if value.numel() else 0,), (1,)).view(torch.uint8)
        memory = pickle.PickleBuffer(flat.numpy().data)
        return _tensor, (memory, value.dtype, tuple(value.shape), value.stride())


def _is_plain(value: Tensor) -> bool:
    return (
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
    )


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if not memoryview(memory).nbytes:
        return torch.empty(0, dtype=dtype).as_strided(shape, stride)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def send(link: socket.socket, value: Any, flags: int = 0) -> None:
    """Sends a value, as one message of a ``SOCK_SEQPACKET`` socket.

    Raises:
        BlockingIOError: there is no room for it now, and ``flags`` say not to wait.
        OSError: nobody is there.
        pickle.PicklingError, TypeError, AttributeError: it cannot be sent.
    """
    text, views = _dump(value)
    places, end = _places(views)  # behind them: what they are, of a length that is known last
    front = pickle.dumps((places, [view.nbytes for view in views])), text
    rest = b"".join((*front, _HEADER.pack(*map(len, front))))
    parts: _Parts = [*zip(places, views, strict=True), (end, rest)]
    whole = end + len(rest)
    if whole <= _INLINE:
        arena = bytearray(whole)
        _fill(memoryview(arena), parts)
        link.send(arena, flags)
    else:
        _send_apart(link, whole, parts, flags)


def bits_of(value: Any) -> bytes:
    """Returns bytes that are the same for values with the same bits.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: it cannot be sent, nor compared.
    """
    text, views = _dump(value)
    return b"".join((text, *views))


def _dump(value: Any) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    text = BytesIO()
    _Pickler(text, 5, buffer_callback=buffers.append).dump(value)
    return text.getvalue(), [each.raw() for each in buffers]


def _send_apart(link: socket.socket, whole: int, parts: _Parts, flags: int) -> None:
    memory = os.memfd_create("holdfast-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, whole)
        for place, part in parts:
            _write(memory, memoryview(part), place)
        socket.send_fds(link, [b"-"], [memory], flags)
    finally:
        os.close(memory)


def _places(views: Sequence[memoryview]) -> tuple[list[int], int]:
    places, end = [], 0
    for view in views:
        address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
        places.append(-(-end // _ALIGN) * _ALIGN + address % _ALIGN)
        end = places[-1] + view.nbytes
    return places, end


def _write(memory: int, part: memoryview, place: int) -> None:
    """Writes all of it: mapping the file instead would take a page fault for every page, in both processes."""
    while part:
        written = os.pwrite(memory, part, place)
        part, place = part[written:], place + written


def _fill(arena: memoryview, parts: _Parts) -> None:
    with arena:
        for place, part in parts:
            arena[place : place + len(part)] = part


def receive(link: socket.socket) -> Any:
    """Returns the next value; waits for it as the socket does.

    Raises:
        EOFError: there is nobody who could send one.
    """
    try:
        data, memories, _, _ = socket.recv_fds(link, _INLINE, 1)
    except ConnectionError:
        data, memories = b"", []
    if not data:
        raise EOFError
    arena = _read(memories[0]) if memories else _copied(data)
    lengths = _HEADER.unpack(arena[-_HEADER.size :])
    end = len(arena) - _HEADER.size
    head, text = arena[end - sum(lengths) : end - lengths[1]], arena[end - lengths[1] : end]
    views = [arena[place : place + size] for place, size in zip(*pickle.loads(head), strict=True)]
    return pickle.loads(text, buffers=views)


def _read(memory: int) -> memoryview:
    """Returns what a file holds, in memory aligned as torch's; closes it."""
    try:
        arena = _empty(os.fstat(memory).st_size)
        place = 0
        while place < len(arena):
            place += os.preadv(memory, [arena[place:]], place)
        return arena
    finally:
        os.close(memory)


def _copied(data: bytes) -> memoryview:
    arena = _empty(len(data))
    arena[:] = data
    return arena


def _empty(size: int) -> memoryview:
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data
