"""What a script's optimizers and schedulers are and have: told, compared, taken over, and seen by the script."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.config.deciding import compare_told, spelled
from holdfast.data.feeds import Indexed
from holdfast.data.orders import shuffled
from holdfast.errors import ConfigError
from holdfast.runtime.loop.alone import run_step
from holdfast.runtime.loop.facts import data_facts, source_files
from holdfast.runtime.loop.prepared import prepare
from holdfast.runtime.loop.stage import Gradients, LoopStage

MICROBATCHES = 4
SCHEDULES = torch.optim.lr_scheduler


def model(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(whole, step, number):
    torch.manual_seed(100 * step + number)
    return whole(torch.randn(2, 3, dtype=next(whole.parameters()).dtype)).square().mean()


class AtOnce:
    """Stands for a loop: each item is computed where it is asked for."""

    def __init__(self, prepared):
        self.prepared = prepared

    def run(self, items, take):
        for item in items:
            if not take(item, self._run(item)):
                return

    def _run(self, item):
        self.prepared.model.zero_grad()
        loss = loss_of(self.prepared.model, item.step, item.number)
        loss.backward()
        rows = (tuple(p.grad for p in bucket.parameters() if p.requires_grad) for bucket in self.prepared.buckets)
        return Gradients(of=tuple(rows), loss=loss.detach().float().reshape(1))


class Job:
    """One worker's part of a job, as far as some step."""

    def __init__(self, whole, *optimizers, schedulers=(), bucket_bytes=20):
        self.optimizer, self.model = optimizers[0], whole
        self.prepared = prepare(whole, optimizers, schedulers=schedulers, bucket_bytes=bucket_bytes)
        self.prepared.begin()
        self.stage = LoopStage(
            prepared=self.prepared,
            turns=AtOnce(self.prepared),
            owned=range(len(self.prepared.buckets)),
            num_microbatches=MICROBATCHES,
        )

    def run(self, *steps):
        for step in steps:
            run_step(self.stage, SimpleNamespace(prepared=self.prepared, microbatches=MICROBATCHES), step)
        return self

    def take(self, other, facts=None):
        with self.prepared.as_of(other.prepared.facts if facts is None else facts):
            for layer in other.stage.layers:
                self.stage.restore(layer, other.stage.snapshot(layer)())
        return self


def plain(whole, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        for number in range(MICROBATCHES):
            (loss_of(whole, step, number) / MICROBATCHES).backward()
        optimizer.step()


def adamw(whole, **options):
    return torch.optim.AdamW(whole.parameters(), **{"lr": 0.1, "foreach": False, **options})


def same_state(one, other):
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    return left.keys() == right.keys() and all(
        torch.allclose(torch.as_tensor(left[key][name]), torch.as_tensor(right[key][name]), rtol=1e-5, atol=1e-7)
        for key in left
        for name in left[key]
    )


# --- what the script sees ---------------------------------------------------------------------------------------------


def test_the_scripts_optimizer_shows_the_state_that_there_is():
    ours, theirs = model(), model()
    job, optimizer = Job(ours, adamw(ours)).run(0, 1, 2), adamw(theirs)
    plain(theirs, optimizer, range(3))
    assert len(job.optimizer.state_dict()["state"]) == 4
    assert same_state(job.optimizer, optimizer)
    joiner = model()
    other = Job(joiner, adamw(joiner)).take(job)
    assert same_state(other.optimizer, optimizer), "also after it came from elsewhere"
    for each in job.optimizer.state.values():
        each["exp_avg"].zero_()
    for entries in (job.stage.export(layer).optimizer for layer in job.stage.layers):
        assert all(not each["exp_avg"].any() for each in entries.values()), "no copies"


@pytest.mark.parametrize("make", [adamw, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, foreach=False)])
def test_a_state_of_steps_before_is_taken_over(make):
    theirs, ours = model(), model()
    optimizer = make(theirs)
    plain(theirs, optimizer, range(2))
    ours.load_state_dict(theirs.state_dict())
    again = make(ours)
    again.load_state_dict(optimizer.state_dict())
    first = {key: value["step"].item() for key, value in again.state_dict()["state"].items()}
    job = Job(ours, again)
    assert set(first.values()) == {2.0}
    begun = job.prepared.fingerprint()
    job.run(0)
    plain(theirs, optimizer, [0])
    assert same_state(job.optimizer, optimizer)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    fresh = model()
    fresh.load_state_dict(ours.state_dict())
    assert Job(fresh, make(fresh)).prepared.fingerprint() not in (begun, job.prepared.fingerprint())


