"""One process that trains as many workers would: what a simulated failure leaves of a mini-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast.config.load import parse_job
from holdfast.data.sampler import load_microbatch
from holdfast.errors import ConfigError, StorageError
from holdfast.runtime.engine.modules import build_model
from holdfast.study.scenarios import StudyScenario
from holdfast.study.trainer import Split, Trainer, load_states, save_states

JOB = {
    "model": {"kind": "python", "target": f"{__file__}:build", "loss": "torch.nn.functional:cross_entropy"},
    "data": {"kind": "digits"},
    "grid": {"pipelines": 4, "stages": 1, "microbatches": 1, "microbatch_size": 4},
    "optimizer": {"kind": "sgd", "lr": 0.125, "momentum": 0.5, "schedule": "linear"},
    "train": {"steps": 9, "seed": 3},
}
AT = 2


def build():
    return [
        nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()),
        nn.Linear(72, 8),
        nn.Linear(8, 10),
    ]


@pytest.fixture(scope="module")
def job():
    torch.set_num_threads(1)
    return parse_job(copy.deepcopy(JOB))


@pytest.fixture(scope="module")
def split(job):
    return Split(job)


@pytest.fixture(scope="module")
def before(job, split):
    trainer = Trainer(job, split)
    for step in range(AT):
        trainer.run(step)
    return trainer.states()


def after(job, split, before, **failure):
    """The weights by layer, after step AT, and the trainer."""
    trainer = Trainer(job, split, StudyScenario(seed=3, at=AT, **failure) if failure else None)
    trainer.take(before)
    trainer.run(AT)
    return trainer


def weights(trainer_or_states):
    states = trainer_or_states.states() if isinstance(trainer_or_states, Trainer) else trainer_or_states
    return [value for state in states for value in state.parameters.values()]


def same(ours, theirs):
    return [torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True)]


def test_a_fifth_is_held_out_and_not_trained_on(split):
    held = sum(len(y) for _, y in split.held_out)
    assert (len(split.training), held) == (1438, 359)
    assert set(split.training.indices).isdisjoint(range(4, 1797, 5))


def test_a_state_that_was_written_goes_on_with_the_same_bits(job, split, before, tmp_path):
    save_states(tmp_path / "state", before)
    assert not (tmp_path / "state.tmp").exists()
    straight, again = after(job, split, before), after(job, split, load_states(tmp_path / "state"))
    for trainer in (straight, again):
        trainer.run(AT + 1)
    assert straight.weights_sha256() == again.weights_sha256()
    assert straight.held_out(AT + 2) == again.held_out(AT + 2)


@pytest.mark.parametrize(
    "failure",
    [
        {"strategy": "lossy-forward", "progress": 100, "survivors": 1},
        {"strategy": "lossy-forward", "progress": 0, "survivors": 4},
        {"strategy": "skip", "progress": 100},
        {"strategy": "rollback", "progress": 0},
    ],
    ids=lambda failure: failure["strategy"],
)
def test_a_failure_that_takes_nothing_leaves_the_bits_of_none(job, split, before, failure):
    baseline, failed = after(job, split, before), after(job, split, before, **failure)
    for trainer in (baseline, failed):
        trainer.run(AT + 1)
    assert same(failed, baseline) == [True] * 7


def test_what_is_skipped_stays_as_it_was_and_what_was_reduced_does_not(job, split, before):
    baseline = after(job, split, before)
    half = after(job, split, before, strategy="skip", progress=50)
    assert same(half, before) == [True] * 4 + [False] * 3, "not even momentum moves them"
    assert same(half, baseline) == [False] * 4 + [True] * 3


def test_a_rollback_makes_the_step_twice_where_gradients_were_used(job, split, before):
    twice = after(job, split, before, strategy="rollback", progress=50)
    assert not any(same(twice, before))
    assert not any(same(twice, after(job, split, before)))
    assert {state.step for state in twice.states()} == {AT + 1}


def test_survivors_average_their_own_gradients(job, split, before):
    lossy = after(job, split, before, strategy="lossy-forward", progress=0, survivors=3)
    model = nn.Sequential(*build_model(job).layers)
    found = [value for state in before for value in state.parameters.values()]
    for parameter, value in zip(model.parameters(), found, strict=True):
        parameter.data.copy_(value)
    for number in range(3):  # the first ones survive
        x, y = load_microbatch(
            split.training, seed=3, step=AT, microbatch=number, num_microbatches=4, microbatch_size=4
        )
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
    momenta = [entry["momentum_buffer"] for state in before for entry in state.optimizer.values()]
    rate = 0.125 * (1 - AT / 9)
    for ours, was, parameter, momentum in zip(weights(lossy), found, model.parameters(), momenta, strict=True):
        assert torch.allclose(ours, was - rate * (0.5 * momentum + parameter.grad), atol=1e-6)


@pytest.mark.parametrize("survivors", [1, 3, 4])
def test_others_compute_what_was_lost_and_the_bits_are_those_of_no_failure(job, split, before, survivors):
    trainer = Trainer(job, split, StudyScenario(seed=3, at=AT, strategy="adaptive", survivors=survivors))
    trainer.take(before)
    ran = []
    trainer._model.register_forward_hook(lambda *_: ran.append(1))
    trainer.run(AT)
    assert len(ran) == 4 + (4 - survivors)
    assert trainer.weights_sha256() == after(job, split, before).weights_sha256()
    trainer.run(AT + 1)
    assert len(ran) == 4 + (4 - survivors) + 4


def build_tied():
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)]
    layers[2].weight = layers[1].weight
    return layers


def test_a_weight_that_two_layers_share_is_one(split):
    job = parse_job({**copy.deepcopy(JOB), "model": {**JOB["model"], "target": f"{__file__}:build_tied"}})
    trainer = Trainer(job, split)
    trainer.run(0)
    _, first, second, _ = trainer._model
    assert first.weight is second.weight
    assert sum(state.parameter_bytes for state in trainer.states()) == 4 * (64 * 64 + 2 * 64 + 64 * 10 + 10)


def test_a_state_takes_the_place_of_one_that_is_there_and_a_part_of_it_is_refused(job, split, before, tmp_path):
    folder = tmp_path / "state"
    for _ in range(2):
        save_states(folder, before)
    assert list(tmp_path.iterdir()) == [folder]
    assert len(load_states(folder)) == len(before)
    (folder / "layer-0006.safetensors").unlink()
    with pytest.raises(StorageError, match="a state of 6 gradients; expected 7"):
        Trainer(job, split).take(load_states(folder))


def few():
    return [(torch.zeros(1, 8, 8), torch.tensor(0))] * 4


def test_too_few_items_to_hold_any_out_are_refused():
    with pytest.raises(ConfigError, match="expected 5 items or more, got 4"):
        Split(parse_job({**copy.deepcopy(JOB), "data": {"kind": "python", "target": f"{__file__}:few"}}))


def no_number(output, target):
    return output.square().mean() * float("nan")


def test_a_loss_that_is_no_number_is_told(split):
    job = parse_job({**copy.deepcopy(JOB), "model": {**JOB["model"], "loss": f"{__file__}:no_number"}})
    with pytest.raises(ConfigError, match="after 4 steps the held-out loss is nan"):
        Trainer(job, split).held_out(4)


def test_targets_that_are_no_classes_have_a_loss_alone(split, job):
    reals = parse_job({**copy.deepcopy(JOB), "model": {**JOB["model"], "loss": f"{__file__}:squares"}})
    other = Split(job)
    other.held_out = [(x, torch.zeros(len(x), 10)) for x, _ in split.held_out]
    held = Trainer(reals, other).held_out(0)
    assert held.accuracy is None
    assert held.loss > 0


def squares(output, target):
    return output.square().mean()
