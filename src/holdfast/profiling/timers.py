"""Stopwatches for the two kinds of device: the host's clock, and events in the stream of a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

__all__ = ["CudaTimer", "HostTimer", "Timer", "timer_for"]

T = TypeVar("T")


class Timer(ABC):
    """Times pieces of work; pieces of the same name add up until they are settled as one sample.

    Attributes:
        samples: what was settled, in seconds, by name.
    """

    def __init__(self) -> None:
        self.samples: dict[Hashable, list[float]] = defaultdict(list)
        self._pieces: dict[Hashable, list[tuple[Any, Any]]] = defaultdict(list)

    def time(self, name: Hashable, work: Callable[[], T]) -> T:
        """Does a piece of work, times it and returns what it returned."""
        start = self._mark()
        result = work()
        self._pieces[name].append((start, self._mark()))
        return result

    def settle(self) -> None:
        """Makes the pieces since the last time into one sample of each name."""
        self._wait()
        for name, pieces in self._pieces.items():
            self.samples[name].append(sum(self._between(start, end) for start, end in pieces))
        self._pieces.clear()

    def forget(self) -> None:
        """Drops everything: what was measured so far was to get warm."""
        self._wait()
        self._pieces.clear()
        self.samples.clear()

    @abstractmethod
    def _mark(self) -> Any:
        """Marks now."""

    @abstractmethod
    def _wait(self) -> None:
        """Waits until every mark has been passed."""

    @abstractmethod
    def _between(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks."""


class HostTimer(Timer):
    """Reads the host's clock: right where an operation is done when its call returns."""

    def _mark(self) -> int:
        return time.perf_counter_ns()

    def _wait(self) -> None:
        """All marks are passed."""

    def _between(self, start: int, end: int) -> float:
        return (end - start) * 1e-9


class CudaTimer(Timer):
    """Puts events into the current stream of a GPU, since calls return before their work is done."""

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _wait(self) -> None:
        torch.cuda.synchronize()

    def _between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3


def timer_for(device: torch.device) -> Timer:
    """Returns the timer for a device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()
