"""What a worker's protocol asks its driver to do, beyond the effects of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.control.messages import Message, StateAt
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.program import Wanted
from holdfast.core.summing import SumSize
from holdfast.protocol.executor import Effect

__all__ = [
    "Asked",
    "Attach",
    "Boundary",
    "Build",
    "Consult",
    "Consulted",
    "Disconnect",
    "Drain",
    "Evaluate",
    "ScoresAwaited",
    "Fetch",
    "Fetched",
    "Flush",
    "Listen",
    "Load",
    "Pin",
    "Release",
    "Report",
    "Serve",
    "WorkerEffect",
    "Written",
]


@dataclass(frozen=True, slots=True)
class Asked:
    """Wait until the loop whose steps these are waits for an item of this one; all before it are over.

    ``repeated``: the steps that were run once more, in a step behind. ``begins``: whether there is such a step; else
    the loop is to come to its end.
    """

    step: int
    repeated: tuple[int, ...] = ()
    begins: bool = True


@dataclass(frozen=True, slots=True)
class Attach:
    """Say hello to the coordinator, now and whenever the connection to it had to be made anew."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send this to the coordinator; never blocks. ``when_written``: once all that was pinned before is written."""

    message: Message
    when_written: bool = False


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait for the coordinator's next command and return it."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the communication of whatever generation was before: it is over."""


@dataclass(frozen=True, slots=True)
class Load:
    """Return a new compute engine for the layers that the plan gives us; the old one is over.

    ``state``: what all of them begin with; None: what the old engine holds of them is kept. ``beside``: the old one
    stays, and is not touched.
    """

    plan: Plan
    state: StateAt | None
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Build:
    """Connect the members of each group for ``generation``.

    ``neighbours``: with whom we may have to talk once others are lost; whoever keeps connections can make them now.
    ``step``: before which all go over to it; None if that is yet to be told. ``sums``: for a replay, all that is summed
    over workers, with the most bytes of a contribution; None: what our programs tell.
    """

    generation: int
    groups: tuple[tuple[WorkerId, ...], ...]
    neighbours: tuple[WorkerId, ...] = ()
    step: int | None = None
    sums: tuple[tuple[Reduction, SumSize], ...] | None = None


@dataclass(frozen=True, slots=True)
class Boundary:
    """Return the order of the generation that is prepared, and forget it: we go over now."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until all that was sent has left; the connections are not needed any more then."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run layers forward on a micro-batch that the state before ``step`` is evaluated by; see ``Engine.evaluate``."""

    step: int
    number: int
    value: Any
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class ScoresAwaited:
    """Wait until the evaluation of the state before ``step`` is known to be kept."""

    step: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Give ``target`` these snapshots, of the state before ``step``, whenever it asks; never blocks.

    ``inexact``: the layers of which other owners may hold other bits, as a step of theirs, or of ours, was inverted.
    """

    generation: int
    step: int
    target: WorkerId
    snapshots: Mapping[int, Callable[[], bytes]]
    inexact: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Release:
    """Give nothing any more to any worker but these."""

    keep: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to fetch the state of layers that peers serve to us; never blocks."""

    generation: int
    holders: Mapping[int, tuple[WorkerId, ...]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Return the state of all layers that we fetch; None while some of it is still on its way.

    ``wait``: first wait for it, a moment at most.
    """

    wait: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """Copy these layers as they are at ``step``, and write the copies into the checkpoint while training goes on."""

    generation: int
    step: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Wait until all that was pinned is written, or could not be."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until all that was logged can be read by others, a moment at most."""


@dataclass(frozen=True, slots=True)
class Consult:
    """Begin to read what was logged of steps, in order; never blocks.

    Attributes:
        generation: under which they are run again; what is logged of them from now on is logged apart.
        wanted: what is read of each step, besides the verdict over it.
        ends: what comes out, with what it is compared where it was logged.
        start: the first step.
        stop: one past the last, whose verdict is known otherwise.
    """

    generation: int
    wanted: frozenset[Wanted]
    ends: frozenset[tuple[Payload, int]]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Consulted:
    """Return what was logged of a step, by what it is; None while it is read. The verdict has micro-batch 0."""

    step: int


WorkerEffect = (
    Effect
    | Asked
    | Attach
    | Report
    | Listen
    | Disconnect
    | Load
    | Build
    | Boundary
    | Drain
    | Evaluate
    | ScoresAwaited
    | Serve
    | Release
    | Fetch
    | Fetched
    | Pin
    | Written
    | Flush
    | Consult
    | Consulted
)
