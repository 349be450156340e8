"""Entry points of the processes that measure; light, as whoever starts them does not import torch."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from holdfast.config.job import Job
from holdfast.core.profile import LayerProfile

__all__ = ["PROGRESS", "Measured", "echo_main", "layers_main", "link_main"]

PROGRESS = "progress"
"""First word of what :func:`layers_main` sends before its answer: how many iterations are done."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`layers_main` answers with."""

    layers: tuple[LayerProfile, ...]
    machine: dict[str, str | int | float]


def layers_main(job: Job, iterations: int, device: str, answer: Connection) -> None:
    """Measures the layers of a job; answers with what they cost and what they were measured on."""
    from holdfast.profiling.children import run_layers

    run_layers(job, iterations, device, answer)


def link_main(job: Job, rounds: int, pipe: Connection, answer: Connection) -> None:
    """Measures what a message costs; answers with the link."""
    from holdfast.profiling.children import run_link

    run_link(job, rounds, pipe, answer)


def echo_main(job: Job, rounds: int, pipe: Connection, answer: Connection) -> None:
    """Sends back what :func:`link_main` sends."""
    from holdfast.profiling.children import run_echo

    run_echo(job, rounds, pipe, answer)
