"""The loss is scaled: no bit of a sound step changes, small gradients live, and the scale is state like the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from holdfast.core.schedule import OpKind
from holdfast.errors import CorruptBlob
from holdfast.optim.committed import CommittedLayer
from holdfast.optim.digest import LayerState, decode_layer, digest_states, encode_layer, layer_sha256
from holdfast.optim.factory import make_optimizer
from holdfast.optim.loss_scale import LARGEST, LossScale, LossScaling
from holdfast.optim.shadow import ShadowedLayer
from holdfast.optim.undoable import UndoableLayer
from holdfast.runtime.engine.stage import Stage

from .numerics_grid import Job, add_up, commit, convnet_job, digest, gpt_job, reduce, run_microbatch, train
from .small_layer import gradients, make_layer
from .test_healing import digests, run_step
from .test_speculative import STEPS, poisoned, train_ahead

COMMITS: dict[str, type[CommittedLayer]] = {"shadow": ShadowedLayer, "undo": UndoableLayer}
JOBS = {"gpt": (gpt_job, [(0, 2), (2, 5)]), "convnet": (convnet_job, [(0, 3), (3, 6)])}
SCALING = LossScaling(initial=8.0, growth_every=2)
SMALL = 2.0**-20
"""What the loss of the model in half precision is multiplied by."""


# --- the rule ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 4), st.integers(1, 5))
def test_the_scale_follows_from_which_steps_were_omitted(counted: list[bool], exponent: int, growth_every: int) -> None:
    scaling = LossScaling(initial=2.0**exponent, growth_every=growth_every)
    scale, streak = scaling.first, 0
    for each in counted:
        before, scale = scale, scaling.after(scale, counted=each)
        streak = streak + 1 if each else 0
        doubled = each and streak % growth_every == 0
        assert scale.value == (max(before.value / 2, 1.0) if not each else before.value * (2 if doubled else 1))


def test_it_is_set_as_torch_sets_its_own() -> None:
    ours, theirs = LossScaling(), torch.amp.GradScaler("cpu")
    assert (ours.initial, ours.growth_every) == (theirs.get_scale(), theirs.get_growth_interval())


def test_the_scale_has_limits() -> None:
    scaling = LossScaling(initial=LARGEST, growth_every=1)
    assert scaling.after(scaling.first, counted=True).value == LARGEST
    assert scaling.after(LossScale(value=1.0), counted=False).value == 1.0


# --- one layer --------------------------------------------------------------------------------------------------------


def small(kind: str) -> CommittedLayer:
    return COMMITS[kind](3, make_layer(), make_optimizer("adamw", lr=0.01), scaling=SCALING)


def advance(layer: CommittedLayer, step: int, *, counted: bool = True) -> None:
    if counted:
        layer.update(gradients(step, layer.module), 1.0)
    else:
        layer.skip()
    layer.swap()


@pytest.mark.parametrize("kind", COMMITS)
def test_the_scale_goes_with_the_layer_and_comes_back_with_it(kind: str) -> None:
    layer = small(kind)
    seen = [layer.loss_scale]
    for step, counted in enumerate([True, False, True, True]):
        advance(layer, step, counted=counted)
        seen.append(layer.loss_scale)
        layer.take_back(step)
        assert layer.loss_scale == seen[-2]
        advance(layer, step, counted=counted)
        assert layer.loss_scale == seen[-1]
    values = [(scale.value, scale.streak) for scale in seen if scale is not None]
    assert values == [(8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]


@pytest.mark.parametrize("kind", COMMITS)
def test_an_update_that_is_not_live_changes_no_scale(kind: str) -> None:
    layer = small(kind)
    layer.skip()
    assert layer.loss_scale == SCALING.first
    layer.take_back(0)
    advance(layer, 0)
    assert layer.loss_scale == LossScale(value=8.0, streak=1)


@pytest.mark.parametrize("kind", COMMITS)
def test_a_step_that_counted_can_be_made_again_as_omitted(kind: str) -> None:
    layer = small(kind)
    advance(layer, 0)
    layer.take_back(0)
    advance(layer, 0, counted=False)
    assert layer.loss_scale == LossScale(value=4.0)


def test_a_layer_that_scales_nothing_has_no_scale() -> None:
    layer = ShadowedLayer(3, make_layer(), make_optimizer("adamw", lr=0.01))
    advance(layer, 0)
    advance(layer, 1, counted=False)
    assert layer.loss_scale is None
    assert b"loss_scale" not in encode_layer(layer.export())


@pytest.mark.parametrize("kind", COMMITS)
def test_the_state_of_a_run_with_another_setting_can_be_installed(kind: str) -> None:
    plain = COMMITS[kind](3, make_layer(), make_optimizer("adamw", lr=0.01))
    scaled = small(kind)
    for layer in (plain, scaled):
        advance(layer, 0)
    left, right = decode_layer(encode_layer(plain.export())), decode_layer(encode_layer(scaled.export()))
    plain.install(right)
    scaled.install(left)
    assert (plain.loss_scale, scaled.loss_scale) == (None, SCALING.first)
    scaled.install(right)
    assert scaled.loss_scale == LossScale(value=8.0, streak=1)


# --- digests and files ------------------------------------------------------------------------------------------------


def state(scale: LossScale | None) -> LayerState:
    return LayerState(layer=0, step=2, parameters={"w": torch.ones(2)}, loss_scale=scale)


def test_the_scale_is_in_the_digest_of_the_state_and_in_no_other() -> None:
    scales = [None, LossScale(value=2.0), LossScale(value=4.0), LossScale(value=4.0, streak=1)]
    states = [state(scale) for scale in scales]
    assert len({digest_states([each]).state_sha256 for each in states}) == 4
    assert len({layer_sha256(each) for each in states}) == 4
    assert len({digest_states([each]).weights_sha256 for each in states}) == 1


def test_the_scale_goes_through_bytes() -> None:
    for scale in (None, LossScale(value=0.5 * LARGEST, streak=7)):
        assert decode_layer(encode_layer(state(scale))).loss_scale == scale


def test_a_scale_that_is_none_is_refused() -> None:
    data = encode_layer(state(LossScale(value=4.0)))
    assert data.count(b"streak") == 1
    with pytest.raises(CorruptBlob, match="streak"):
        decode_layer(data.replace(b"streak", b"strike"))


# --- training ---------------------------------------------------------------------------------------------------------


def scales(stages: list[Stage]) -> LossScale:
    """The scale of every layer of every worker, which is one."""
    (found,) = {stage.export(layer).loss_scale for stage in stages for layer in stage.layers}
    assert found is not None
    return found


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", JOBS)
def test_scaling_changes_no_bit_of_steps_that_count(name: str, split: bool) -> None:
    """A power of two goes through the backward pass and out again; norm and clipping see what they would without."""
    make, ranges = JOBS[name]
    changes: dict[str, Any] = {"clip_norm": 0.5}
    plain, losses = train(make(**changes), ranges, [[0, 1]], 3, split=split)
    scaled, same = train(make(**changes, scaling=SCALING), ranges, [[0, 1]], 3, split=split)
    assert same == losses
    assert digest(scaled).weights_sha256 == digest(plain).weights_sha256
    assert digest(scaled).state_sha256 != digest(plain).state_sha256
    assert scales(scaled) == LossScale(value=16.0, streak=1)


@pytest.mark.parametrize("name", JOBS)
def test_the_loss_is_scaled_before_the_backward_pass(name: str) -> None:
    """What goes from stage to stage is scaled, which is what half precision needs."""
    make, ranges = JOBS[name]
    sent = []
    for scaling in (None, SCALING):
        first, last = make(scaling=scaling).stages(ranges)
        activation = first.forward(0, 1, None)
        last.forward(0, 1, activation)
        sent.append(last.backward(OpKind.B, 0, 1, None))
    assert torch.equal(sent[1], sent[0] * 8)
    assert bool(sent[0].any())


@pytest.mark.parametrize("commit_by", COMMITS)
def test_an_omitted_step_halves_the_scale_on_every_grid(commit_by: Any) -> None:
    changes: dict[str, Any] = {"scaling": SCALING, "commit": commit_by}
    one, _ = train(poisoned(convnet_job(**changes), 2), [(0, 6)], [[0]], STEPS)
    many, _ = train(
        poisoned(convnet_job(**changes), 2), [(0, 2), (2, 6), (0, 3), (3, 6)], [[0, 1], [2, 3]], STEPS, order=range(6)
    )
    assert scales(one) == scales(many) == LossScale(value=16.0), "8, 8, 16, 8, 8, 16"
    assert digest(one) == digest(many)


@pytest.mark.parametrize("commit_by", COMMITS)
@pytest.mark.parametrize("step", [0, 2, STEPS - 1])
def test_updates_ahead_of_the_verdict_end_at_the_same_scale(step: int, commit_by: Any) -> None:
    """A step that is made again as omitted halves the scale as the run does that waits for the verdict."""
    ranges = [(0, 3), (3, 6)]

    def make() -> Any:
        return poisoned(convnet_job(scaling=SCALING, commit=commit_by), step)

    expected, _ = train(make(), ranges, [[0, 1]], STEPS)
    stages, redone = train_ahead(make(), ranges, 2)
    assert redone == [step]
    assert scales(stages) == scales(expected)
    if commit_by == "shadow":
        assert digest(stages) == digest(expected)


def test_a_step_run_again_has_the_bits_of_the_first_time() -> None:
    expected, _ = train(poisoned(convnet_job(scaling=SCALING), 1), [(0, 6)], [[0]], 3)
    job = poisoned(convnet_job(scaling=SCALING), 1)
    (stage,), _ = train(job, [(0, 6)], [[0]], 2)
    assert scales([stage]).value == 4.0
    stage.take_back(1)
    assert scales([stage]).value == 8.0
    for step in (1, 2):
        run_and_commit(job, stage, step)
    assert digest([stage]) == digest(expected)


def test_who_follows_comes_to_the_scale_of_the_others() -> None:
    """Over steps that counted and one that did not, at a scale of which it has seen nothing."""
    job = poisoned(convnet_job(scaling=SCALING), 2)
    owner, follower = job.stages([(0, 6), (0, 6)])
    for step in range(4):
        if step == 1:
            follower.follow(range(6), 1)
            pinned = {layer: owner.snapshot(layer) for layer in range(6)}
        run_step(job, owner, follower, step)
    follower.heal({layer: encode() for layer, encode in pinned.items()})
    assert scales([owner, follower]) == LossScale(value=8.0, streak=1)
    assert digests(follower) == digests(owner)
    run_step(job, owner, follower, 4)
    assert digests(follower) == digests(owner)


def test_a_snapshot_brings_the_scale_back() -> None:
    job = poisoned(convnet_job(scaling=SCALING), 1)
    (stage,), _ = train(job, [(0, 6)], [[0]], 1)
    pinned = {layer: stage.snapshot(layer) for layer in range(6)}
    expected, _ = train(job, [(0, 6)], [[0]], 2)
    (other,) = job.stages([(0, 6)])
    for layer, encode in pinned.items():
        other.restore(layer, encode())
    assert scales([other]) == LossScale(value=8.0, streak=1)
    run_and_commit(job, other, 1)
    assert scales([other]) == LossScale(value=4.0)
    assert digest([other]) == digest(expected)


def run_and_commit(job: Job, stage: Stage, step: int) -> None:
    for microbatch in range(job.num_microbatches):
        run_microbatch([stage], step, microbatch)
    reduce([stage])
    commit([stage])


# --- half precision ---------------------------------------------------------------------------------------------------


class Half(nn.Module):
    """A layer that computes, keeps its weights and hands on its activations in float16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs).half()

    def forward(self, source: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.linear(source.half()))
        return found


