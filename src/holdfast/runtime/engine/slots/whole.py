"""A module that is cut at its blocks, and whether its layers give its bits: its output, and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.data.items import Inputs, first_of, of_each
from holdfast.errors import ConfigError
from holdfast.runtime.engine.evaluated import as_evaluated, beside_of, run_as_evaluated
from holdfast.runtime.engine.foreign import theirs
from holdfast.runtime.engine.model import Loss, check_loss
from holdfast.runtime.engine.precision import cast_to
from holdfast.runtime.engine.slots.blocks import buffers_kept, find_blocks
from holdfast.runtime.engine.slots.frames import Call, Way
from holdfast.runtime.engine.slots.split import Alone, split
from holdfast.runtime.tensors import same_bits

__all__ = ["Whole", "called", "check_equal"]


def called(module: nn.Module, inputs: Inputs) -> Tensor:
    """Returns the output of a module whose forward pass takes a tensor, or tensors by the names of its arguments.

    Raises:
        ConfigError: it returns something else than a tensor.
    """
    output = module(**inputs) if isinstance(inputs, dict) else module(inputs)
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"{type(module).__name__} returned a {type(output).__name__}; expected one tensor, which the loss is given"
        )
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A module that is to be cut.

    Attributes:
        module: the module.
        call: runs it.
        count: how many blocks it has; None: as many as its longest list of modules.
        takes: the names of the arguments that it may be given; None: whichever it takes.
        notes: what a person should know of it.
    """

    module: nn.Module
    call: Call = called
    count: int | None = None
    takes: frozenset[str] | None = None
    notes: tuple[str, ...] = ()

    def layers(self, inputs: Inputs) -> tuple[nn.Module, ...]:
        """Returns its layers, which have its parameters under its names.

        Args:
            inputs: of some micro-batch, on which it is run to see where its blocks are.

        Raises:
            ConfigError: it fails, or cannot be cut.
        """
        path, way = self._blocks(inputs)
        return self._layers(path, way, inputs)

    def one(self) -> tuple[nn.Module, ...]:
        """Returns it as the only layer."""
        return (Alone(self.module, self.call),)

    def check(self, batch: tuple[Inputs, Tensor], loss: Loss, precision: torch.dtype | None = None) -> None:
        """Checks that its layers, one after another, give its bits; each part runs under a seed of its own.

        Args:
            batch: inputs and targets of a micro-batch.
            loss: of its output.
            precision: of what autocast makes all that; None: as it is written.

        Raises:
            ConfigError: something differs; names the first thing that does. Or see ``layers``.
        """
        path, way = self._blocks(batch[0])
        layers = self._layers(path, way, batch[0])
        with theirs(f"model: {self._kind} failed on a micro-batch"):
            check_equal(self.module, layers, path, self.call, batch, loss, precision)

    @property
    def _kind(self) -> str:
        return type(self.module).__name__

    def _blocks(self, inputs: Inputs) -> tuple[str, Way]:
        if self.takes is not None and isinstance(inputs, dict) and (others := sorted(inputs.keys() - self.takes)):
            raise ConfigError(
                f"data: {self._kind} takes no {', '.join(others)}; expected some of {', '.join(sorted(self.takes))}"
            )
        with theirs(f"model: {self._kind} failed on a micro-batch"):
            return find_blocks(self.module, self.call, inputs, self.count)

    def _layers(self, path: str, way: Way, inputs: Inputs) -> tuple[nn.Module, ...]:
        with theirs(f"model: {self._kind} cannot be cut"):
            return split(self.module, path, way, self.call, inputs)


