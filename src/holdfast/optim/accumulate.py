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

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from holdfast.devices.fresh import fresh
from holdfast.errors import ConfigError, InternalError, LedgerError

__all__ = [
    "Accumulator",
    "ExactAccumulator",
    "FastAccumulator",
    "Layout",
    "Numerics",
    "QueuedAccumulator",
    "Reduced",
    "check_dtype",
    "make_accumulator",
    "present",
]

Numerics: TypeAlias = Literal["exact", "fast"]

_SCALE_BITS = 40
_RANGE_BITS = 62
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTIAL_BITS = 52  # of float64's 53: whole numbers that add up to less stay exact, with a bit to spare for rounding
_LEFT_OUT = 0x7FC0_1EF7  # bits of a float32 that is no number and that no computation gives
_BLOCK = 1 << 18  # elements that stay in a CPU's cache from one operation to the next
_LARGE_BLOCK = 1 << 26  # elements that are worth a call of an accelerator, and take no more memory than need be


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

    @property
    def packed_bytes(self) -> int:
        """How long a packed sum is."""
        records = self.num_microbatches * self.record_width
        return 8 * (2 + len(self.shapes)) + 4 * (sum(self.sizes) + records)

    def pack(self, reduced: Reduced) -> Tensor:
        """Return a sum as bytes, all bits of it but who dissents: uint8.

        In order: squared norm, as float64; whether it is finite, and which gradients there are, as int64; gradients,
        then records, as float32.
        """
        flags = [int(reduced.finite), *(int(gradient is not None) for gradient in reduced.gradients)]
        gradients = (
            torch.zeros(size) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(reduced.gradients, self.sizes, strict=True)
        )
        parts = (
            torch.tensor([reduced.squared_norm], dtype=torch.float64),
            torch.tensor(flags),
            *gradients,
            reduced.records.reshape(-1),
        )
        return torch.cat([part.cpu().contiguous().view(torch.uint8) for part in parts])

    def unpack(self, data: Tensor, device: torch.device | None = None) -> Reduced:
        """Return the sum that `pack` wrote.

        Raises:
            InternalError: it has another length.
        """
        if data.shape != (self.packed_bytes,):
            raise InternalError(f"a sum of {self.layers}: {tuple(data.shape)} bytes, expected {self.packed_bytes}")
        norm, flags, numbers = torch.split(
            data, [8, 8 * (1 + len(self.shapes)), data.numel() - 8 * (2 + len(self.shapes))]
        )
        finite, *has = flags.clone().view(torch.int64).tolist()
        *found, records = torch.split(numbers.clone().view(torch.float32), [*self.sizes, self.sections[-1]])
        pieces = zip(found, self.shapes, has, strict=True)
        return Reduced(
            gradients=tuple(piece.view(shape).to(device) if there else None for piece, shape, there in pieces),
            finite=bool(finite),
            squared_norm=float(norm.clone().view(torch.float64).item()),
            records=records.view(self.num_microbatches, self.record_width).to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What a reduced message says.

    Attributes:
        gradients: float32 mean over the micro-batches per parameter; None where no owner had a gradient.
        finite: whether every contribution was finite and in range; if not, the gradients mean nothing.
        squared_norm: float64 squared L2 norm of all gradients; 0 if not finite.
        records: float32 ``[num_microbatches, record_width]``; see `present` for those that were left out.
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

    Cost: the message, from the first contribution of a step until it was given away and reset.

    Args:
        layout: the message's layout.
        device: where the gradients are.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._records_at = sum(layout.sections[:-1])
        self.reset()

    _dtype: torch.dtype
    _left_out: frozenset[int]

    @property
    def counts(self) -> dict[tuple[int, int], int]:
        """How often each (layer, micro-batch) was added here; pairs never added are absent."""
        return dict(self._counts)

    @property
    def message_bytes(self) -> int:
        """How many bytes the message has at most."""
        return self.layout.length * self._dtype.itemsize

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
        self._own()
        self._absorb(gradients)
        self._counts[layer, microbatch] += 1

    def add_sums(self, sums: Sequence[Tensor | None]) -> None:
        """Add what the gradients of micro-batches have come to that were counted one by one, as none, by `add`.

        Args:
            sums: one per parameter, of its shape; None where there was no gradient.
        """
        for place, each in enumerate(sums):
            self._has_counts[place] += each is not None
        self._own()
        self._absorb(sums)

    def record(self, microbatch: int, values: Tensor) -> None:
        """Store a micro-batch's record: float32 ``[record_width]``."""
        rows = self._own()[self._records_at :].view(self.layout.num_microbatches, self.layout.record_width)
        rows[microbatch] = self._widened(values)

    def leave_out(self, microbatches: Collection[int]) -> None:
        """Expect no contribution of these, until the next reset: the mean is that of all others.

        Raises:
            InternalError: one of them was added here, beside others.
        """
        added = {microbatch for (_, microbatch), count in self._counts.items() if count}
        if added and added <= set(microbatches):
            self.reset()
        elif not added.isdisjoint(microbatches):
            raise InternalError(
                f"reduction {self.layout.layers}: micro-batches {sorted(added)} are in the sums, of which only "
                f"{sorted(microbatches)} were to be left out"
            )
        self._left_out = frozenset(microbatches)

    def reset(self) -> None:
        """Forget everything added; a message that was given away stays as it is."""
        self._left_out = frozenset()
        self._message: Tensor | None = None
        self._given = False
        self._has_counts = [0] * len(self.layout.shapes)
        self._not_finite = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def _own(self) -> Tensor:
        """Returns the memory of a message that nobody else has; a new one begins with zeros."""
        if self._message is None:
            self._message = fresh(self.layout.length, self._dtype, self._device).zero_()
        elif self._given:
            self._message = self._message.clone()
        else:
            return self._message
        self._given = False
        self._bind(self._message[: sum(self.layout.sizes)])
        return self._message

    def message(self, dissent: int = 0) -> Tensor:
        """Give the message away: it is not changed here any more. What is added later goes into a copy.

        Args:
            dissent: 1 if this owner is not ready for the generation that is prepared.
        """
        message = self._own()
        self._settle()
        order = [(layer, m) for layer in self.layout.layers for m in range(self.layout.num_microbatches)]
        counts = [*self._has_counts, self._not_finite_count(), dissent, *(self._counts[pair] for pair in order)]
        start = sum(self.layout.sizes)
        message[start : start + len(counts)] = torch.tensor(counts, dtype=self._dtype)
        self._given = True
        return message

    def decode(self, reduced: Tensor) -> Reduced:
        """Check a reduced message and take it apart.

        Args:
            reduced: the element-wise sum of all owners' messages.

        Raises:
            LedgerError: a micro-batch was not counted exactly once.
            InternalError: the message has another shape or type.
        """
        if reduced.shape != (self.layout.length,) or reduced.dtype != self._dtype:
            raise InternalError(
                f"reduction {self.layout.layers}: message is {reduced.dtype} {tuple(reduced.shape)},"
                f" expected {self._dtype} {(self.layout.length,)}"
            )
        sums, has, flags, ledger, rows = torch.split(reduced, self.layout.sections)
        self._check_ledger(ledger)
        means = self._means(sums)
        not_finite, dissent = (int(flag) for flag in flags.tolist())
        norm = _squared_norm(means)
        finite = not_finite == 0 and math.isfinite(norm)  # no squares of finite numbers of 32 bits are too many
        pieces = zip(torch.split(means, self.layout.sizes), self.layout.shapes, has.tolist(), strict=True)
        gradients = tuple(piece.view(shape) if count else None for piece, shape, count in pieces)
        records = self._narrowed(rows.view(self.layout.num_microbatches, self.layout.record_width))
        records.view(torch.int32)[sorted(self._left_out)] = _LEFT_OUT
        return Reduced(
            gradients=gradients,
            finite=finite,
            squared_norm=norm if finite else 0.0,
            records=records,
            dissent=dissent,
        )

    @property
    def _num_expected(self) -> int:
        return self.layout.num_microbatches - len(self._left_out)

    def _check_ledger(self, ledger: Tensor) -> None:
        if not self._left_out and bool((ledger == 1).all()):
            return
        rows = ledger.view(len(self.layout.layers), -1).tolist()
        for layer, row in zip(self.layout.layers, rows, strict=True):
            for microbatch, count in enumerate(row):
                if count != (microbatch not in self._left_out):
                    raise LedgerError(layer, microbatch, int(count))

    @abstractmethod
    def _bind(self, sums: Tensor) -> None:
        """Keep what is needed of the sums, which are in another place now; until a reset, as it keeps their memory."""

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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some elements of one parameter, which lie in one block."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def _pieces(sizes: Sequence[int], block: int) -> list[list[_Piece]]:
    """Returns what every block of so many elements consists of, where parameters of these sizes lie side by side."""
    found: list[list[_Piece]] = [[] for _ in range(0, sum(sizes), block)]
    at = 0
    for parameter, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + block - at % block)
            found[at // block].append(_Piece(parameter, start, stop))
            at, start = at + stop - start, stop
    return found


class ExactAccumulator(Accumulator):
    """Order-invariant sums: multiples of 2^-40 as int64.

    A contribution's elements must stay below 2^22 / (micro-batches × layers of the reduction) in absolute value; else,
    or if it is not finite, it is flagged and left out.

    Contributions are whole numbers that are held as float64 first, in the memory of the sums, because adding these is
    the cheapest. A bound on their elements is kept; before one could reach 2^52, where float64 would round, and for the
    message, they become int64 in place, and what comes later is added to that. So the result is that of integer
    additions throughout. All is done in blocks, so that it stays in a CPU's cache and needs no memory beyond.
    """

    _dtype = torch.int64

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        size = sum(layout.sizes)
        self._block = max(1, min(size, _block_of(device)))
        self._pieces = _pieces(layout.sizes, self._block)
        self._limit = 2.0 ** (_RANGE_BITS - _SCALE_BITS) / (layout.num_microbatches * len(layout.layers))

    def reset(self) -> None:
        """Forget everything added; a message that was given away stays as it is."""
        super().reset()
        self._blocks: tuple[Tensor, ...] = ()
        self._partial: tuple[Tensor, ...] = ()  # the same memory
        self._bound = 0.0  # no element of the sums is larger, as a gradient; 0: they are zero
        self._whole = False  # whether the sums are held as int64

    def _bind(self, sums: Tensor) -> None:
        self._blocks = torch.split(sums, self._block)
        self._partial = torch.split(sums.view(torch.float64), self._block)

    def _absorb(self, gradients: Sequence[Tensor | None]) -> None:
        found = [_largest(gradient) for gradient in gradients if gradient is not None]
        if not all(each < self._limit for each in found):
            self._not_finite += 1
            return
        largest = max(found, default=0.0)
        if largest == 0.0:  # of zeros with a sign the bits would not be those of a whole number
            return
        if self._bound + largest >= 2.0 ** (_PARTIAL_BITS - _SCALE_BITS):
            self._settle()
        scratch_wide = self._scratch(torch.float64)
        for number, scaled in self._in_blocks(gradients):
            wide = scratch_wide[: scaled.numel()]
            if self._whole:
                self._blocks[number].add_(wide.view(torch.int64).copy_(scaled))
            elif self._bound:
                self._partial[number].add_(wide.copy_(scaled))
            else:
                self._partial[number].copy_(scaled)
        self._bound += largest

    def _in_blocks(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """Yields each block of a contribution as whole numbers, with its number, in scratch space that all share."""
        flat = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
        scratch = self._scratch(torch.float32)
        for number, pieces in enumerate(self._pieces):
            yield number, self._scale([(flat[piece.parameter], piece) for piece in pieces], scratch)

    def _scratch(self, dtype: torch.dtype) -> Tensor:
        return fresh(self._block, dtype, self._device)

    def _scale(self, found: Sequence[tuple[Tensor | None, _Piece]], scratch: Tensor) -> Tensor:
        """Returns a block of a contribution as whole numbers, in scratch space."""
        parts = [
            scratch.new_zeros(piece.size) if flat is None else flat[piece.start : piece.stop] for flat, piece in found
        ]
        scaled = scratch[: sum(piece.size for _, piece in found)]
        if len(parts) == 1 and parts[0].dtype == torch.float32:
            torch.mul(parts[0], 2.0**_SCALE_BITS, out=scaled)  # a power of two: exact in float32
        else:
            torch.cat(parts, out=scaled).mul_(2.0**_SCALE_BITS)
        return scaled.round_()

    def _settle(self) -> None:
        """Hold the sums as int64, in the same memory."""
        if self._bound and not self._whole:
            wide = self._scratch(torch.float64)
            for block, partial in zip(self._blocks, self._partial, strict=True):
                block.copy_(wide[: block.numel()].view(torch.int64).copy_(partial))
        self._whole = True

    def _not_finite_count(self) -> int:
        return self._not_finite

    def _means(self, sums: Tensor) -> Tensor:
        means = fresh(sums.numel(), torch.float32, sums.device)
        divisor = 2.0**_SCALE_BITS * max(1, self._num_expected)
        wide = self._scratch(torch.float64)
        for mean, block in zip(torch.split(means, self._block), torch.split(sums, self._block), strict=True):
            mean.copy_(wide[: block.numel()].copy_(block).div_(divisor))
        return means

    def _widened(self, values: Tensor) -> Tensor:
        return values.view(torch.int32).to(torch.int64)  # the bits, so that a sum with zeros keeps them

    def _narrowed(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32).view(torch.float32)


class QueuedAccumulator(ExactAccumulator):
    """The same sums on a device whose operations are queued: integers from the first on, and it is asked nothing.

    Whether a contribution was finite and in range is found, and counted, on the device. It is in the sums all the same,
    which mean nothing then.
    """

    def reset(self) -> None:
        """Forget everything added; a message that was given away stays as it is."""
        super().reset()
        self._whole = True
        self._outside: Tensor | None = None  # how many blocks of contributions were

    def _absorb(self, gradients: Sequence[Tensor | None]) -> None:
        wide = self._scratch(torch.int64)
        for number, scaled in self._in_blocks(gradients):
            self._look_at(scaled)
            self._blocks[number].add_(wide[: scaled.numel()].copy_(scaled))

    def _look_at(self, scaled: Tensor) -> None:
        low, high = torch.aminmax(scaled)  # NaN if there is one
        limit = self._limit * 2.0**_SCALE_BITS
        outside = ((low > -limit) & (high < limit)).logical_not().to(torch.int64)
        self._outside = outside if self._outside is None else self._outside + outside

    def message(self, dissent: int = 0) -> Tensor:
        """See `Accumulator.message`."""
        message = super().message(dissent)
        if self._outside is not None:
            message[sum(self.layout.sizes) + len(self.layout.shapes)] += self._outside
        return message


class FastAccumulator(Accumulator):
    """Plain float32 sums: they depend on which worker computed which micro-batch, and in which order."""

    _dtype = torch.float32

    def reset(self) -> None:
        """Forget everything added; a message that was given away stays as it is."""
        super().reset()
        self._views: list[Tensor] = []

    def _bind(self, sums: Tensor) -> None:
        pieces = torch.split(sums, self.layout.sizes)
        self._views = [piece.view(shape) for piece, shape in zip(pieces, self.layout.shapes, strict=True)]

    def _absorb(self, gradients: Sequence[Tensor | None]) -> None:
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient)

    def _not_finite_count(self) -> int:
        return 0  # whatever is not finite stays so in the sums

    def _means(self, sums: Tensor) -> Tensor:
        return torch.div(sums, max(1, self._num_expected), out=fresh(sums.numel(), sums.dtype, sums.device))

    def _widened(self, values: Tensor) -> Tensor:
        return values

    def _narrowed(self, rows: Tensor) -> Tensor:
        return rows.clone()


def present(records: Tensor) -> Tensor:
    """Return the rows of records of the micro-batches that were not left out: float32 ``[at most all, width]``."""
    return records[records.view(torch.int32)[:, 0] != _LEFT_OUT] if records.numel() else records


def make_accumulator(numerics: Numerics, layout: Layout, device: torch.device | None = None) -> Accumulator:
    """Return the accumulator for these numerics.

    Raises:
        ConfigError: the numerics are unknown.
    """
    device = device or torch.device("cpu")
    exact = ExactAccumulator if device.type == "cpu" else QueuedAccumulator
    kinds: dict[str, type[Accumulator]] = {"exact": exact, "fast": FastAccumulator}
    if numerics not in kinds:
        raise ConfigError(f"numerics {numerics!r} is unknown, expected exact or fast")
    return kinds[numerics](layout, device)


def _largest(values: Tensor) -> float:
    """Return the largest absolute value in one pass; NaN if there is one, 0 if there are no values."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low.item()), float(high.item()))


def _squared_norm(values: Tensor) -> float:
    blocks = torch.split(values, _block_of(values.device))
    wide = (fresh(block.numel(), torch.float64, block.device).copy_(block) for block in blocks)
    squares = [torch.dot(block, block) for block in wide]  # all are queued before the first is waited for
    return math.fsum(each.item() for each in squares)


def _block_of(device: torch.device) -> int:
    """How many elements are worked on at a time."""
    return _BLOCK if device.type == "cpu" else _LARGE_BLOCK