def half_job(**changes: Any) -> Job:
    def load(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        return torch.rand(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)

    def layers() -> list[nn.Module]:
        torch.manual_seed(1)
        return [Half(12, 16), Half(16, 16), Half(16, 16), Half(16, 5)]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), targets) * SMALL

    return Job(layers=layers, loss=loss, load=load, optimizer=make_optimizer("sgd", lr=0.1), **changes)


def first_gradient(job: Job) -> tuple[float, bool]:
    """The norm of the whole gradient of the first step, and whether it is finite."""
    stages = job.stages([(0, 2), (2, 4)])
    for microbatch in range(job.num_microbatches):
        run_microbatch(stages, 0, microbatch)
    vote = add_up(stages)[1]
    return float(vote[:, 1].sum().sqrt()), not bool(vote[:, 0].any())


def test_gradients_too_small_for_half_precision_are_kept() -> None:
    """In float16 nothing below 2^-25 is left of them; scaled, they are those of float32, up to its rounding."""
    wide = half_job()
    layers = wide.layers
    wide.layers = lambda: [Full(layer) for layer in layers()]
    expected, _ = first_gradient(wide)
    scaled, finite = first_gradient(half_job(scaling=LossScaling(initial=2.0**22)))
    lost, _ = first_gradient(half_job())
    assert finite
    assert scaled == pytest.approx(expected, rel=0.01)
    assert abs(lost - expected) > 10 * abs(scaled - expected)


