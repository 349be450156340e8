"""The operations of a step, their order on every worker, and the text form of both."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.errors import ConfigError, InvalidSchedule

__all__ = ["Op", "OpKind", "Orders", "format_orders"]


class OpKind(StrEnum):
    """The letters of ``torch.distributed.pipelining``."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: I and W in one."""
    I = "I"  # noqa: E741  the letter is the name of the operation
    """Backward for the input."""
    W = "W"
    """Backward for the weights."""


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One operation on one micro-batch, over the layers of its visit to the worker that runs it. Text: ``F1.5``."""

    kind: OpKind
    microbatch: MicroBatch

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Orders:
    """For every worker, sorted, the operations that it runs, in order."""

    rows: tuple[tuple[WorkerId, tuple[Op, ...]], ...]

    def __post_init__(self) -> None:
        for (earlier, _), (later, _) in pairwise(self.rows):
            if not earlier < later:
                raise InvalidSchedule(
                    f"workers must be listed once each, sorted; comes after {earlier}", worker=str(later)
                )

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers, sorted."""
        return tuple(worker for worker, _ in self.rows)

    def of(self, worker: WorkerId) -> tuple[Op, ...]:
        """Returns the operations of a worker, in order.

        Raises:
            ConfigError: the worker has no row.
        """
        at = bisect_left(self.rows, worker, key=_worker_of)
        if at == len(self.rows) or self.rows[at][0] != worker:
            raise ConfigError(f"worker {worker} has no row among the {len(self.rows)} of these orders")
        return self.rows[at][1]


def format_orders(orders: Orders) -> str:
    """Returns the text form: one line per worker, ``1.2: F1.0 F1.1 B1.0``, each ended by a newline."""
    return "".join(f"{worker}: {' '.join(str(op) for op in row)}".rstrip() + "\n" for worker, row in orders.rows)


def _worker_of(row: tuple[WorkerId, tuple[Op, ...]]) -> WorkerId:
    return row[0]
