"""A module whose blocks are slots: its own forward pass can be run up to them, from them on, or around them.

Whatever the module does before its blocks and behind them, it does itself: nothing of it is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.data.items import Inputs, of_each
from holdfast.errors import ConfigError

__all__ = ["Call", "Frame", "Given", "Halt", "Way", "generators", "generators_kept"]

Call: TypeAlias = Callable[[nn.Module, Inputs], Tensor]
"""Runs a module on the inputs of a micro-batch; returns its output."""


class Halt(Exception):
    """Ends a forward pass: what it was run for is there."""


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a block."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Way:
    """How blocks are given the hidden state, and return it.

    Attributes:
        place: which argument it is: its number, or its name.
        among: of how many results it is the first; 0: it is the result.
    """

    place: int | str
    among: int = 0

    def taken(self, given: Given) -> Tensor:
        """Returns the hidden state among the arguments of a block."""
        found: Tensor = given.positional[self.place] if isinstance(self.place, int) else given.named[self.place]
        return found

    def put(self, value: Tensor | None, given: Given) -> Given:
        """Returns the arguments with another hidden state."""
        if isinstance(self.place, str):
            return Given(given.positional, {**given.named, self.place: value})
        before, behind = given.positional[: self.place], given.positional[self.place + 1 :]
        return Given((*before, value, *behind), given.named)

    def returned(self, value: Tensor) -> Any:
        """Returns a hidden state as a block does."""
        return (value, *[None] * (self.among - 1)) if self.among else value

    def found(self, returned: Any) -> Tensor:
        """Returns the hidden state in what a block has returned."""
        value: Tensor = returned[0] if self.among else returned
        return value


class _Slot(nn.Module):
    """In the place of a block, whose attributes it has: modules ask their blocks for some."""

    course: _Course
    number: int

    def __init__(self, course: _Course, number: int, like: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(course=course, number=number, like=like)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["like"], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        """Does what the frame is run for."""
        return self.course.reach(self.number, Given(positional, named))


class _Course:
    """A pass through the slots of a frame: what is done at each, and how many were reached."""

    def __init__(self) -> None:
        self.begin(_never)

    def begin(self, reached: Callable[[int, Given], Any]) -> None:
        """What slots do from now on."""
        self._reached, self.count = reached, 0

    def reach(self, number: int, given: Given) -> Any:
        """A slot is reached; raises ConfigError if it is not its turn."""
        if number != self.count:
            raise ConfigError(
                f"block {number} runs where block {self.count} is to run; expected that all run in each pass, one "
                "behind the other: not layerdrop, which leaves some out"
            )
        self.count += 1
        return self._reached(number, given)


class Frame:
    """A copy of a module with slots for its blocks.

    Attributes:
        module: the copy.
        count: how many blocks there are.

    Args:
        whole: the module, which stays as it is; parameters that are kept are its own.
        path: of the list of its blocks.
        kept: by identity, parameters and buffers that the copy has, too. Other parameters are zeros that take no
            memory, and no parameters; other buffers are copies that are no buffers.
    """

    def __init__(self, whole: nn.Module, path: str, kept: Collection[int]) -> None:
        blocks = whole.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList), "it is the list of the blocks"
        self.count = len(blocks)
        self._course = _Course()  # not we: what has a circle waits to be looked for
        memo: dict[int, Any] = {}
        for parameter in whole.parameters():
            stays = id(parameter) in kept
            memo[id(parameter)] = parameter if stays else _zeros(parameter.detach(), parameter.shape)
        slots = [_Slot(self._course, number, copy.deepcopy(block, memo)) for number, block in enumerate(blocks)]
        memo[id(blocks)] = nn.ModuleList(slots)
        self.module = copy.deepcopy(whole, memo)
        self._zeros: list[tuple[nn.Module, str, torch.Size]] = []
        for module in (*self.module.modules(), *(each for slot in slots for each in slot.like.modules())):
            for name, value in list(module._parameters.items()):
                if value is not None and not isinstance(value, nn.Parameter):
                    del module._parameters[name]
                    module.__dict__[name] = value
                    self._zeros.append((module, name, value.shape))
        pairs = [(each, whole.get_submodule(path)) for path, each in self.module.named_modules()]
        for slot, block in zip(slots, blocks, strict=True):
            pairs += zip(slot.like.modules(), block.modules(), strict=True)
        self._apart = [*_set_apart(pairs, kept)]

    @property
    def passed(self) -> int:
        """How many slots the pass that runs has reached."""
        return self._course.count

    def move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Has what is not kept be where, and of the type, that ``change`` makes of it; see ``nn.Module._apply``."""
        for module, name, shape in self._zeros:
            module.__dict__[name] = _zeros(change(_zeros(module.__dict__[name], torch.Size())), shape)
        for module, name in self._apart:
            module.__dict__[name] = change(module.__dict__[name])

    def run(self, call: Call, inputs: Inputs, reached: Callable[[int, Given], Any]) -> Tensor | None:
        """Runs the module on a micro-batch; returns its output, or None if a slot has halted it.

        Args:
            call: runs it.
            inputs: of the micro-batch.
            reached: called at each slot, in order, with its number and what a block would be given; returns what a
                block would, or raises Halt.

        Raises:
            ConfigError: slots are not reached one behind the other, or not all of them.
        """
        self._course.begin(reached)
        before = [(module.__dict__[name], module.__dict__[name]._version) for module, name in self._apart]
        output: Tensor | None = None
        try:
            with suppress(Halt):
                output = call(self.module, of_each(torch.clone, inputs))  # which it may change in place
                if self._course.count != self.count:
                    raise ConfigError(f"a pass has left out block {self._course.count}; expected that all run")
        finally:
            self._course.begin(_never)
        self._check_apart(before)
        return output

    def _check_apart(self, before: Sequence[tuple[Tensor, int]]) -> None:
        """Statistics of batch-norm are another layer's: what becomes of them here counts for nothing."""
        for (module, name), (tensor, version) in zip(self._apart, before, strict=True):
            changed = module.__dict__[name] is not tensor or tensor._version != version
            if changed and not isinstance(module, _BatchNorm):
                raise ConfigError(
                    f"{type(module).__name__} changes its buffer {name!r} in the forward pass; expected that none but "
                    "those of batch-norm change"
                )


def _set_apart(pairs: Iterable[tuple[nn.Module, nn.Module]], kept: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Makes ordinary attributes of the buffers of modules that are not kept of those that they are copies of."""
    for module, original in pairs:
        for name, value in list(module._buffers.items()):
            if value is not None and id(original._buffers[name]) not in kept:
                del module._buffers[name]
                module._non_persistent_buffers_set.discard(name)
                module.__dict__[name] = value
                yield module, name


def _never(number: int, given: Given) -> Any:
    raise AssertionError("a frame is run by `run` only")


def _zeros(like: Tensor, shape: torch.Size) -> Tensor:
    """Zeros that take the memory of one."""
    return like.new_zeros(()).expand(shape)


def generators(device: torch.device) -> Callable[[], None]:
    """Returns what has generators give again what they would give now: the host's, and a device's own."""
    host = torch.get_rng_state()
    other = None if device.type == "cpu" else torch.get_device_module(device)
    state = None if other is None else other.get_rng_state(device)

    def put_back() -> None:
        torch.set_rng_state(host)
        if other is not None:
            other.set_rng_state(state, device)

    return put_back


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Behind it, generators give what they would have given without."""
    put_back = generators(device)
    try:
        yield
    finally:
        put_back()
