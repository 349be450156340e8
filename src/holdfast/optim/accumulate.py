"""Sums of gradients over micro-batches, in a fixed order, with a ledger of what was added.

A *reduction* is what the owners of some layers sum: one layer's own parameters, or the weights tied between several.
What a worker has of it are partial sums (`holdfast.core.sum_order`), each a float32 tensor of the gradients of all its
parameters in order. Additions are made in the order that the micro-batches have, whoever has computed them, so the sum
has the same bits for any workers. Its contribution to the sum of all owners are its parts, and a header:

    [ how many owners dissent from what the next step brings, how many parts and records follow: int32
    | per part: the place of its layer in the reduction, its first micro-batch, the one behind its last: int32
    | the micro-batches that records follow of: int32
    | their records: float32
    | per parameter: whether it had a gradient: uint8 ]

The parts of all owners are the ledger: each micro-batch of each layer must be in exactly one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy
import torch
from torch import Tensor

from holdfast.core.ids import Interval
from holdfast.core.sum_order import SumOrder
from holdfast.core.summing import Contribution, SumSize, Told, Total
from holdfast.devices.fresh import fresh
from holdfast.errors import ConfigError, InternalError, LedgerError

__all__ = ["Accumulator", "Layout", "Reduced", "check_dtype", "present"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEFT_OUT = 0x7FC0_1EF7  # bits of a float32 that is no number and that no computation gives
_BLOCK = 1 << 15  # elements whose squares 32 bits add up well; in a CPU's cache, in 64 bits too
_LARGE_BLOCK = 1 << 26  # elements that are worth a call of an accelerator, and take no more memory than need be


@dataclass(frozen=True)
class Layout:
    """What a reduction sums.

    Attributes:
        layers: the layers of the reduction, ascending.
        shapes: shapes of the parameters in order.
        num_microbatches: micro-batches of a step.
        record_width: float32 values recorded per micro-batch.
        chunks: in how many chunks they are cut, see `SumOrder.of`.
    """

    layers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_microbatches: int
    record_width: int
    chunks: int | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @cached_property
    def length(self) -> int:
        """Elements of the sum."""
        return sum(self.sizes)

    @cached_property
    def order(self) -> SumOrder:
        """The order of the additions."""
        return SumOrder.of(self.num_microbatches, self.chunks)

    @property
    def sum_size(self) -> SumSize:
        """How much an owner contributes at most: all micro-batches one by one, if they came in the worst order."""
        records = self.num_microbatches * self.record_width
        pairs = len(self.layers) * self.num_microbatches
        numbers = 3 + 3 * pairs + self.num_microbatches + records
        return SumSize(header=4 * numbers + len(self.shapes), part=4 * self.length, parts=pairs)

    @property
    def packed_bytes(self) -> int:
        """How long a packed sum is."""
        records = self.num_microbatches * self.record_width
        return 8 * (2 + len(self.shapes)) + 4 * (self.length + records)

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
        records = self.num_microbatches * self.record_width
        *found, rows = torch.split(numbers.clone().view(torch.float32), [*self.sizes, records])
        pieces = zip(found, self.shapes, has, strict=True)
        return Reduced(
            gradients=tuple(piece.view(shape).to(device) if there else None for piece, shape, there in pieces),
            finite=bool(finite),
            squared_norm=float(norm.clone().view(torch.float64).item()),
            records=rows.view(self.num_microbatches, self.record_width).to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What a sum over all owners says.

    Attributes:
        gradients: float32 mean over the micro-batches per parameter; None where no owner had a gradient.
        finite: whether the sum is; if not, the gradients are zero.
        squared_norm: float64 squared L2 norm of all gradients; 0 if not finite.
        records: float32 ``[num_microbatches, record_width]``; see `present` for those that were left out.
        dissent: how many owners are not ready for the generation that is prepared.
    """

    gradients: tuple[Tensor | None, ...]
    finite: bool
    squared_norm: float
    records: Tensor
    dissent: int = 0


