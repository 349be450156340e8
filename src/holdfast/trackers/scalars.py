"""The numbers of a step, and of an evaluation, by the names under which trackers keep them."""

from __future__ import annotations

from holdfast.telemetry.events import Evaluated
from holdfast.telemetry.tracking import Stepped

__all__ = ["scalars_of"]


def scalars_of(happening: Stepped | Evaluated) -> dict[str, float]:
    """Returns what is known, by name."""
    if isinstance(happening, Evaluated):
        return {f"evaluation/{name}": value for name, value in happening.scores if value is not None}
    found = {
        "train/loss": happening.loss,
        "train/gradient_norm": happening.norm,
        "train/learning_rate": happening.rate,
        "speed/samples_per_s": happening.samples_per_s,
        "speed/memory_gb": happening.memory / 1e9 or None,
        "speed/workers": float(happening.workers),
    }
    return {name: value for name, value in found.items() if value is not None}
