import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.errors import ConfigError, InternalError, LedgerError
from holdfast.optim.accumulate import Accumulator, Layout, QueuedAccumulator, check_dtype, make_accumulator

LAYOUT = Layout(layers=(3,), shapes=((4, 3), (5,), ()), num_microbatches=6, record_width=2)


def gradients(microbatch: int, scale: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randn(shape, generator=generator) * scale for shape in LAYOUT.shapes]


EXACT = pytest.mark.parametrize("numerics", ["exact", "queued"])


def make(numerics: Any, layout: Layout) -> Accumulator:
    """Also the sums of a device whose operations are queued, on this one: they are the same."""
    return (
        QueuedAccumulator(layout, torch.device("cpu")) if numerics == "queued" else make_accumulator(numerics, layout)
    )


def filled(numerics: Any, microbatches: tuple[int, ...], layout: Layout = LAYOUT) -> Accumulator:
    sums = make(numerics, layout)
    for microbatch in microbatches:
        sums.add(3, microbatch, gradients(microbatch))
        sums.record(microbatch, torch.tensor([float(microbatch), float("-inf")]))
    return sums


@EXACT
def test_exact_sums_do_not_depend_on_the_order_or_the_partition(numerics: Any) -> None:
    whole = filled(numerics, tuple(range(6))).message()
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        for cut in (1, 3):
            parts = filled(numerics, order[:cut]).message() + filled(numerics, order[cut:]).message()
            assert torch.equal(parts, whole)


@pytest.mark.parametrize("numerics", ["exact", "queued", "fast"])
def test_the_mean_gradients_and_records_come_back(numerics: Any) -> None:
    one, other = filled(numerics, (5, 1, 2)), filled(numerics, (0, 4, 3))
    reduced = one.decode(one.message() + other.message())
    assert reduced.finite
    for place, found in enumerate(reduced.gradients):
        expected = torch.stack([gradients(m)[place].double() for m in range(6)]).mean(0)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-7)
        assert found.dtype == torch.float32
    assert reduced.records.tolist() == [[float(m), float("-inf")] for m in range(6)]


@pytest.mark.parametrize("numerics", ["exact", "queued", "fast"])
def test_no_message_is_longer_than_was_said(numerics: Any) -> None:
    sums = filled(numerics, (0, 1))
    assert 0 < sums.message().nbytes <= sums.message_bytes


@pytest.mark.parametrize("numerics", ["exact", "queued", "fast"])
def test_a_parameter_without_any_gradient_gets_none(numerics: Any) -> None:
    sums = make(numerics, LAYOUT)
    for microbatch in range(6):
        first, second, _ = gradients(microbatch)
        sums.add(3, microbatch, [first, second if microbatch == 4 else None, None])
    found = sums.decode(sums.message()).gradients
    assert found[2] is None
    torch.testing.assert_close(found[1], gradients(4)[1] / 6)


@pytest.mark.parametrize("numerics", ["exact", "queued", "fast"])
@pytest.mark.parametrize(("microbatches", "wrong"), [((0, 1, 2, 2, 3, 4, 5), (2, 2)), ((0, 1, 3, 4, 5), (2, 0))])
def test_counts_other_than_one_are_refused(
    numerics: Any, microbatches: tuple[int, ...], wrong: tuple[int, int]
) -> None:
    sums = filled(numerics, microbatches)
    with pytest.raises(LedgerError) as caught:
        sums.decode(sums.message())
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (3, *wrong)


@EXACT
def test_uses_of_a_tied_weight_are_counted_per_layer(numerics: Any) -> None:
    layout = Layout(layers=(0, 9), shapes=((4,),), num_microbatches=2, record_width=0)
    sums = make(numerics, layout)
    for microbatch, layer in ((0, 0), (1, 9), (1, 0)):
        sums.add(layer, microbatch, [torch.full((4,), 0.5)])
    with pytest.raises(LedgerError, match="layer 9 counts micro-batch 0 0 times"):
        sums.decode(sums.message())
    sums.add(9, 0, [torch.full((4,), 0.25)])
    (found,) = sums.decode(sums.message()).gradients
    assert found.tolist() == [(0.5 * 3 + 0.25) / 2] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**22, -(2.0**22), 3e38])