@dataclass(frozen=True, slots=True)
class _Header:
    """What an owner says beside its parts."""

    dissent: int
    parts: tuple[tuple[int, Interval], ...]
    records: dict[int, numpy.ndarray]
    has: tuple[bool, ...]

    def pack(self) -> bytes:
        """See the head of this file."""
        parts = [number for place, interval in self.parts for number in (place, *interval)]
        numbers = [self.dissent, len(self.parts), len(self.records), *parts, *self.records]
        rows = b"".join(row.tobytes() for row in self.records.values())
        return numpy.array(numbers, "<i4").tobytes() + rows + bytes(self.has)

    @classmethod
    def unpack(cls, data: bytes, layout: Layout) -> _Header:
        """Reads what `pack` wrote.

        Raises:
            InternalError: it is none for this layout.
        """
        width = layout.record_width
        dissent, num_parts, num_records = numpy.frombuffer(data, "<i4", 3).tolist() if len(data) >= 12 else (0, 0, -1)
        rows_at = 12 + 4 * (3 * num_parts + num_records)
        has_at = rows_at + 4 * num_records * width
        if num_records < 0 or num_parts < 0 or len(data) != has_at + len(layout.shapes):
            raise InternalError(f"reduction {layout.layers}: {len(data)} bytes are no header of it")
        table = numpy.frombuffer(data, "<i4", 3 * num_parts, 12).reshape(-1, 3).tolist()
        numbers = numpy.frombuffer(data, "<i4", num_records, 12 + 12 * num_parts).tolist()
        of = layout.num_microbatches
        known = all(0 <= place < len(layout.layers) and 0 <= start < stop <= of for place, start, stop in table)
        if not known or not all(0 <= number < of for number in numbers):
            raise InternalError(f"reduction {layout.layers}: a header of other layers, or of other micro-batches")
        rows = numpy.frombuffer(data, "<f4", num_records * width, rows_at).reshape(num_records, width)
        parts = tuple((place, (start, stop)) for place, start, stop in table)
        return cls(dissent, parts, dict(zip(numbers, rows, strict=True)), tuple(map(bool, data[has_at:])))


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that gradients of this type can be accumulated.

    Raises:
        ConfigError: the type is neither float32, bfloat16 nor float16.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"parameter {name} is {dtype}, expected float32, bfloat16 or float16")


@dataclass(slots=True, eq=False)
class _Part:
    """The sum of the gradients of some micro-batches of a layer.

    Attributes:
        sums: of all parameters, float32; None: zeros, for which nobody has needed memory yet.
        views: the same, in the shapes of the parameters.
        given: whether it was given away, and is not changed any more.
    """

    sums: Tensor | None
    views: list[Tensor] = field(repr=False)
    given: bool = False


