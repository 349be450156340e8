import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from holdfast.core.summing import Contribution, Told, Total, add_up
from holdfast.errors import ConfigError, InternalError, LedgerError
from holdfast.optim.accumulate import Accumulator, Layout, check_dtype

LAYOUT = Layout(layers=(3,), shapes=((4, 3), (5,), ()), num_microbatches=6, record_width=2)


def gradients(microbatch: int, layout: Layout = LAYOUT) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randn(shape, generator=generator) for shape in layout.shapes]


def filled(microbatches: Sequence[int], layout: Layout = LAYOUT) -> Accumulator:
    sums = Accumulator(layout)
    for microbatch in microbatches:
        sums.add(3, microbatch, gradients(microbatch, layout))
        sums.record(microbatch, torch.tensor([float(microbatch), float("-inf")]))
    return sums


def summed(*workers: Accumulator) -> Total:
    return add_up([worker.message() for worker in workers])


def numbers(*workers: Accumulator) -> Tensor:
    total = summed(*workers).total
    assert isinstance(total, Tensor)
    return total


def test_the_bits_are_those_of_additions_in_the_order_of_the_micro_batches() -> None:
    found = [torch.cat([gradient.reshape(-1) for gradient in gradients(m) if gradient is not None]) for m in range(6)]
    first, second = (found[a] + found[a + 1] + found[a + 2] for a in (0, 3))
    expected = (first + second) / 6
    assert torch.equal(numbers(filled(range(6))), expected)
    assert not torch.equal(expected, (found[5] + found[4] + found[3] + found[2] + found[1] + found[0]) / 6)


def test_sums_do_not_depend_on_the_order_or_the_partition() -> None:
    whole = numbers(filled(range(6)))
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        for cut in (0, 1, 3):
            assert torch.equal(numbers(filled(order[:cut]), filled(order[cut:])), whole)


def test_what_is_contributed_again_after_a_failure_has_the_same_bits() -> None:
    """Nobody changes what was given away: it may still be on its way."""
    whole = numbers(filled(range(6)))
    for seed in range(40):
        draw = random.Random(seed)
        order = draw.sample(range(6), 6)
        sums, given = Accumulator(LAYOUT), []
        for microbatch in order:
            sums.add(3, microbatch, gradients(microbatch))
            if draw.random() < 0.5:
                given.append([(part, part.clone()) for part in sums.message().parts])
        assert torch.equal(numbers(sums), whole)
        assert all(torch.equal(part, copy) for each in given for part, copy in each)


def test_shares_of_the_elements_are_folded_alike() -> None:
    """And what came for the sum alone may be used for it."""
    workers = [filled((0, 1, 4)), filled((3, 2)), filled((5,))]
    told = [worker.message() for worker in workers]
    whole = add_up(told).total
    for start, stop in ((0, 7), (7, 7), (7, 18)):
        shares = [Told(each.header, [part[start:stop].clone() for part in each.parts], kept=False) for each in told]
        assert torch.equal(told[0].fold(shares, stop - start), whole[start:stop])


def test_the_mean_gradients_and_records_come_back() -> None:
    one, other = filled((5, 1, 2)), filled((0, 4, 3))
    reduced = one.decode(summed(one, other))
    assert reduced.finite
    for place, found in enumerate(reduced.gradients):
        expected = torch.stack([gradients(m)[place].double() for m in range(6)]).mean(0)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
        assert found.dtype == torch.float32
    assert reduced.records.tolist() == [[float(m), float("-inf")] for m in range(6)]
    assert reduced.squared_norm == pytest.approx(sum(float((g.double() ** 2).sum()) for g in reduced.gradients))


def test_nothing_is_longer_than_was_said() -> None:
    for order in ((0, 1), (5, 4, 2, 1), range(6)):
        message, size = filled(order).message(), LAYOUT.sum_size
        assert 0 < len(message.header) <= size.header
        assert {part.nbytes for part in message.parts} == {size.part}
        assert len(message.parts) <= size.parts


def test_a_parameter_without_any_gradient_gets_none() -> None:
    sums = Accumulator(LAYOUT)
    for microbatch in range(6):
        first, second, _ = gradients(microbatch)
        sums.add(3, microbatch, [first, second if microbatch == 4 else None, None])
    found = sums.decode(summed(sums)).gradients
    assert found[2] is None
    assert torch.equal(found[1], gradients(4)[1] / 6)


