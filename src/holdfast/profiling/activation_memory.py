"""Counts the memory that operations leave behind, by watching which of the storages that they made are still alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["ActivationMemory"]


class ActivationMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the types of all this out
    """Notes, without keeping it alive, the storage of everything that operations within return.

    So it counts what a layer really holds between its forward and its backward pass, whoever holds it: what autograd
    saved, inputs and outputs, gradients that wait for W. A storage counts once, however many tensors share it.

    Args:
        ours: tensors whose storages do not count: parameters and buffers.
    """

    def __init__(self, ours: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ours = {_reference(tensor).cdata for tensor in ours}
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.note(value)
        return result

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor that came from elsewhere, as long as it lives."""
        reference = _reference(tensor)
        if reference.cdata not in self._ours:
            self._noted[reference.cdata] = (reference, tensor.untyped_storage().nbytes())

    def alive_bytes(self) -> int:
        """Returns the size of what was noted and is still alive."""
        return sum(size for reference, size in self._noted.values() if _lives(reference))


def _lives(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
