"""Failures that are simulated: workers whose gradients count as absent from some point of a backward pass on.

What comes of it is, bit by bit, what comes of a real loss at the same point, and costs no process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

from torch.optim import Optimizer

from holdfast.errors import ConfigError

__all__ = ["Recovery", "SimulatedFailure"]

Recovery: TypeAlias = Literal["lossy-forward", "skip", "rollback"]
"""What answers the failure: the survivors' mean; nothing; nothing, and then the same mini-batch again."""


class SimulatedFailure:
    """An optimizer in whose training some workers fail once; given to ``hf.prepare`` in the optimizer's place.

    From a gradient on, in the order in which a backward pass makes them, the casualties' gradients are absent: the mean
    is that of the survivors, and where there are none, nothing is updated (gradients of zero would still move weights
    by momentum, weight decay or Adam).

    Args:
        optimizer: the optimizer.
        step: of which step the backward pass fails; or the epoch, and the mini-batch in it.
        casualties: how many workers fail, the last ones, or which; all of them with ``rollback`` and ``skip``.
        workers: how many there are.
        progress: percent of the gradients that are summed and used before the failure, rounded down; or give ``layer``.
        layer: name of the module with whose gradients the failure begins.
        recovery: what answers it.

    Raises:
        ConfigError: no such failure is possible.

    Source: Nicolae et al., section III-C; there gradients are set to zero, which for SGD without momentum is the same.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        step: int | tuple[int, int],
        casualties: int | Collection[int] | None = None,
        workers: int = 8,
        progress: int | None = None,
        layer: str | None = None,
        recovery: Recovery = "lossy-forward",
    ) -> None:
        if (progress is None) == (layer is None):
            raise ConfigError(f"SimulatedFailure: expected progress or layer, got {progress} and {layer}")
        if progress is not None and not 0 <= progress <= 100:
            raise ConfigError(f"SimulatedFailure: progress: expected 0 to 100 percent, got {progress}")
        if recovery not in ("lossy-forward", "skip", "rollback"):
            raise ConfigError(f"SimulatedFailure: recovery: expected lossy-forward, skip or rollback, got {recovery!r}")
        if min(step) < 0 if isinstance(step, tuple) else step < 0:
            raise ConfigError(f"SimulatedFailure: step: expected 0 or more, got {step}")
        self.optimizer = optimizer
        self.workers, self.recovery = workers, recovery
        self.casualties = _casualties(casualties, workers, recovery)
        self._at, self._progress, self._layer = step, progress, layer

    def step_of(self, steps_per_epoch: int) -> int:
        """Returns the step that fails."""
        if isinstance(self._at, int):
            return self._at
        epoch, minibatch = self._at
        if minibatch >= steps_per_epoch:
            raise ConfigError(f"SimulatedFailure: step: an epoch has {steps_per_epoch} mini-batches, got {minibatch}")
        return epoch * steps_per_epoch + minibatch

    def standing(self, gradients: Sequence[str]) -> int:
        """Returns how many gradients are summed before the failure.

        Args:
            gradients: names of the parameters, in the order in which a backward pass comes to them.

        Raises:
            ConfigError: no parameter is of the layer.
        """
        if self._progress is not None:
            return len(gradients) * self._progress // 100
        layer = self._layer
        found = next((at for at, name in enumerate(gradients) if name == layer or name.startswith(f"{layer}.")), None)
        if found is None:
            layers = dict.fromkeys(name.rpartition(".")[0] for name in gradients)
            raise ConfigError(f"SimulatedFailure: layer: there is no {layer!r}; layers are {', '.join(layers)}")
        return found

    def microbatches(self, num_microbatches: int) -> frozenset[int]:
        """Returns the global numbers of those that the casualties run."""
        base, more = divmod(num_microbatches, self.workers)
        starts = [worker * base + min(worker, more) for worker in range(self.workers + 1)]
        return frozenset(m for worker in self.casualties for m in range(starts[worker], starts[worker + 1]))


def _casualties(wanted: int | Collection[int] | None, workers: int, recovery: Recovery) -> frozenset[int]:
    everybody = frozenset(range(workers))
    if wanted is None:
        found = everybody
    elif isinstance(wanted, int):
        if not 0 <= wanted <= workers:
            raise ConfigError(f"SimulatedFailure: casualties: there are {workers} workers, got {wanted}")
        found = frozenset(range(workers - wanted, workers))
    else:
        found = frozenset(wanted)
        if not found <= everybody:
            raise ConfigError(f"SimulatedFailure: casualties: workers are 0 to {workers - 1}, got {sorted(found)}")
    if recovery == "lossy-forward" and found == everybody:
        raise ConfigError("SimulatedFailure: casualties: lossy-forward needs survivors, and all workers fail")
    if recovery != "lossy-forward" and found != everybody:
        raise ConfigError(
            f"SimulatedFailure: casualties: with {recovery} nobody goes on with the mini-batch: expected all "
            f"{workers} workers, got {len(found)}"
        )
    return found
