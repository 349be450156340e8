"""Programs: what one worker runs in one step, message by message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Instruction, Payload, Receive, Reduction, Send, Sum, UpdateLayer
from holdfast.core.step_plan import StepPlan

__all__ = ["Wanted", "WorkerProgram", "groups"]

Wanted = tuple[Payload, int, int]
"""What is read of a step: an activation or a gradient, its boundary and micro-batch; or a sum, its tie and 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram:
    """What one worker runs in one step.

    Attributes:
        step: what it was lowered from.
        operations: what it computes, receives, sends and contributes to sums, in order.
        verdict: the exchange of votes that settles a step at its end.
        riding: ``operations``, and between them the exchange that settles the step *before*: every message of it
            travels right before the activation or gradient of one micro-batch between the same workers, so nobody waits
            for it longer than for that.
        recalled: what it takes out of the worker's log.
        besides: what it may have to receive in some steps, of audits.
    """

    step: StepPlan
    operations: tuple[Instruction, ...]
    verdict: tuple[Send | Receive, ...]
    riding: tuple[Instruction, ...]
    recalled: frozenset[Wanted] = frozenset()
    besides: tuple[Receive, ...] = ()

    @property
    def worker(self) -> WorkerId:
        """Whose it is."""
        return self.step.worker

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The sums that it takes part in, in the order in which it contributes."""
        return tuple(each.reduction for each in self.step.sums)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it updates, ascending."""
        return self.step.updates

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """A whole step that is settled at its end, with the optimizer after the verdict."""
        return (*self.operations, *self._after_operations)

    @property
    def closing(self) -> tuple[Instruction, ...]:
        """A whole step that settles the one before, and itself at its end: all that any form of a step has.

        The other forms leave out one or both of the exchanges, on all workers alike. That makes nobody wait for more,
        so they cannot deadlock where this one does not.
        """
        return (*self.riding, *self._after_operations)

    @property
    def _after_operations(self) -> tuple[Instruction, ...]:
        return (*map(Sum, self.reductions), *self.verdict, *map(UpdateLayer, self.layers))


def groups(programs: Iterable[WorkerProgram]) -> tuple[tuple[WorkerId, ...], ...]:
    """Returns the communication groups that programs need, without duplicates, sorted: used links and reductions.

    One worker's program alone gives the groups that this worker is in.
    """
    found: set[tuple[WorkerId, ...]] = set()
    for program in programs:
        for instruction in (*program.operations, *program.verdict, *program.besides):
            if isinstance(instruction, Send | Receive):
                peer = instruction.peer
                found.add((min(program.worker, peer), max(program.worker, peer)))
        found.update(reduction.workers for reduction in program.reductions if len(reduction.workers) > 1)
    return tuple(sorted(found))
