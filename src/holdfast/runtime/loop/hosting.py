"""What a loop is, and what carries it in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.data.feeds import Feed
from holdfast.devices.device import Device
from holdfast.runtime.loop.leftovers import meet_leftovers
from holdfast.runtime.loop.prepared import Prepared
from holdfast.runtime.loop.stage import LoopStage
from holdfast.runtime.loop.turns import Turns

__all__ = ["Host", "Loop", "host", "hosted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a script says of its loop, the same in every process.

    Attributes:
        seed: of all that is drawn.
        prepared: what is trained.
        dataset: what the script loops over.
        feed: how items are made of it.
        microbatches: items of a step, over all workers.
        size: samples of an item.
        steps: how many steps there are.
        logs: names of what is logged of items.
        sum_chunks: in how many chunks items are cut for their sum; None: see `holdfast.core.sum_order.SumOrder.of`.
    """

    seed: int
    prepared: Prepared
    dataset: Any
    feed: Feed
    microbatches: int
    size: int
    steps: int
    logs: tuple[str, ...] = ()
    sum_chunks: int | None = None


class Host(Protocol):
    """What carries a loop in this process."""

    @property
    def per_gradient(self) -> bool:
        """Whether each gradient is summed by itself."""

    @property
    def worker(self) -> str:
        """Who this process is."""

    @property
    def device(self) -> Device:
        """What the loop computes on."""

    @property
    def untried(self) -> bool:
        """Whether nobody has tried the first item before: what it leaves is compared bit by bit then."""

    @property
    def deadline(self) -> float:
        """When the loop is to be stopped, in seconds since the epoch; infinite: by no time."""

    def ended(self) -> None:
        """The script's loop has come to its end: it was not left before, by ``break`` or an exception."""

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """Begins to take turns with the loop; returns what tells which engine computes by it now."""

    def is_first(self) -> bool:
        """Whether this worker is the first of those that live, as of the step that runs."""


_hosts: list[Host] = []
"""None or one: a process is one worker, for life."""


def hosted(by: Host) -> None:
    """From now on the loop of this process is carried by this, and calls for torch's own launcher are met."""
    _hosts[:] = [by]

    def say(text: str) -> None:
        if by.is_first():
            print(text, file=sys.stderr, flush=True)

    meet_leftovers(say, by.is_first)


def host() -> Host | None:
    """Returns what carries the loop of this process; None if nothing does yet."""
    return _hosts[0] if _hosts else None
