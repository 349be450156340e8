"""The operations of a step, their order on every worker, and the text form of both."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from holdfast.core.ids import Batch, MicroBatch, WorkerId
from holdfast.errors import ConfigError, InvalidSchedule

__all__ = ["Op", "OpKind", "Orders", "format_orders", "parse_orders"]

_OP = re.compile(r"([FBIW])(\d+)\.(\d+)", re.ASCII)


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

    @classmethod
    def parse(cls, text: str, batch: Batch) -> Op:
        """Returns the operation that a text such as ``F1.5`` names.

        Raises:
            InvalidSchedule: the text is no such operation, or there is no such micro-batch.
        """
        match = _OP.fullmatch(text)
        if match is None:
            raise InvalidSchedule(f"{text!r} is no operation: expected F, B, I or W and a micro-batch, such as F1.5")
        try:
            return cls(OpKind(match[1]), batch.named(int(match[2]), int(match[3])))
        except ConfigError as error:
            raise InvalidSchedule(f"{text!r} is no operation: {error}") from error


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


def parse_orders(text: str, batch: Batch) -> Orders:
    """Returns the orders that :func:`format_orders` wrote; rows may come in any order, ``#`` starts a comment.

    Args:
        text: one line per worker.
        batch: the micro-batches that it is about.

    Raises:
        InvalidSchedule: a line cannot be read; it carries the worker and the position, and names the line.
    """
    rows: dict[WorkerId, tuple[Op, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        worker, row = _parse_row(content, number, batch)
        if worker in rows:
            raise InvalidSchedule(f"line {number}: the worker already has a row", worker=str(worker))
        rows[worker] = row
    return Orders(tuple(sorted(rows.items())))


def _parse_row(content: str, number: int, batch: Batch) -> tuple[WorkerId, tuple[Op, ...]]:
    name, colon, ops = content.partition(":")
    if not colon:
        raise InvalidSchedule(f"line {number}: expected a worker, a colon and operations, found {content!r}")
    try:
        worker = WorkerId.parse(name)
    except ConfigError as error:
        raise InvalidSchedule(f"line {number}: {error}") from error
    return worker, tuple(_parse_op(op, worker, position, number, batch) for position, op in enumerate(ops.split()))


def _parse_op(text: str, worker: WorkerId, position: int, number: int, batch: Batch) -> Op:
    try:
        return Op.parse(text, batch)
    except InvalidSchedule as error:
        rule = f"line {number}: {error.rule}"
        raise InvalidSchedule(rule, worker=str(worker), position=position, op=text) from error


def _worker_of(row: tuple[WorkerId, tuple[Op, ...]]) -> WorkerId:
    return row[0]
