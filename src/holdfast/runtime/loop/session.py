"""``holdfast.session()``: what a training script changes to go on while workers die.

    hf = holdfast.session()
    model, optimizer = hf.prepare(model, optimizer)
    for step in hf.steps(dataset, microbatches=48, size=4):
        for x, y in step:
            step.backward(loss_fn(model(x), y))

Under ``holdfast run`` this process is one of several workers, each of which runs some of a step's items. If one is
lost, the loop over the items of the others goes on with those that are lost. By itself the script is one worker, with
the same bits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.data.randomness import seed_all
from holdfast.data.wanted import Wanted, feed_of
from holdfast.errors import ConfigError
from holdfast.runtime.loop.alone import Alone
from holdfast.runtime.loop.buckets import BUCKET_BYTES
from holdfast.runtime.loop.failing import SimulatedFailure
from holdfast.runtime.loop.feeding import Feeding
from holdfast.runtime.loop.guarding import Guard
from holdfast.runtime.loop.habits import (
    Divisors,
    GradientsAway,
    StrayOptimizers,
    has_stray_average,
    stray_schedulers,
)
from holdfast.runtime.loop.hosting import Host, Loop, host, hosted
from holdfast.runtime.loop.launched import give_way
from holdfast.runtime.loop.prepared import Prepared, Stateful, prepare
from holdfast.runtime.loop.stage import LAST, UNWEIGHTED, VOID, Gradients, LoopStage
from holdfast.runtime.loop.turns import GivesItems, Item, Turns

__all__ = ["Runner", "Session", "Step", "seed_all", "session"]


_sessions: list[Session] = []
"""None or one."""


def session(*, seed: int = 0) -> Session:
    """Returns the session of this process; seeds torch, numpy and random, so that all workers build the same model.

    Under torchrun this does not return: the first process becomes ``holdfast run`` with as many workers, and is told
    what the environment variable ``HOLDFAST_RUN`` holds besides; the others end.

    Args:
        seed: of the model's first weights, and of what is drawn in every item.
    """
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"holdfast.session: seed: expected a whole number from 0, got {seed!r}")
    if not _sessions:
        if host() is None:
            give_way()
            hosted(Alone())
        by = host()
        assert by is not None, "a host was set just now"
        _sessions.append(Session(by, seed))
    return _sessions[0]


class Session:
    """A script's part in a job; made by :func:`session`."""

    def __init__(self, host: Host, seed: int) -> None:
        self._host = host
        self._seed = seed
        self._prepared: Prepared | None = None
        self._objects: list[Stateful] = []
        self._stray: list[Any] = []
        self._began = False
        self._runner: Runner | None = None
        seed_all(seed)

    @property
    def worker(self) -> str:
        """Who this process is, such as ``2.0``."""
        return self._host.worker

    @property
    def device(self) -> torch.device:
        """What this worker computes on, as ``train.device`` says: the model and what goes into it belong there."""
        return self._host.device.torch

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that should print or save what only one should: the first that lives."""
        return self._host.is_first()

    def prepare(
        self,
        model: nn.Module,
        *optimizers: Optimizer | SimulatedFailure,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Any:
        """Hands the model and its optimizers over, and returns them: they are used as before, but never stepped.

        Args:
            model: all its parameters are summed over the workers.
            optimizers: one or more, of distinct parameters; what they have of steps before is taken over. A
                `holdfast.SimulatedFailure` stands for the one that it wraps.
            scheduler: one of ``torch.optim.lr_scheduler``, or a list: each takes a step after each step.
            scaler: a ``torch.amp.GradScaler``; its settings are taken over.
            clip_norm: largest norm of the mean gradient over the whole model.
            bucket_bytes: gradients are summed in buckets of about so many bytes.

        Raises:
            ConfigError: they cannot be trained like that.
        """
        if self._prepared is not None:
            raise ConfigError("hf.prepare: was called before; a script trains one model")
        schedulers = (
            tuple(scheduler) if isinstance(scheduler, list | tuple) else () if scheduler is None else (scheduler,)
        )
        prepared = prepare(
            model,
            optimizers,
            schedulers=schedulers,
            scaler=scaler,
            clip_norm=clip_norm,
            bucket_bytes=1 if self._host.per_gradient else bucket_bytes,
            device=self.device,
        )
        prepared.objects = self._objects
        self._prepared = prepared
        return (model, *prepared.optimizers)

    def state(self, obj: Any) -> Any:
        """Has the state of an object saved with that of the model, and given to whoever joins; returns the object.

        It must change between two steps only, and alike on all workers.

        Args:
            obj: has ``state_dict`` and ``load_state_dict``.
        """
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise ConfigError(f"hf.state: a {type(obj).__name__} has no state_dict and load_state_dict")
        if self._began:
            raise ConfigError("hf.state: expected before the loop over hf.steps begins")
        self._objects.append(obj)
        return obj

    def stop(self) -> None:
        """Ends the loop over `steps` behind the step that runs, or that was the last to run, as if it had no more.

        All workers learn of it with the sums of a step, and end at the same one; what stands behind the loop is run.
        One worker is enough to say so; if it is lost before anybody has heard, the loop goes on. Where some say so
        between two steps and others do not, these may have run items of the next one by then, which change nothing.

        Raises:
            ConfigError: the loop has not begun.
        """
        if self._runner is None:
            raise ConfigError("hf.stop: expected within the loop over hf.steps(...), which has not begun")
        self._runner.stop()

    def steps(
        self,
        dataset: Any,
        *,
        microbatches: int,
        size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        shuffle: bool | None = None,
        sampler: Any = None,
        weights: Any = None,
        group_by_length: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        to_device: bool = False,
        logs: Sequence[str] = (),
        time_limit: float | None = None,
        sum_chunks: int | None = None,
    ) -> Iterator[Step]:
        """Yields the steps of the job, each an iterable of items.

        Samples are shuffled anew every epoch and come once in each, unless told otherwise. A step may go over the end
        of an epoch; so may the last one, which is as long as all others.

        Args:
            dataset: a length, and samples by index; or a ``DataLoader``, whose settings are taken over; or an iterable
                that can be read again, which every worker reads as a whole.
            microbatches: items of a step, over all workers.
            size: samples of an item; a ``DataLoader`` says it by its batch size.
            steps: how many steps; None: as many as ``epochs`` take, which is 1 unless told.
            epochs: passes over the dataset.
            shuffle: False: samples come in the dataset's order.
            sampler: yields the samples of an epoch, or the batches: read once per epoch, under a seed of that epoch.
            weights: of each sample, by which it is drawn, with replacement.
            group_by_length: the length of each sample, or a function that returns it, given the sample's number: those
                of like length share an item.
            collate: makes what is yielded of the samples of an item; None: torch's ``default_collate``.
            workers: processes that load ahead, for each worker; 0: each item is loaded before it runs.
            prefetch: items that each of them loads ahead.
            pin_memory: whether tensors lie in memory from which ``x.to(hf.device, non_blocking=True)`` goes beside the
                computation; None: as a ``DataLoader`` says, else False.
            to_device: whether tensors come on ``hf.device``; those of the next item are copied while one is computed,
                if it is loaded ahead.
            logs: names that ``step.log`` is given.
            time_limit: seconds after which the loop ends as by `stop`; ``train.time_limit`` of a job may be shorter.
            sum_chunks: in how many chunks of neighbours the items of a step are cut: within one their gradients are
                added one after another, then chunks by twos. A number that divides them, on which bits depend; as many
                as workers, where these are not 2, 4 or 8, has them send the least. None: the largest power of two that
                divides them, up to 8.

        Raises:
            ConfigError: the loop cannot be carried; or it left out an item, or its backward pass.
        """
        wanted = Wanted(
            dataset=dataset,
            size=size,
            shuffle=shuffle,
            sampler=sampler,
            weights=weights,
            group_by_length=group_by_length,
            collate=collate,
            loaders=workers,
            prefetch=prefetch,
            pin_memory=pin_memory,
            to_device=to_device,
            seed=self._seed,
        )
        loop = self._loop(wanted, microbatches, steps, epochs, logs, sum_chunks)
        turns, deadline = Turns(), min(self._host.deadline, _after(time_limit))
        with closing(Feeding(loop, self.worker, self._host.device)) as feeding:  # forks, so before there are threads
            stage = self._host.begin(loop, turns)
            self._runner = runner = Runner(loop, turns, stage, feeding, self._tell, deadline)
            runner.guard.bits, runner.guard.schedulers = self._host.untried, self._stray
            with runner.strays.refused(), runner.away.removed():
                while (next_one := turns.next_step()) is not None:
                    counted, shown = next_one
                    if runner.leaves(counted):
                        continue
                    seed_all(loop.seed, shown)
                    step = Step(shown, runner, counted)
                    yield step
                    runner.away.end()
                    step.check_ended()
                    runner.put_back()
                    loop.prepared.check_unchanged()
                    feeding.check_unchanged()
        self._host.ended()
        ends = loop.prepared.ends
        if ends is not None:
            self._tell(f"the loop over hf.steps was stopped behind step {ends - 1}, before {loop.steps - ends} more")
        seed_all(loop.seed, loop.steps if ends is None else ends)

    def _loop(
        self,
        wanted: Wanted,
        microbatches: int,
        steps: int | None,
        epochs: float | None,
        logs: Sequence[str],
        sum_chunks: int | None,
    ) -> Loop:
        if self._began:
            raise ConfigError("hf.steps: a script has one loop over all its steps; expected one call, with epochs=")
        if self._prepared is None:
            raise ConfigError("hf.steps: nothing was prepared; call hf.prepare(model, optimizer) first")
        for name, value in (("microbatches", microbatches), ("steps", steps), ("sum_chunks", sum_chunks)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"hf.steps: {name}: expected a whole number from 1, got {value!r}")
        if sum_chunks is not None and microbatches % sum_chunks:
            raise ConfigError(
                f"hf.steps: sum_chunks: {sum_chunks} chunks, and a step has {microbatches} items; expected a number "
                "that divides it"
            )
        if isinstance(logs, str):
            raise ConfigError(f"hf.steps: logs: expected names, such as ({logs!r},), got a text")
        feed = feed_of(wanted, self._tell)
        if steps is not None and epochs is not None:
            raise ConfigError("hf.steps: expected steps or epochs, got both")
        length, entries = feed.source.length, microbatches * feed.source.size
        if length is not None and entries > length:
            raise ConfigError(
                f"hf.steps: microbatches: a step of {microbatches} items of {feed.source.size} is larger than the "
                f"dataset, which has {length} in an epoch; expected at most {length // feed.source.size} of them"
            )
        if steps is None:
            if length is None:
                raise ConfigError("hf.steps: the dataset has no length, and nobody knows its epochs; expected steps=")
            steps = max(1, -int(-(1 if epochs is None else epochs) * length // entries))
        self._prepared.fail(microbatches, max(1, steps if length is None else length // entries))
        failing = self._prepared.failing
        if failing is not None and failing.step >= steps:
            raise ConfigError(
                f"SimulatedFailure: step: {failing.step} is behind the last of {steps} steps, counted from 0"
            )
        prepared = self._prepared
        known = (*prepared.schedulers, *self._objects)
        self._stray = stray_schedulers(prepared.optimizers, known)
        self._objects += self._stray
        if has_stray_average(prepared.model, known):
            self._tell(
                "an AveragedModel was not handed to hf.state: neither a checkpoint nor a worker that joins would have "
                "what it has; expected average = hf.state(AveragedModel(model))"
            )
        prepared.streamed = feed.streamed
        prepared.begin()
        self._began = True
        return Loop(
            seed=self._seed,
            prepared=self._prepared,
            dataset=feed.dataset,
            feed=feed,
            microbatches=microbatches,
            size=feed.num_samples,
            steps=steps,
            logs=tuple(logs),
            sum_chunks=sum_chunks,
        )

    def _tell(self, text: str) -> None:
        if self.is_first:
            print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Runner:
    """What the items of all steps have in common."""

    loop: Loop
    turns: GivesItems
    stage: Callable[[], LoopStage]
    """The engine that computes now."""
    feeding: Feeding
    tell: Callable[[str], None] = lambda text: None
    """Tells people something; one worker's does."""
    deadline: float = math.inf
    """When the loop is to be stopped, in seconds since the epoch."""
    guard: Guard = field(init=False)
    strays: StrayOptimizers = field(init=False)
    away: GradientsAway = field(init=False)
    weighted: bool | None = None
    """Whether items have weights; None before it is known."""
    stops_before: float = math.inf
    """The first step that is not to be run, as the job counts; infinite before the script has stopped its loop."""
    begun: int = -1
    """The newest step that has begun."""
    divisors: Divisors | None = field(default_factory=Divisors)
    """What losses are divided by in the first step that runs here; None behind it."""

    def __post_init__(self) -> None:
        """What an item must leave as it is, is known from the start."""
        prepared = self.loop.prepared
        self.guard = Guard(prepared)
        self.strays = StrayOptimizers(prepared.named, prepared.optimizers)
        self.away = GradientsAway(prepared.model)

    def put_back(self) -> None:
        """Between two steps: takes what the script has put in the place of tensors.

        Raises:
            ConfigError: it has another shape or type.
        """
        self.guard.put_back()
        self.stage().put_back()

    def stop(self) -> None:
        """No step behind the one that has begun is to be run."""
        self.stops_before = min(self.stops_before, self.begun + 1)

    def stops(self, step: int) -> int:
        """What an item of a step that ends is marked with, so that all workers know."""
        if time.time() >= self.deadline:
            self.stop()
        return VOID if step >= self.stops_before else LAST if step + 1 == self.stops_before else 0

    def leaves(self, step: int) -> bool:
        """Whether a step that begins is not to be run: its items are handed over as void."""
        if step < self.stops_before:
            self.begun = step
            return False
        nothing = tuple(tuple(None for _ in trained) for trained in self.loop.prepared.trained)
        width, logs = self.stage().stats.width, self.loop.logs
        while self.turns.next_item(step) is not None:
            stats, logged = _none(width) if width else None, _none(2 * len(logs)) if logs else None
            self.turns.done(Gradients(of=nothing, loss=_none(1), stats=stats, logged=logged, stops=VOID))
        return True

    def weigh(self, weight: float | Tensor | None) -> float:
        """Returns what a loss is multiplied by.

        Raises:
            ConfigError: it is no weight; or items before had some and this one has none, or the other way round.
        """
        if self.weighted not in (None, weight is not None):
            raise ConfigError("weight: expected one in each step.backward, or in none")
        self.weighted = weight is not None
        if weight is None:
            return 1.0
        found = float(torch.as_tensor(weight, dtype=torch.float32))
        if not 0 <= found < math.inf:
            raise ConfigError(f"weight: expected a number from 0, got {weight}")
        return found

    def count(self, items: int) -> None:
        """A step is over, of which that many items were run here: warns of losses that were divided by their number."""
        if self.divisors is not None and items:
            if text := self.divisors.warning((self.loop.microbatches, items)):
                self.tell(text)
            self.divisors = None

    def load(self, item: Item) -> Any:
        """Returns what an item's samples are collated to; what its computation draws does not depend on them."""
        with self.stage().loading:
            return self.feeding.load(item.shown, item.number)