def test_without_a_state_the_fingerprint_is_that_of_the_weights_alone():
    prints = [Job(each, adamw(each)).prepared.fingerprint() for each in (model(), model(), model(6))]
    assert prints[0] == prints[1] != prints[2]


def test_what_an_object_keeps_is_told_as_tensors_and_in_no_more_words_than_a_small_one():
    """An average as large as the model: text of its numbers took ten seconds, in which no other thread ran."""

    def told(width):
        whole = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        average = AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        job = Job(whole, adamw(whole))
        job.prepared.objects.append(average)
        return average, job, job.prepared.tell()

    (_, _, small), (average, job, large) = told(4), told(5000)
    assert abs(len(large.text) - len(small.text)) < 100, "shapes at most"
    shared = {each.data_ptr() for each in large.tensors}
    assert {each.data_ptr() for each in average.parameters()} <= shared, "without a copy"
    expected = [each.clone() for each in average.parameters()]
    states = {layer: job.stage.snapshot(layer)() for layer in job.stage.layers}
    with torch.no_grad():
        for each in average.parameters():
            each.zero_()
    for layer, state in states.items():
        job.stage.restore(layer, state)
    assert all(map(torch.equal, average.parameters(), expected))


def test_within_the_loop_a_state_is_not_loaded():
    whole = model()
    optimizer = adamw(whole)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    job = Job(whole, optimizer)
    with pytest.raises(ConfigError, match=r"AdamW.load_state_dict .* expected before hf.steps"):
        job.optimizer.load_state_dict(state)


def test_a_state_of_no_parameter_is_refused():
    whole = model()
    optimizer = adamw(whole)
    optimizer.state["calls"] = 1
    with pytest.raises(ConfigError, match="AdamW has state 'calls' that is of no parameter"):
        Job(whole, optimizer)
    optimizer = adamw(whole)
    optimizer.state[whole[0].weight]["history"] = [1]
    with pytest.raises(ConfigError, match="its state 'history' of a parameter is a list"):
        Job(whole, optimizer)


def test_step_hooks_are_called_once_for_a_step():
    whole, calls = model(), []
    optimizer = adamw(whole)
    job = Job(whole, optimizer)
    before = whole[0].weight.detach().clone(), whole[2].bias.detach().clone()
    now = (whole[0].weight, whole[2].bias)

    def pre(found, args, kwargs):
        calls.append(("pre", found is optimizer, [torch.equal(*each) for each in zip(before, now, strict=True)]))

    def post(found, args, kwargs):
        calls.append(("post", found is optimizer, [torch.equal(*each) for each in zip(before, now, strict=True)]))

    optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)
    assert len(job.prepared.buckets) > 1
    job.run(0)
    assert calls == [("pre", True, [True, True]), ("post", True, [False, False])]
    job.run(1)
    assert len(calls) == 4


