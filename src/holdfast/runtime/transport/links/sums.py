"""Sums over workers, made by whoever reads what the others contribute, while the worker computes.

Short ones, and those of two workers, are sent whole from each to each, and everybody adds. Of longer ones every worker
adds one share of the elements, and sends that to the others: then nobody sends more than twice what it has. What is
added in which order the contributions themselves say; it is done once all of them are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution, Told, Total
from holdfast.devices.device import HOST, Device
from holdfast.devices.fresh import Memory, host_memory
from holdfast.errors import HoldfastError
from holdfast.runtime.transport.framing import Body, body_of
from holdfast.runtime.transport.links.inbox import Inbox, Incoming
from holdfast.runtime.transport.links.parts import COUNT_BYTES, goes_whole
from holdfast.runtime.transport.links.wire import Kind, Label, label_of_sum
from holdfast.runtime.transport.port import SumKey

__all__ = ["Summing"]


class Send(Protocol):
    """See `ConnectionManager.send`."""

    def __call__(self, to: WorkerId, label: Label, body: Body, /, *, more: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one other worker is to send."""

    source: WorkerId
    label: Label
    incoming: Incoming

    @property
    def data(self) -> torch.Tensor:
        """Where it has come, bytes."""
        assert self.incoming.data is not None, "what is complete and of the right size has a place"
        return self.incoming.data


