"""A transport whose messages take as long as on the links of a profile, over one that is faster.

The sender's clock travels with each message, and whoever takes it waits until it would have arrived. So neither end is
held up while a message is under way, and several may be under way at once. All workers must be on one machine, where
they share the monotonic clock.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy
import torch

from holdfast.core.ids import WorkerId
from holdfast.core.profile import Link
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import StaleGeneration
from holdfast.runtime.tensors import num_bytes
from holdfast.runtime.transport.around import TransportAround
from holdfast.runtime.transport.framing import framed, unframed
from holdfast.runtime.transport.port import Expected, MessageHandle, MessageKey, Transport

__all__ = ["DelayedTransport"]

_STAMP = struct.Struct("<d")


class DelayedTransport(TransportAround):
    """See :class:`holdfast.runtime.transport.port.Transport`; reductions are not delayed.

    Args:
        inner: what carries everything.
        link: how long messages take.
        bytes_of: size that an incoming message is to have, if larger than it is; asked when its receive begins.
        clock: seconds, the same for all workers.
    """

    def __init__(
        self,
        inner: Transport,
        link: Link,
        bytes_of: Callable[[MessageKey], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._link = link
        self._bytes_of = bytes_of
        self._clock = clock
        # Under `_changed`: set by whoever aborts, so that those who wait in `_wait_until` end.
        self._aborted = 0
        self._changed = threading.Condition()

    def build(
        self,
        generation: int,
        groups: tuple[tuple[WorkerId, ...], ...],
        neighbours: tuple[WorkerId, ...] = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """See Transport.build."""
        stamped = None
        if expected is not None:
            messages = tuple((receive, _stamped(spec)) for receive, spec in expected.messages)
            stamped = replace(expected, messages=messages)
        super().build(generation, groups, neighbours, step=step, expected=stamped)

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """See Transport.send."""
        super().send(key, peer, framed(_STAMP.pack(self._clock()), tensor))

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> _Travelling:
        """See Transport.receive; the handle's ``wait`` ends when the message would have arrived."""
        delay_s = self._link.seconds_of(max(num_bytes(spec), self._bytes_of(key)))
        return _Travelling(self, super().receive(key, peer, _stamped(spec)), spec, key.generation, delay_s)

    def abort(self, generation: int) -> None:
        """See Transport.abort."""
        with self._changed:
            self._aborted = max(self._aborted, generation)
            self._changed.notify_all()
        super().abort(generation)

    def _wait_until(self, moment: float, generation: int) -> None:
        with self._changed:
            while self._aborted < generation:
                left = moment - self._clock()
                if left <= 0:
                    return
                self._changed.wait(left)
            raise StaleGeneration(generation)


def _stamped(spec: TensorSpec) -> TensorSpec:
    """What a message is like with the sender's clock before it."""
    return TensorSpec(shape=(_STAMP.size + num_bytes(spec),), dtype="uint8")


class _Travelling:
    """A message that may have come already, but is not here yet."""

    def __init__(
        self, transport: DelayedTransport, handle: MessageHandle, spec: TensorSpec, generation: int, delay_s: float
    ) -> None:
        self._transport = transport
        self._handle = handle
        self._spec = spec
        self._generation = generation
        self._delay_s = delay_s

    def wait(self) -> torch.Tensor:
        frame = self._handle.wait().numpy()
        self._transport._wait_until(self._arrival(frame), self._generation)
        return unframed(frame, _STAMP.size, self._spec)

    def kept(self) -> torch.Tensor | None:
        found = self._handle.kept()
        if found is None or self._arrival(found.numpy()) > self._transport._clock():
            return None
        return unframed(found.numpy(), _STAMP.size, self._spec)

    def _arrival(self, frame: numpy.ndarray) -> float:
        (sent_s,) = _STAMP.unpack_from(frame.data)
        return float(sent_s) + self._delay_s
