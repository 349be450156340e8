"""Batch-norm within a micro-batch: its own statistics while it trains, the running ones in ``eval()``."""

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
    torch.testing.assert_close(taken, torch.cat([inner.mean(0), inner.var(0)]))
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

    def train(self, mode: bool = True) -> "Counted":
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


@pytest.mark.parametrize(("mode", "advice"), [(False, "it is in eval.. now"), (True, "set track_running_stats=False")])
def test_one_that_did_not_run_is_told_with_what_would_help(mode: bool, advice: str) -> None:
    model, stats, samples = made()
    with stats.apart():
        model.eval()(samples)
        model.train(mode)
        with pytest.raises(ConfigError, match=f"batch-norm '1' ran 0 times in one forward pass .*{advice}"):
            stats.taken()


def test_one_that_is_in_eval_from_the_beginning_is_not_taken_apart() -> None:
    model, _, samples = made()
    model.eval()
    frozen = RunningStats(0, model)
    with frozen.apart():
        assert torch.equal(model(samples), model(samples))
    assert frozen.width == 0