# --- what is refused, and what is not ---------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("make", "optimizer", "text"),
    [
        (Complex, torch.optim.SGD, "parameter factor is torch.complex64.*torch.view_as_complex"),
        (model, torch.optim.LBFGS, "LBFGS computes the loss several times"),
        (lambda: nn.Embedding(3, 2), torch.optim.SparseAdam, "SparseAdam is for sparse gradients"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
            torch.optim.SGD,
            "0 has sparse gradients.*sparse=False",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(2)), torch.optim.SGD, "parameter 0.weight has no shape yet"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(make, optimizer, text):
    whole = make()
    with pytest.raises(ConfigError, match=text):
        prepare(whole, (optimizer(whole.parameters(), lr=0.1),))


def test_a_rate_that_is_a_tensor_counts_as_its_value():
    ours, theirs = model(), model()
    job = Job(ours, adamw(ours, lr=torch.tensor(0.5))).run(0)
    assert job.optimizer.param_groups[0]["lr"] == 0.5
    plain(theirs, adamw(theirs, lr=0.5), [0])
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_float64_model_is_trained_in_float64_by_sums_in_float32():
    ours, theirs = model().double(), model().double()
    job = Job(ours, adamw(ours)).run(0, 1)
    plain(theirs, adamw(theirs), range(2))
    assert all(p.dtype == torch.float64 for p in ours.parameters())
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert next(iter(job.optimizer.state.values()))["exp_avg"].dtype == torch.float64


# --- facts ------------------------------------------------------------------------------------------------------------


def job_of(make=adamw, seed=5, **options):
    whole = model(seed)
    return Job(whole, make(whole, **options))


def facts(make=adamw, **options):
    return spelled(job_of(make, **options).prepared.facts)


def differing(one, other):
    return {each.path: (each.saved, each.wanted) for each in compare_told(one, other)}


def two_groups(whole, **options):
    weights, biases = ([p for p in whole.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 0.1, "foreach": False, **options})


def sgd(whole, **options):
    return torch.optim.SGD(whole.parameters(), **{"lr": 0.1, "foreach": False, **options})


def test_settings_are_compared_by_key():
    before = facts()
    assert differing(before, facts(lr=0.2)) == {"optimizer.lr": (0.1, 0.2)}
    betas = facts(betas=(0.8, 0.999))
    assert differing(before, betas) == {"optimizer.betas": ([0.9, 0.999], [0.8, 0.999])}
    found = differing(before, facts(sgd))
    assert found.keys() == {"optimizer.kind", "optimizer.weight_decay"}, "what only one kind has follows"
    groups = facts(two_groups)
    assert differing(before, groups) == {
        "optimizer.groups": (
            [["0.weight", "0.bias", "2.weight", "2.bias"]],
            [["0.weight", "2.weight"], ["0.bias", "2.bias"]],
        ),
        "optimizer.weight_decay": (0.01, {"0": 0.01, "1": 0.0}),
    }


def scheduled(make, lr=0.1, **options):
    whole = model()
    optimizer = adamw(whole, lr=lr, **options)
    return Job(whole, optimizer, schedulers=(make(optimizer),))


def test_schedules_are_compared_by_key_however_far_they_are():
    one = scheduled(lambda o: SCHEDULES.StepLR(o, 2, gamma=0.5)).prepared.facts
    other = scheduled(lambda o: SCHEDULES.StepLR(o, 3, gamma=0.5), lr=0.2).prepared.facts
    assert differing(one, other) == {"optimizer.lr": (0.1, 0.2), "scheduler.step_size": (2, 3)}
    warm = scheduled(lambda o: SCHEDULES.LinearLR(o)).prepared.facts
    assert warm["optimizer.lr"] == 0.1, "before a schedule"
    assert differing(one, warm).keys() == {"scheduler.kind"}
    gone = facts()
    assert differing(one, gone).keys() == {"scheduler.kind"}


def test_what_is_as_it_was_goes_on_as_it_was():
    make = lambda o: SCHEDULES.StepLR(o, 1, gamma=0.5)  # noqa: E731
    ran = scheduled(make).run(0, 1)
    ran.optimizer.param_groups[0]["eps"] = 1e-3
    other = scheduled(make).take(ran)
    assert (other.optimizer.param_groups[0]["lr"], other.optimizer.param_groups[0]["eps"]) == (0.025, 1e-3)
    unknown = scheduled(make, lr=0.2)
    with unknown.prepared.as_of(None):
        unknown.prepared.take(ran.prepared.tell())
    assert unknown.optimizer.param_groups[0]["lr"] == 0.025, "as there, where it is not known what the script said"


def test_another_rate_counts_and_is_where_its_schedule_was():
    ran = job_of().run(0, 1)
    assert job_of(lr=0.2).take(ran).optimizer.param_groups[0]["lr"] == 0.2
    make = lambda o: SCHEDULES.StepLR(o, 1, gamma=0.5)  # noqa: E731
    job = scheduled(make, lr=0.2).take(scheduled(make).run(0, 1))
    group, scheduler = job.optimizer.param_groups[0], job.prepared.schedulers[0]
    assert (group["lr"], group["initial_lr"]) == (pytest.approx(0.05), 0.2)
    assert (scheduler.base_lrs, scheduler.get_last_lr(), scheduler.last_epoch) == ([0.2], [group["lr"]], 2)
    job.run(2)
    assert group["lr"] == pytest.approx(0.025)
    joiner = scheduled(make, lr=0.2).take(job)
    assert joiner.optimizer.param_groups[0]["lr"] == group["lr"], "whoever joins has what there is"


def test_another_setting_of_a_schedule_counts():
    ran = scheduled(lambda o: SCHEDULES.ExponentialLR(o, 0.5)).run(0, 1)
    job = scheduled(lambda o: SCHEDULES.ExponentialLR(o, 0.1)).take(ran)
    assert (job.prepared.schedulers[0].gamma, job.prepared.schedulers[0].last_epoch) == (0.1, 2)
    assert job.run(2).optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)
    anew = scheduled(lambda o: SCHEDULES.StepLR(o, 2, gamma=0.1)).take(ran)
    assert anew.prepared.schedulers[0].last_epoch == 0, "another one begins anew"
    assert anew.optimizer.param_groups[0]["lr"] == 0.1


