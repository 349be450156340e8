"""Sums of gradients over micro-batches with a ledger of what was added, as one flat message per reduction.

A *reduction* is what the owners of some layers sum: one layer's own parameters, or the weights tied between several.
Its message is a 1-D tensor, int64 for ``exact`` and float32 for ``fast``:

    [ sums of the parameters in order
    | per parameter: how many gradients were added
    | how many contributions were not finite or out of range, how many owners dissent from what the next step brings
    | per (layer of the reduction, micro-batch): how often it was counted
    | per micro-batch: a record of fixed size, zero where another worker computed it ]

Messages of all owners are summed element by element. Then every count of the ledger must be 1.

``exact`` rounds each gradient to a multiple of 2^-40 and sums integers, so neither order nor owner can change the sum.
``fast`` sums in float32. Both sum a micro-batch's gradients whole: half-batches would differ already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from holdfast.errors import ConfigError, InternalError, LedgerError

__all__ = [
    "Accumulator",
    "ExactAccumulator",
    "FastAccumulator",
    "Layout",
    "Numerics",
    "Reduced",
    "check_dtype",
    "make_accumulator",
]

Numerics: TypeAlias = Literal["exact", "fast"]

_SCALE_BITS = 40
_RANGE_BITS = 62
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTIAL_BITS = 52  # of float64's 53: whole numbers that add up to less stay exact, with a bit to spare for rounding
_BLOCK = 1 << 15  # elements that stay in a CPU's cache from one operation to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where what stands in a reduction's message.

    Attributes:
        layers: the layers of the reduction, ascending.
        shapes: shapes of the parameters in order.
        num_microbatches: micro-batches of a step.
        record_width: float32 values recorded per micro-batch.
    """

    layers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_microbatches: int
    record_width: int

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def sections(self) -> list[int]:
        """Lengths of the five parts of the message."""
        n = self.num_microbatches
        return [sum(self.sizes), len(self.shapes), 2, len(self.layers) * n, n * self.record_width]

    @property
    def length(self) -> int:
        """Elements of the message."""
        return sum(self.sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What a reduced message says.

    Attributes:
        gradients: float32 mean over the micro-batches per parameter; None where no owner had a gradient.
        finite: whether every contribution was finite and in range; if not, the gradients mean nothing.
        squared_norm: float64 squared L2 norm of all gradients; 0 if not finite.
        records: float32 ``[num_microbatches, record_width]``.
        dissent: how many owners are not ready for the generation that is prepared.
    """

    gradients: tuple[Tensor | None, ...]
    finite: bool
    squared_norm: float
    records: Tensor
    dissent: int = 0


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that gradients of this type can be accumulated.

    Raises:
        ConfigError: the type is neither float32, bfloat16 nor float16.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"parameter {name} is {dtype}, expected float32, bfloat16 or float16")


class Accumulator(ABC):
    """The sums and the ledger of one reduction on one worker.

    Cost: the sums once, and for ``exact`` 12 bytes per parameter more.

    Args:
        layout: the message's layout.
        device: where the gradients are.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._message = torch.zeros(layout.length, dtype=self._dtype, device=device)
        self._sums, self._has, self._flags, self._ledger, self._rows = torch.split(self._message, layout.sections)
        self._rows = self._rows.view(layout.num_microbatches, layout.record_width)
        self._has_counts = [0] * len(layout.shapes)
        self._not_finite = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    _dtype: torch.dtype

    @property
    def counts(self) -> dict[tuple[int, int], int]:
        """How often each (layer, micro-batch) was added here; pairs never added are absent."""
        return dict(self._counts)

    def add(self, layer: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients and count it.

        Args:
            layer: a layer of the reduction.
            microbatch: global number.
            gradients: one per parameter, of its shape; None where there is none.

        Raises:
            InternalError: the layer or the micro-batch is not of this reduction.
        """
        if layer not in self.layout.layers or not 0 <= microbatch < self.layout.num_microbatches:
            raise InternalError(f"layer {layer}, micro-batch {microbatch} is not of reduction {self.layout.layers}")
        for place, gradient in enumerate(gradients):
            self._has_counts[place] += gradient is not None
        self._absorb(gradients)
        self._counts[layer, microbatch] += 1

    def record(self, microbatch: int, values: Tensor) -> None:
        """Store a micro-batch's record: float32 ``[record_width]``."""
        self._rows[microbatch] = self._widened(values)

    def reset(self) -> None:
        """Forget everything added, in place."""
        self._message.zero_()
        self._has_counts = [0] * len(self.layout.shapes)
        self._not_finite = 0
        self._counts.clear()

    def message(self, dissent: int = 0) -> Tensor:
        """Return a copy of the message, free to be reduced in place. Safe to call again.

        Args:
            dissent: 1 if this owner is not ready for the generation that is prepared.
        """
        self._settle()
        order = [(layer, m) for layer in self.layout.layers for m in range(self.layout.num_microbatches)]
        counts = [*self._has_counts, self._not_finite_count(), dissent, *(self._counts[pair] for pair in order)]
        start = self._sums.numel()
        self._message[start : start + len(counts)] = torch.tensor(counts, dtype=self._dtype)
        return self._message.clone()

    def decode(self, reduced: Tensor) -> Reduced:
        """Check a reduced message and take it apart.

        Args:
            reduced: the element-wise sum of all owners' messages.

        Raises:
            LedgerError: a micro-batch was not counted exactly once.
            InternalError: the message has another shape or type.
        """
        if reduced.shape != self._message.shape or reduced.dtype != self._dtype:
            raise InternalError(
                f"reduction {self.layout.layers}: message is {reduced.dtype} {tuple(reduced.shape)},"
                f" expected {self._dtype} {tuple(self._message.shape)}"
            )
        sums, has, flags, ledger, rows = torch.split(reduced, self.layout.sections)
        self._check_ledger(ledger)
        means = self._means(sums)
        not_finite, dissent = (int(flag) for flag in flags.tolist())
        finite = not_finite == 0 and _all_finite(means)
        pieces = zip(torch.split(means, self.layout.sizes), self.layout.shapes, has.tolist(), strict=True)
        gradients = tuple(piece.view(shape) if count else None for piece, shape, count in pieces)
        return Reduced(
            gradients=gradients,
            finite=finite,
            squared_norm=_squared_norm(means) if finite else 0.0,
            records=self._narrowed(rows.view_as(self._rows)),
            dissent=dissent,
        )

    def _check_ledger(self, ledger: Tensor) -> None:
        if bool((ledger == 1).all()):
            return
        rows = ledger.view(len(self.layout.layers), -1).tolist()
        for layer, row in zip(self.layout.layers, rows, strict=True):
            for microbatch, count in enumerate(row):
                if count != 1:
                    raise LedgerError(layer, microbatch, int(count))

    @abstractmethod
    def _absorb(self, gradients: Sequence[Tensor | None]) -> None: ...

    def _settle(self) -> None:  # noqa: B027
        """Bring the sums up to date."""

    @abstractmethod
    def _not_finite_count(self) -> int: ...

    @abstractmethod
    def _means(self, sums: Tensor) -> Tensor: ...

    @abstractmethod
    def _widened(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _narrowed(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The same elements of all that `ExactAccumulator` keeps, and scratch space for as many, which all blocks share.

    Attributes:
        part: which elements.
        scaled: the contribution being added, float32.
        partial: the partial sum, float64.
        sums: part of the message, int64.
        wide: scratch space, float64.
        whole: the same memory as ``wide``, int64.
    """

    part: slice
    scaled: Tensor
    partial: Tensor
    sums: Tensor
    wide: Tensor
    whole: Tensor


class ExactAccumulator(Accumulator):
    """Order-invariant sums: multiples of 2^-40 as int64.

    A contribution's elements must stay below 2^22 / (micro-batches × layers of the reduction) in absolute value; else,
    or if it is not finite, it is flagged and left out.

    Contributions are whole numbers held as float64 first, because adding these is the cheapest. A bound on the partial
    sum's elements is kept; before it could reach 2^52, where float64 would round, and for every message, the partial
    sum moves into the int64 sums. So the result is that of integer additions throughout.
    """

    _dtype = torch.int64

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        size = self._sums.numel()
        self._scaled = torch.empty(size, dtype=torch.float32, device=device)
        self._partial = torch.empty(size, dtype=torch.float64, device=device)
        self._bound = 0.0  # no element of the partial sum is larger, as a gradient; 0: its content means nothing
        self._settled = False  # whether the int64 sums hold anything
        self._blocks = self._make_blocks()
        self._zeros = [torch.zeros(0, device=device)] * len(layout.shapes)
        self._limit = 2.0 ** (_RANGE_BITS - _SCALE_BITS) / (layout.num_microbatches * len(layout.layers))

    def _make_blocks(self) -> list[_Block]:
        size = self._sums.numel()
        length = min(size, _BLOCK) if self._sums.device.type == "cpu" else size
        wide = torch.empty(length, dtype=torch.float64, device=self._sums.device)
        parts = [slice(start, min(start + length, size)) for start in range(0, size, length or 1)]
        return [
            _Block(
                part=part,
                scaled=self._scaled[part],
                partial=self._partial[part],
                sums=self._sums[part],
                wide=wide[: part.stop - part.start],
                whole=wide[: part.stop - part.start].view(torch.int64),
            )
            for part in parts
        ]

    def reset(self) -> None:
        """Forget everything added, in place."""
        super().reset()
        self._bound, self._settled = 0.0, False

    def _absorb(self, gradients: Sequence[Tensor | None]) -> None:
        if not gradients or self._sums.numel() == 0:
            return
        parts = [self._zero(n) if g is None else g.reshape(-1) for n, g in enumerate(gradients)]
        torch.cat(parts, out=self._scaled)
        largest = _largest(self._scaled)
        if not largest < self._limit:
            self._not_finite += 1
            return
        if self._bound + largest >= 2.0 ** (_PARTIAL_BITS - _SCALE_BITS):
            self._settle()
        self._scaled.mul_(2.0**_SCALE_BITS).round_()  # a power of two: exact in float32
        if self._bound == 0.0:
            self._partial.copy_(self._scaled)
        else:
            for block in self._blocks:
                block.partial.add_(block.wide.copy_(block.scaled))
        self._bound += largest

    def _settle(self) -> None:
        """Move the partial sum into the int64 sums."""
        if self._bound == 0.0:
            return
        for block in self._blocks:
            if self._settled:
                block.sums.add_(block.whole.copy_(block.partial))
            else:
                block.sums.copy_(block.partial)
        self._bound, self._settled = 0.0, True

    def _zero(self, place: int) -> Tensor:
        size = self.layout.sizes[place]
        if self._zeros[place].numel() != size:
            self._zeros[place] = torch.zeros(size, device=self._scaled.device)
        return self._zeros[place]

    def _not_finite_count(self) -> int:
        return self._not_finite

    def _means(self, sums: Tensor) -> Tensor:
        means = torch.empty_like(self._scaled)
        divisor = 2.0**_SCALE_BITS * self.layout.num_microbatches
        for block in self._blocks:
            means[block.part].copy_(block.wide.copy_(sums[block.part]).div_(divisor))
        return means

    def _widened(self, values: Tensor) -> Tensor:
        return values.view(torch.int32).to(torch.int64)  # the bits, so that a sum with zeros keeps them

    def _narrowed(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32).view(torch.float32)


class FastAccumulator(Accumulator):
    """Plain float32 sums: they depend on which worker computed which micro-batch, and in which order."""

    _dtype = torch.float32

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        starts = [0, *accumulate(layout.sizes)]
        self._views = [
            self._sums[start : start + size].view(shape)
            for start, size, shape in zip(starts[:-1], layout.sizes, layout.shapes, strict=True)
        ]

    def _absorb(self, gradients: Sequence[Tensor | None]) -> None:
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient)

    def _not_finite_count(self) -> int:
        return int(not _all_finite(self._sums))

    def _means(self, sums: Tensor) -> Tensor:
        return sums / self.layout.num_microbatches

    def _widened(self, values: Tensor) -> Tensor:
        return values

    def _narrowed(self, rows: Tensor) -> Tensor:
        return rows.clone()


def make_accumulator(numerics: Numerics, layout: Layout, device: torch.device | None = None) -> Accumulator:
    """Return the accumulator for these numerics.

    Raises:
        ConfigError: the numerics are unknown.
    """
    kinds: dict[str, type[Accumulator]] = {"exact": ExactAccumulator, "fast": FastAccumulator}
    if numerics not in kinds:
        raise ConfigError(f"numerics {numerics!r} is unknown, expected exact or fast")
    return kinds[numerics](layout, device or torch.device("cpu"))


def _largest(values: Tensor) -> float:
    """Return the largest absolute value in one pass; NaN if there is one, 0 if there are no values."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low.item()), float(high.item()))


def _all_finite(values: Tensor) -> bool:
    return _largest(values) < float("inf")


def _squared_norm(values: Tensor) -> float:
    wide = values.to(torch.float64)
    return float(torch.dot(wide, wide).item())