def test_absent_gradients_and_zeros_of_either_sign_add_alike() -> None:
    layout = Layout(layers=(0,), shapes=((2,),), num_microbatches=4, record_width=0)
    for zeros in ([None] * 4, [torch.tensor([-0.0, 0.0])] * 4, [None, torch.tensor([-0.0, -0.0]), None, None]):
        for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
            sums = Accumulator(layout)
            for microbatch in order:
                sums.add(0, microbatch, [zeros[microbatch]])
            assert numbers(sums).view(torch.int32).tolist() == [0, 0]


@pytest.mark.parametrize("halves", [((0, 1, 2), (2, 3, 4, 5)), ((0, 1, 2, 3, 4, 5), (2,)), ((2, 0), (4, 2, 3, 5, 1))])
def test_a_micro_batch_that_two_count_is_refused_by_all(halves: tuple[tuple[int, ...], ...]) -> None:
    told = [filled(half).message() for half in halves]
    for each in told:
        with pytest.raises(LedgerError) as caught:
            each.fold([other.told for other in told], LAYOUT.length)
        assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (3, 2, 2)


def test_a_micro_batch_that_nobody_counts_is_refused() -> None:
    with pytest.raises(LedgerError) as caught:
        summed(filled((0, 1)), filled((3, 4, 5)))
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (3, 2, 0)
    whole = filled(range(6))
    with pytest.raises(LedgerError):
        whole.decode(Total(numbers(whole), (filled((0, 1)).message().header,)))


def test_a_micro_batch_that_was_added_is_not_added_again() -> None:
    sums = filled((0, 1, 2))
    with pytest.raises(LedgerError, match="layer 3 counts micro-batch 1 2 times"):
        sums.add(3, 1, gradients(1))
    assert sums.counted == {(3, 0), (3, 1), (3, 2)}


def test_uses_of_a_tied_weight_are_counted_and_added_per_layer() -> None:
    layout = Layout(layers=(0, 9), shapes=((4,),), num_microbatches=2, record_width=0)
    values = {
        (layer, m): torch.rand(4, generator=torch.Generator().manual_seed(layer + m))
        for layer in (0, 9)
        for m in (0, 1)
    }
    expected = ((values[0, 0] + values[0, 1]) + (values[9, 0] + values[9, 1])) / 2
    for first in itertools.permutations(values, 2):
        both = Accumulator(layout), Accumulator(layout)
        for pair, value in values.items():
            both[pair in first].add(*pair, [value])
        assert torch.equal(numbers(*both), expected)
    sums = Accumulator(layout)
    for microbatch, layer in ((0, 0), (1, 9), (1, 0)):
        sums.add(layer, microbatch, [torch.full((4,), 0.5)])
    with pytest.raises(LedgerError, match="layer 9 counts micro-batch 0 0 times"):
        summed(sums)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_is_not_finite_is_found(value: float) -> None:
    sums = filled((0, 1, 2, 3))
    for microbatch in (4, 5):
        bad = gradients(microbatch)
        assert bad[1] is not None
        bad[1][2] = value
        sums.add(3, microbatch, bad)
    reduced = sums.decode(summed(sums))
    assert (reduced.finite, reduced.squared_norm) == (False, 0.0)
    assert not any(bool(gradient.any()) for gradient in reduced.gradients)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25])
def test_the_norm_is_that_of_the_sum_also_where_its_square_needs_64_bits(scale: float) -> None:
    layout = Layout(layers=(3,), shapes=((70_001,),), num_microbatches=1, record_width=0)
    sums = Accumulator(layout)
    gradient = scale * torch.randn(70_001, generator=torch.Generator().manual_seed(7))
    sums.add(3, 0, [gradient])
    reduced = sums.decode(summed(sums))
    assert reduced.finite
    assert reduced.squared_norm == pytest.approx(gradient.double().square().sum().item(), rel=1e-5)


def test_large_and_small_numbers_are_summed_as_float32_does() -> None:
    layout = Layout(layers=(0,), shapes=((3,),), num_microbatches=2, record_width=0)
    sums = Accumulator(layout)
    sums.add(0, 0, [torch.tensor([1e30, 1e-45, 1e-20])])
    sums.add(0, 1, [torch.tensor([1e30, 1e-45, -1e-21])])
    assert torch.equal(numbers(sums), torch.tensor([2e30, 2.8e-45, 0.9e-20]) / 2)
    assert sums.decode(summed(sums)).finite