def check_equal(
    whole: nn.Module,
    layers: Sequence[nn.Module],
    path: str,
    call: Call,
    batch: tuple[Inputs, Tensor],
    loss: Loss,
    precision: torch.dtype | None = None,
) -> None:
    """Runs a micro-batch through a module and through its layers, each part under a seed of its own.

    Args:
        whole: the module; the gradients of its parameters, and its buffers, are left as they are found.
        layers: of it, with its own parameters.
        path: of the list of its blocks.
        call: runs it.
        batch: inputs and targets of a micro-batch.
        loss: of its output.
        precision: of what autocast makes all that; None: as it is written.

    Raises:
        ConfigError: something differs; names the first thing that does.
    """
    inputs, targets = batch
    named = {name: each for name, each in whole.named_parameters() if each.requires_grad}
    with buffers_kept(whole), _seeded(whole, path):
        _seed(0)
        with cast_to(precision, first_of(inputs).device):
            expected = call(whole, of_each(torch.clone, inputs))
            total = check_loss(loss(expected, targets))
        wanted = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    found, given = _layer_by_layer(layers, inputs, lambda output: check_loss(loss(output, targets)), precision)
    kind = type(whole).__name__
    if not same_bits(expected, found):
        raise ConfigError(f"{kind} cannot be cut: its layers, one after another, give other bits than the whole of it")
    for (name, parameter), gradient in zip(named.items(), wanted, strict=True):
        other = given.get(id(parameter))
        if (gradient is None) != (other is None) or (gradient is not None and not same_bits(gradient, other)):
            raise ConfigError(
                f"{kind} cannot be cut: layer by layer, the gradient of {name} has other bits than that of the whole"
            )
    with torch.no_grad(), buffers_kept(whole), cast_to(precision, first_of(inputs).device):
        for module in (whole, *layers):
            _change_statistics(module)
        with _seeded(whole, path), as_evaluated(whole):
            _seed(0)
            expected = call(whole, of_each(torch.clone, inputs))
        found = first_of(inputs).clone()
        for number, layer in enumerate(layers):
            beside = beside_of(layer, lambda: inputs, evaluated=True)
            _seed(number)
            found = run_as_evaluated(number, layer, found, beside)
    if not same_bits(expected, found):
        raise ConfigError(f"{kind} cannot be cut: its layers give other bits than the whole of it in eval mode")


def _change_statistics(module: nn.Module) -> None:
    """Gives batch-norm statistics as after some training: they find who reads others than its layer's own."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.25)
        if name.endswith("running_var"):
            buffer.fill_(1.5)


def _layer_by_layer(
    layers: Sequence[nn.Module], inputs: Inputs, loss: Callable[[Tensor], Tensor], precision: torch.dtype | None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns the output, and the gradient of each parameter, by its identity."""
    cells: list[tuple[Tensor, Tensor]] = []
    value = first_of(inputs)
    device = value.device
    for number, layer in enumerate(layers):
        source = value.detach().requires_grad_(number > 0)
        with cast_to(precision, device):
            beside = beside_of(layer, lambda: inputs)
            _seed(number)
            value = layer(source) if beside is None else layer(source, beside)
        cells.append((source, value))
    output = value.detach().requires_grad_()
    with cast_to(precision, device):
        total = loss(output)
    (gradient,) = torch.autograd.grad(total, [output])
    sums: dict[int, Tensor] = {}
    for layer, (source, returned) in reversed([*zip(layers, cells, strict=True)]):
        trained = [each for each in layer.parameters() if each.requires_grad]
        wanted = [*([source] if source.requires_grad else []), *trained]
        if not wanted or not returned.requires_grad:
            continue
        found = torch.autograd.grad(returned, wanted, gradient, allow_unused=True)
        for parameter, each in zip(trained, found[len(wanted) - len(trained) :], strict=True):
            if each is not None:
                before = sums.get(id(parameter))
                sums[id(parameter)] = each if before is None else before + each
        gradient = found[0] if source.requires_grad else gradient
    return output, sums


@contextmanager
def _seeded(whole: nn.Module, path: str) -> Iterator[None]:
    """Within it, each block of a module begins with a seed of its own, and so does what is behind them."""
    blocks = [*whole.get_submodule(path).children()]

    def before(number: int) -> Callable[..., None]:
        return lambda *_: _seed(number + 1)

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(before(number)).remove)
        hooks.callback(blocks[-1].register_forward_hook(before(len(blocks))).remove)
        yield


def _seed(number: int) -> None:
    torch.manual_seed(number)
