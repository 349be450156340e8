"""A worker's part of an evaluation: micro-batches run forward, from others to others, between two steps."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from holdfast.core.faults import Point
from holdfast.core.ids import place_in_evaluation
from holdfast.core.instructions import Compute, Receive, Send
from holdfast.core.program import WorkerProgram
from holdfast.protocol.effects import Evaluate, WorkerEffect
from holdfast.protocol.executor import Expect, Give, Reach, Take

__all__ = ["evaluate"]

Rows = tuple[tuple[int, dict[str, float]], ...]


def evaluate(program: WorkerProgram, step: int) -> Generator[WorkerEffect, Any, Rows]:
    """Yields what a worker does to evaluate the state before ``step``; nothing of any step is touched.

    Returns:
        The scores of each micro-batch that it has run to the end, by their numbers.

    Raises:
        ClusterError: thrown in by the driver; it can be begun anew.
    """
    yield Expect(tuple((each, step) for each in program.operations if isinstance(each, Receive)))
    computes = [each for each in program.operations if isinstance(each, Compute)]
    half = computes[len(computes) // 2] if computes else None
    rows: list[tuple[int, dict[str, float]]] = []
    value: Any = None
    for instruction in program.operations:
        match instruction:
            case Receive():
                value = yield Take(instruction, step)
            case Compute(op=op, layers=layers):
                if instruction is half:
                    yield Reach(Point.EVALUATE, step)
                assert layers is not None, "only what was read does not say what it runs over"
                number = place_in_evaluation(op.microbatch)
                value = yield Evaluate(step, number, value, layers)
                if layers.stop == program.step.num_layers:
                    rows.append((number, value))
                    value = None
            case Send():
                yield Give(instruction, step, value)
                value = None
    return tuple(rows)
