"""A model as buckets: contiguous parts of its parameters, each of which is summed and updated as one layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor, nn

from holdfast.errors import ConfigError

__all__ = ["BUCKET_BYTES", "Bucket", "make_buckets"]

BUCKET_BYTES = 1 << 22
"""A bucket is closed once it has so many bytes: a sum costs its messages, however small it is."""


class Bucket(nn.Module):
    """Parameters and buffers of a model by their full names, dots included; it runs nothing.

    Args:
        parameters: the model's own, in registration order.
        buffers: the persistent ones.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters.update(parameters)
        self._buffers.update(buffers)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter; its name is no path here."""
        found = self._parameters[target]
        assert found is not None, "a bucket has parameters only"
        return found


def make_buckets(
    model: nn.Module,
    belongs_to: Callable[[nn.Parameter], object],
    *,
    apart: Collection[int] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Returns the buckets of a model, in registration order; all buffers are in the last one.

    Args:
        model: its parameters count once, those that are shared at their first use.
        belongs_to: parameters of which this differs are in different buckets: their optimizers; None: any will do.
        apart: identities of parameters that share no bucket with any other.
        bucket_bytes: a bucket is closed once it has so many; 1: each parameter that is trained has one of its own.

    Raises:
        ConfigError: it has no parameter that is trained.
    """
    named = list(model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"hf.prepare: {type(model).__name__} has no parameter that is trained")
    *rows, tail = _cut(named, bucket_bytes, belongs_to, frozenset(apart))
    if rows and not any(p.requires_grad for p in tail.values()):
        rows[-1] |= tail  # what is never summed is no bucket
    else:
        rows.append(tail)
    kept = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    last = len(rows) - 1
    return tuple(Bucket(row, buffers if index == last else {}) for index, row in enumerate(rows))


def _cut(
    named: Iterable[tuple[str, nn.Parameter]],
    most: int,
    belongs_to: Callable[[nn.Parameter], object],
    apart: frozenset[int],
) -> Iterable[dict[str, nn.Parameter]]:
    row: dict[str, nn.Parameter] = {}
    size, owner, is_apart = 0, None, None
    for name, parameter in named:
        trained, theirs, other = parameter.requires_grad, belongs_to(parameter), id(parameter) in apart
        strange = (None not in (owner, theirs) and theirs is not owner) or is_apart not in (None, other)
        if row and (size >= most or (trained and strange)):
            yield row
            row, size, owner, is_apart = {}, 0, None, None
        row[name] = parameter
        if trained:
            size, owner, is_apart = size + parameter.nbytes, theirs if theirs is not None else owner, other
    yield row