@EXACT
def test_what_is_not_finite_or_out_of_range_raises_the_flag(numerics: Any, value: float) -> None:
    sums = filled(numerics, (0, 1, 2, 3, 4))
    bad = gradients(5)
    bad[1][2] = value
    sums.add(3, 5, bad)
    assert not sums.decode(sums.message()).finite


@pytest.mark.parametrize(("layers", "microbatches"), [((0,), 1), ((0,), 6), ((0, 1), 4), ((0, 1, 2), 16)])
@EXACT
def test_what_could_add_up_to_more_than_the_sums_hold_is_left_out(
    numerics: Any, layers: tuple[int, ...], microbatches: int
) -> None:
    """All contributions together stay below 2^22, a quarter of what 64 bits hold in steps of 2^-40."""
    layout = Layout(layers=layers, shapes=((2,),), num_microbatches=microbatches, record_width=0)
    limit = torch.tensor(2.0**22 / (len(layers) * microbatches))
    below = torch.nextafter(limit, torch.tensor(0.0))
    for value, fits in ((below, True), (-below, True), (limit, False), (-limit, False)):
        sums = make(numerics, layout)
        for layer, microbatch in itertools.product(layers, range(microbatches)):
            sums.add(layer, microbatch, [torch.stack([torch.tensor(0.5), value])])
        reduced = sums.decode(sums.message())
        assert reduced.finite is fits
        if fits:
            expected = len(layers) * torch.stack([torch.tensor(0.5), value]).double()
            assert torch.equal(reduced.gradients[0], expected.float())


@EXACT
def test_the_largest_sum_in_range_does_not_wrap(numerics: Any) -> None:
    layout = Layout(layers=(0, 1), shapes=((2,),), num_microbatches=4, record_width=0)
    largest = 2.0**22 / 8 * (1 - 2**-20)
    sums = make(numerics, layout)
    for layer, microbatch in itertools.product((0, 1), range(4)):
        sums.add(layer, microbatch, [torch.tensor([largest, -largest])])
    reduced = sums.decode(sums.message())
    assert reduced.finite
    assert reduced.gradients[0].tolist() == [2 * largest, -2 * largest]


def whole(values: Tensor) -> Tensor:
    return (values.reshape(-1) * 2.0**40).round().to(torch.int64)


@pytest.mark.parametrize("exponent", [-14.0, -9.0, 0.0, 3.0, 3.5, 5.0])
@pytest.mark.parametrize("ask_early", [False, True])
@EXACT
def test_exact_sums_are_those_of_integers(numerics: Any, exponent: float, ask_early: bool) -> None:
    """Of all sizes: several blocks of elements, and magnitudes whose partial sums would not fit into float64."""
    layout = Layout(layers=(0, 4), shapes=((300, 250), (7,)), num_microbatches=6, record_width=0)
    generator = torch.Generator().manual_seed(1)
    sums = make(numerics, layout)
    expected = torch.zeros(300 * 250 + 7, dtype=torch.int64)
    for number, (layer, microbatch) in enumerate(itertools.product((0, 4), range(6))):
        scale = 10.0 ** (exponent if number % 3 else exponent - 4)
        first, second = (scale * torch.rand(shape, generator=generator) for shape in layout.shapes)
        first[0, :4] = torch.tensor([-0.0, 2.0**-41, 3 * 2.0**-41, 1e-45])
        sums.add(layer, microbatch, [first, None if number == 7 else second])
        expected[: first.numel()] += whole(first)
        expected[first.numel() :] += whole(second) if number != 7 else 0
        if ask_early and number % 2:
            assert torch.equal(sums.message()[: expected.numel()], expected)
    message = sums.message()
    assert torch.equal(message[: expected.numel()], expected)
    means = (expected.double() / (2.0**40 * 6)).float()
    reduced = sums.decode(message)
    assert reduced.finite
    assert torch.equal(torch.cat([gradient.reshape(-1) for gradient in reduced.gradients]), means)