class Accumulator:
    """The sums and the ledger of one reduction on one worker.

    Cost: its parts, from the first contribution of a step until they were given away and reset.

    Args:
        layout: of the reduction.
        device: where the gradients are.
    """

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        self.layout = layout
        self._device = device or torch.device("cpu")
        self.reset()

    @property
    def counted(self) -> frozenset[tuple[int, int]]:
        """Each (layer, micro-batch) that was added here."""
        return frozenset(self._counted)

    def reset(self) -> None:
        """Forget everything added; what was given away stays as it is."""
        self._left_out: frozenset[int] = frozenset()
        self._parts: dict[int, dict[Interval, _Part]] = {layer: {} for layer in self.layout.layers}
        self._has = [False] * len(self.layout.shapes)
        self._records: dict[int, Tensor] = {}
        self._counted: set[tuple[int, int]] = set()

    @torch.no_grad()
    def add(self, layer: int, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients and count it.

        Args:
            layer: a layer of the reduction.
            microbatch: global number.
            gradients: one per parameter, of its shape; None where there is none.

        Raises:
            InternalError: the layer or the micro-batch is not of this reduction.
            LedgerError: it was added before.
        """
        if layer not in self.layout.layers or not 0 <= microbatch < self.layout.num_microbatches:
            raise InternalError(f"layer {layer}, micro-batch {microbatch} is not of reduction {self.layout.layers}")
        if (layer, microbatch) in self._counted:
            raise LedgerError(layer, microbatch, 2)
        for place, gradient in enumerate(gradients):
            self._has[place] |= gradient is not None
        self.layout.order.add(
            self._parts[layer],
            microbatch,
            begin=lambda: self._begun(gradients),
            onto=lambda part: self._grown(part, gradients),
            join=self._joined,
        )
        self._counted.add((layer, microbatch))

    @torch.no_grad()
    def add_sums(self, sums: Sequence[Tensor | None]) -> None:
        """Add what the gradients of micro-batches have come to that were counted one by one, as none, by `add`.

        The bits of the sum are not those of its order then.

        Args:
            sums: one per parameter, of its shape; None where there was no gradient.
        """
        parts = next((parts for parts in self._parts.values() if parts), None)
        if parts is None:
            raise InternalError(f"reduction {self.layout.layers}: sums of micro-batches that were not counted")
        for place, each in enumerate(sums):
            self._has[place] |= each is not None
        interval = min(parts)
        parts[interval] = self._grown(parts[interval], sums)

    def record(self, microbatch: int, values: Tensor) -> None:
        """Store a micro-batch's record: float32 ``[record_width]``."""
        self._records[microbatch] = values.detach().clone()

    def leave_out(self, microbatches: Collection[int]) -> None:
        """Expect no contribution of these, until the next reset: the mean is that of all others.

        Raises:
            InternalError: one of them was added here, beside others.
        """
        added = {microbatch for _, microbatch in self._counted}
        if added and added <= set(microbatches):
            self.reset()
        elif not added.isdisjoint(microbatches):
            raise InternalError(
                f"reduction {self.layout.layers}: micro-batches {sorted(added)} are in the sums, of which only "
                f"{sorted(microbatches)} were to be left out"
            )
        self._left_out = frozenset(microbatches)

    def message(self, dissent: int = 0) -> Contribution:
        """Give away what there is: it is not changed here any more. What is added later goes into copies.

        Args:
            dissent: 1 if this owner is not ready for the generation that is prepared.
        """
        found = [
            (place, interval, part)
            for place, layer in enumerate(self.layout.layers)
            for interval, part in sorted(self._parts[layer].items(), key=lambda item: item[0])
        ]
        for _, _, part in found:
            part.given = True
        header = _Header(
            dissent=dissent,
            parts=tuple((place, interval) for place, interval, _ in found),
            records=self._recorded(),
            has=tuple(self._has),
        )
        parts = tuple(self._filled(part) for _, _, part in found) if self.layout.length else ()
        return Contribution(header.pack(), parts, self.layout.length, partial(_mean, self.layout, self._left_out))

    def _recorded(self) -> dict[int, numpy.ndarray]:
        """The records by micro-batch, on the host: one copy of all of them, which is waited for."""
        if not self._records:
            return {}
        numbers = sorted(self._records)
        rows = torch.stack([self._records[number] for number in numbers]).cpu().numpy()
        return dict(zip(numbers, rows, strict=True))

    def decode(self, summed: Total) -> Reduced:
        """Check what came of the sum over all owners, and take it apart.

        Raises:
            LedgerError: a micro-batch was not counted exactly once.
            InternalError: it is not of this reduction.
        """
        means, layout = summed.total, self.layout
        if means.shape != (layout.length,) or means.dtype != torch.float32:
            raise InternalError(
                f"reduction {layout.layers}: the sum is {means.dtype} {tuple(means.shape)},"
                f" expected {torch.float32} {(layout.length,)}"
            )
        headers = [_Header.unpack(each, layout) for each in summed.headers]
        _check_ledger(layout, self._left_out, headers)
        norm = _squared_norm(means)
        finite = math.isfinite(norm)
        if not finite:  # who updates ahead of the verdict has to be able to take that back
            means = torch.zeros_like(means)
        has = (any(each) for each in zip(*(header.has for header in headers), strict=True))
        pieces = zip(torch.split(means, layout.sizes), layout.shapes, has, strict=True)
        gradients = tuple(piece.view(shape) if there else None for piece, shape, there in pieces)
        records = numpy.zeros((layout.num_microbatches, layout.record_width), numpy.float32)
        for header in headers:
            for number, row in header.records.items():
                records[number] = row
        if self._left_out:
            records.view(numpy.int32)[sorted(self._left_out)] = _LEFT_OUT
        return Reduced(
            gradients=gradients,
            finite=finite,
            squared_norm=norm if finite else 0.0,
            records=torch.from_numpy(records).to(self._device),
            dissent=sum(header.dissent for header in headers),
        )

    def _new(self) -> _Part:
        return _Part(*self._room())

    def _room(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for a part, and the same in the shapes of the parameters."""
        sums = fresh(self.layout.length, torch.float32, self._device)
        pieces = zip(torch.split(sums, self.layout.sizes), self.layout.shapes, strict=True)
        return sums, [piece.view(shape) for piece, shape in pieces]

    def _begun(self, gradients: Sequence[Tensor | None]) -> _Part:
        """Returns a part that begins with gradients, on zeros: absent ones and zeros of either sign add alike."""
        if all(gradient is None for gradient in gradients):
            return _Part(None, [])
        part = self._new()
        for view, gradient in zip(part.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                torch.add(gradient, 0.0, out=view)
        return part

    def _grown(self, part: _Part, gradients: Sequence[Tensor | None]) -> _Part:
        """Returns the sum of a part and gradients, in its memory if nobody else has it."""
        if part.sums is None:
            return self._begun(gradients)
        if part.given:
            given, part = part.sums, self._new()
            self._filled(part).copy_(given)
        for view, gradient in zip(part.views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient)
        return part

    def _joined(self, one: _Part, other: _Part) -> _Part:
        """Returns the sum of two parts, in the memory of one that nobody else has."""
        if one.sums is None or other.sums is None:
            return other if one.sums is None else one
        into = self._new() if one.given and other.given else other if one.given else one
        torch.add(one.sums, other.sums, out=into.sums)
        return into

    def _filled(self, part: _Part) -> Tensor:
        """Returns the numbers of a part, in memory from now on."""
        if part.sums is None:
            part.sums, part.views = self._room()
            part.sums.zero_()
        return part.sums


def _ledger(layout: Layout, headers: Sequence[_Header]) -> Iterator[tuple[int, int, int]]:
    """Yields each layer and micro-batch, and how often it counts."""
    counts: Counter[tuple[int, int]] = Counter()
    for header in headers:
        for place, (start, stop) in header.parts:
            counts.update((place, number) for number in range(start, stop))
    for place, layer in enumerate(layout.layers):
        for number in range(layout.num_microbatches):
            yield layer, number, counts[place, number]


def _check_ledger(layout: Layout, left_out: Collection[int], headers: Sequence[_Header]) -> None:
    if not left_out and _follow_on(layout, headers):
        return
    for layer, microbatch, count in _ledger(layout, headers):
        if count != (microbatch not in left_out):
            raise LedgerError(layer, microbatch, count)


def _follow_on(layout: Layout, headers: Sequence[_Header]) -> bool:
    """Whether the parts of each layer follow one on the other, from the first micro-batch to the last."""
    ends = [0] * len(layout.layers)
    for place, (start, stop) in sorted(part for header in headers for part in header.parts):
        if start != ends[place]:
            return False
        ends[place] = stop
    return all(end == layout.num_microbatches for end in ends)


@torch.no_grad()
def _mean(layout: Layout, left_out: frozenset[int], told: Sequence[Told], length: int) -> Tensor:
    """Returns the mean of what all owners have told of a reduction, or of a share of its elements.

    Layers of a reduction are added ascending.
    """
    headers = [_Header.unpack(each.header, layout) for each in told]
    _check_ledger(layout, left_out, headers)
    if not layout.length:
        return torch.zeros(0)
    found: dict[int, dict[Interval, _Share]] = {place: {} for place in range(len(layout.layers))}
    for each, header in zip(told, headers, strict=True):
        if len(header.parts) != len(each.parts):
            raise InternalError(f"reduction {layout.layers}: {len(each.parts)} parts, and a header of others")
        for (place, interval), part in zip(header.parts, each.parts, strict=True):
            found[place][interval] = _Share(part, each.kept)
    total: _Share | None = None
    for parts in found.values():
        of_layer = layout.order.total(parts, left_out, _Share.plus)
        if of_layer is not None:
            total = of_layer if total is None else total.plus(of_layer)
    counted = layout.num_microbatches - len(left_out)
    if total is None:  # all were left out
        return torch.zeros(length)
    return torch.div(total.numbers, counted, out=total.room.numbers)


@dataclass(frozen=True, slots=True)
class _Share:
    """A part, or some elements of it; ``kept``: somebody else needs it as it is."""

    numbers: Tensor
    kept: bool

    @property
    def room(self) -> _Share:
        """Where a result may go: here, if nobody else needs what is here."""
        return (
            self
            if not self.kept
            else _Share(fresh(self.numbers.numel(), torch.float32, self.numbers.device), kept=False)
        )

    def plus(self, other: _Share) -> _Share:
        into = self.room if other.kept else other
        torch.add(self.numbers, other.numbers, out=into.numbers)
        return into


def present(records: Tensor) -> Tensor:
    """Return the rows of records of the micro-batches that were not left out: float32 ``[at most all, width]``."""
    return records[records.view(torch.int32)[:, 0] != _LEFT_OUT] if records.numel() else records


def _squared_norm(values: Tensor) -> float:
    """The sum of the squares, of which those below 1e-38 may count as none; not finite if a value is not."""
    found = _sum_of_squares(values, torch.float32)
    # Squares of numbers of 32 bits may be too many for 32 bits, and never for 64.
    return found if math.isfinite(found) else _sum_of_squares(values, torch.float64)


def _sum_of_squares(values: Tensor, dtype: torch.dtype) -> float:
    blocks = (block.to(dtype) for block in torch.split(values, _block_of(values.device)))
    squares = [torch.dot(block, block) for block in blocks]  # all are queued before the first is waited for
    return math.fsum(each.item() for each in squares)


def _block_of(device: torch.device) -> int:
    """How many elements are worked on at a time."""
    return _BLOCK if device.type == "cpu" else _LARGE_BLOCK
