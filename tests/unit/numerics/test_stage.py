"""Stages driven as grids: equal bits on every grid, and the course of a step with all that can go wrong in it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.placement import LayerRange
from holdfast.core.progress import Part
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.errors import ConfigError, InternalError, LedgerError, ReplicaDiverged
from holdfast.optim.digest import digest_run, load_layer
from holdfast.optim.factory import make_optimizer
from holdfast.runtime.engine.model import Model
from holdfast.runtime.engine.stage import Stage, layer_seed

from .numerics_grid import Job, backward, commit, convnet_job, digest, forward, gpt_job, reduce, run_microbatch, train

GPT_GRIDS: dict[str, dict[str, Any]] = {
    "two_by_two": {"ranges": [(0, 2), (2, 5), (0, 2), (2, 5)], "routes": [[0, 1], [2, 3]]},
    "re_routed": {"ranges": [(0, 2), (2, 5), (0, 2), (2, 5)], "routes": [[0, 1], [2, 1], [0, 3]]},
    "four_workers": {"ranges": [(0, 5)] * 4, "routes": [[0], [1], [2], [3]]},
    "uneven": {"ranges": [(0, 1), (1, 5), (0, 4), (4, 5)], "routes": [[0, 1], [2, 3]]},
    "idle_worker": {"ranges": [(0, 5), (0, 5), (2, 5)], "routes": [[0], [1]]},
    "other_order": {"ranges": [(0, 5)], "routes": [[0]], "order": [4, 1, 5, 0, 3, 2]},
    "split": {"ranges": [(0, 3), (3, 5)], "routes": [[0, 1]], "split": True},
    "one_layer_each": {"ranges": [(i, i + 1) for i in range(5)], "routes": [[0, 1, 2, 3, 4]]},
}

CONVNET_GRIDS: dict[str, dict[str, Any]] = {
    "two_by_two": {"ranges": [(0, 3), (3, 6), (0, 3), (3, 6)], "routes": [[0, 1], [2, 3]]},
    "four_workers": {"ranges": [(0, 6)] * 4, "routes": [[0], [1], [2], [3]]},
    "other_order": {"ranges": [(0, 6)], "routes": [[0]], "order": [4, 1, 5, 0, 3, 2]},
    "split": {"ranges": [(0, 1), (1, 6)], "routes": [[0, 1]], "split": True},
}


@pytest.fixture(scope="module")
def gpt_reference() -> tuple[Any, list[list[float]]]:
    torch.set_num_threads(1)
    stages, losses = train(gpt_job(), [(0, 5)], [[0]], 3)
    return digest(stages), losses


@pytest.fixture(scope="module")
def convnet_reference() -> tuple[Any, list[list[float]]]:
    torch.set_num_threads(1)
    stages, losses = train(convnet_job(), [(0, 6)], [[0]], 3)
    return digest(stages), losses


@pytest.mark.parametrize("grid", GPT_GRIDS)
def test_gpt_ends_in_the_same_bits_on_every_grid(grid: str, gpt_reference: Any) -> None:
    stages, losses = train(gpt_job(), steps=3, **GPT_GRIDS[grid])
    assert digest(stages) == gpt_reference[0]
    assert losses == gpt_reference[1]


@pytest.mark.parametrize("grid", CONVNET_GRIDS)
def test_convnet_ends_in_the_same_bits_on_every_grid(grid: str, convnet_reference: Any) -> None:
    stages, losses = train(convnet_job(), steps=3, **CONVNET_GRIDS[grid])
    assert digest(stages) == convnet_reference[0]
    assert losses == convnet_reference[1]


def test_training_changes_the_weights_and_lowers_the_loss() -> None:
    job = gpt_job(seed=1)
    window = torch.arange(34).reshape(2, 17) % 32
    job.load = lambda _step, _microbatch: (window[:, :-1].contiguous(), window[:, 1:].contiguous())
    stages, losses = train(job, [(0, 5)], [[0]], 12)
    assert sum(losses[-1]) < 0.8 * sum(losses[0])
    assert digest(stages).weights_sha256 != digest(job.stages([(0, 5)])).weights_sha256


def test_tied_weights_stay_equal() -> None:
    stages, _ = train(gpt_job(), [(0, 2), (2, 5)], [[0, 1]], 2)
    embedding, head = stages[0].export(0), stages[1].export(4)
    assert torch.equal(embedding.parameters["token.weight"], head.parameters["weight"])
    assert head.tied == ("weight",)
    assert embedding.tied == ()


def test_gradients_equal_plain_autograd() -> None:
    job = gpt_job(num_microbatches=2)
    job.layers = lambda: _without_dropout()
    (stage,) = job.stages([(0, 5)])
    plain = _without_dropout()
    for microbatch in range(2):
        x, target = job.load(0, microbatch)
        run_microbatch([stage], 0, microbatch)
        for layer in plain:
            x = layer(x)
        job.loss(x, target).backward()
    reduce([stage])
    for index, layer in enumerate(plain):
        found = stage._gradients(index, stage._owned[index], 1.0)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad / 2, rtol=1e-4, atol=1e-7, check_device=False)


def _without_dropout() -> list[nn.Module]:
    from holdfast.models import gpt

    return gpt.build(layers=3, width=32, heads=2, context=16, vocab=32, dropout=0.0)


def test_the_ledger_refuses_a_micro_batch_counted_twice() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    for microbatch in (0, 1, 2, 3):
        run_microbatch([stage], 0, microbatch)
    with pytest.raises(LedgerError) as caught:
        run_microbatch([stage], 0, 3)
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (4, 3, 2)


def test_the_ledger_refuses_a_micro_batch_that_two_workers_count() -> None:
    stages = gpt_job().stages([(0, 5), (0, 5)])
    for microbatch in range(6):
        run_microbatch([stages[0]], 0, microbatch)
    run_microbatch([stages[1]], 0, 3)
    with pytest.raises(LedgerError) as caught:
        reduce(stages)
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (0, 3, 2)


def test_the_ledger_refuses_a_dropped_micro_batch() -> None:
    first, second = gpt_job().stages([(0, 2), (2, 5)])
    for microbatch in range(6):
        run_microbatch([first, second], 0, microbatch, split=True) if microbatch != 4 else None
    forward([first, second], 0, 4)
    second.backward(OpKind.B, 0, 4, None)
    with pytest.raises(LedgerError) as caught:
        reduce([first, second])
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (0, 4, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_step_that_is_not_finite_is_omitted(value: float) -> None:
    job = gpt_job()
    stages = job.stages([(0, 2), (2, 5)])
    before = digest(stages)
    for microbatch in range(6):
        forward(stages, 0, microbatch)
        if microbatch == 2:
            gradient = stages[1].backward(OpKind.B, 0, 2, None)
            stages[0].backward(OpKind.B, 0, 2, gradient.fill_(value))
        else:
            backward(stages, 0, microbatch)
    reduce(stages)
    assert all(stage.omitted for stage in stages)
    commit(stages)
    assert digest(stages) == before
    assert set(stages[0].layer_steps().values()) == {1}
    for microbatch in range(6):
        run_microbatch(stages, 1, microbatch)
    reduce(stages)
    assert not stages[0].omitted


def test_clipping_is_the_same_on_every_grid_and_limits_the_norm() -> None:
    sgd = make_optimizer("sgd", lr=1.0)
    one, _ = train(gpt_job(clip_norm=0.5, optimizer=sgd), [(0, 5)], [[0]], 1)
    two, _ = train(gpt_job(clip_norm=0.5, optimizer=sgd), [(0, 2), (2, 5)], [[0, 1]], 1)
    free, _ = train(gpt_job(optimizer=sgd), [(0, 5)], [[0]], 1)
    assert digest(one) == digest(two) != digest(free)
    start = gpt_job().stages([(0, 5)])[0]
    moved = sum(
        float((new - old).double().square().sum())
        for layer in range(5)
        for (name, new), old in zip(
            one[0].export(layer).parameters.items(), start.export(layer).parameters.values(), strict=True
        )
        if name not in one[0].export(layer).tied
    )
    assert moved**0.5 == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("point", ["reduced", "updated", "half_swapped", "swapped", "skipped"])
@pytest.mark.parametrize("make", [gpt_job, convnet_job])
def test_a_step_taken_back_and_run_again_gives_the_same_bits(point: str, make: Callable[..., Job]) -> None:
    last = len(make().layers())
    cut = [(0, 2), (2, last)]
    expected = digest(train(make(), cut, [[0, 1]], 3)[0])
    stages = train(make(), cut, [[0, 1]], 2)[0]
    before = digest(stages)
    for microbatch in reversed(range(6)):
        run_microbatch(stages, 2, microbatch)
    reduce(stages)
    _interrupt(stages, point)
    for stage in stages:
        stage.take_back(2)
        stage.take_back(2)
    assert digest(stages) == before
    for microbatch in range(6):
        run_microbatch(stages, 2, microbatch)
    reduce(stages)
    commit(stages)
    assert digest(stages) == expected


def _interrupt(stages: list[Stage], point: str) -> None:
    if point == "skipped":
        for stage in stages:
            stage.conclude(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    layers = [(stage, layer) for stage in stages for layer in stage.layers]
    for count, (stage, layer) in enumerate(layers if point != "reduced" else []):
        stage.update(layer)
        if point in ("swapped", "skipped") or (point == "half_swapped" and count < 3):
            stage.swap(layer)


def test_an_interrupted_step_goes_on_with_only_what_is_missing() -> None:
    expected = digest(train(gpt_job(), [(0, 5)], [[0]], 1)[0])
    stages = gpt_job().stages([(0, 5), (0, 5)])
    for microbatch in (0, 2, 5):
        run_microbatch([stages[0]], 0, microbatch)
    forward([stages[0]], 0, 3)
    (kept,) = stages[0].progress()
    assert kept.contexts == (Part(3, LayerRange(0, 5)),)
    assert kept.counted == tuple((layer, (0, 2, 5)) for layer in range(5))
    assert kept.complete == ()
    for stage in stages:
        stage.resume(0, ())
    stages[0].backward(OpKind.B, 0, 3, None)
    for microbatch in (1, 4):
        run_microbatch([stages[1]], 0, microbatch)
    reduce(stages)
    commit(stages)
    assert digest(stages) == expected


@pytest.mark.parametrize("make", [gpt_job, convnet_job])
def test_a_sum_that_stands_is_handed_over_and_nothing_is_added_to_it(make: Callable[..., Job]) -> None:
    whole = (0, len(make().layers()))
    expected = digest(train(make(), [whole], [[0]], 1)[0])
    first, second = make().stages([whole, whole])
    for microbatch in range(6):
        run_microbatch([first], 0, microbatch)
    standing = first.reductions[:3]
    for reduction in standing:
        first.accept(reduction, add_up([first.message(reduction)]))
    (kept,) = first.progress()
    assert kept.complete == tuple(sorted(standing))
    for stage in (first, second):
        stage.resume(0, standing)
    for reduction in standing:
        message = first.sum_message(reduction)
        assert message.nbytes == first.sum_bytes(reduction)
        second.take_sum(reduction, message)
    forward([second], 0, 4)
    second.backward(OpKind.B, 0, 4, None, adds=False)
    reduce([first, second], standing)
    assert int(first.vote()[:, 2].max()) == 1, "who is handed a sum cannot know who was ready for another generation"
    commit([first, second])
    assert digest([first, second]) == expected


def test_what_only_makes_a_message_again_counts_for_nothing() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    forward([stage], 0, 1)
    again = [stage.backward(OpKind.B, 0, 1, None, LayerRange(3, 5), adds=False)]
    stage.forward(0, 1, None, LayerRange(0, 3), adds=False)
    assert stage.counted() == dict.fromkeys(range(5), frozenset())
    assert stage.progress()[0].contexts == (Part(1, LayerRange(0, 3)),)
    forward([stage], 0, 1)
    again.append(stage.backward(OpKind.B, 0, 1, None, LayerRange(3, 5)))
    assert torch.equal(*again)
    assert stage.counted()[4] == {1}


def test_discard_forgets_the_sums() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    run_microbatch([stage], 0, 1)
    stage.discard()
    assert stage.counted() == dict.fromkeys(range(5), frozenset())
    assert all(not stage.message(reduction).parts for reduction in stage.reductions)


@pytest.mark.parametrize("make", [gpt_job, convnet_job])
def test_files_have_the_digests_of_live_stages_and_restore_them(make: Callable[..., Job], tmp_path: Path) -> None:
    last = len(make().layers())
    stages = train(make(), [(0, 3), (3, last)], [[0, 1]], 2)[0]
    for stage in stages:
        for layer in stage.layers:
            assert stage.save(layer, tmp_path).name == f"layer-{layer:04d}.safetensors"
    assert digest_run(tmp_path) == digest(stages)
    (restored,) = make(seed=5).stages([(0, last)])
    for layer in range(last):
        restored.install(layer, load_layer(tmp_path / f"layer-{layer:04d}.safetensors"))
    assert digest([restored]) == digest(stages)
    expected = digest(train(make(), [(0, last)], [[0]], 3)[0])
    for microbatch in range(6):
        run_microbatch([restored], 2, microbatch)
    reduce([restored])
    commit([restored])
    assert digest([restored]) == expected


def test_own_layers_alone_suffice() -> None:
    job = gpt_job()
    whole = job.stages([(0, 2), (2, 5)])
    model = Model.build(job.layers(), job.loss)
    parts = [
        Stage(
            layers=copy.deepcopy(model.layers[part.start : part.stop]),
            owned=part.indices,
            num_layers=5,
            ties=model.ties,
            loss=job.loss,
            optimizer=job.optimizer,
            lr_scale=lambda step: 1.0 / (1 + step),
            seed=job.seed,
            num_microbatches=6,
            load=job.load,
        )
        for part in (LayerRange(0, 2), LayerRange(2, 5))
    ]
    for stages in (whole, parts):
        for microbatch in range(6):
            run_microbatch(stages, 0, microbatch)
        reduce(stages)
        commit(stages)
    assert parts[0].reductions == ((0,), (1,), (0, 4))
    assert digest(parts) == digest(whole)


def test_running_statistics_are_those_of_torch() -> None:
    for momentum in (0.1, None):
        job = convnet_job()
        (stage,) = job.stages([(0, 6)])
        plain = job.layers()
        for layer in (*plain, *(stage._owned[i].module for i in range(6))):
            for module in layer.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = momentum
        for microbatch in range(6):
            run_microbatch([stage], 0, microbatch)
            plain[0](job.load(0, microbatch)[0])
        assert stage.export(0).buffers["norm.num_batches_tracked"].item() == 0
        reduce([stage])
        commit([stage])
        for name, value in plain[0].named_buffers():
            torch.testing.assert_close(stage.export(0).buffers[name], value, check_device=False)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class TwiceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Replacing(nn.Module):
    """Puts a module in the place of another one in each forward pass.

    Args:
        make: what comes there.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.inner = nn.Sequential(nn.Linear(4, 4), make())

    def forward(self, x: Tensor) -> Tensor:
        self.inner[1] = self.make().to(x.device)
        output: Tensor = self.inner(x)
        return output


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


