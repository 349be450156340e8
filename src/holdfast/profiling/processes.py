"""The processes that measure, by name, and what they answer; light, as whoever starts them does not import torch."""

from __future__ import annotations

import msgspec

from holdfast.core.profile import LayerProfile
from holdfast.runtime.node.entries import EntryPoint

__all__ = ["ECHO", "LAYERS", "LINK", "PROGRESS", "SEVERAL_GPUS", "Measured"]

PROGRESS = "progress"
"""First word of what ``LAYERS`` and ``SEVERAL_GPUS`` send before their answer: how many iterations are done."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What ``LAYERS`` answers with."""

    layers: tuple[LayerProfile, ...]
    machine: dict[str, str | int | float]


LAYERS = EntryPoint("layers", "holdfast.profiling.children:run_layers")
SEVERAL_GPUS = EntryPoint("layers on several GPUs", "holdfast.profiling.children:run_several_gpus")
LINK = EntryPoint("link", "holdfast.profiling.children:run_link")
ECHO = EntryPoint("echo", "holdfast.profiling.children:run_echo")
