"""Where the blocks of a module are, and how one hands the hidden state to the next: found out by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data.items import Inputs, first_of, of_each
from holdfast.errors import ConfigError
from holdfast.runtime.engine.slots.frames import Call, Given, Way, generators_kept

__all__ = ["buffers_kept", "find_blocks"]


@dataclass(slots=True)
class _Seen:
    """What was seen of a list of modules in one forward pass.

    Attributes:
        ran: the numbers of the modules that ran, in order.
        given: what each was given.
        returned: what each returned.
    """

    ran: list[int] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)


def find_blocks(whole: nn.Module, call: Call, inputs: Inputs, count: int | None = None) -> tuple[str, Way]:
    """Returns the path of the list of a module's blocks, and how they hand on the hidden state.

    Args:
        whole: the module.
        call: runs it.
        inputs: of some micro-batch.
        count: how many blocks there are; None: the longest list has them.

    Raises:
        ConfigError: there is no such list, or its modules do not run one after another; says what was seen.
    """
    lists = {path: each for path, each in whole.named_modules() if isinstance(each, nn.ModuleList) and len(each) > 1}
    outermost = {path: each for path, each in lists.items() if not any(path.startswith(f"{o}.") for o in lists)}
    wanted = {path: each for path, each in outermost.items() if count in (None, len(each))}
    kind = type(whole).__name__
    if not wanted:
        which = "blocks" if count is None else f"{count} blocks"
        raise ConfigError(f"{kind} has no torch.nn.ModuleList of {which}, two or more; expected one, to cut it there")
    longest = max(map(len, wanted.values()))
    path, *more = (path for path, each in wanted.items() if len(each) == longest)
    if more:
        raise ConfigError(f"{kind} has several lists of {longest} blocks, {path} and {more[0]}; expected one")
    seen = _Seen()
    device = first_of(inputs).device
    with torch.no_grad(), generators_kept(device), _watched(wanted[path], seen), buffers_kept(whole):
        call(whole, of_each(torch.clone, inputs))
    if seen.ran != list(range(longest)):
        twice = next((number for number in seen.ran if seen.ran.count(number) > 1), None)
        what = f"block {twice} runs more than once" if twice is not None else f"they run in the order {seen.ran}"
        raise ConfigError(f"{kind}: {path}: {what} in a forward pass; expected each once, one behind the other")
    return path, _way(f"{kind}: {path}", seen)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Behind it, a module has the buffers that it had, with what they held."""
    before = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    held = [(value, value.clone()) for _, row in before for value in row.values() if value is not None]
    try:
        yield
    finally:
        for buffers, row in before:
            buffers.update(row)
        for value, copy in held:
            if not torch.equal(value, copy):  # what is not changed may be such that it cannot be written
                value.copy_(copy)


@contextmanager
def _watched(blocks: nn.ModuleList, seen: _Seen) -> Iterator[None]:
    def before(number: int) -> Callable[..., None]:
        def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.ran.append(number)
            seen.given.append(Given(positional, named))

        return note

    def behind(_: nn.Module, __: tuple[Any, ...], returned: Any) -> None:
        seen.returned.append(returned)

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(before(number), with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(behind).remove)
        yield


def _way(what: str, seen: _Seen) -> Way:
    """How the first block hands on to the second; it must be so between all."""
    found: set[Way] = set()
    for number, (given, returned) in enumerate(zip(seen.given[1:], seen.returned, strict=False)):
        among = len(returned) if isinstance(returned, tuple | list) else 0
        hidden = returned[0] if among else returned
        arguments: list[tuple[int | str, Any]] = [*enumerate(given.positional), *given.named.items()]
        places = [place for place, each in arguments if each is hidden and isinstance(each, Tensor)]
        if not places:
            raise ConfigError(
                f"{what}: block {number + 1} is not given what the one before returned; expected that nothing is done "
                "between blocks"
            )
        found.add(Way(places[0], among))
    if len(found) > 1:
        raise ConfigError(f"{what}: blocks are given the hidden state in several ways; expected one")
    (way,) = found
    return way
