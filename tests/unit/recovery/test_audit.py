"""Silent corruption is found as often as N says, and whoever is right is never blamed."""

from __future__ import annotations

import doctest
import random
from collections import Counter

import numpy
import pytest
import torch
from tests.detection import detection_rate
from torch import nn

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError
from holdfast.optim.digest import tensors_sha256
from holdfast.recovery import audit
from holdfast.recovery.audit import (
    AuditFinding,
    Claim,
    Sample,
    Sampling,
    Strikes,
    audits_weights,
    judge,
    other_owners,
    sample,
)
from holdfast.schedule.builders import regular_plan

A, B, C, D = (WorkerId(pipeline, 1) for pipeline in range(4))


def claims(*said: tuple[WorkerId, str]) -> tuple[Claim, ...]:
    return tuple(Claim(worker=worker, inputs="i", result=result) for worker, result in said)


def found(said, others=()):
    judgement = judge(claims(*said), others)
    return judgement.finding, judgement.wrong or judgement.ask


def test_two_that_agree():
    judgement = judge(claims((A, "x"), (B, "x")), (C,))
    assert (judgement.finding, judgement.right) == (AuditFinding.AGREED, "x")


@pytest.mark.parametrize(
    ("said", "others", "expected"),
    [
        ([(A, "x")], (B, C), (AuditFinding.ASK, (B,))),
        ([(A, "x"), (B, "y")], (C, D), (AuditFinding.ASK, (C,))),
        ([(A, "x"), (B, "y"), (C, "y")], (), (AuditFinding.WRONG, (A,))),
        ([(A, "x"), (B, "y"), (C, "x")], (D,), (AuditFinding.WRONG, (B,))),
        ([(A, "x"), (B, "y"), (C, "z")], (D,), (AuditFinding.ASK, (D,))),
        ([(A, "x"), (B, "y"), (C, "z"), (D, "z")], (), (AuditFinding.WRONG, (A, B))),
        ([(A, "x"), (B, "y"), (C, "z")], (), (AuditFinding.ASK, (A, B, C))),
        # two owners: both repeat
        ([(A, "x"), (B, "y")], (), (AuditFinding.ASK, (A, B))),
        ([(A, "x"), (B, "y"), (A, "y")], (), (AuditFinding.WRONG, (A,))),
        ([(A, "x"), (B, "y"), (A, "y"), (B, "y")], (), (AuditFinding.WRONG, (A,))),
        ([(A, "x"), (B, "y"), (A, "x"), (B, "z")], (), (AuditFinding.WRONG, (B,))),
        ([(A, "x"), (B, "y"), (A, "x"), (B, "y")], (), (AuditFinding.UNDECIDED, ())),
        ([(A, "x"), (B, "y"), (A, "y"), (B, "x")], (), (AuditFinding.UNSTEADY, ())),
        ([(A, "x"), (B, "y"), (C, "x"), (A, "y"), (B, "x"), (C, "x")], (), (AuditFinding.UNSTEADY, ())),
        ([(A, "x"), (B, "y"), (A, "v"), (B, "w")], (), (AuditFinding.UNSTEADY, ())),
        # one owner: it repeats, and says of itself only whether it does
        ([(A, "x")], (), (AuditFinding.ASK, (A,))),
        ([(A, "x"), (A, "x")], (), (AuditFinding.AGREED, ())),
        ([(A, "x"), (A, "y")], (), (AuditFinding.UNSTEADY, ())),
    ],
)
def test_who_is_wrong(said, others, expected):
    assert found(said, others) == expected


def test_what_was_computed_of_something_else_proves_nothing():
    one, other = Claim(worker=A, inputs="i", result="x"), Claim(worker=B, inputs="j", result="y")
    assert judge((one, other), (C,)).finding is AuditFinding.INPUTS


def test_nobody_claims_anything():
    with pytest.raises(ConfigError, match="nobody claims anything"):
        judge((), (A,))


def test_whoever_is_wrong_twice_is_told_to_leave():
    strikes = Strikes().add([A, B]).add([]).add([A])
    assert strikes.counts == ((A, 2), (B, 1))
    assert strikes.leaving == (A,)