@EXACT
def test_exact_sums_start_anew_after_a_reset(numerics: Any) -> None:
    sums = filled(numerics, (0, 1, 2))
    sums.reset()
    assert not sums.message().any()
    sums.add(3, 4, gradients(4))
    assert torch.equal(sums.message()[:18], torch.cat([whole(g) for g in gradients(4)]))
    sums.reset()
    sums.add(3, 5, gradients(5))
    assert torch.equal(sums.message()[:18], torch.cat([whole(g) for g in gradients(5)]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fast_raises_the_flag_too(value: float) -> None:
    sums = filled("fast", (0, 1, 2, 3, 4))
    sums.add(3, 5, [torch.full(shape, value) for shape in LAYOUT.shapes])
    assert not sums.decode(sums.message()).finite


@pytest.mark.parametrize("numerics", ["exact", "queued", "fast"])
def test_messages_repeat_and_reset_forgets(numerics: Any) -> None:
    sums = filled(numerics, (0, 1, 2))
    first = sums.message()
    again = sums.message()
    assert torch.equal(first.nan_to_num(), again.nan_to_num())
    assert first.numel() == LAYOUT.length == 18 + 3 + 2 + 6 + 12
    first.zero_()
    assert sums.message().any()
    assert sums.counts == {(3, 0): 1, (3, 1): 1, (3, 2): 1}
    sums.reset()
    assert not sums.message().any()
    assert sums.counts == {}


@EXACT
def test_half_precision_gradients_are_summed_exactly(numerics: Any) -> None:
    layout = Layout(layers=(0,), shapes=((64,),), num_microbatches=3, record_width=0)
    values = [torch.randn(64).bfloat16() for _ in range(3)]
    sums = make(numerics, layout)
    for microbatch, value in enumerate(values):
        sums.add(0, microbatch, [value])
    expected = (torch.stack(values).double().sum(0) / 3).float()
    torch.testing.assert_close(sums.decode(sums.message()).gradients[0], expected)


def test_what_does_not_belong_is_refused() -> None:
    sums = filled("exact", (0,))
    with pytest.raises(InternalError, match="layer 4"):
        sums.add(4, 0, gradients(0))
    with pytest.raises(InternalError, match="micro-batch 6"):
        sums.add(3, 6, gradients(0))
    with pytest.raises(InternalError, match="message is"):
        sums.decode(sums.message()[:-1])
    with pytest.raises(ConfigError, match="numerics 'slow'"):
        make_accumulator("slow", LAYOUT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float64"):
        check_dtype("weight", torch.float64)


def test_a_layer_without_parameters_still_has_a_ledger() -> None:
    layout = Layout(layers=(2,), shapes=(), num_microbatches=2, record_width=0)
    for numerics in ("exact", "queued", "fast"):
        sums = make(numerics, layout)
        sums.add(2, 0, [])
        with pytest.raises(LedgerError):
            sums.decode(sums.message())
        sums.add(2, 1, [])
        assert sums.decode(sums.message()).gradients == ()


def test_a_flag_stays_with_its_step() -> None:
    sums = make("queued", LAYOUT)
    for microbatch in range(6):
        sums.add(3, microbatch, [torch.full(shape, float("nan")) for shape in LAYOUT.shapes])
    assert not sums.decode(sums.message()).finite
    assert torch.equal(sums.message(), sums.message()), "it is asked for again after a failure"
    sums.reset()
    for microbatch in range(6):
        sums.add(3, microbatch, gradients(microbatch))
    assert torch.equal(sums.message()[:18], filled("exact", tuple(range(6))).message()[:18])
    for microbatch in range(6):
        sums.record(microbatch, torch.zeros(2))
    assert sums.decode(sums.message()).finite
