"""Whether the layers of a module give the bits of the whole: its output, and the gradient of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.runtime.engine.model import Loss, WithContext, check_loss
from holdfast.runtime.engine.precision import cast_to
from holdfast.runtime.engine.slots.frames import Call
from holdfast.runtime.tensors import same_bits

__all__ = ["check_equal"]


def check_equal(
    whole: nn.Module,
    layers: Sequence[nn.Module],
    path: str,
    call: Call,
    batch: tuple[Tensor, Tensor],
    loss: Loss,
    precision: torch.dtype | None = None,
) -> None:
    """Runs a micro-batch through a module and through its layers, each part under a seed of its own.

    Args:
        whole: the module; the gradients of its parameters are left as they are found.
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
    with _seeded(whole, path):
        _seed(0)
        with cast_to(precision, inputs.device):
            expected = call(whole, inputs)
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


def _layer_by_layer(
    layers: Sequence[nn.Module], inputs: Tensor, loss: Callable[[Tensor], Tensor], precision: torch.dtype | None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Returns the output, and the gradient of each parameter, by its identity."""
    cells: list[tuple[Tensor, Tensor]] = []
    value = inputs
    for number, layer in enumerate(layers):
        source = value.detach().requires_grad_(number > 0)
        with cast_to(precision, inputs.device):
            beside = (layer.context(inputs),) if isinstance(layer, WithContext) else ()
            _seed(number)
            value = layer(source, *beside)
        cells.append((source, value))
    output = value.detach().requires_grad_()
    with cast_to(precision, inputs.device):
        total = loss(output)
    (gradient,) = torch.autograd.grad(total, [output])
    sums: dict[int, Tensor] = {}
    for layer, (source, returned) in reversed([*zip(layers, cells, strict=True)]):
        trained = [each for each in layer.parameters() if each.requires_grad]
        wanted = [*([source] if source.requires_grad else []), *trained]
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
