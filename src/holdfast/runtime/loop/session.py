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

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from holdfast.data.sampler import load_items, sample_indices
from holdfast.errors import ConfigError
from holdfast.runtime.loop.alone import Alone
from holdfast.runtime.loop.buckets import BUCKET_BYTES
from holdfast.runtime.loop.failing import SimulatedFailure
from holdfast.runtime.loop.hosting import Host, Loop, host, hosted
from holdfast.runtime.loop.launched import give_way
from holdfast.runtime.loop.prepared import Prepared, Stateful, prepare
from holdfast.runtime.loop.stage import Gradients, LoopStage
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
        self._began = False
        seed_all(seed)

    @property
    def worker(self) -> str:
        """Who this process is, such as ``2.0``."""
        return self._host.worker

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
            optimizers: one or more, of distinct parameters; they must not have made a step. A
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

    def steps(
        self,
        dataset: Any,
        *,
        microbatches: int,
        size: int,
        steps: int | None = None,
        epochs: float | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        logs: Sequence[str] = (),
    ) -> Iterator[Step]:
        """Yields the steps of the job, each an iterable of items.

        Samples are shuffled anew every epoch and come once in each. A step may go over the end of an epoch; so may the
        last one, which is as long as all others.

        Args:
            dataset: a length, and samples by index.
            microbatches: items of a step, over all workers.
            size: samples of an item.
            steps: how many steps; None: as many as ``epochs`` take, which is 1 unless told.
            epochs: passes over the dataset.
            collate: makes what is yielded of the samples of an item.
            logs: names that ``step.log`` is given.

        Raises:
            ConfigError: the loop cannot be carried; or it left out an item, or its backward pass.
        """
        loop = self._loop(dataset, microbatches, size, steps, epochs, logs)
        turns = Turns()
        stage = self._host.begin(loop, turns)
        runner = Runner(loop, turns, stage, collate)
        while (next_one := turns.next_step()) is not None:
            counted, shown = next_one
            seed_all(loop.seed, shown)
            step = Step(shown, runner, counted)
            yield step
            step.check_ended()
            loop.prepared.check_unchanged()
        seed_all(loop.seed, loop.steps)

    def _loop(
        self,
        dataset: Any,
        microbatches: int,
        size: int,
        steps: int | None,
        epochs: float | None,
        logs: Sequence[str],
    ) -> Loop:
        if self._began:
            raise ConfigError("hf.steps: a script has one loop over all its steps; expected one call, with epochs=")
        if self._prepared is None:
            raise ConfigError("hf.steps: nothing was prepared; call hf.prepare(model, optimizer) first")
        for name, value in (("microbatches", microbatches), ("size", size), ("steps", steps)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"hf.steps: {name}: expected a whole number from 1, got {value!r}")
        if isinstance(logs, str):
            raise ConfigError(f"hf.steps: logs: expected names, such as ({logs!r},), got a text")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ConfigError(f"hf.steps: a {type(dataset).__name__} has no length, or no items by index")
        if not len(dataset):
            raise ConfigError("hf.steps: the dataset is empty")
        if steps is not None and epochs is not None:
            raise ConfigError("hf.steps: expected steps or epochs, got both")
        if steps is None:
            steps = max(1, -int(-(1 if epochs is None else epochs) * len(dataset) // (microbatches * size)))
        self._prepared.fail(microbatches, max(1, len(dataset) // (microbatches * size)))
        failing = self._prepared.failing
        if failing is not None and failing.step >= steps:
            raise ConfigError(
                f"SimulatedFailure: step: {failing.step} is behind the last of {steps} steps, counted from 0"
            )
        self._began = True
        return Loop(
            seed=self._seed,
            prepared=self._prepared,
            dataset=dataset,
            microbatches=microbatches,
            size=size,
            steps=steps,
            logs=tuple(logs),
        )


@dataclass(slots=True)
class Runner:
    """What the items of all steps have in common."""

    loop: Loop
    turns: GivesItems
    stage: Callable[[], LoopStage]
    """The engine that computes now."""
    collate: Callable[[list[Any]], Any]

    def load(self, item: Item) -> Any:
        """Returns what an item's samples are collated to."""
        loop = self.loop
        indices = sample_indices(loop.seed, item.shown, item.number, loop.microbatches, loop.size, len(loop.dataset))
        return self.collate(load_items(loop.dataset, indices))


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
    _losses: list[Tensor] = field(default_factory=list)
    _values: list[tuple[str, float]] = field(default_factory=list)
    _logged: dict[str, float] | None = None
    _skipped: bool = False
    _ended: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yields items until all workers have what they need of the step: it is updated then."""
        turns, model = self._runner.turns, self._runner.loop.prepared.model
        while (item := turns.next_item(self._counted)) is not None:
            with ExitStack() as stack:
                self._begin(item)
                stats = self._runner.stage().stats
                if stats.width:
                    stack.enter_context(stats.apart())
                versions = _versions(model, stats.buffer_names)
                yield self._runner.load(item)
                self._check(model, versions)
                taken = stats.taken() if stats.width and not self._skipped else None
            self._hand_over(taken)
        self._ended, self._logged = True, self._runner.loop.prepared.take_logged(self._counted)
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

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of an item's loss: a scalar, the mean over its samples.

        It may be called several times for one item; all of it counts.
        """
        item = self._item
        if item is None:
            raise ConfigError(f"step {self.number}: backward outside of the loop over its items")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"{self._where()}: the loss is {what}; expected a tensor of one element")
        (loss if item.loss_scale is None else loss.float() * item.loss_scale).backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach().float().reshape(1))

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
        self._values.append((name, float(value)))

    @property
    def logged(self) -> dict[str, float]:
        """The mean of what was logged of all items of the step, whoever has run them, by name; the same everywhere.

        Where nothing was, as where a lossy strategy has left the whole step out, it is not a number.

        Raises:
            ConfigError: the loop over the items has not come to its end.
        """
        if self._logged is None:
            raise ConfigError(f"{self._where()}: step.logged is known behind the loop over its items")
        return self._logged

    def check_ended(self) -> None:
        """Checks that the loop over the items came to its end."""
        if not self._ended:
            raise ConfigError(
                f"{self._where()}: the loop over its items was left before its end; other workers wait for what is "
                "missing. Leave out `break`, and use step.skip() for an item that is not to count"
            )

    def _begin(self, item: Item) -> None:
        self._item, self._skipped = item, False
        self._losses.clear()
        self._values.clear()
        seed_all(self._runner.loop.seed, item.shown, item.number)
        for parameter in self._runner.loop.prepared.model.parameters():
            parameter.grad = None

    def _check(self, model: nn.Module, versions: list[tuple[str, Tensor, int]]) -> None:
        if not self._losses and not self._skipped:
            raise ConfigError(f"{self._where()}: no step.backward(loss) was called; step.skip() leaves an item out")
        buffers = dict(model.named_buffers())
        for name, buffer, version in versions:
            if buffers.get(name) is not buffer or buffer._version != version:
                raise ConfigError(
                    f"{self._where()}: the model changed its buffer {name!r}; only batch-norm's running statistics may "
                    "change, because the order of items is not fixed"
                )

    def _hand_over(self, stats: Tensor | None) -> None:
        runner, rows = self._runner, []
        for trained in runner.loop.prepared.trained:
            rows.append(tuple(None if self._skipped else parameter.grad for parameter in trained))
            for parameter in trained:
                parameter.grad = None
        loss = torch.stack(self._losses).sum(0) if self._losses and not self._skipped else _none(1)
        width = runner.stage().stats.width
        if width and stats is None:
            stats = _none(width)
        self._item = None
        runner.turns.done(Gradients(of=tuple(rows), loss=loss, stats=stats, logged=self._tell_logged()))

    def _tell_logged(self) -> Tensor | None:
        names = self._runner.loop.logs
        if not names:
            return None
        sums = [sum(value for each, value in self._values if each == name) for name in names]
        counts = [sum(each == name for each, _ in self._values) for name in names]
        return torch.tensor([*sums, *counts], dtype=torch.float32, device="cpu")

    def _where(self) -> str:
        return f"step {self.number}" if self._item is None else f"step {self.number}, item {self._item.number}"


def _none(width: int) -> Tensor:
    """Of an item that counts with zeros; whatever the script's defaults are."""
    return torch.zeros(width, dtype=torch.float32, device="cpu")


def _versions(model: nn.Module, but: frozenset[str]) -> list[tuple[str, Tensor, int]]:
    return [(name, buffer, buffer._version) for name, buffer in model.named_buffers() if name not in but]


def seed_all(seed: int, *of: int) -> None:
    """Seeds torch, numpy and random from a seed and what is about to run: a step, and an item of it."""
    mixed = blake2b(struct.pack(f"<{1 + len(of)}q", seed, *of), digest_size=8).digest()
    value = int.from_bytes(mixed, "little") if of else seed
    if torch.accelerator.current_accelerator() is not None:  # this torch knows one, whether it is here or not
        torch.manual_seed(value)
    else:  # it asks after every kind of device, which takes half a millisecond where the caches are cold
        torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)
