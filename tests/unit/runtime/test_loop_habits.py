"""What people have in their loops: what is put in the place of tensors, and calls whose work Holdfast does."""

from __future__ import annotations

import copy
import gc
import threading
from collections import defaultdict

import pytest
import torch
from tests.waiting import LIMIT_S
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from holdfast.errors import ConfigError
from holdfast.runtime.loop.alone import Alone
from holdfast.runtime.loop.habits import stray_schedulers
from holdfast.runtime.loop.session import Session

STEPS, ITEMS = 4, 3


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def nothing(*args):
    """Stands for a habit that somebody has not."""


class Run:
    """A script of its own, in this process, that calls ``in_item`` behind each backward pass and ``between`` steps."""

    def __init__(self, first=None, make=lambda parameters: torch.optim.SGD(parameters, lr=0.05), **options):
        self.hf = Session(Alone(), 0)
        self.told = []
        self.hf._tell = self.told.append
        self.model = nn.Sequential(nn.Linear(8, 16) if first is None else first(), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = make(self.model.parameters())
        self.options = {name: option(self.optimizer) for name, option in options.items()}

    def __call__(self, in_item=nothing, between=nothing, before=nothing, change=lambda loss: loss):
        self.hf.prepare(self.model, self.optimizer, **self.options)
        for step in self.hf.steps(data(), microbatches=ITEMS, size=8, steps=STEPS):
            for x, y in step:
                before(self)
                step.backward(change(nn.functional.mse_loss(self.model(x), y)))
                in_item(self)
            between(self)
        return parameters_to_vector(self.model.parameters()).detach()


def clamp(run):
    for p in run.model.parameters():
        p.data.clamp_(-0.2, 0.2)


def clamp_into_another_tensor(run):
    for p in run.model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


def clamp_as_a_vector(run):
    vector_to_parameters(parameters_to_vector(run.model.parameters()).clamp(-0.2, 0.2), run.model.parameters())


def clamp_into_new_parameters(run):
    for module in (run.model[0], run.model[2]):
        module.weight = nn.Parameter(module.weight.detach().clamp(-0.2, 0.2))
        module.bias = nn.Parameter(module.bias.detach().clamp(-0.2, 0.2))


@pytest.mark.parametrize("between", [clamp_into_another_tensor, clamp_as_a_vector, clamp_into_new_parameters])
def test_what_is_put_in_the_place_of_a_tensor_between_steps_is_trained(between):
    assert torch.equal(Run()(between=between), Run()(between=clamp))
    assert not torch.equal(Run()(between=between), Run()())


def test_a_view_of_the_same_memory_counts_as_what_it_shows():
    def turn(run):
        weight = run.model[2].weight
        weight.data = weight.data.flip(1)

    def turned_view(run):
        square = run.model[0].weight
        square.data = square.data.view(8, 16).T

    square = Run()
    square(between=turned_view)
    assert square.model[0].weight.is_contiguous()
    assert not torch.equal(Run()(between=turn), Run()())


def test_another_shape_is_refused_by_name():
    def grow(run):
        run.model[0].weight = nn.Parameter(torch.zeros(17, 8))

    def grow_data(run):
        run.model[0].bias.data = torch.zeros(17)

    with pytest.raises(ConfigError, match=r"0\.weight is torch.float32 \(17, 8\) now, and was torch.float32 \(16, 8\)"):
        Run()(between=grow)
    with pytest.raises(ConfigError, match=r"0\.bias is torch.float32 \(17,\) now"):
        Run()(between=grow_data)


class MaxNorm(nn.Linear):
    """As networks for EEG have it: forward puts another tensor under the parameter."""

    def __init__(self):
        super().__init__(8, 16)

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1.0)
        return super().forward(x)


class Renormed(nn.Embedding):
    """Renorms the vectors that it looks up, in place."""

    def __init__(self):
        super().__init__(4, 16, max_norm=0.1)

    def forward(self, x):
        return super().forward(x[:, 0].abs().long() % 4)


@pytest.mark.parametrize("first", [MaxNorm, Renormed])
def test_a_parameter_that_forward_changes_is_refused_by_name(first):
    with pytest.raises(
        ConfigError, match=r"step 0, item 0: the model changed its parameter '0\.weight'.*between steps"
    ):
        Run(first)()