@dataclass(slots=True, eq=False)
class Step:
    """One step of the loop: yields its items, as the dataset's samples are collated.

    Attributes:
        number: of the step, from 0.
    """

    number: int
    _runner: Runner
    _counted: int
    """The step as the job counts it."""
    _item: Item | None = None
    _parameters: tuple[nn.Parameter, ...] = ()
    _losses: list[Tensor] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _values: list[tuple[str, float]] = field(default_factory=list)
    _logged: dict[str, tuple[float, int]] | None = None
    _skipped: bool = False
    _ended: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yields items until all workers have what they need of the step: it is updated then."""
        turns, guard, count = self._runner.turns, self._runner.guard, 0
        self._runner.away.end()
        if not self._ended:
            self._runner.put_back()
        self._parameters = tuple(self._runner.loop.prepared.model.parameters())
        while (item := turns.next_item(self._counted)) is not None:
            with ExitStack() as stack:
                self._begin(item)
                stats = self._runner.stage().stats
                if stats.width:
                    stack.enter_context(stats.apart())
                guard.begin(stats.buffer_names)
                yield self._runner.load(item)
                self._check(guard)
                taken = stats.taken() if stats.width and not self._skipped else None
            self._hand_over(taken)
            count += 1
        self._runner.count(count)
        self._ended, self._logged = True, self._runner.loop.prepared.take_logged(self._counted)
        self._runner.away.begin()
        seed_all(self._runner.loop.seed, self.number, self._runner.loop.microbatches)  # whichever items were ours

    @property
    def item(self) -> int:
        """The number of the item that runs, the same whoever runs it, from 0 in each step.

        Raises:
            ConfigError: none does.
        """
        if self._item is None:
            raise ConfigError(f"step {self.number}: no item runs outside of the loop over them")
        return self._item.number

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Runs the backward pass of an item's loss: a scalar, the mean over its samples.

        It may be called several times for one item; all of it counts.

        Args:
            loss: whose gradients are averaged over all items.
            weight: of this one in that average, such as how many tokens ``loss`` is the mean of: the sum of weight x
                gradient over all items is divided by the sum of all weights. Each item has one, or none has.

        Raises:
            ConfigError: no item runs; the loss is no scalar; or the weight is none.
        """
        item = self._item
        if item is None:
            raise ConfigError(f"step {self.number}: backward outside of the loop over its items")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"{self._where()}: the loss is {what}; expected a tensor of one element")
        self._runner.guard.check_gradients()
        if self._runner.divisors is not None:
            if not self._losses:
                self._check_none()
            self._runner.divisors.note(loss)
            self._runner.strays.note(loss)
        try:
            factor = self._runner.weigh(weight)
        except ConfigError as error:
            raise ConfigError(f"{self._where()}: step.backward: {error}") from None
        scaled = loss if item.loss_scale is None else loss.float() * item.loss_scale
        (scaled if weight is None else scaled * factor).backward()  # type: ignore[no-untyped-call]
        self._runner.guard.note_gradients()
        self._losses.append(loss.detach().float().reshape(1))
        self._weights.append(factor)

    def skip(self) -> None:
        """This item has no gradient, and no loss: it counts with zeros.

        Raises:
            ConfigError: a backward pass of it has run.
        """
        if self._losses:
            raise ConfigError(f"{self._where()}: step.skip() behind step.backward(loss), which counts; expected before")
        self._skipped = True

    def log(self, name: str, value: float | Tensor) -> None:
        """Logs something of the item that runs; several values of one name count as so many.

        Whoever runs it again logs it again, and it counts once: so nothing that a lost worker has counted is missing.

        Raises:
            ConfigError: no item runs, the name is none of ``logs``, or the value is not one number.
        """
        if self._item is None:
            raise ConfigError(f"step {self.number}: step.log outside of the loop over its items")
        if name not in self._runner.loop.logs:
            raise ConfigError(f"{self._where()}: step.log({name!r}): hf.steps was told logs={self._runner.loop.logs}")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(f"{self._where()}: step.log({name!r}): {tuple(value.shape)}; expected one number")
        self._values.append((name, float(value.detach() if isinstance(value, Tensor) else value)))

    @property
    def logged(self) -> dict[str, float]:
        """The mean of what was logged of all items of the step, whoever has run them, by name; the same everywhere.

        Where nothing was, as where a lossy strategy has left the whole step out, it is not a number.

        Raises:
            ConfigError: the loop over the items has not come to its end.
        """
        return {name: value / count if count else math.nan for name, (value, count) in self._totals().items()}

    @property
    def sums(self) -> dict[str, float]:
        """The sum of what was logged of all items of the step, by name, in float64: those of an epoch add up.

        Raises:
            ConfigError: see `logged`.
        """
        return {name: value for name, (value, _) in self._totals().items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many values `sums` are of.

        Raises:
            ConfigError: see `logged`.
        """
        return {name: count for name, (_, count) in self._totals().items()}

    def _totals(self) -> dict[str, tuple[float, int]]:
        if self._logged is None:
            raise ConfigError(f"{self._where()}: step.logged is known behind the loop over its items")
        return self._logged

    def check_ended(self) -> None:
        """Checks that the loop over the items came to its end."""
        if not self._ended:
            raise ConfigError(
                f"{self._where()}: the loop over its items was left before its end; other workers wait for what is "
                "missing. Leave out `break`: step.skip() is for an item that is not to count, hf.stop() ends the loop "
                "over steps"
            )

    def _begin(self, item: Item) -> None:
        self._item, self._skipped = item, False
        self._losses.clear()
        self._weights.clear()
        self._values.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _check_none(self) -> None:
        try:
            self._runner.guard.check_none()
        except ConfigError as error:
            raise ConfigError(f"{self._where()}: {error}") from None

    def _check(self, guard: Guard) -> None:
        if not self._losses and not self._skipped:
            raise ConfigError(f"{self._where()}: no step.backward(loss) was called; step.skip() leaves an item out")
        try:
            guard.check()
        except ConfigError as error:
            raise ConfigError(f"{self._where()}: {error}") from None

    def _hand_over(self, stats: Tensor | None) -> None:
        runner, rows = self._runner, []
        for trained in runner.loop.prepared.trained:
            rows.append(tuple(None if self._skipped else parameter.grad for parameter in trained))
            for parameter in trained:
                parameter.grad = None
        loss, weight = self._weighed()
        width = runner.stage().stats.width
        if width and stats is None:
            stats = _none(width)
        self._item = None
        stops, logged = runner.stops(self._counted), self._tell_logged()
        runner.turns.done(Gradients(of=tuple(rows), loss=loss, stats=stats, logged=logged, weight=weight, stops=stops))

    def _weighed(self) -> tuple[Tensor, float]:
        """The loss of the item that ends, and its weight."""
        if self._skipped or not self._losses:
            return _none(1), math.nan
        if not self._runner.weighted:
            return sum(self._losses[1:], self._losses[0]), UNWEIGHTED
        losses = torch.stack(self._losses)
        total = sum(self._weights)
        shares = torch.tensor(self._weights, dtype=torch.float32, device=losses.device).reshape(-1, 1)
        return (losses * shares).sum(0) / (total or 1.0), total

    def _tell_logged(self) -> Tensor | None:
        names = self._runner.loop.logs
        if not names:
            return None
        sums = [sum(value for each, value in self._values if each == name) for name in names]
        counts = [sum(each == name for each, _ in self._values) for name in names]
        return torch.tensor([*sums, *counts], dtype=torch.float32, device="cpu")

    def _where(self) -> str:
        return f"step {self.number}" if self._item is None else f"step {self.number}, item {self._item.number}"


def _after(seconds: float | None) -> float:
    """Returns when so many seconds are over, in seconds since the epoch.

    Raises:
        ConfigError: they are no time.
    """
    if seconds is None:
        return math.inf
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"hf.steps: time_limit: expected seconds, more than 0, got {seconds!r}")
    return time.time() + seconds


def _none(width: int) -> Tensor:
    """Of an item that counts with zeros; whatever the script's defaults are."""
    return torch.zeros(width, dtype=torch.float32, device="cpu")