class Full(nn.Module):
    """The layer of a model in half precision, in float32."""

    def __init__(self, half: nn.Module) -> None:
        super().__init__()
        self.linear = half.linear.float()

    def forward(self, source: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.linear(source))
        return found


def test_a_scale_that_is_too_large_comes_down_until_nothing_overflows() -> None:
    job = half_job(scaling=LossScaling(initial=2.0**46, growth_every=1000))
    (stage,) = job.stages([(0, 4)])
    omitted = []
    for step in range(24):
        run_and_commit(job, stage, step)
        omitted.append(scales([stage]).streak == 0)
    assert omitted[0]
    assert not any(omitted[-4:])
    assert scales([stage]).value == 2.0 ** (46 - sum(omitted))


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "staggered"])
def test_half_precision_has_the_same_bits_on_every_grid(ahead: bool) -> None:
    """With overflows of its own: the scale grows after every step that counts, until one does not."""
    scaling = LossScaling(initial=2.0**36, growth_every=1)
    expected, _ = train(half_job(scaling=scaling), [(0, 4)], [[0]], STEPS)
    if ahead:
        stages, redone = train_ahead(half_job(scaling=scaling), [(0, 1), (1, 4)], 2)
        assert redone
    else:
        ranges = [(0, 1), (1, 4), (0, 2), (2, 4)]
        stages, _ = train(half_job(scaling=scaling), ranges, [[0, 1], [2, 3]], STEPS)
    assert digest(stages) == digest(expected)