@pytest.mark.parametrize("every", [1, 4, 10])
def test_one_step_in_so_many_and_every_pair_as_often_as_another(every):
    steps = 12_000 * every // 4
    samples = [each for step in range(steps) if (each := sample(3, step, every, 4, 6))]
    assert [each.step // every for each in samples] == list(range(steps // every))
    pairs = Counter((each.layer, each.microbatch) for each in samples)
    assert len(pairs) == 24
    assert max(pairs.values()) < 1.4 * len(samples) / 24
    places = Counter(each.step % every for each in samples)
    assert len(places) == every
    assert max(places.values()) < 1.25 * len(samples) / every


def test_samples_depend_on_seed_and_step_alone():
    one = [sample(3, step, 5, 4, 6) for step in range(50)]
    assert [sample(3, step, 5, 4, 6) for step in range(49, -1, -1)] == one[::-1]
    assert [sample(4, step, 5, 4, 6) for step in range(50)] != one


@pytest.mark.parametrize("numbers", [(0, 4, 6), (5, 0, 6), (5, 4, 0)])
def test_impossible_audits(numbers):
    with pytest.raises(ConfigError, match="expected at least 1 each"):
        sample(1, 0, *numbers)


def test_weights_are_compared_once_in_so_many_steps():
    assert [step for step in range(12) if audits_weights(step, 4)] == [3, 7, 11]
    assert all(audits_weights(step, 1) for step in range(3))


def test_others_are_asked_in_turn():
    first = Counter()
    for step in range(3000):
        others = other_owners(1, Sample(step=step, layer=0, microbatch=0), (D, A, C, B), A)
        assert sorted(others) == [B, C, D]
        first[others[0]] += 1
    assert min(first.values()) > 800
    assert other_owners(1, Sample(step=0, layer=0, microbatch=0), (A,), A) == ()


@pytest.mark.parametrize(("share", "every", "steps"), [(1 / 12, 3, 40), (0.25, 5, 23), (1.0, 7, 3), (1 / 24, 1, 30)])
def test_the_rate_is_that_of_what_is_sampled(share, every, steps):
    layers, microbatches, seeds = 4, 6, 4000
    wrong = {divmod(pair, microbatches) for pair in range(round(share * layers * microbatches))}

    def caught(seed):
        samples = (sample(seed, step, every, layers, microbatches) for step in range(steps))
        return any(each and (each.layer, each.microbatch) in wrong for each in samples)

    rate = sum(map(caught, range(seeds))) / seeds
    assert rate == pytest.approx(detection_rate(share, every, steps), abs=4 * (0.25 / seeds) ** 0.5)


class Numpy(nn.Module):
    """Draws from numpy's generator, which nobody seeds."""

    def forward(self, x):
        return x * float(numpy.random.default_rng().random())


class Worker:
    """Holds a layer of its own and computes samples with it, for real."""

    def __init__(self, worker, layer=None, hurt=None):
        torch.manual_seed(5)
        self.worker, self.layer = worker, layer or nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.hurt = hurt
        if hurt == "weight":
            flip(self.layer[0].weight.detach())

    def claim(self, number):
        torch.manual_seed(number)
        x, gradient = torch.randn(3, 6).requires_grad_(), torch.randn(3, 6)
        before = {"input": x.detach().clone(), "gradient": gradient.clone()}
        output = self.layer(x)
        if self.hurt == "activation":
            flip(output.data)  # autograd does not notice, as it would not if hardware did it
        weights = dict(self.layer.named_parameters())
        gradients = torch.autograd.grad(output, [x, *weights.values()], gradient)
        if self.hurt == "gradient":
            flip(gradients[-1])
        after = {"output": output, **dict(zip(["input", *weights], gradients, strict=True))}
        return Claim(worker=self.worker, inputs=tensors_sha256(before), result=tensors_sha256(after))


def flip(tensor):
    """The lowest bit of one number."""
    tensor.view(-1).view(torch.int32)[1] ^= 1


def audited(workers, number):
    """Everybody is asked as judged, until it is known."""
    left = [worker.worker for worker in workers[1:]]
    by_name = {worker.worker: worker for worker in workers}
    made = [workers[0].claim(number)]
    while (judgement := judge(tuple(made), tuple(left))).finding is AuditFinding.ASK:
        for worker in judgement.ask:
            made.append(by_name[worker].claim(number))
            left = [each for each in left if each != worker]
    return judgement


@pytest.mark.parametrize("hurt", ["weight", "activation", "gradient"])
@pytest.mark.parametrize("whose", range(3))
def test_one_flipped_bit_of_one_of_three_is_found_and_named(hurt, whose):
    workers = [Worker(each, hurt=hurt if number == whose else None) for number, each in enumerate((A, B, C))]
    judgement = audited(workers, 7)
    asked = whose < 2  # the third is asked only if the first two differ
    assert judgement.finding is (AuditFinding.WRONG if asked else AuditFinding.AGREED)
    assert judgement.wrong == ((A, B, C)[whose],) * asked
    assert judgement.right == Worker(D).claim(7).result


@pytest.mark.parametrize("hurt", ["weight", "activation", "gradient"])
def test_of_two_nobody_can_tell_who_is_wrong_if_it_stays_so(hurt):
    assert audited([Worker(A), Worker(B, hurt=hurt)], 7).finding is AuditFinding.UNDECIDED


def test_of_two_whoever_was_wrong_once_is_named():
    hurt = Worker(B, hurt="gradient")
    sound = hurt.claim

    def once(number):
        made = sound(number)
        hurt.hurt = None
        return made

    hurt.claim = once
    judgement = audited([Worker(A), hurt], 7)
    assert (judgement.finding, judgement.wrong) == (AuditFinding.WRONG, (B,))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_layer_that_does_not_repeat_is_nobodys_fault(count):
    workers = [Worker(each, layer=Numpy()) for each in (A, B, C)[:count]]
    assert audited(workers, 7).finding is AuditFinding.UNSTEADY


def test_no_false_alarm_in_five_thousand_steps():
    """Every tenth is audited."""
    workers = [Worker(A), Worker(B)]
    samples = [each for step in range(5000) if (each := sample(3, step, 10, 4, 6))]
    assert len(samples) == 500
    assert {audited(workers, each.step).finding for each in samples} == {AuditFinding.AGREED}


@pytest.mark.parametrize("owners", [2, 3, 4])
def test_whoever_is_sound_is_never_blamed(owners):
    """One worker, at most, is wrong, sometimes or always, in any way; 3,000 courses of events."""
    names = (A, B, C, D)[:owners]
    for seed in range(3000):
        source = random.Random(seed)
        bad, rate = source.choice(names), source.choice([0.3, 1.0])

        def claim(worker, source=source, bad=bad, rate=rate):
            wrong = worker == bad and source.random() < rate
            return Claim(worker=worker, inputs="i", result=source.choice(["x", "y"]) if wrong else "right")

        ran = source.choice(names)
        left = [each for each in names if each != ran]
        made = [claim(ran)]
        while (judgement := judge(tuple(made), tuple(left))).finding is AuditFinding.ASK:
            made += [claim(worker) for worker in judgement.ask]
            left = [each for each in left if each not in judgement.ask]
        assert judgement.wrong in ((), (bad,)), f"seed {seed}"
        assert judgement.right in (None, "right"), f"seed {seed}"
        if judgement.finding is not AuditFinding.AGREED and owners > 2:
            assert judgement.wrong == (bad,), f"seed {seed}"


def test_examples_in_docstrings():
    assert doctest.testmod(audit).failed == 0


def test_of_a_loop_one_item_is_run_twice_in_the_step_before_weights_are_compared():
    sampling, plan = Sampling(seed=3, every=5, layers=False), regular_plan(2, split_evenly(4, 1), 3)
    found = {step: sampling.item(step, plan) for step in range(500)}
    early = {1, 3}
    assert {s for s, item in found.items() if item is not None} == early | {
        s for s in range(500) if audits_weights(s, 5)
    }
    seldom = Sampling(seed=3, every=300, layers=False)
    compared = [step for step in range(700) if seldom.weighs(step)]
    assert compared == [1, 3, 7, 15, 31, 63, 127, 255, 299, 599], "soon, and then more and more seldom"
    assert [step for step in range(700) if Sampling(seed=3, every=300).weighs(step)] == [299, 599]
    assert set(found.values()) == {None, *range(6)}
    assert all(sampling.of(step, plan) is None for step in range(500)), "no sample of a layer"
    assert all(Sampling(seed=3, every=5).item(step, plan) is None for step in range(500))
