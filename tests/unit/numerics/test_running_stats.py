"""Batch-norm within a micro-batch: its own statistics while it trains, the running ones in ``eval()``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.optim.running_stats import RunningStats


def made() -> tuple[nn.Sequential, RunningStats, Tensor]:
    """A model whose running statistics are not the first ones, its statistics, and samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for _ in range(3):
        model(torch.randn(8, 3) * 5 + 1)
    return model, RunningStats(0, model), torch.randn(6, 3)


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("compiled", [False, True])
def test_in_eval_it_reads_the_running_statistics_and_changes_none(compiled: bool) -> None:
    model, stats, samples = made()
    run = torch.compile(model, backend="eager") if compiled else model
    expected, before = model.eval()(samples), buffers(model)
    model.train()
    plain = copy.deepcopy(model)
    trained = plain(samples)
    for _ in range(2):
        with stats.apart():
            model.eval()
            assert torch.equal(run(samples), expected)
            model.train()
            assert torch.equal(run(samples), trained)
            model.eval()
            assert torch.equal(run(samples), expected), "also behind a pass that trains"
            model.train()
            taken = stats.taken()
        assert all(torch.equal(one, other) for one, other in zip(buffers(model), before, strict=True))
    norm, inner = plain[1], plain[0](samples)
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(norm.momentum, float)
    torch.testing.assert_close(
        taken, torch.cat([norm.momentum * inner.mean(0), norm.momentum * inner.var(0), torch.ones(1)])
    )
    assert "train" not in vars(model[1])


def test_a_copy_that_is_made_meanwhile_does_not_turn_the_original() -> None:
    model, stats, samples = made()
    expected = copy.deepcopy(model).eval()(samples)
    with stats.apart():
        teacher = copy.deepcopy(model).eval()
        assert model[1].training
        model(samples)
        stats.taken()
        assert torch.equal(teacher(samples), expected)
    assert torch.equal(teacher(samples), expected)


class Counted(nn.BatchNorm1d):
    """Does something when its mode changes."""

    turns = 0

    def train(self, mode: bool = True) -> Counted:
        self.turns += 1
        super().train(mode)
        return self


def test_what_a_module_does_itself_when_its_mode_changes_is_done() -> None:
    model = nn.Sequential(nn.Linear(3, 4), norm := Counted(4))
    stats = RunningStats(0, model)
    with stats.apart():
        model.eval()
        model.train()
        model(torch.randn(6, 3))
        stats.taken()
    assert norm.turns == 2


def folded(stats: RunningStats, model: nn.Module, taken: list[Tensor]) -> list[Tensor]:
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stats.fold(found, torch.stack(taken))
    return list(found.values())


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("runs", [[1, 1], [2, 2, 2], [0, 3, 1], [0, 0]])
def test_any_number_of_runs_in_a_micro_batch_gives_what_they_give_one_behind_the_other(
    runs: list[int], momentum: float | None
) -> None:
    """As of siamese nets, of the two views of SimCLR, of what only some micro-batches come to, of those left out."""
    model, _, _ = made()
    assert isinstance(model[1], nn.BatchNorm1d)
    model[1].momentum = momentum
    plain, stats, taken = copy.deepcopy(model), RunningStats(0, model), []
    for number in runs:
        with stats.apart():
            for _ in range(number):
                samples = torch.randn(6, 3)
                assert torch.equal(model(samples), plain(samples))
            taken.append(stats.taken())
    for ours, theirs in zip(folded(stats, model, taken), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    if not any(runs):
        assert all(torch.equal(a, b) for a, b in zip(folded(stats, model, taken), model.buffers(), strict=True))


def test_one_that_is_in_eval_is_not_changed_until_it_trains() -> None:
    model, stats, samples = made()
    model.eval()
    before, expected = buffers(model), model(samples)
    with stats.apart():
        assert torch.equal(model(samples), expected)
        taken = stats.taken()
    assert all(torch.equal(a, b) for a, b in zip(folded(stats, model, [taken]), before, strict=True))
    with stats.apart():
        model.train()(samples)
        taken = stats.taken()
    assert not torch.equal(folded(stats, model, [taken])[0], before[0])
    assert all(torch.equal(one, other) for one, other in zip(buffers(model), before, strict=True))


def test_what_a_module_itself_does_when_its_mode_changes_stays() -> None:
    """As of one that is frozen: ``norm.train = lambda mode=True: norm``."""
    model, stats, samples = made()
    norm = model[1].eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign, assignment, misc]
    before = buffers(model)
    with stats.apart():
        model.train()(samples)
        assert not norm.training
        taken = stats.taken()
    assert all(torch.equal(a, b) for a, b in zip(folded(stats, model, [taken]), before, strict=True))
    model.train()
    assert not norm.training, "it is still frozen"


def test_filled_buffers_are_no_change_of_what_does_not_run() -> None:
    model, stats, samples = made()
    with stats.filled(1.0), stats.apart():
        model[1].eval()
        model(samples)
        stats.taken()
    with stats.apart():
        assert not stats.taken().any()


class Uncounted(nn.BatchNorm1d):
    """Has a rule of its own for its running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        self.running_mean.lerp_(input.detach().mean(0), 0.5)
        return input


def test_one_that_does_not_count_its_runs_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Uncounted(4))
    stats = RunningStats(0, model)
    with stats.apart():
        model(torch.randn(6, 3))
        with pytest.raises(ConfigError, match=r"batch-norm '1' \(Uncounted\) changes .* without counting it in num_b"):
            stats.taken()


class Around(nn.Module):
    """Calls the function with its batch-norm's buffers, and not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)


def test_one_that_somebody_else_runs_without_counting_is_refused_by_the_first_micro_batch() -> None:
    stats = RunningStats(0, model := Around())
    with stats.apart():
        model(torch.randn(6, 4))
        with pytest.raises(ConfigError, match=r"batch-norm 'norm' \(BatchNorm1d\) changes .* without counting it"):
            stats.taken()


def test_one_that_stops_counting_is_refused_by_the_update() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    stats = RunningStats(0, model)
    rows = []
    for counts in (True, False):
        with stats.apart():
            model(torch.randn(6, 4))
            if not counts:
                model[0].num_batches_tracked.zero_()
            rows.append(stats.taken())
    with pytest.raises(ConfigError, match=r"batch-norm '0' \(BatchNorm1d\) changes .* without counting it in num"):
        stats.fold(dict(model.named_buffers()), torch.stack(rows))