def small_job(*layers: Callable[[], nn.Module], **changes: Any) -> Job:
    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [layer() for layer in layers]

    def load(_step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(microbatch)
        return torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)

    return Job(layers=build, loss=nn.functional.mse_loss, load=load, num_microbatches=3, **changes)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Counts, r"layer 1 \(Counts\) changes its buffer 'calls'"),
        (Pair, r"layer 1 \(Pair\) returned a tuple of 2"),
        (lambda: Replacing(linear), r"layer 1 \(Replacing\) replaces a module of its own in the forward pass"),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True)), "changes its"),
        (lambda: nn.Linear(4, 4, dtype=torch.float64), "expected float32"),
    ],
)
def test_layers_that_cannot_be_exact_are_refused(layer: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small_job(linear, layer, linear), [(0, 3)], [[0]], 1)


def test_a_module_without_parameters_may_be_replaced() -> None:
    train(small_job(linear, lambda: Replacing(nn.ReLU), linear), [(0, 3)], [[0]], 1)


def test_layers_that_still_share_a_parameter_are_refused() -> None:
    layer = linear()
    with pytest.raises(ConfigError, match="untie"):
        Stage(
            layers=[layer, layer],
            owned=range(2),
            ties=(),
            loss=nn.functional.mse_loss,
            optimizer=make_optimizer("sgd", lr=0.1),
            lr_scale=lambda _: 1.0,
            seed=0,
            num_microbatches=1,
            load=lambda *_: (torch.zeros(1, 4), torch.zeros(1, 4)),
        )


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    job = small_job(linear)
    job.loss = lambda output, target: (output - target).square()
    with pytest.raises(ConfigError, match="scalar"):
        train(job, [(0, 1)], [[0]], 1)


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "checkpointed_norm": (linear, Checkpointed, linear),
    "frozen": (lambda: linear().requires_grad_(False), linear, nn.ReLU, lambda: linear().requires_grad_(False), linear),
    "bfloat16": (lambda: linear().bfloat16(), linear),
    "views": (linear, lambda: nn.Unflatten(1, (2, 2)), lambda: nn.Flatten(1), linear),
    "repeated": (linear, nn.Tanh, linear),
    "normed twice": (linear, TwiceNormed, linear),
}


