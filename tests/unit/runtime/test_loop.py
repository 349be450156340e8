"""A user's loop as the runtime has it: turns, buckets, mirrored optimizers, and steps ended by others' sums."""

from __future__ import annotations

import json
import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast.core.ids import MicroBatch
from holdfast.core.instructions import Compute
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import Op, OpKind
from holdfast.core.summing import add_up
from holdfast.errors import ConfigError, InternalError, LedgerError, WorkFailed
from holdfast.optim.live import LiveLayer
from holdfast.optim.mirror import Mirror
from holdfast.runtime.loop.alone import Alone, run_step
from holdfast.runtime.loop.buckets import make_buckets
from holdfast.runtime.loop.failing import SimulatedFailure
from holdfast.runtime.loop.prepared import ToldState, prepare
from holdfast.runtime.loop.session import Session
from holdfast.runtime.loop.stage import Gradients, LoopStage
from holdfast.runtime.loop.turns import Item, LoopAbandoned, Turns
from holdfast.runtime.tensors import settle_thread

MICROBATCHES = 4


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class AtOnce:
    """Stands for a loop: each item is computed where it is asked for."""

    def __init__(self, prepared):
        self.prepared = prepared
        self.ran = []

    def run(self, items, take):
        for item in items:
            if not take(item, self._run(item)):
                return

    def _run(self, item):
        self.ran.append((item.step, item.number))
        self.prepared.model.zero_grad()
        torch.manual_seed(100 * item.step + item.number)
        loss = self.prepared.model(torch.randn(2, 3)).square().mean()
        loss.backward()
        rows = (tuple(p.grad for p in bucket.parameters() if p.requires_grad) for bucket in self.prepared.buckets)
        return Gradients(of=tuple(rows), loss=loss.detach().reshape(1))