def test_sums_start_anew_after_a_reset() -> None:
    sums = filled((0, 1, 2))
    sums.reset()
    assert (sums.counted, sums.message().parts) == (frozenset(), ())
    for microbatch in range(6):
        sums.add(3, microbatch, gradients(microbatch))
    assert torch.equal(numbers(sums), numbers(filled(range(6))))


def test_messages_repeat() -> None:
    sums = filled((0, 1, 2, 4))
    first, again = sums.message(), sums.message()
    assert first.header == again.header
    assert all(map(torch.equal, first.parts, again.parts))
    assert sums.decode(summed(sums, filled((3, 5)))).dissent == 0
    told = [sums.message(dissent=1), filled((3, 5)).message(dissent=1)]
    assert sums.decode(add_up(told)).dissent == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = Layout(layers=(0,), shapes=((64,),), num_microbatches=3, record_width=0)
    values = [torch.randn(64).to(dtype) for _ in range(3)]
    sums = Accumulator(layout)
    for microbatch, value in enumerate(values):
        sums.add(0, microbatch, [value])
    assert torch.equal(numbers(sums), (values[0].float() + values[1].float() + values[2].float()) / 3)


def test_gradients_may_be_laid_out_as_they_like() -> None:
    layout = Layout(layers=(0,), shapes=((4, 3),), num_microbatches=2, record_width=0)
    one, other = torch.rand(3, 4).t(), torch.rand(1, 1).expand(4, 3)
    sums = Accumulator(layout)
    sums.add(0, 0, [one])
    sums.add(0, 1, [other])
    assert torch.equal(numbers(sums), ((one + other) / 2).reshape(-1))


def test_what_is_left_out_does_not_count() -> None:
    one, other = filled((0, 2)), filled((5,))
    for worker in (one, other):
        worker.leave_out({1, 3, 4})
    found = [gradients(m)[1] for m in (0, 2, 5)]
    reduced = one.decode(summed(one, other))
    assert torch.equal(reduced.gradients[1], (found[0] + found[1] + found[2]) / 3)
    with pytest.raises(InternalError, match=r"micro-batches \[0, 2\] are in the sums, of which only \[2\] were"):
        one.leave_out({2})
    one.leave_out({0, 2, 4})
    assert one.counted == frozenset()
    none = Accumulator(LAYOUT)
    none.leave_out(range(6))
    assert none.decode(summed(none)).squared_norm == 0.0


def test_what_a_sharded_stage_gathers_is_added_to_what_it_has_counted() -> None:
    sums = Accumulator(LAYOUT)
    with pytest.raises(InternalError, match="not counted"):
        sums.add_sums(gradients(0))
    for microbatch in range(6):
        sums.add(3, microbatch, [None] * 3)
    sums.message()
    sums.add_sums([gradients(7)[0], None, None])
    first, second, third = sums.decode(summed(sums)).gradients
    assert torch.equal(first, gradients(7)[0] / 6)
    assert (second, third) == (None, None)


def test_what_does_not_belong_is_refused() -> None:
    sums = filled((0,))
    with pytest.raises(InternalError, match="layer 4"):
        sums.add(4, 0, gradients(0))
    with pytest.raises(InternalError, match="micro-batch 6"):
        sums.add(3, 6, gradients(0))
    whole = summed(filled(range(6)))
    with pytest.raises(InternalError, match="the sum is"):
        sums.decode(Total(whole.total[:-1], whole.headers))
    for header in (b"", whole.headers[0][:-1], whole.headers[0] + b"\0", b"\xff" * 40):
        with pytest.raises(InternalError, match="bytes are no header of it"):
            sums.decode(Total(whole.total, (header,)))
    with pytest.raises(ConfigError, match="float64"):
        check_dtype("weight", torch.float64)


def test_a_layer_without_parameters_still_has_a_ledger() -> None:
    layout = Layout(layers=(2,), shapes=(), num_microbatches=2, record_width=0)
    sums = Accumulator(layout)
    sums.add(2, 0, [])
    with pytest.raises(LedgerError):
        summed(sums)
    sums.add(2, 1, [])
    message: Contribution = sums.message()
    assert message.parts == ()
    assert sums.decode(add_up([message])).gradients == ()