@pytest.mark.parametrize("case", [name for name in UNUSUAL if name != "bfloat16"])
@pytest.mark.parametrize("split", [False, True])
def test_unusual_layers_give_the_same_bits_on_two_grids(case: str, split: bool) -> None:
    layers = UNUSUAL[case]
    one, losses = train(small_job(*layers), [(0, len(layers))], [[0]], 2)
    cut, cut_losses = train(small_job(*layers), [(0, 1), (1, len(layers))], [[0, 1]], 2, split=split, order=[2, 0, 1])
    assert digest(one) == digest(cut)
    assert losses == cut_losses


CHECKPOINTED = [frozenset(range(6)), frozenset({0, 2, 5})]


@pytest.mark.parametrize("chosen", CHECKPOINTED, ids=["all", "some"])
@pytest.mark.parametrize("grid", ["two_by_two", "split", "other_order"])
def test_gpt_with_dropout_has_the_same_bits_without_its_activations(
    grid: str, chosen: frozenset[int], gpt_reference: Any
) -> None:
    stages, losses = train(gpt_job(checkpointed=chosen), steps=3, **GPT_GRIDS[grid])
    assert digest(stages) == gpt_reference[0]
    assert losses == gpt_reference[1]


@pytest.mark.parametrize("chosen", CHECKPOINTED, ids=["all", "some"])
@pytest.mark.parametrize("grid", ["two_by_two", "split"])
def test_batch_norm_has_the_same_bits_without_its_activations(
    grid: str, chosen: frozenset[int], convnet_reference: Any
) -> None:
    stages, losses = train(convnet_job(checkpointed=chosen), steps=3, **CONVNET_GRIDS[grid])
    assert digest(stages) == convnet_reference[0]
    assert losses == convnet_reference[1]


