"""The systems, a row each; where its authors give no cost, what is assumed is said in the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.sim.systems.system import Back, Halt, Seats, System

__all__ = ["OOBLECK", "SYSTEMS", "Facts"]

OOBLECK = "oobleck"
"""The one that makes pipelines of templates."""

_VARUNA_EVERY, _BAMBOO_EVERY, _HOROVOD_EVERY = 10, 50, 30
_BAMBOO_RATE, _BAMBOO_SLOWER, _BAMBOO_REBUILD_S = 0.71, 1.5, 30.0
_OOBLECK_STALL_S, _TORCHFT_S = 10.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What rows are made of.

    Attributes:
        pipelines_of: of each machine's place, the pipelines that its workers are in.
        pipelines: how many there are.
        job_s: of a step of the job itself, while nobody is missing.
        healthy_s: of one by 1F1B.
        of_pipelines: of so many pipelines as deep as the job's, seconds of a step; None for none.
        of_grids: of so many machines, seconds of a step of as many such pipelines as they make; None for none.
        of_templates: of so many machines, seconds of a step of the best pipelines of Oobleck's; None for too few.
        detect_s: until a loss is known.
        start_s: until a new process is there.
        load_s: in which the slowest worker reads its state.
        save_s: in which it writes it.
        pin_s: in which it copies it in its own memory.
    """

    pipelines_of: tuple[frozenset[int], ...]
    pipelines: int
    job_s: float
    healthy_s: float
    of_pipelines: Callable[[int], float | None]
    of_grids: Callable[[int], float | None]
    of_templates: Callable[[int], float | None]
    detect_s: float
    start_s: float
    load_s: float
    save_s: float
    pin_s: float

    @property
    def restart_s(self) -> float:
        """Seconds in which all processes are started again, and read their state."""
        return self.start_s + self.load_s

    def hit(self, seats: Seats) -> frozenset[int]:
        """Returns the pipelines that miss somebody."""
        return frozenset[int]().union(*(self.pipelines_of[place] for place in seats.vacant))

    def broken(self, seats: Seats) -> frozenset[int]:
        """Returns the pipelines in which two places beside each other are vacant."""
        pairs = ((place, place + 1) for place in seats.vacant if place + 1 in seats.vacant)
        return frozenset[int]().union(*(self.pipelines_of[a] & self.pipelines_of[b] for a, b in pairs))


def _nothing(before: Seats, after: Seats) -> None:
    """Whoever comes takes part from the next step on."""


def varuna(facts: Facts, *, every: int = _VARUNA_EVERY) -> System:
    """Grids of as many equal pipelines as there are machines for; every change restarts all of it.

    Args:
        facts: of the job.
        every: steps from one checkpoint to the next.
    """
    restart = Halt(seconds=facts.detect_s + facts.restart_s, back=Back.CHECKPOINT)

    def come(before: Seats, after: Seats) -> Halt | None:
        grows = facts.of_grids(after.taken) != facts.of_grids(before.taken)
        return Halt(seconds=facts.save_s + facts.restart_s) if grows else None

    return System(
        name="varuna",
        costs="equal pipelines only; a synchronous checkpoint every 10 steps; all restart from it at each loss, and "
        "when a pipeline more can be made; at a notice one more checkpoint, if there is time",
        source="Varuna (EuroSys 2022), as run by Oobleck (SOSP 2023), 7.1",
        assumed="restart: start_s and load; a checkpoint takes as long as the slowest worker writes",
        step_s=lambda seats: facts.of_grids(seats.taken),
        lost=lambda before, after: restart,
        come=come,
        every=every,
        checkpoint_s=facts.save_s,
        at_notice=True,
    )


def bamboo(facts: Facts, *, slower: float = _BAMBOO_SLOWER) -> System:
    """Each worker computes its successor's part, too, and takes over from it.

    Args:
        facts: of the job.
        slower: how many times as long a step takes while somebody computes for two.
    """

    def step_s(seats: Seats) -> float | None:
        broken = facts.broken(seats)
        period = facts.of_pipelines(facts.pipelines - len(broken))
        alone = slower if facts.hit(seats) - broken else 1.0
        return None if period is None else period / _BAMBOO_RATE * alone

    def lost(before: Seats, after: Seats) -> Halt:
        if facts.broken(after) == facts.broken(before):
            return Halt(seconds=facts.detect_s)
        seconds = facts.detect_s + _BAMBOO_REBUILD_S + facts.restart_s
        return Halt(seconds=seconds, back=Back.CHECKPOINT)

    return System(
        name="bamboo",
        costs="redundant computation: 0.71 of the speed, twice the memory; one lost of a pipeline slows steps by 1.5; "
        "after two beside each other all restart from a checkpoint without that pipeline, and 30 s",
        source="Bamboo (NSDI 2023); 0.71 by SlipStream (SOSP 2024), table 1; 30 s by Oobleck's artifact",
        assumed="a checkpoint every 50 steps that costs a copy; memory suffices; whoever comes reads its state",
        step_s=step_s,
        lost=lost,
        come=lambda before, after: Halt(seconds=facts.load_s),
        every=_BAMBOO_EVERY,
        checkpoint_s=facts.pin_s,
    )