class Summing:
    """One sum under way.

    Args:
        key: which.
        worker: who we are, one of at least two.
        own: what we contribute.
        inbox: where the others' contributions come.
        send: sends to another worker.
        memory: of the sum, where what we contribute is in the host's memory.
        device: on which a sum is made, beside the computation, of which a part is there.
    """

    def __init__(
        self,
        key: SumKey,
        worker: WorkerId,
        own: Contribution,
        inbox: Inbox,
        send: Send,
        memory: Memory = host_memory,
        device: Device = HOST,
    ) -> None:
        self._memory, self._device = memory, device
        self._key, self._worker, self._inbox, self._send = key, worker, inbox, send
        self._members = key.reduction.workers
        self._others = tuple(member for member in self._members if member != worker)
        self._own = own
        self._dtype = own.parts[0].dtype if own.parts else torch.float32
        self._whole = goes_whole(own.length * self._dtype.itemsize, len(self._members))
        # Whoever brings `_missing` to 0 folds, outside the lock. Others' shares of `_total` come straight into it; it
        # is whole once `_open` is 0.
        self._lock = threading.Lock()
        self._headers: dict[WorkerId, _Asked] = {}
        self._parts: dict[WorkerId, list[_Asked]] = {other: [] for other in self._others}
        self._shares: list[tuple[_Asked, torch.Tensor]] = []
        self._total: torch.Tensor | None = None
        self._error: HoldfastError | None = None
        self._missing = len(self._others) + 1
        self._open = 1 if self._whole else 1 + len(self._others)

    def start(self) -> None:
        """Asks for the others' contributions, so that what comes is never parked, and sends ours."""
        for other in self._others:
            self._headers[other] = self._ask(other, Kind.HEADER, 0, partial(self._heard, other))
        if not self._whole:
            self._total = self._room(self._own.length)
            for other in self._others:
                place = self._share(self._total, other)
                straight = place if place.is_cpu else None
                asked = self._ask(other, Kind.TOTAL, 0, self._finish, straight, size=place.nbytes)
                self._shares.append((asked, place))
        header = memoryview(len(self._own.parts).to_bytes(COUNT_BYTES, "little") + self._own.header)
        for other in self._others:
            self._send(other, label_of_sum(self._key, Kind.HEADER), header, more=bool(self._own.parts))
            last = len(self._own.parts) - 1
            for number, part in enumerate(self._own.parts):
                part = part if self._whole else self._share(part, other)
                self._tell(other, Kind.PART, number, part, more=number < last)
        self._came()

    @property
    def ready(self) -> bool:
        """See :class:`holdfast.runtime.transport.port.SumHandle`."""
        return not self._missing_workers()

    def wait(self) -> Total:
        """See :class:`holdfast.runtime.transport.port.SumHandle`."""
        self._inbox.wait(self._key.generation, self._missing_workers)
        for asked in self._all_asked():
            self._inbox.forget(asked.source, asked.label, asked.incoming)
        if self._error is not None:
            raise self._error
        for asked, place in self._shares:
            if asked.data.data_ptr() != place.data_ptr():  # it came another way, or too early to know its place
                with self._device.beside():
                    place.view(torch.uint8).copy_(asked.data, non_blocking=not place.is_cpu)
        headers = tuple(self._own.header if m == self._worker else self._header_of(m) for m in self._members)
        for parts in self._parts.values():
            parts.clear()  # what has come of them goes
        assert self._total is not None, "it is there once nothing is missing"
        return Total(self._total, headers)

    def _all_asked(self) -> list[_Asked]:
        parts = (asked for each in self._parts.values() for asked in list(each))
        return [*self._headers.values(), *parts, *(asked for asked, _ in self._shares)]

    def _missing_workers(self) -> Collection[WorkerId]:
        """Whose numbers are still to come; ourselves, if only adding is left."""
        asked = self._all_asked()
        if not self._open or self._error is not None or any(each.incoming.wrong for each in asked):
            return ()
        return [each.source for each in asked if not each.incoming.complete] or (self._worker,)

    def _bounds(self, member: WorkerId) -> tuple[int, int]:
        """Which elements a member adds up: the first one, and the one behind the last."""
        number, of, size = self._members.index(member), len(self._members), self._own.length
        return size * number // of, size * (number + 1) // of

    def _share(self, tensor: torch.Tensor, member: WorkerId) -> torch.Tensor:
        start, stop = self._bounds(member)
        return tensor[start:stop]

    def _room(self, length: int) -> torch.Tensor:
        """Memory for the sum, where what we contribute is."""
        if not self._own.parts or self._own.parts[0].is_cpu:
            return self._memory(length * self._dtype.itemsize).view(self._dtype)
        with self._device.beside():
            return torch.empty(length, dtype=self._dtype, device=self._device.torch)

    def _tell(self, other: WorkerId, kind: Kind, number: int, part: torch.Tensor, *, more: bool = False) -> None:
        self._send(other, label_of_sum(self._key, kind, number), body_of(part), more=more)

    def _ask(
        self,
        other: WorkerId,
        kind: Kind,
        number: int,
        then: Callable[[Incoming], None],
        place: torch.Tensor | None = None,
        *,
        size: int | None = None,
    ) -> _Asked:
        label = label_of_sum(self._key, kind, number)
        data = None if place is None else place.view(torch.uint8)
        return _Asked(other, label, self._inbox.expect(other, label, data, then, size=size))

    def _heard(self, other: WorkerId, header: Incoming) -> None:
        """It is known how many parts another worker contributes: now they can be asked for."""
        assert header.data is not None, "a header is of any size"
        count = int.from_bytes(bytes(header.data[:COUNT_BYTES].numpy()), "little")
        start, stop = (0, self._own.length) if self._whole else self._bounds(self._worker)
        with self._lock:
            self._missing += count
        size = (stop - start) * self._dtype.itemsize
        for number in range(count):
            self._parts[other].append(self._ask(other, Kind.PART, number, self._came, size=size))
        self._came()

    def _header_of(self, other: WorkerId) -> bytes:
        return bytes(self._headers[other].data[COUNT_BYTES:].numpy())

    def _came(self, _: Incoming | None = None) -> None:
        """One thing more is here, or all have been asked for: folds them once all are here."""
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        if any(asked.incoming.wrong for each in self._parts.values() for asked in each):
            return
        told = [self._told_by(member) for member in self._members]
        device = HOST if all(part.is_cpu for each in told for part in each.parts) else self._device
        try:
            with device.beside():
                self._fold([_on(device, each) for each in told])
        except HoldfastError as error:
            self._error = error
            self._inbox.wake()
            return
        self._finish()

    def _fold(self, told: list[Told]) -> None:
        start, stop = (0, self._own.length) if self._whole else self._bounds(self._worker)
        total = self._own.fold(told, stop - start)
        if self._whole:
            self._total = total
            return
        assert self._total is not None, "it was made as this began"
        share = self._share(self._total, self._worker)
        share.copy_(total)
        for other in self._others:
            self._tell(other, Kind.TOTAL, 0, share)

    def _told_by(self, member: WorkerId) -> Told:
        """What a member contributes to what we add up."""
        if member == self._worker:
            parts = self._own.parts
            return Told(self._own.header, parts if self._whole else [self._share(part, member) for part in parts])
        came = [asked.data.view(self._dtype) for asked in self._parts[member]]
        return Told(self._header_of(member), came, kept=False)

    def _finish(self, _: Incoming | None = None) -> None:
        """One of the things is there that the sum consists of."""
        with self._lock:
            self._open -= 1
            done = not self._open
        if done:
            self._inbox.wake()


def _on(device: Device, told: Told) -> Told:
    """The same with all parts on a device."""
    return replace(told, parts=[part.to(device.torch, non_blocking=True) for part in told.parts])