@pytest.mark.parametrize("case", [name for name in UNUSUAL if name != "bfloat16"])
def test_unusual_layers_have_the_same_bits_without_their_activations(case: str) -> None:
    layers, chosen = UNUSUAL[case], frozenset(range(len(UNUSUAL[case])))
    kept, losses = train(small_job(*layers), [(0, len(layers))], [[0]], 2)
    for split in (False, True):
        again, again_losses = train(
            small_job(*layers, checkpointed=chosen), [(0, 1), (1, len(layers))], [[0, 1]], 2, split=split
        )
        assert digest(kept) == digest(again)
        assert losses == again_losses


def test_a_checkpointed_layer_keeps_no_graph_and_runs_twice() -> None:
    calls = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    (stage,) = small_job(lambda: Watched(4, 4), checkpointed=frozenset({0})).stages([(0, 1)])
    stage.forward(0, 0, None)
    (cell,) = stage._contexts[0][0].cells
    assert cell.output.grad_fn is None
    stage.backward(OpKind.I, 0, 0, None)
    stage.backward(OpKind.W, 0, 0, None)
    assert calls == [True, True], "W uses the graph that I made anew"


def test_a_checkpointed_layer_that_changes_its_input_is_refused() -> None:
    job = small_job(lambda: nn.Sequential(nn.ReLU(inplace=True), linear()), checkpointed=frozenset({0}))
    with pytest.raises(ConfigError, match=r"layer 0 changes its input in place; leave it out of model\.checkpoint"):
        train(job, [(0, 1)], [[0]], 1)


