"""Sums over workers, made by whoever reads what the others contribute, while the worker computes.

Short ones, and those of two workers, are sent whole from each to each, and everybody adds. Of longer ones every worker
adds one part of all, and sends that to the others: then nobody sends more than twice what it has. Where the order of
additions changes nothing, each part is added as it comes, out of the reader's buffer. Where it does (rounded numbers of
more than two workers), they are added in the order of the workers, by everybody alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy
import torch

from holdfast.core.ids import WorkerId
from holdfast.devices.fresh import Memory, host_memory
from holdfast.runtime.transport.framing import KNOWN_TO_NUMPY
from holdfast.runtime.transport.links.inbox import Inbox, Incoming
from holdfast.runtime.transport.links.parts import goes_whole
from holdfast.runtime.transport.links.wire import Kind, Label, label_of_sum
from holdfast.runtime.transport.port import SumKey

__all__ = ["Summing"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one other worker is to send, and the place for it."""

    source: WorkerId
    label: Label
    incoming: Incoming
    place: torch.Tensor

    def bring(self) -> None:
        """Puts into its place what came before that was known."""
        data = self.incoming.data
        if data is not None and data.data_ptr() != self.place.data_ptr():
            self.place.view(torch.uint8).copy_(data)


class Summing:
    """One sum under way, of a tensor that is not empty.

    Args:
        key: which.
        worker: who we are, one of at least two.
        own: what we contribute; nobody changes it any more.
        inbox: where the others' contributions come.
        send: sends to another worker.
        memory: of what others contribute, and of the sum.
    """

    def __init__(
        self,
        key: SumKey,
        worker: WorkerId,
        own: torch.Tensor,
        inbox: Inbox,
        send: Callable[[WorkerId, Label, memoryview], None],
        memory: Memory = host_memory,
    ) -> None:
        self._memory = memory
        self._key, self._worker, self._inbox, self._send = key, worker, inbox, send
        self._members = key.reduction.workers
        self._others = tuple(member for member in self._members if member != worker)
        self._shape = own.shape
        self._own = own.detach().contiguous().view(-1)
        self._total = memory(self._own.nbytes).view(self._own.dtype)
        self._whole = goes_whole(self._own.nbytes, len(self._members))
        # What comes is folded in under the lock where the order does not matter; else all is added, outside it, by
        # whoever brings `_missing` to 0. Others' shares of `_total` come straight into it. It is whole once `_open` is
        # 0.
        self._lock = threading.Lock()
        self._asked: list[_Asked] = []
        self._open = 1 if self._whole else 1 + len(self._others)
        self._missing = 0

    def start(self) -> None:
        """Asks for the others' contributions, so that what comes is never parked, and sends ours."""
        self._ask_for_parts()
        if not self._whole:
            self._ask(Kind.TOTAL, {other: self._share(self._total, other) for other in self._others}, self._finish)
        for other in self._others:
            self._tell(other, Kind.PART, self._own if self._whole else self._share(self._own, other))

    @property
    def ready(self) -> bool:
        """See :class:`holdfast.runtime.transport.port.SumHandle`."""
        return not self._missing_workers()

    def wait(self) -> torch.Tensor:
        """See :class:`holdfast.runtime.transport.port.Handle`."""
        self._inbox.wait(self._key.generation, self._missing_workers)
        for asked in self._asked:
            self._inbox.forget(asked.source, asked.label, asked.incoming)
            if asked.label.kind is Kind.TOTAL:
                asked.bring()
        self._asked.clear()  # what was parked of them goes
        return self._total.view(self._shape)

    def _missing_workers(self) -> Collection[WorkerId]:
        """Whose numbers are still to come; ourselves, if only adding is left."""
        if not self._open or any(asked.incoming.wrong for asked in self._asked):
            return ()
        return [asked.source for asked in self._asked if not asked.incoming.complete] or (self._worker,)

    def _share(self, tensor: torch.Tensor, member: WorkerId) -> torch.Tensor:
        """The part that a member adds up."""
        number, of, size = self._members.index(member), len(self._members), tensor.numel()
        return tensor[size * number // of : size * (number + 1) // of]

    def _tell(self, other: WorkerId, kind: Kind, part: torch.Tensor) -> None:
        self._send(other, label_of_sum(self._key, kind), part.view(torch.uint8).numpy().data)

    def _ask(self, kind: Kind, places: Mapping[WorkerId, torch.Tensor], then: Callable[[], None]) -> None:
        label, asked = label_of_sum(self._key, kind), []
        for other, place in places.items():
            incoming = self._inbox.expect(other, label, place.view(torch.uint8), then)
            asked.append(_Asked(other, label, incoming, place))
        self._asked += asked

    def _ask_for_parts(self) -> None:
        """Asks every other worker for its contribution to what we add up."""
        own, total = self._own, self._total
        if not self._whole:
            own, total = self._share(own, self._worker), self._share(total, self._worker)
        if own.dtype in KNOWN_TO_NUMPY and (len(self._others) == 1 or not own.is_floating_point()):
            self._missing = len(self._others) * own.nbytes
            base = own if len(self._others) == 1 else total.copy_(own)
            for other in self._others:
                self._ask_to_fold(other, base, total)
        else:
            self._missing = len(self._others) + 1
            then = partial(self._came, own, total)
            places = {other: self._memory(own.nbytes).view(own.dtype) for other in self._others}
            self._ask(Kind.PART, places, then)
            then()

    def _ask_to_fold(self, other: WorkerId, base: torch.Tensor, total: torch.Tensor) -> None:
        """Asks for a contribution, to be added as it comes; of two, one that is here already becomes the total."""
        label = label_of_sum(self._key, Kind.PART)
        fold = partial(self._fold, base.numpy(), total.numpy())
        incoming, parked = self._inbox.fold(other, label, base.nbytes, fold)
        self._asked.append(_Asked(other, label, incoming, base))
        if parked is None:
            return
        if base is not total and len(parked) == base.nbytes:
            self._total = total = parked.view(base.dtype)
        self._fold(base.numpy(), total.numpy(), 0, parked.numpy().data)

    def _fold(self, base: numpy.ndarray, total: numpy.ndarray, offset: int, part: memoryview) -> None:
        """Adds what has come of one contribution to what is there: all before it, or ours alone."""
        numbers = numpy.frombuffer(part, total.dtype)
        begin = offset // total.itemsize
        place = slice(begin, begin + len(numbers))
        with self._lock:
            numpy.add(base[place], numbers, out=total[place])
            self._missing -= len(part)
            done = not self._missing
        if done:
            self._added()

    def _came(self, own: torch.Tensor, total: torch.Tensor) -> None:
        """One more contribution is here, or all have been asked for: adds them up in their order once they are here."""
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        parts = {asked.source: asked for asked in self._asked if asked.label.kind is Kind.PART}
        if any(asked.incoming.wrong for asked in parts.values()):
            return
        for asked in parts.values():
            asked.bring()
        first, *others = (own if member == self._worker else parts[member].place for member in self._members)
        total.copy_(first)
        for other in others:
            total += other
        self._added()

    def _added(self) -> None:
        """What we add up is complete."""
        if not self._whole:
            share = self._share(self._total, self._worker)
            for other in self._others:
                self._tell(other, Kind.TOTAL, share)
        self._finish()

    def _finish(self) -> None:
        """One of the things is there that the sum consists of."""
        with self._lock:
            self._open -= 1
            done = not self._open
        if done:
            self._inbox.wake()