def oobleck(facts: Facts, *, stall_s: float = _OOBLECK_STALL_S) -> System:
    """Pipelines of templates for any number of machines, gone over to at once.

    Args:
        facts: of the job.
        stall_s: for which training stands still at each loss and join.
    """
    stall = Halt(seconds=facts.detect_s + stall_s)
    return System(
        name=OOBLECK,
        costs="the best pipelines of templates for the machines that are there; training stands still for 10 s at each "
        "loss and join, and the step under way is run again",
        source="Oobleck (SOSP 2023), 4 and 7; 2 to 10 s by its artifact",
        assumed="the stall; `templates` here goes over while all train",
        step_s=lambda seats: facts.of_templates(seats.taken),
        lost=lambda before, after: stall,
        come=lambda before, after: Halt(seconds=stall_s),
    )


def elastic_batching(facts: Facts) -> System:
    """Pipelines that miss somebody are dropped; a step has fewer samples, and counts as so much of one."""

    def step_s(seats: Seats) -> float | None:
        whole = facts.pipelines - len(facts.hit(seats))
        return facts.healthy_s * facts.pipelines / whole if whole else None

    return System(
        name="elastic-batching",
        costs="a pipeline that misses somebody is dropped with all its machines; the batch shrinks by it",
        source="SlipStream (SOSP 2024), 2.3",
        assumed="the step under way is run again; nothing else stands still",
        step_s=step_s,
        lost=lambda before, after: Halt(seconds=facts.detect_s),
        come=lambda before, after: Halt(seconds=facts.load_s),
    )


def torchft(facts: Facts) -> System:
    """As elastic batching, by groups of replicas that heal from each other."""
    plain = elastic_batching(facts)
    return System(
        name="torchft",
        costs="as elastic-batching; the others wait 5 s for a lost one; whoever comes is given state while they train",
        source="measured with its default times (docs/benchmarks.md)",
        assumed="a pipeline is a replica group",
        step_s=plain.step_s,
        lost=lambda before, after: Halt(seconds=_TORCHFT_S),
        come=_nothing,
    )


def elastic_horovod(facts: Facts) -> System:
    """As elastic batching, from copies in memory."""
    plain = elastic_batching(facts)
    return System(
        name="elastic-horovod",
        costs="as elastic-batching; all go back to the last copy in memory, made every 30 steps, and begin anew; so "
        "they do, without going back, when somebody comes",
        source="SWIFT (PPoPP 2023), 2.2 and 7.1",
        assumed="a copy takes as long as pinning a checkpoint; beginning anew: state read by one, given to all",
        step_s=plain.step_s,
        lost=lambda before, after: Halt(seconds=facts.detect_s + facts.load_s, back=Back.CHECKPOINT),
        come=lambda before, after: Halt(seconds=facts.load_s),
        every=_HOROVOD_EVERY,
        checkpoint_s=facts.pin_s,
    )


def spare_nodes(facts: Facts) -> System:
    """Machines wait to take the places of the lost; without one, nobody trains."""
    swap = Halt(seconds=facts.detect_s + facts.restart_s, back=Back.CHECKPOINT)
    return System(
        name="spare-nodes",
        costs="a spare takes a lost place, and all restart from the last checkpoint; where none is left, nobody trains",
        source="SlipStream (SOSP 2024), 2.3",
        assumed="a checkpoint every 50 steps that costs a copy; restart: start_s and load",
        step_s=lambda seats: None if seats.vacant else facts.healthy_s,
        lost=lambda before, after: swap,
        come=lambda before, after: swap,
        every=_BAMBOO_EVERY,
        checkpoint_s=facts.pin_s,
    )


_ROWS = (varuna, bamboo, oobleck, elastic_batching, torchft, elastic_horovod, spare_nodes)
SYSTEMS: Mapping[str, Callable[[Facts], System]] = MappingProxyType(
    {row.__name__.replace("_", "-"): row for row in _ROWS}
)
"""Each by its name."""
