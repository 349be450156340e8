"""What of a model can be shared by several GPUs; told before anybody trains, and without loading FSDP2."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError
from holdfast.runtime.engine.model import WithContext

__all__ = ["check_layer", "part_spec"]


def check_layer(layer: int, module: nn.Module) -> None:
    """Checks that a layer's parameters can be sharded, and its samples be shared.

    Raises:
        ConfigError: they cannot; says what would be right.
    """
    what = f"grid: layer {layer} ({type(module).__name__}) cannot be shared by several GPUs with numerics fast"
    if isinstance(module, WithContext):
        raise ConfigError(f"{what}: it is given more than what the one before returns; expected one GPU for each stage")
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        if not parameter.dim():
            raise ConfigError(
                f"{what}: its parameter {name} is a single number; expected one of at least one dimension"
            )
    if len(types := {parameter.dtype for parameter in named.values()}) > 1:
        raise ConfigError(
            f"{what}: its parameters are {' and '.join(sorted(map(str, types)))}; expected one type in each layer"
        )
    if any(isinstance(each, _BatchNorm) for each in module.modules()):
        raise ConfigError(
            f"{what}: batch-norm is over all samples of a micro-batch; expected one GPU for each stage, or exact"
        )


def part_spec(layer: int, spec: TensorSpec, gpus: int, samples: int) -> TensorSpec:
    """Returns what a layer returns for one GPU's samples of a micro-batch, given what it returns for all.

    Raises:
        ConfigError: its first dimension is not the samples, or they cannot be shared evenly.
    """
    if spec.shape[:1] != (samples,) or samples % gpus:
        raise ConfigError(
            f"grid: layer {layer} returns {spec} for {samples} samples, which the {gpus} GPUs of a stage are to share; "
            "expected the samples as its first dimension, and grid.microbatch_size to be a multiple of the GPUs"
        )
    return TensorSpec(shape=(samples // gpus, *spec.shape[1:]), dtype=spec.dtype)
