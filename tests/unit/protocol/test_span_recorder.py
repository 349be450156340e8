"""What lies between the effects of a protocol is work of its stage; what takes long in some effects is waiting."""

import pytest

from holdfast.core.faults import Point
from holdfast.core.ids import Batch, WorkerId
from holdfast.core.instructions import Reduction
from holdfast.core.schedule import Op, OpKind
from holdfast.protocol.executor import FinishReduce, Reach, StepCommitted
from holdfast.protocol.span_recorder import SpanRecorder, add_span, resident_bytes


def finish(layer):
    return FinishReduce(Reduction((layer,), (WorkerId(0, 0),)), 3)


UPDATE, COMMIT, VERDICT = (Reach(point, 3) for point in (Point.UPDATE, Point.COMMIT, Point.VERDICT))
DONE = StepCommitted(3, ())


@pytest.fixture
def watch():
    """Runs effects, each given with the time when it is yielded and the time when it is done."""
    now = [0.0]
    recorder = SpanRecorder(clock=lambda: now[0])

    def run(*effects):
        for effect, begin, end in effects:
            now[0] = begin
            recorder.yielded(effect)
            now[0] = end
            recorder.performed(effect)
        return recorder

    return run


def test_a_step_that_is_settled_at_its_end_updates_all_layers_after_the_verdict(watch):
    recorder = watch(
        (finish(0), 1, 3), (finish(1), 3.5, 4), (VERDICT, 5, 5), (UPDATE, 6, 6.5), (COMMIT, 7, 7), (DONE, 9, 9)
    )
    assert recorder.spans == [("reduce", (0,), 1, 3), ("reduce", (1,), 3.5, 4), ("update", (), 5, 9)]


def test_a_staggered_step_updates_each_layer_when_its_sum_is_there(watch):
    recorder = watch((finish(0), 1, 3), (UPDATE, 4, 4), (COMMIT, 5, 5), (finish(1), 6, 8), (DONE, 9, 9))
    assert recorder.spans == [
        ("reduce", (0,), 1, 3),
        ("update", (), 3, 6),
        ("reduce", (1,), 6, 8),
        ("update", (), 8, 9),
    ]


def test_a_step_that_is_given_up_leaves_nothing(watch):
    recorder = watch((finish(0), 1, 3), (UPDATE, 4, 4))
    recorder.clear()
    assert watch((finish(0), 11, 12), (DONE, 13, 13)).spans == [("reduce", (0,), 11, 12)]


def test_the_parts_of_an_operation_are_one_span():
    spans, (first, second) = [], Batch((2,)).microbatches
    for op, start, end in [(Op(OpKind.F, first), 0, 1), (Op(OpKind.B, first), 1, 2), (Op(OpKind.B, first), 2.5, 3)]:
        add_span(spans, op, start, end)
    add_span(spans, Op(OpKind.B, second), 3, 4)
    assert spans == [("F", 0, 0, 0, 1), ("B", 0, 0, 1, 3), ("B", 0, 1, 3, 4)]


def test_this_process_is_in_memory():
    assert 1 << 20 < resident_bytes() < 1 << 40
