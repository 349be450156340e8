"""What links may keep before anybody asks for it."""

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Send
from holdfast.core.lower import lower
from holdfast.core.placement import split_evenly
from holdfast.core.summing import SumSize
from holdfast.core.tensorspec import TensorSpec
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.parts import goes_whole, longest_parts
from holdfast.runtime.transport.links.wire import BACKGROUND, BadFrame, Kind, label_of, label_of_sum
from holdfast.runtime.transport.port import Expected, MessageKey, SumKey
from holdfast.schedule.builders import regular_plan

GENERATION = 3
PROGRAMS = {program.worker: program for program in lower(regular_plan(3, split_evenly(6, 3), 2), ties=((0, 5),))}
WORKER = WorkerId(1, 1)
SPEC = TensorSpec(shape=(25,), dtype="float32")
SIZE = SumSize(header=40, part=6_000_000, parts=3)


def allowance():
    return Allowance.of(WORKER, GENERATION, Expected.of([PROGRAMS[WORKER]], lambda receive: SPEC, lambda layers: SIZE))


def sent_to(worker, step):
    """All that the others send to a worker in one step, by their own programs: (who, label, bytes)."""
    for other in PROGRAMS.keys() - {worker}:
        for send in PROGRAMS[other].closing:
            if isinstance(send, Send) and send.peer == worker:
                yield other, label_of(MessageKey.of(send, GENERATION, step)), 100
        for reduction in PROGRAMS[other].reductions:
            if worker in reduction.workers:
                for kind, size in longest_parts(SIZE, len(reduction.workers)).items():
                    for number in range(SIZE.parts if kind is Kind.PART else 1):
                        yield other, label_of_sum(SumKey(GENERATION, step, reduction), kind, number), size


def test_two_steps_of_what_the_others_send_may_wait_and_no_more():
    waiting = allowance()
    messages = [message for step in (7, 8) for message in sent_to(WORKER, step)]
    assert {label.kind for _, label, _ in messages} == set(Kind) - {Kind.ENTER, Kind.SUM, Kind.AUDIT} - BACKGROUND
    for message in messages:
        waiting.park(*message)
    source, label, size = next(sent_to(WORKER, 9))
    with pytest.raises(BadFrame, match=f"{len(messages)} messages of .* wait, and no more may"):
        waiting.park(source, label, size)
    waiting.ask(messages[0][2])
    waiting.park(source, label, size)


def test_empty_messages_are_counted_too():
    waiting = allowance()
    source, label, _ = next(sent_to(WORKER, 0))
    for step in range(2 * len(list(sent_to(WORKER, 0)))):
        waiting.park(source, label._replace(step=step), 0)
    with pytest.raises(BadFrame, match="no more may"):
        waiting.park(source, label._replace(step=-1), 0)


def test_what_the_plan_does_not_have_may_not_come():
    source, label, size = next(sent_to(WORKER, 0))
    for stranger, other, more in (
        (WORKER, label, size),
        (source, label._replace(microbatch=99), size),
        (source, label._replace(place=77), size),
    ):
        with pytest.raises(BadFrame, match="the plan has no such message"):
            allowance().park(stranger, other, more)
    with pytest.raises(BadFrame, match=f"of {size + 1} bytes: the plan gives it {size}"):
        allowance().park(source, label, size + 1)


def test_where_no_plan_is_known_all_may_come_but_not_without_end():
    waiting = Allowance.of(WORKER, GENERATION, None)
    for step in range(9):
        for message in sent_to(WorkerId(0, 0), step):
            waiting.park(*message)
    source, label, _ = next(sent_to(WORKER, 9))
    with pytest.raises(BadFrame, match="no more may"):
        waiting.park(source, label, 4 << 30)


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize("numbers", [0, 1, 7, 1 << 18, 1_250_001])
def test_no_share_is_longer_than_it_may_be(members, numbers):
    size = SumSize(header=9, part=4 * numbers)
    allowed = longest_parts(size, members)
    shares = [4 * (numbers * (n + 1) // members - numbers * n // members) for n in range(members)]
    sent = (
        {Kind.PART: size.part}
        if goes_whole(size.part, members)
        else dict.fromkeys((Kind.PART, Kind.TOTAL), max(shares))
    )
    assert allowed.keys() == sent.keys() | {Kind.HEADER}
    assert all(size <= allowed[kind] for kind, size in sent.items())


def test_as_many_parts_may_come_as_were_declared():
    reduction = next(each for each in PROGRAMS[WORKER].reductions if len(each.workers) > 1)
    waiting = Allowance.of(WORKER, GENERATION, Expected(messages=(), sums=((reduction, SIZE),)))
    source = next(worker for worker in reduction.workers if worker != WORKER)
    parts = [label_of_sum(SumKey(GENERATION, 0, reduction), Kind.PART, number) for number in range(SIZE.parts)]
    for part in parts:
        waiting.park(source, part, 100)
    with pytest.raises(BadFrame, match="the plan has no such message"):
        waiting.park(source, parts[0]._replace(kind=Kind.SUM), 100)


def test_what_is_asked_for_without_a_size_may_be_no_longer_than_the_plan_says():
    source, label, size = next(each for each in sent_to(WORKER, 0) if each[1].kind is Kind.HEADER)
    allowance().check(source, label, size)
    with pytest.raises(BadFrame, match=f"of {size + 1} bytes: the plan gives it {size}"):
        allowance().check(source, label, size + 1)
