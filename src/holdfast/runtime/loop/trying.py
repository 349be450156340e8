"""A loop tried out before any worker starts: its first item is run twice, and two updates are made of it.

What gives other bits the second time would after a loss, too, and what is kept where no checkpoint and no joiner has it
would be missed there; see the rules of ADR 25 for layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.devices.device import Device
from holdfast.errors import ConfigError
from holdfast.optim.mirror import Mirror
from holdfast.runtime.loop.alone import run_step, whole_stage
from holdfast.runtime.loop.facts import parts
from holdfast.runtime.loop.feeding import Feeding
from holdfast.runtime.loop.hosting import Loop
from holdfast.runtime.loop.stage import Gradients, LoopStage
from holdfast.runtime.loop.turns import Item, Take, Turns
from holdfast.runtime.tensors import same_bits

__all__ = ["ItemTrial"]


@dataclass(slots=True)
class ItemTrial:
    """Runs a loop as far as its first item.

    Attributes:
        loop: what is tried.
        turns: by which it is reached.
        device: what it computes on.
        stage: computes by it; as all of the model's, of a step that has this one item.
        differences: what gave other bits the second time, a line each.
    """

    loop: Loop
    turns: Turns
    device: Device
    stage: LoopStage = field(init=False)
    differences: tuple[str, ...] = field(init=False, default=())
    _found: Gradients | None = field(init=False, default=None)
    _item_s: float = field(init=False, default=0.001)

    def __post_init__(self) -> None:
        """The stage is there before the loop goes on."""
        self.loop = replace(self.loop, microbatches=1, sum_chunks=None)
        self.stage = whole_stage(self.loop, self, self.device)

    @property
    def first_item(self) -> str:
        """A digest of what came of the item."""
        assert self._found is not None, "it was run"
        return self._found.digest

    def __call__(self) -> None:
        """Runs the item twice; then the update by it, twice.

        Raises:
            ConfigError: weights are changed by an item, or an optimizer keeps what would be lost with its process.
        """
        self.turns.between(0)
        if self.loop.prepared.failing is not None:  # its steps lack items
            scale = self.stage.loss_scale
            self.run((Item(step=0, shown=0, number=0, loss_scale=scale),), lambda *_: False)
            return
        run_step(self.stage, self.loop, 0)
        before = self._attributes()
        run_step(self.stage, self.loop, 1)
        for kind, name in sorted(key for key, value in self._attributes().items() if before.get(key) != value):
            raise ConfigError(
                f"{kind} keeps something from one step to the next in its attribute {name!r}, which neither a "
                "checkpoint nor a worker that joins would have; expected it in optimizer.state[parameter]"
            )
        self._check_apart()

    def _check_apart(self) -> None:
        """What updates the parameters of one bucket must need nothing of those of others.

        Raises:
            ConfigError: an optimizer does otherwise when it has all of its parameters.
        """
        assert self._found is not None, "it was run"
        prepared, found = self.loop.prepared, self._found.of
        gradients = {
            id(p): g for row, of in zip(prepared.trained, found, strict=True) for p, g in zip(row, of, strict=True)
        }
        for optimizer in prepared.optimizers:
            ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
            rows = [[p for p in row if id(p) in ours] for row in prepared.trained]
            rows = [row for row in rows if row]
            if len(rows) < 2:
                continue
            apart = [tensor for row in rows for tensor in _stepped(optimizer, row, gradients)]
            all_of_them = [p for row in rows for p in row]
            together, again = (_stepped(optimizer, all_of_them, gradients) for _ in range(2))
            if all(map(same_bits, together, again)) and not all(map(same_bits, apart, together)):
                raise ConfigError(
                    f"{type(optimizer).__name__} updates a parameter by what others have, such as a norm over all "
                    "gradients, and is run for each bucket of parameters by itself; expected hf.prepare(..., "
                    f"bucket_bytes={sum(p.nbytes for row in rows for p in row)}), which makes one of all, or an "
                    "optimizer that updates each parameter by itself"
                )

    def seconds(self) -> tuple[float, float]:
        """How long the item took when it was run again, and a digest of all state takes."""
        begun = time.perf_counter()
        for layer in self.stage.layers:
            self.stage.layer_digest(layer)
        return self._item_s, time.perf_counter() - begun

    def run(self, items: Iterable[Item], take: Take) -> None:
        """Has the loop run the item, and run it again; knows afterwards what came of it."""
        (item,) = items
        if self._found is None:
            self._found = self._have_run(item)
            self.device.outgoing(self._found.loss).wait()  # so that nothing is under way any more
            begun = time.perf_counter()
            again = self._have_run(item)
            self.device.outgoing(again.loss).wait()
            self._item_s = time.perf_counter() - begun
            self.differences = tuple(self._compare(self._found, again))
            if self.stage.stats.foreign and not self.differences:
                self._check_stats(item)
        take(item, self._found)

    def _have_run(self, item: Item) -> Gradients:
        found: list[Gradients] = []

        def take(item: Item, gradients: Gradients) -> bool:
            found.append(gradients)
            return False

        self.turns.run((item,), take)
        return found[0]

    def _check_stats(self, item: Item) -> None:
        """Batch-norm that trains must not read its running statistics, which are others while an item runs.

        Raises:
            ConfigError: one does.
        """
        assert self._found is not None, "it was run"
        stats = self.stage.stats
        with stats.filled(1.0):
            found = replace(self._have_run(item), stats=self._found.stats)
        if (name := self._first_difference(self._found, found)) is not None:
            raise ConfigError(
                f"the {name} depends on the running statistics of batch-norm in train() ({', '.join(stats.foreign)}: "
                "a class with a forward pass of its own), which the step folds only behind all of its items; expected "
                "that it reads them in eval() only, as torch.nn.BatchNorm2d does"
            )

    def _compare(self, one: Gradients, other: Gradients) -> Iterator[str]:
        if self._data_differ():
            yield (
                "item 0 has other data when it is loaded again: the dataset, a transform or collate draws from a "
                "generator of its own, such as numpy.random.default_rng or torch.Generator, or keeps something from "
                "one sample to the next; expected the generators of torch, numpy and random themselves, which are "
                "seeded for each item, or one that is made for each sample from what these draw"
            )
        elif (name := self._first_difference(one, other)) is not None:
            yield (
                f"item 0 has another {name} when it is run again: the model or the loop over items draws from a "
                "generator of its own, such as numpy.random.default_rng or torch.Generator, keeps something from one "
                "item to the next, or runs an operation that is not deterministic; expected step.number and step.item "
                "for what changes from one item to the next, and the generators of torch, numpy and random themselves, "
                "which are seeded for each item"
            )

    def _first_difference(self, one: Gradients, other: Gradients) -> str | None:
        names = {id(parameter): name for name, parameter in self.loop.prepared.model.named_parameters()}
        for parameters, row, again in zip(self.loop.prepared.trained, one.of, other.of, strict=True):
            for parameter, a, b in zip(parameters, row, again, strict=True):
                if not same_bits(a, b):
                    return f"gradient of {names[id(parameter)]}"
        if not same_bits(one.stats, other.stats):
            return "mean or variance in batch-norm"
        return None if same_bits(one.loss, other.loss) else "loss"

    def _data_differ(self) -> bool:
        feed = self.loop.feed
        if feed.on_start is not None:  # it may need what only loader processes have; one of them loads it twice
            with closing(Feeding(self.loop)) as feeding:
                found = [list(parts(feeding.load(0, 0))) for _ in range(max(2, feed.loaders + 1))]
        else:
            asked = feed.source.ask(0, 0)
            found = [list(parts(feed.make(asked, self.loop.seed, 0, 0))) for _ in range(2)]
        return any(each != found[0] for each in found)

    def _attributes(self) -> dict[tuple[str, str], Any]:
        """What the optimizers of all buckets have besides their groups and their states of parameters."""
        found: dict[tuple[str, str], list[Any]] = {}
        for optimizer in self.stage.optimizers:
            for name, value in vars(optimizer).items():
                if name not in ("param_groups", "state") and not name.startswith("_optimizer_"):
                    found.setdefault((type(optimizer).__name__, name), []).append(_frozen(value))
        return dict(found)


def _stepped(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], gradients: Mapping[int, Tensor | None]
) -> list[Tensor]:
    """What one step of the optimizer would make of parameters, if it had these alone."""
    mirror = Mirror(optimizer, parameters)
    stand_ins = [nn.Parameter(p.detach().clone()) for p in parameters]
    made = mirror(stand_ins)
    for parameter, stand_in, entries in zip(parameters, stand_ins, mirror.entries(), strict=True):
        gradient = gradients[id(parameter)]
        stand_in.grad = None if gradient is None else gradient.to(stand_in.dtype).clone()
        if entries:
            made.state[stand_in] = entries
    made.step()
    return [stand_in.detach() for stand_in in stand_ins]


def _frozen(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Returns what does not change with a value: the same for parameters, which change, and for foreign objects."""
    if id(value) in within or isinstance(value, nn.Parameter):
        return None
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return [(_frozen(key, within), _frozen(each, within)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_frozen(each, within) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_frozen(each, within)) for each in value)
    return list(parts(value))