def test_schedules_within_a_schedule_go_on():
    def make(gamma):
        return lambda o: SCHEDULES.SequentialLR(o, [SCHEDULES.LinearLR(o), SCHEDULES.ExponentialLR(o, gamma)], [2])

    ran = scheduled(make(0.5)).run(0, 1, 2)
    job = scheduled(make(0.1), lr=0.2).take(ran)
    inner = job.prepared.schedulers[0]._schedulers[1]
    assert (inner.gamma, inner.last_epoch, inner.base_lrs) == (0.1, 1, [0.2])
    assert job.run(3).optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5 * 0.1)


@pytest.mark.parametrize(("make", "options"), [(adamw, {"amsgrad": True}), (sgd, {"momentum": 0.9})])
def test_another_kind_of_optimizer_begins_anew_with_the_weights_that_there_are(make, options):
    ran = job_of().run(0, 1)
    job = job_of(make, seed=6, **options).take(ran)
    assert all(torch.equal(a, b) for a, b in zip(job.model.parameters(), ran.model.parameters(), strict=True))
    assert not job.optimizer.state_dict()["state"]
    assert job.stage.layer_steps()[0] == 2
    assert len(job.run(2).optimizer.state) == 4


def test_other_groups_count_and_the_state_of_parameters_goes_along():
    ran = job_of().run(0, 1)
    job = job_of(two_groups, seed=6, lr=0.3).take(ran)
    assert [group["weight_decay"] for group in job.optimizer.param_groups] == [0.01, 0.0]
    assert [group["lr"] for group in job.optimizer.param_groups] == [0.3, 0.3]
    for mine, theirs in zip(job.model.parameters(), ran.model.parameters(), strict=True):
        assert torch.equal(job.optimizer.state[mine]["exp_avg"], ran.optimizer.state[theirs]["exp_avg"])


# --- data and source files --------------------------------------------------------------------------------------------


class Samples:
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        return sample() if callable(sample) else sample


def told(*samples):
    dataset = Samples(*samples)

    def sample(index):
        torch.manual_seed(index)
        return dataset[index]

    return data_facts(Indexed(dataset, shuffled(0, len(dataset), 1)), sample)


def test_a_dataset_is_known_by_its_length_and_three_samples():
    rows = [(torch.tensor([float(i)]), {"label": i, "picture": np.arange(i)}) for i in range(5)]
    known = told(*rows)
    assert known == told(*rows)
    assert known["data.length"] == 5
    assert told(*rows, rows[0])["data.length"] == 6
    changed = {"data.samples": known["data.samples"]}
    for at in (0, 2, 4):
        for other in (
            (torch.tensor([9.0]), rows[at][1]),
            (rows[at][0].double(), rows[at][1]),
            (rows[at][0], {"label": -1, "picture": np.arange(at)}),
            (rows[at][0], {"label": at, "picture": np.arange(at) + 1.0}),
        ):
            assert told(*rows[:at], other, *rows[at + 1 :])["data.samples"] not in changed.values()
    assert told(rows[0], "other", *rows[2:]) == known, "others are not looked at"


def test_of_a_sample_that_is_drawn_anew_its_form_counts():
    generator = np.random.default_rng()
    seeded, unseeded = (lambda: torch.randn(3)), (lambda: torch.tensor(generator.random(3)))
    assert told(seeded) == told(seeded)
    assert told(unseeded) == told(unseeded)
    assert told(unseeded) != told(lambda: torch.tensor(generator.random(4)))
    assert told(seeded) != told(lambda: torch.randn(3) + 1)


def test_source_files_are_the_script_and_what_it_imports_from_beside_it(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    for path in (script, tmp_path / "sub" / "helping.py", tmp_path / "not_imported.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("pass")
    monkeypatch.setitem(sys.modules, "helping", SimpleNamespace(__file__=str(tmp_path / "sub" / "helping.py")))
    before = source_files(str(script))
    assert before.keys() == {"script.py", "sub/helping.py"}
    script.write_text("pass  # changed")
    assert source_files(str(script)) == {**before, "script.py": source_files(str(script))["script.py"]} != before