class Worker:
    """One worker's stage, of two that share a step's items."""

    def __init__(self, items, num_microbatches=MICROBATCHES):
        whole = model()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.prepared = prepare(whole, (optimizer,), schedulers=(self.scheduler,), bucket_bytes=60)
        self.turns, self.items = AtOnce(self.prepared), items
        owned = range(len(self.prepared.buckets))
        self.stage = LoopStage(prepared=self.prepared, turns=self.turns, owned=owned, num_microbatches=num_microbatches)
        self.layers = LayerRange(0, len(owned))

    def compute(self, step):
        self.stage.begin(step)
        for number in self.items:
            self.stage.forward(step, number, None, self.layers)
            self.stage.backward(OpKind.B, step, number, None, self.layers)

    def update(self):
        self.stage.conclude(self.stage.vote())
        for layer in self.stage.layers:
            self.stage.update(layer)
            self.stage.swap(layer)

    def weights(self):
        return [p.detach().clone() for p in self.prepared.model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def reduce(workers, reductions, takers=None):
    for reduction in reductions:
        summed = add_up([worker.stage.message(reduction) for worker in workers])
        for worker in workers if takers is None else takers:
            worker.stage.accept(reduction, replace(summed, total=summed.total.clone()))


def healthy(steps):
    alone = Worker(range(MICROBATCHES))
    for step in range(steps):
        alone.compute(step)
        reduce([alone], alone.stage.reductions)
        alone.update()
    return alone


def test_who_has_ended_a_step_that_is_gone_on_with_is_ahead_of_it_until_all_have():
    alone = Worker(range(MICROBATCHES))
    alone.compute(0)
    reduce([alone], alone.stage.reductions)
    alone.update()
    assert not alone.stage.ahead
    alone.stage.take_back(0)
    assert alone.stage.ahead
    with pytest.raises(InternalError, match="is ahead of the step that it counts"):
        alone.stage.layer_digest(0)
    alone.stage.resume(0, alone.stage.reductions)
    alone.update()
    assert not alone.stage.ahead


def test_two_workers_have_the_bits_of_one():
    first, second = Worker((0, 1)), Worker((2, 3))
    for step in range(3):
        for worker in (first, second):
            worker.compute(step)
        reduce((first, second), first.stage.reductions)
        for worker in (first, second):
            worker.update()
    assert same(first.weights(), healthy(3).weights())
    assert same(second.weights(), first.weights())
    assert first.scheduler.get_last_lr() == healthy(3).scheduler.get_last_lr() == [0.1 * 0.5**3]


def test_whoever_has_gone_on_hands_its_sums_over_and_nothing_moves():
    """A is in the next step, B lacks a sum of the one before: nothing is run again, A's weights never seem to move."""
    first, second = Worker((0, 1)), Worker((2, 3))
    for worker in (first, second):
        worker.compute(0)
    some, *others = first.stage.reductions
    reduce((first, second), others)
    reduce((first, second), [some], takers=[first])
    first.update()
    first.compute(1)
    ran, ahead = len(first.turns.ran), first.weights()
    told = {each.step: each for each in first.stage.progress()}
    assert told[0].complete == tuple(sorted(first.stage.reductions))
    everything = list(first.stage.reductions)
    for worker in (first, second):
        worker.stage.resume(0, everything)
    assert first.stage.layer_steps() == dict.fromkeys(first.stage.layers, 0)
    with pytest.raises(InternalError, match="ahead of the step"):
        first.stage.export(0)
    with pytest.raises(InternalError, match="have made this step already"):
        first.stage.forward(0, 0, None, first.layers)
    second.stage.take_sum(some, first.stage.sum_message(some))
    for worker in (first, second):
        worker.update()
    assert len(first.turns.ran) == ran, "no item of a step that is over is run again"
    assert same(first.weights(), ahead)
    assert same(second.weights(), ahead)
    assert first.scheduler.get_last_lr() == second.scheduler.get_last_lr() == [0.05]
    for worker in (first, second):
        worker.compute(1)
    reduce((first, second), everything)
    for worker in (first, second):
        worker.update()
    assert same(first.weights(), healthy(2).weights())


def test_sums_of_the_step_before_are_kept_until_those_of_the_next_are_there():
    alone = healthy(1)
    alone.compute(1)
    first, *others = alone.stage.reductions
    assert alone.stage.progress()[0].complete == tuple(sorted(alone.stage.reductions))
    reduce([alone], [first])
    assert alone.stage.progress()[0].complete == tuple(sorted(others))


def test_a_lost_workers_items_are_run_by_another_one():
    first = Worker((0, 1))
    first.compute(0)
    first.stage.resume(0, ())
    for number in (2, 3):
        first.stage.forward(0, number, None, first.layers)
        first.stage.backward(OpKind.B, 0, number, None, first.layers)
    reduce([first], first.stage.reductions)
    first.update()
    assert same(first.weights(), healthy(1).weights())
    assert first.turns.ran == [(0, 0), (0, 1), (0, 2), (0, 3)]


def at_a_stretch(worker):
    """The operations of all its items, in the order of one pipeline of one stage."""
    names = [MicroBatch(number, 0, number) for number in worker.items]
    return [Compute(Op(kind, name), worker.layers) for name in names for kind in (OpKind.F, OpKind.B)]


@pytest.mark.parametrize("most", range(1, 2 * MICROBATCHES))
def test_operations_at_a_stretch_end_wherever_no_more_are_wanted(most):
    worker, ran = Worker(range(MICROBATCHES)), []
    computes = at_a_stretch(worker)
    worker.stage.run(0, computes, lambda compute: ran.append(compute) or len(ran) < most)
    assert ran == computes[:most]
    assert worker.turns.ran == [(0, number) for number in range((most + 1) // 2)]
    (told,) = worker.stage.progress()
    assert told.counted == (
        (tuple((layer, tuple(range(most // 2))) for layer in worker.stage.layers)) if most > 1 else ()
    )
    assert bool(told.contexts) == bool(most % 2)
    worker.stage.run(0, computes[most:], lambda compute: True)
    reduce([worker], worker.stage.reductions)
    worker.update()
    assert same(worker.weights(), healthy(1).weights())
    assert len(worker.turns.ran) == MICROBATCHES, "each once"


def test_sums_keep_what_the_script_has_flushed_to_zero_in_its_thread():
    """Other threads add, too, and somebody else's loop may have other items."""
    worker = Worker((0, 1), num_microbatches=2)
    gradients = {0: 2e-38, 1: -1.9e-38}

    def compute(item):
        rows = (tuple(torch.full_like(p, gradients[item.number]) for p in each) for each in worker.prepared.trained)
        return Gradients(of=tuple(rows), loss=torch.zeros(1))

    worker.turns._run = compute
    found = []

    def script():
        torch.set_flush_denormal(True)
        worker.stage.run(0, at_a_stretch(worker), lambda compute: True)
        found.append(float(torch.tensor(1e-38) * 0.1))

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    assert found == [0.0], "what is the script's stays as it wants it"
    for reduction in worker.stage.reductions:
        (sums,) = worker.stage.message(reduction).parts
        assert bool((sums > 0).all())


def test_a_thread_is_settled_whoever_begins_it():
    found = []

    def second():
        settle_thread()
        found.append(float(torch.tensor(1e-38) * 0.1))

    def first():
        torch.set_flush_denormal(True)
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert found != [0.0]


def test_what_is_left_out_is_left_out_of_the_mean():
    first = Worker((0, 1))
    first.compute(0)
    first.stage.resume(0, (), ((0, 2),))
    reduce([first], first.stage.reductions)
    assert len(first.stage.losses()) == 2
    first.update()
    two = Worker((0, 1), num_microbatches=2)
    two.compute(0)
    reduce([two], two.stage.reductions)
    two.update()
    assert same(first.weights(), two.weights())
    assert not same(first.weights(), healthy(1).weights())


def test_what_was_added_cannot_be_left_out_of_a_sum_alone():
    first = Worker((0, 1))
    first.compute(0)
    with pytest.raises(InternalError, match="were to be left out"):
        first.stage.resume(0, (), ((0, 1), (2, 4)))


def test_a_step_of_which_nothing_counts_updates_nothing():
    first = Worker(range(4))
    before = first.weights()
    first.compute(0)
    first.stage.resume(0, (), ())
    reduce([first], first.stage.reductions)
    assert first.stage.losses() == []
    first.update()
    assert same(first.weights(), before)
    assert first.stage.layer_steps()[0] == 1


def test_a_joiner_gets_all_that_is_the_loops(tmp_path):
    alone, joiner = healthy(2), Worker(range(MICROBATCHES))
    for layer in alone.stage.layers:
        joiner.stage.restore(layer, alone.stage.snapshot(layer)())
    assert same(joiner.weights(), alone.weights())
    assert joiner.scheduler.get_last_lr() == alone.scheduler.get_last_lr()
    assert joiner.scheduler.state_dict() == alone.scheduler.state_dict()
    for worker in (alone, joiner):
        worker.compute(2)
        reduce([worker], worker.stage.reductions)
        worker.update()
    assert same(joiner.weights(), healthy(3).weights())


# --- turns ------------------------------------------------------------------------------------------------------------


def looping(turns, seen):
    try:
        while (step := turns.next_step()) is not None:
            seen.append(("begin", *step))
            while (item := turns.next_item(step[0])) is not None:
                seen.append((step[0], item.number))
                turns.done(item.number * 10)
        seen.append("end")
    except LoopAbandoned:
        seen.append("abandoned")


@contextmanager
def a_loop(turns):
    seen = []
    loop = threading.Thread(target=looping, args=(turns, seen))
    loop.start()
    yield seen
    loop.join(5.0)
    assert not loop.is_alive()


def run(turns, step, *numbers, most=99):
    """What came of items, of which no more are wanted than told."""
    found = []
    items = [Item(step=step, shown=step, number=number) for number in numbers]
    turns.run(items, lambda item, result: found.append((item.number, result)) or len(found) < most)
    return found


def test_items_are_run_in_the_loops_thread_and_a_step_is_over_when_it_is_settled():
    turns = Turns()
    with a_loop(turns) as seen:
        results = []
        for step in range(2):
            assert turns.between(step, 5.0)
            results += run(turns, step, 3, 1)
        assert turns.between(2, 5.0, begins=False)
        turns.end()
    assert results == [(3, 30), (1, 10), (3, 30), (1, 10)]
    assert seen == [("begin", 0, 0), (0, 3), (0, 1), ("begin", 1, 1), (1, 3), (1, 1), "end"]


def test_no_more_items_are_run_than_are_wanted():
    turns = Turns()
    with a_loop(turns) as seen:
        assert turns.between(0, 5.0)
        assert run(turns, 0, 3, 1, 2, most=2) == [(3, 30), (1, 10)]
        assert run(turns, 0, 0) == [(0, 0)]
        assert turns.between(1, 5.0, begins=False)
        turns.end()
    assert seen == [("begin", 0, 0), (0, 3), (0, 1), (0, 0), "end"]


def test_what_cannot_be_taken_is_raised_where_items_are_asked_for_and_the_loop_goes_on():
    def take(item, result):
        raise LedgerError(0, item.number, 2)

    turns = Turns()
    with a_loop(turns) as seen:
        assert turns.between(0, 5.0)
        with pytest.raises(LedgerError, match="micro-batch 3"):
            turns.run([Item(step=0, shown=0, number=number) for number in (3, 1)], take)
        assert run(turns, 0, 2) == [(2, 20)]
        assert turns.between(1, 5.0, begins=False)
        turns.end()
    assert seen == [("begin", 0, 0), (0, 3), (0, 2), "end"]


def test_a_loop_is_given_every_step_in_order_whether_or_not_it_has_items():
    turns = Turns()
    assert not turns.between(4, 0.0)  # it is elsewhere
    assert not turns.between(6, 0.0), "two steps are over meanwhile"
    with a_loop(turns) as seen:
        assert turns.between(6, 5.0)
        assert turns.between(7, 5.0, repeated=(5,))
        run(turns, 7, 0)
        assert turns.between(8, 5.0, repeated=(5,), begins=False)
        turns.end()
    assert seen[:2] == [("begin", 6, 6), ("begin", 7, 6)], (
        "the first is where it came in; the second is shown as run once more"
    )


def test_a_loop_that_is_behind_a_step_does_not_come_back_for_those_who_have_not_ended_it():
    turns = Turns()
    with a_loop(turns) as seen:
        assert turns.between(0, 5.0)
        run(turns, 0, 0)
        assert turns.between(1, 5.0)
        assert turns.between(0, 5.0), "it waits in step 1"
        run(turns, 1, 0)
        assert turns.between(2, 5.0, begins=False)
        assert turns.between(1, 5.0), "it waits behind step 1"
        assert turns.between(2, 5.0, begins=False)
        turns.end()
    assert seen == [("begin", 0, 0), (0, 0), ("begin", 1, 1), (1, 0), "end"]


def test_a_loop_that_the_job_ends_without_does_not_come_to_its_end():
    turns = Turns()
    with a_loop(turns) as seen:
        assert turns.between(0, 5.0)
        turns.end(finished=False)
    assert seen == [("begin", 0, 0), "abandoned"]


def test_a_loop_over_items_cannot_be_begun_within_itself():
    turns = Turns()
    driver = threading.Thread(target=lambda: (turns.between(0, 5.0), run(turns, 0, 2)))
    driver.start()
    step, _ = turns.next_step()
    assert turns.next_item(step).number == 2
    with pytest.raises(ConfigError, match="cannot be begun again within it"):
        turns.next_item(step)
    turns.done(None)
    driver.join(5.0)
    assert not driver.is_alive()


def test_what_the_loop_raises_reaches_the_driver():
    turns = Turns()
    turns.fail(ValueError("no"))
    with pytest.raises(WorkFailed, match="script, micro-batch 4: ValueError: no"):
        run(turns, 0, 4)
    with pytest.raises(WorkFailed, match="script: ValueError: no"):
        turns.between(0, 0.0)


def test_what_ends_the_driver_reaches_the_loop():
    turns = Turns()
    turns.end(ConfigError("other steps"))
    with pytest.raises(ConfigError, match="other steps"):
        turns.next_step()
    with pytest.raises(ConfigError, match="other steps"):
        turns.next_item(0)


def test_a_loop_that_is_away_is_waited_for_no_longer_than_told():
    assert not Turns().between(0, 0.0)


# --- buckets, optimizers ----------------------------------------------------------------------------------------------


def test_buckets_are_in_registration_order_and_have_every_parameter_once():
    whole = model()
    whole.append(nn.BatchNorm1d(2))
    whole[2].weight = whole[0].weight  # tied: it counts where it is used first
    whole[4].requires_grad_(False)
    for size in (100, 1):
        buckets = make_buckets(whole, lambda p: None, bucket_bytes=size)
        names = [name for bucket in buckets for name, _ in bucket.named_parameters()]
        assert names == [name for name, _ in whole.named_parameters()]
        trained = [sum(p.requires_grad for p in bucket.parameters()) for bucket in buckets]
        assert all(trained), "what is never summed is no bucket"
        assert size > 1 or set(trained) == {1}
        assert [len(list(bucket.buffers())) for bucket in buckets] == [0] * (len(buckets) - 1) + [3]


def test_parameters_of_other_optimizers_are_in_other_buckets():
    whole = model()
    ours = list(whole[0].parameters())
    buckets = make_buckets(whole, lambda p: "one" if any(p is each for each in ours) else "other")
    assert all(len({name.partition(".")[0] == "0" for name, _ in bucket.named_parameters()}) == 1 for bucket in buckets)


def test_parameters_of_no_optimizer_are_in_whichever_bucket():
    """They are summed, and updated by nobody: that cuts no bucket, and costs no sum."""
    whole = model()
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.ndim == 1], lr=0.1)
    assert len(prepare(whole, (optimizer,)).buckets) == 1


def test_what_lies_apart_shares_no_bucket_with_what_does_not():
    whole = model()
    whole[2].weight.requires_grad_(False)
    apart = {id(whole[0].bias), id(whole[2].weight), id(whole[2].bias)}
    buckets = make_buckets(whole, lambda p: None, apart=apart)
    names = [[name for name, _ in bucket.named_parameters()] for bucket in buckets]
    assert names == [["0.weight"], ["0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]]


def test_a_parameter_without_elements_is_no_gradient_of_a_simulated_failure():
    whole = model()
    whole[2].empty = nn.Parameter(torch.zeros(0))
    wrapped = SimulatedFailure(torch.optim.SGD(whole.parameters(), lr=0.1), step=1, casualties=2, progress=50)
    prepared = prepare(whole, (wrapped,))
    prepared.fail(8, 10)
    assert prepared.failing.layers == {0}
    assert [len(row) for row in prepared.trained] == [3, 4]


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        make_buckets(nn.ReLU(), lambda p: None)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_a_mirror_does_what_the_optimizer_would_do(make):
    theirs, ours = model(), model()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    layers = [LiveLayer(0, ours, Mirror(optimizer, list(ours.parameters())))]
    for step in range(3):
        torch.manual_seed(step)
        gradients = {name: torch.randn_like(p) for name, p in theirs.named_parameters()}
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name].clone()
        for each in (optimizer, plain):
            each.param_groups[0]["lr"] = 0.1 / (step + 1)
        plain.step()
        layers[0].update(gradients, 1.0)
        layers[0].swap()
    assert same(list(theirs.parameters()), list(ours.parameters()))


def test_a_step_of_the_script_itself_is_refused():
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    prepare(whole, (optimizer,))
    with pytest.raises(ConfigError, match=r"SGD.step: Holdfast makes the step"):
        optimizer.step()


def test_a_scheduler_does_not_warn_of_steps_that_it_has_not_seen():
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    prepared = prepare(whole, (optimizer,), schedulers=(scheduler,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared.advance()
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        (lambda m: (), "expected the optimizers"),
        (lambda m: (torch.optim.SGD(model().parameters(), lr=0.1),), "a parameter that is not the model's"),
        (lambda m: ("adam",), "got str"),
    ],
)
def test_what_cannot_be_trained_is_refused(optimizers, text):
    whole = model()
    with pytest.raises(ConfigError, match=text):
        prepare(whole, optimizers(whole))


OF_AN_OLDER_CHECKPOINT = {
    "groups": [[{"lr": 0.1}]],
    "schedulers": [],
    "objects": [{"__dict__": [["value", {"__tensor__": ["float32", [2], "AACAPwAAAEA="]}]]}],
}


def test_the_state_of_objects_comes_back_as_it_was():
    class Kept:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    rows = {3: [1, 2.5, None, "text"], "tensor": torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16)}
    prepared, other = (prepare(m, (torch.optim.SGD(m.parameters(), lr=0.1),)) for m in (model(), model()))
    prepared.objects, other.objects = [Kept(rows)], [Kept({})]
    other.take(prepared.tell())
    found = other.objects[0].value
    assert found[3] == rows[3]
    assert torch.equal(found["tensor"].view(torch.int16), rows["tensor"].view(torch.int16))
    assert len(prepared.tell().tensors) == 1, "tensors are no part of the text"
    other.take(ToldState(json.dumps(OF_AN_OLDER_CHECKPOINT)))
    assert other.objects[0].value.tolist() == [1.0, 2.0]
    prepared.objects = [Kept(object())]
    with pytest.raises(ConfigError, match=r"hf.state\(Kept\): its state holds a object"):
        prepared.tell()
    other.objects = []
    prepared.objects = [Kept(1)]
    with pytest.raises(ConfigError, match="a state has 1 objects, the script has 0"):
        other.take(prepared.tell())


def test_what_is_trained_stays_what_it_was():
    whole = model()
    first, *_, last = whole.parameters()
    last.requires_grad_(False)
    optimizer = torch.optim.SGD([first], lr=0.1)
    prepared = prepare(whole, (optimizer,), bucket_bytes=60)
    prepared.check_unchanged()
    last.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"parameter 4\.bias is trained, and was frozen"):
        prepared.check_unchanged()
    last.requires_grad_(False)
    first.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameter 0\.weight is frozen, and was trained"):
        prepared.check_unchanged()
    first.requires_grad_(True)
    optimizer.add_param_group({"params": [last]})
    with pytest.raises(ConfigError, match="SGD was given 1 more parameters"):
        prepared.check_unchanged()


# --- simulated failures -----------------------------------------------------------------------------------------------


def failure(**options):
    return SimulatedFailure(torch.optim.SGD(model().parameters(), lr=0.1), **{"step": 3, "progress": 50, **options})


def test_the_casualties_micro_batches_are_those_of_their_pipelines():
    assert failure(workers=4, casualties=2).microbatches(10) == {6, 7, 8, 9}
    assert failure(workers=4, casualties=[0]).microbatches(10) == {0, 1, 2}


def test_a_failure_begins_at_a_layer_or_a_percentage_of_gradients():
    names = [f"{layer}.{kind}" for layer in ("head", "body", "stem") for kind in ("bias", "weight")]
    assert failure(casualties=1, progress=50).standing(names) == 3
    assert failure(casualties=1, progress=99).standing(names) == 5
    assert failure(casualties=1, progress=None, layer="body").standing(names) == 2
    with pytest.raises(ConfigError, match="there is no 'neck'; layers are head, body, stem"):
        failure(casualties=1, progress=None, layer="neck").standing(names)


def test_a_failure_is_at_a_step_or_a_mini_batch_of_an_epoch():
    assert failure(casualties=1).step_of(10) == 3
    assert failure(casualties=1, step=(2, 4)).step_of(10) == 24
    with pytest.raises(ConfigError, match="an epoch has 10 mini-batches, got 10"):
        failure(casualties=1, step=(2, 10)).step_of(10)
    for step in (-1, (0, -2), (-1, 3)):
        with pytest.raises(ConfigError, match="step: expected 0 or more"):
            failure(casualties=1, step=step)


def simulated(**options):
    """What training with a failure in its second step ends with, and how many buckets there were."""
    whole = model()
    kinds = {key: options.pop(key) for key in ("bucket_bytes", "clip_norm") if key in options}
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    wrapped = SimulatedFailure(optimizer, **{"step": 1, "workers": 4, "casualties": 2, **options})
    prepared = prepare(whole, (wrapped,), **kinds)
    prepared.fail(MICROBATCHES, 10)
    turns, owned = AtOnce(prepared), range(len(prepared.buckets))
    stage = LoopStage(prepared=prepared, turns=turns, owned=owned, num_microbatches=MICROBATCHES)
    for step in range(3):
        run_step(stage, SimpleNamespace(prepared=prepared, microbatches=MICROBATCHES), step)
    return [p.detach().clone() for p in whole.parameters()], len(owned)


@pytest.mark.parametrize(
    "options",
    [
        {"progress": 50},
        {"progress": 0},
        {"progress": None, "layer": "2"},
        {"progress": 70, "casualties": None, "recovery": "skip"},
        {"progress": 34, "casualties": None, "recovery": "rollback"},
    ],
)
def test_no_bucket_is_both_behind_a_simulated_failure_and_before_it(options):
    """Whole buckets suffice: the bits are those of each gradient summed by itself."""
    weights, buckets = simulated(**options)
    apart, gradients = simulated(**options, bucket_bytes=1)
    assert same(weights, apart)
    assert buckets == (1 if options["progress"] == 0 else 2)
    assert gradients == 6
    assert not same(weights, simulated(**{**options, "step": 0})[0])


def test_with_clipping_each_gradient_is_summed_by_itself_where_a_failure_is_simulated():
    assert simulated(progress=50, clip_norm=0.1)[1] == 6


@pytest.mark.parametrize("length", [0, 3])
def test_a_model_may_have_a_length_which_says_nothing_about_it(length):
    """The last bucket has no batch-norm of its own: the statistics that go with it are those of the model."""

    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 300)

        def __len__(self):
            return length

        def forward(self, x):
            return self.last(self.norm(x))

    whole = Sized()
    prepared = prepare(whole, (torch.optim.SGD(whole.parameters(), lr=0.1),), bucket_bytes=60)
    owned = range(len(prepared.buckets))
    stage = LoopStage(prepared=prepared, turns=AtOnce(prepared), owned=owned, num_microbatches=1)
    assert len(owned) > 1
    assert stage.stats.buffer_names >= {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_a_model_that_is_not_where_it_is_computed_is_refused(what):
    """The meta device stands for any other one."""
    whole = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    if what == "parameter":
        whole[0].weight = nn.Parameter(whole[0].weight.to("meta"))
    else:
        whole[1].running_mean = whole[1].running_mean.to("meta")
    name = {"parameter": "0.weight", "buffer": "1.running_mean"}[what]
    with pytest.raises(ConfigError, match=rf"^hf.prepare: {what} {name} is on meta, .* on cpu; expected model.to\(hf"):
        prepare(whole, (torch.optim.SGD(whole.parameters(), lr=0.1),))


def test_a_script_by_itself_computes_on_the_host():
    assert Session(Alone(), 0).device == torch.device("cpu")