def test_a_checkpointed_layer_may_be_given_what_the_one_before_has_changed_in_place() -> None:
    def layers(**options):
        return small_job(linear, lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)), linear, **options)

    one, other = (train(layers(checkpointed=each), [(0, 3)], [[0]], 1)[0] for each in (frozenset(), frozenset({2})))
    assert digest(one) == digest(other)


def test_one_weight_in_three_layers() -> None:
    shared: list[nn.Module] = []

    def again() -> nn.Module:
        layer = nn.Linear(4, 4)
        shared.append(layer)
        layer.weight = shared[0].weight
        return layer

    def make() -> Job:
        shared.clear()
        return small_job(again, again, nn.Tanh, again)

    one, _ = train(make(), [(0, 4)], [[0]], 2)
    cut, _ = train(make(), [(0, 1), (1, 4), (0, 3), (3, 4)], [[0, 1], [2, 3]], 2)
    assert one[0].reductions[-1] == (0, 1, 3)
    assert digest(one) == digest(cut)


def test_half_precision_parameters_are_trained() -> None:
    job = small_job(lambda: linear().bfloat16())
    load = job.load
    job.load = lambda step, m: tuple(t.bfloat16() for t in load(step, m))
    before = digest(job.stages([(0, 1)]))
    after = digest(train(job, [(0, 1)], [[0]], 1)[0])
    assert before.weights_sha256 != after.weights_sha256


