"""From a module to the layers of a pipeline: what comes before its blocks, each block, and what comes behind them.

Which parameters belong to which layer, no name says: one pass does, and what gradients reach.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from holdfast.data.items import Inputs, first_of, of_each
from holdfast.runtime.engine.evaluated import as_evaluated
from holdfast.runtime.engine.model import WithContext
from holdfast.runtime.engine.slots.frames import Call, Frame, Given, Halt, Way, generators, generators_kept

__all__ = ["Alone", "split"]


def split(whole: nn.Module, path: str, way: Way, call: Call, inputs: Inputs) -> tuple[nn.Module, ...]:
    """Returns a module's layers, whose parameters have its own names, and are its own.

    Args:
        whole: the module, which is not changed.
        path: of the list of its blocks, see :func:`holdfast.runtime.engine.slots.blocks.find_blocks`.
        way: how they hand on the hidden state.
        call: runs the module.
        inputs: of some micro-batch.
    """
    within = {id(parameter) for parameter in whole.get_submodule(path).parameters()}
    others = [parameter for parameter in whole.parameters() if id(parameter) not in within]
    every = {id(parameter) for parameter in others}
    probe = Frame(whole, path, every | {id(buffer) for buffer in whole.buffers()})
    first = first_of(inputs)
    with generators_kept(first.device), torch.enable_grad(), _all_trained(others), _ran_behind(probe) as modules:
        hidden = _Front(probe, way, call)(first, inputs)
        before = _reached(hidden, others)
        behind = _reached(_Head(probe, way, call)(hidden.detach().requires_grad_(), inputs), others)
    of_blocks = {id(buffer) for buffer in whole.get_submodule(path).buffers()}
    buffers = {id(buffer) for buffer in whole.buffers()} - of_blocks
    late = {id(buffer) for name in modules() for buffer in whole.get_submodule(name)._buffers.values()} & buffers
    recorder = _Recorder(Frame(whole, path, ()), way, call, whole.training)
    blocks = enumerate(whole.get_submodule(path).children())
    return (
        _Front(Frame(whole, path, before | (every - behind) | (buffers - late)), way, call),
        *(_Block(f"{path}.{number}", block, way, recorder, number) for number, block in blocks),
        _Head(Frame(whole, path, behind | late), way, call),
    )


@contextmanager
def _ran_behind(frame: Frame) -> Iterator[Callable[[], list[str]]]:
    """Gives what says of all passes within which modules ran behind the blocks, and not before them: their paths."""
    ran: dict[str, set[bool]] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda *_: ran.setdefault(path, set()).add(frame.passed == frame.count)

    with ExitStack() as hooks:
        for path, module in frame.module.named_modules():
            hooks.callback(module.register_forward_pre_hook(note(path)).remove)
        yield lambda: [path for path, behind in ran.items() if behind == {True}]


def _reached(value: Tensor, parameters: Collection[nn.Parameter]) -> set[int]:
    """By identity, the parameters on which a value depends."""
    if not parameters or not value.requires_grad:
        return set()
    found = torch.autograd.grad(value.float().sum(), [*parameters], allow_unused=True)
    return {id(parameter) for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None}


@contextmanager
def _all_trained(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Within it, gradients reach those that are not trained, too."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Recorder:
    """What blocks are given beside the hidden state, as the module around them says, of which no parameter is there."""

    def __init__(self, frame: Frame, way: Way, call: Call, training: bool) -> None:
        self._frame, self._way, self._call, self.training = frame, way, call, training
        self._last: tuple[Inputs, bool, list[Given]] | None = None

    def given(self, inputs: Inputs, number: int, *, training: bool) -> Given:
        """Returns that of a block, of a micro-batch; all blocks of one are asked for together."""
        if self._last is None or self._last[0] is not inputs or self._last[1] != training:
            self._last = inputs, training, self._record(inputs, training)
        return self._last[2][number]

    def _record(self, inputs: Inputs, training: bool) -> list[Given]:
        found: list[Given] = []
        device = first_of(inputs).device

        def note(number: int, given: Given) -> Any:
            found.append(self._way.put(None, given))
            if number == self._frame.count - 1:
                raise Halt
            return self._way.returned(self._way.taken(given))

        self._frame.move(lambda zero: zero.to(device))
        as_it_is = nullcontext() if training else as_evaluated(self._frame.module)
        with torch.no_grad(), generators_kept(device), as_it_is:
            self._frame.run(self._call, inputs, note)
        return found


class _Block(WithContext):
    """One block, under the name that it has in the module."""

    block: nn.Module
    way: Way
    recorder: _Recorder
    number: int

    def __init__(self, path: str, block: nn.Module, way: Way, recorder: _Recorder, number: int) -> None:
        super().__init__()
        *above, last = path.split(".")
        at: nn.Module = self
        for name in above:
            at.add_module(name, nn.Module())
            at = at.get_submodule(name)
        at.add_module(last, block)
        self.__dict__.update(block=block, way=way, recorder=recorder, number=number)
        self.training = recorder.training  # the whole module's, which the block's need not be

    def context(self, inputs: Inputs) -> Given:
        """See WithContext."""
        return self.recorder.given(inputs, self.number, training=self.training)

    def forward(self, value: Tensor, context: Given | None = None) -> Tensor:
        """Returns the next hidden state."""
        assert context is not None, "whoever runs it has asked for it"
        given = self.way.put(value, context)
        return self.way.found(self.block(*given.positional, **given.named))


class _Of(WithContext):
    """A layer that runs a module on the inputs of the micro-batch: its parts are the module's."""

    module: nn.Module
    call: Call

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.__dict__.update(module=module, call=call)
        self.training = module.training
        self.__dict__.update(_modules=module._modules, _parameters=module._parameters, _buffers=module._buffers)
        self.__dict__["_non_persistent_buffers_set"] = module._non_persistent_buffers_set

    def context(self, inputs: Inputs) -> Inputs:
        """See WithContext."""
        return inputs

    def train(self, mode: bool = True) -> Self:
        """Sets the module's mode, too."""
        super().train(mode)
        self.module.train(mode)
        return self