def test_an_optimizer_that_puts_other_tensors_in_the_place_of_parameters_trains():
    class Puts(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data.add(p.grad, alpha=-group["lr"])

    assert torch.equal(Run(make=lambda p: Puts(p, lr=0.05))(), Run()())


def test_parameters_that_share_their_memory_are_refused():
    run = Run()
    run.model.append(nn.Linear(1, 16))
    run.model[3].weight.data = run.model[2].weight.data.view(16, 1)
    with pytest.raises(ConfigError, match=r"2\.weight and 3\.weight .*share their memory"):
        run()


# --- calls ------------------------------------------------------------------------------------------------------------


def zero(run):
    run.optimizer.zero_grad()


def test_zero_grad_before_the_backward_pass_is_nothing_and_behind_it_is_refused():
    assert torch.equal(Run()(before=zero, between=zero), Run()())
    with pytest.raises(ConfigError, match=r"SGD.zero_grad behind step.backward\(loss\).*leave this call out"):
        Run()(in_item=zero)


def test_gradients_changed_behind_the_backward_pass_are_refused_by_name():
    def halve(run):
        run.model[2].bias.grad.mul_(0.5)

    def drop(run):
        run.model.zero_grad()

    for change in (halve, drop):
        with pytest.raises(ConfigError, match=r"the gradient of .* was changed behind step.backward\(loss\)"):
            Run()(in_item=change)


def test_clipping_by_oneself_is_refused_within_items_and_outside():
    def clip(run):
        clip_grad_norm_(run.model.parameters(), 1.0)

    def clip_by_its_full_name(run):
        nn.utils.clip_grad_value_(run.model[0].weight, 1.0)

    for options in ({"in_item": clip}, {"between": clip}, {"in_item": clip_by_its_full_name}):
        with pytest.raises(ConfigError, match=r"clip_grad_\w+_: .*expected hf.prepare\(..., clip_norm=\)"):
            Run()(**options)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    clip_grad_norm_(other.parameters(), 0.1)
    assert float(torch.stack([p.grad.norm() for p in other.parameters()]).norm()) < 0.11


def living(run):
    return [p for p in run.model.parameters() if p.grad is not None]


def clip_what_has_a_gradient(run):
    clip_grad_norm_(living(run), 1.0)


def clip_by_a_norm_that_is_known(run):
    nn.utils.clip_grads_with_norm_(living(run), 1.0, torch.tensor(2.0))


def clamp_each(run):
    for p in living(run):
        p.grad.data.clamp_(-0.01, 0.01)


def log_the_norm(run):
    run.told.append(sum(float(p.grad.norm()) for p in living(run)))


@pytest.mark.parametrize("between", [clip_what_has_a_gradient, clip_by_a_norm_that_is_known, clamp_each, log_the_norm])
def test_gradients_that_are_read_between_steps_are_gone_and_that_is_said(between):
    """None is there, so that all of these would have done nothing, without a word."""
    with pytest.raises(ConfigError, match=r"the gradient of 0\.weight was read between two steps.*clip_norm="):
        Run()(between=between)
    assert "grad" not in vars(nn.Parameter), "nobody else is looked at any more"


def test_whoever_makes_gradients_of_its_own_between_steps_has_them():
    def measure(run):
        run.model.zero_grad()
        nn.functional.mse_loss(run.model(torch.ones(1, 8)), torch.ones(1, 1)).backward()
        assert len(living(run)) == 4
        run.model.zero_grad()

    assert torch.equal(Run()(between=measure), Run()())


def test_gradients_changed_in_their_memory_alone_are_refused():
    with pytest.raises(ConfigError, match=r"item 0: the gradient of 0\.weight was changed behind step.backward"):
        Run()(in_item=clamp_each)


def test_a_backward_pass_of_its_own_before_the_steps_is_refused():
    def backward_twice(loss):
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(ConfigError, match=r"item 0: the gradient of 0\.weight is there before step.backward\(loss\)"):
        Run()(change=backward_twice)


def test_an_optimizer_that_was_not_handed_over_is_refused_where_it_steps():
    class Centred(Run):
        """Trains one number more, by an optimizer of its own."""

        def __init__(self):
            super().__init__()
            self.center = nn.Parameter(torch.zeros(1))
            self.own = torch.optim.SGD([self.center], lr=0.1)

    centred = Centred()
    with pytest.raises(ConfigError, match=r"SGD.step: its parameters \(1,\) have gradients of this worker's items"):
        centred(change=lambda loss: loss + centred.center.sum(), between=lambda run: run.own.step())

    def train_a_probe(run):
        head = nn.Linear(8, 1)
        own = torch.optim.SGD(head.parameters(), lr=0.1)
        head(torch.ones(1, 8)).sum().backward()
        own.step()

    assert torch.equal(Run()(between=train_a_probe), Run()()), "what has nothing of the items is nobody's business"


def test_another_optimizer_over_what_is_trained_is_refused_where_it_is_made():
    def begin_anew(run):
        run.optimizer = torch.optim.Adam(run.model.parameters())

    with pytest.raises(ConfigError, match=r"Adam: 0\.weight is trained by the optimizer that was handed to hf.prepare"):
        Run()(between=begin_anew)
    torch.optim.Adam(Run().model.parameters())


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def test_state_that_is_cleared_or_replaced_between_steps_counts():
    def clear(run):
        run.optimizer.state.clear()

    def replace_all(run):
        run.optimizer.state = defaultdict(dict)

    def zero_each(run):
        for entries in run.optimizer.state.values():
            entries["momentum_buffer"].zero_()

    def replace_each(run):
        for p in run.model.parameters():
            run.optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    zeroed = Run(make=with_momentum)(between=zero_each)
    for change in (clear, replace_all, replace_each):
        assert torch.equal(Run(make=with_momentum)(between=change), zeroed)
    assert not torch.equal(Run(make=with_momentum)(), zeroed)


def of_steps(optimizer):
    return StepLR(optimizer, 2, gamma=0.5)


def test_the_step_of_a_scheduler_that_was_handed_over_is_refused():
    def advance(run):
        run.options["scheduler"].step()

    for options in ({"in_item": advance}, {"between": advance}):
        with pytest.raises(ConfigError, match=r"StepLR.step: .*leave this call out"):
            Run(scheduler=of_steps)(**options)


def test_a_scheduler_that_was_handed_over_has_the_state_that_it_would_have():
    run = Run(scheduler=lambda o: SequentialLR(o, [of_steps(o), of_steps(o)], [2]))
    run()
    scheduler = run.options["scheduler"]
    plain = SequentialLR(o := torch.optim.SGD(run.model.parameters(), lr=0.05), [of_steps(o), of_steps(o)], [2])
    for _ in range(STEPS):
        o.step()
        plain.step()
    assert type(scheduler).__name__ == "SequentialLR"
    assert scheduler.get_last_lr() == plain.get_last_lr()
    assert str(scheduler.state_dict()).replace("object at", "") != ""
    assert set(scheduler.state_dict()) == set(plain.state_dict())
    assert scheduler.state_dict()["last_epoch"] == plain.state_dict()["last_epoch"] == STEPS
    assert isinstance(copy.copy(scheduler), SequentialLR)


def test_the_state_of_schedulers_that_a_script_steps_by_itself_is_told():
    run = Run()
    plateau = ReduceLROnPlateau(run.optimizer, patience=0)
    own = of_steps(run.optimizer)
    run(between=lambda run: own.step())
    assert set(run.hf._prepared.objects) == {own, plateau}
    assert '"last_epoch", 4' in run.hf._prepared.tell().text


def test_an_average_of_the_model_that_nobody_is_told_of_is_named():
    gc.collect()  # those of other tests
    told = Run()
    average = told.hf.state(AveragedModel(told.model))
    told(between=lambda run: average.update_parameters(run.model))
    assert told.told == []
    forgotten = Run()
    average = AveragedModel(forgotten.model)
    forgotten(between=lambda run: average.update_parameters(run.model))
    assert len(forgotten.told) == 1
    assert "an AveragedModel was not handed to hf.state" in forgotten.told[0]


def test_a_rate_that_an_item_changes_is_refused():
    def decay(run):
        run.optimizer.param_groups[0]["lr"] *= 0.9

    def advance(run):
        run.own.step()

    with pytest.raises(ConfigError, match=r"a setting of an optimizer.*while an item ran"):
        Run()(in_item=decay)
    run = Run()
    run.own = of_steps(run.optimizer)  # whose first steps change no rate
    with pytest.raises(ConfigError, match=r"step 0, item 0: a setting of an optimizer.*while an item ran"):
        run(in_item=advance)


def test_a_loss_that_is_divided_by_the_number_of_items_is_told_once():
    run = Run()
    run(change=lambda loss: loss / ITEMS)
    assert [text for text in run.told if f"the loss is divided by {ITEMS}" in text] == run.told
    assert len(run.told) == 1
    for change in (lambda loss: loss, lambda loss: loss / 7, lambda loss: (loss / ITEMS).exp()):
        other = Run()
        other(change=change)
        assert other.told == []
    scaled = Run()
    scaled(change=lambda loss: loss * (1 / ITEMS))
    assert len(scaled.told) == 1


def scaler(optimizer):
    return torch.amp.GradScaler("cpu", init_scale=4.0)


@pytest.mark.parametrize("call", ["scale", "unscale_", "update", "step"])
def test_calls_of_a_scaler_that_was_handed_over_are_refused(call):
    def use(run):
        getattr(run.options["scaler"], call)(run.optimizer)

    with pytest.raises(ConfigError, match=rf"scaler\.{call}: .*leave this call out"):
        Run(scaler=scaler)(in_item=use)


def test_a_scaler_that_was_not_handed_over_does_not_scale():
    mine = scaler(None)
    with pytest.raises(ConfigError, match=r"scaler.scale: expected hf.prepare\(..., scaler=scaler\)"):
        Run()(change=lambda loss: mine.scale(loss))


class Slow(StepLR):
    """Whoever asks for its optimizer waits, first, for ``before``."""

    before = staticmethod(lambda: None)

    @property
    def optimizer(self):
        self.before()
        return self.optimizer_of_it

    @optimizer.setter
    def optimizer(self, optimizer):
        self.optimizer_of_it = optimizer


def test_schedulers_are_found_while_another_thread_fills_a_tuple():
    def numbers():
        yield 0
        begun.set()
        go_on.wait(LIMIT_S)

    def finish():
        go_on.set()
        filling.join(LIMIT_S)

    begun, go_on, filled = threading.Event(), threading.Event(), []
    filling = threading.Thread(target=lambda: filled.append(tuple(numbers())))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    scheduler = Slow(optimizer, 1)
    filling.start()
    assert begun.wait(LIMIT_S)
    scheduler.before = finish
    assert stray_schedulers([optimizer], []) == [scheduler]
    assert filled == [(0,)]