def test_operations_out_of_order_are_refused() -> None:
    (stage,) = gpt_job().stages([(0, 5)])
    with pytest.raises(InternalError, match="other steps"):
        stage.begin(3)
    stage.begin(0)
    with pytest.raises(InternalError, match="W of micro-batch 0 without its I"):
        stage.backward(OpKind.W, 0, 0, None)
    with pytest.raises(InternalError, match="without its forward"):
        stage.backward(OpKind.B, 0, 0, None)
    with pytest.raises(InternalError, match="before the verdict"):
        stage.update(0)
    with pytest.raises(InternalError, match="not accepted"):
        stage.vote()
    with pytest.raises(InternalError, match="swap without an update"):
        stage.swap(0)


def test_votes_that_disagree_are_refused() -> None:
    one, other = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    one[0, 1], other[1, 1] = 1.0, 2.0
    assert Stage.merge_votes(one, other)[:, 1].tolist() == [1.0, 2.0]
    other[0, 1] = 1.5
    with pytest.raises(ReplicaDiverged, match=r"\[0\]"):
        Stage.merge_votes(one, other)


def test_seeds_do_not_depend_on_the_process() -> None:
    assert layer_seed(1, 2, 3, 4) == 15195315728730727403
    seeds = {layer_seed(0, s, m, i) for s in range(5) for m in range(5) for i in range(5)}
    assert len(seeds) == 125


class _Moody(torch.autograd.Function):
    """x * w, whose backward pass gives half of its gradients once, and is right from then on."""

    wrong = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        scale, _Moody.wrong = (0.5 if _Moody.wrong else 1.0), 0
        return scale * gradient * weight, scale * (gradient * x).sum(0)


class _MoodyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return _Moody.apply(x, self.weight)  # type: ignore[no-any-return]


def test_a_layer_that_cannot_be_split_is_run_fused_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    layers = [linear, _MoodyLayer, linear]
    grid = [(0, 1), (1, len(layers))], [[0, 1]], 2
    fused, fused_losses = train(small_job(*layers), *grid)
    assert not caplog.records
    _Moody.wrong = 1
    split, losses = train(small_job(*layers), *grid, split=True)
    assert (digest(split), losses) == (digest(fused), fused_losses)
    assert [record.message for record in caplog.records] == [
        "layer 1: split backward differs from fused; its W is done within I"
    ]