class Alone(_Of):
    """A module as the only layer.

    Args:
        module: the module.
        call: runs it.
    """

    def forward(self, _: Tensor, context: Inputs | None = None) -> Tensor:
        """Returns the module's output."""
        assert context is not None, "whoever runs it has asked for it"
        return self.call(self.module, of_each(torch.clone, context))


class _Around(_Of):
    """A layer that runs a frame."""

    frame: Frame
    way: Way

    def __init__(self, frame: Frame, way: Way, call: Call) -> None:
        super().__init__(frame.module, call)
        self.__dict__.update(frame=frame, way=way)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frame.move(fn)
        return self


class _Front(_Around):
    """What comes before the blocks."""

    def forward(self, _: Tensor, context: Inputs | None = None) -> Tensor:
        """Returns what the first block would be given."""
        assert context is not None, "whoever runs it has asked for it"
        found: list[Tensor] = []

        def stop(_: int, given: Given) -> Any:
            found.append(self.way.taken(given))
            raise Halt

        self.frame.run(self.call, context, stop)
        return found[0]


class _Head(_Around):
    """What comes behind the blocks. What comes before them runs, too, for nothing, and nothing is drawn for it."""

    def forward(self, value: Tensor, context: Inputs | None = None) -> Tensor:
        """Returns the module's output, given what the last block returned."""
        assert context is not None, "whoever runs it has asked for it"
        put_back = generators(value.device)

        def inject(number: int, given: Given) -> Any:
            if number == self.frame.count - 1:
                put_back()
            return self.way.returned(value if number == 0 else self.way.taken(given))

        output = self.frame.run(self.call, context, inject)
        assert output is not None, "nothing halts it"
        return output
