"""What a loop is, and what carries it in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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
        dataset: items by index.
        microbatches: items of a step, over all workers.
        size: samples of an item.
        steps: how many steps there are.
        logs: names of what is logged of items.
    """

    seed: int
    prepared: Prepared
    dataset: Any
    microbatches: int
    size: int
    steps: int
    logs: tuple[str, ...] = ()


class Host(Protocol):
    """What carries a loop in this process."""

    @property
    def per_gradient(self) -> bool:
        """Whether each gradient is summed by itself."""

    @property
    def worker(self) -> str:
        """Who this process is."""

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """Begins to take turns with the loop; returns what tells which engine computes by it now."""

    def is_first(self) -> bool:
        """Whether this worker is the first of those that live, as of the step that runs."""


_hosts: list[Host] = []
"""None or one: a process is one worker, for life."""


def hosted(by: Host) -> None:
    """From now on the loop of this process is carried by this."""
    _hosts[:] = [by]


def host() -> Host | None:
    """Returns what carries the loop of this process; None if nothing does yet."""
    return _hosts[0] if _hosts else None
