"""Measures a job in processes of its own; imports no torch itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from holdfast.config.job import Job
from holdfast.core.profile import GpuProfile, LayerProfile, Link, Profile
from holdfast.errors import ConfigError, InternalError
from holdfast.profiling.processes import ECHO, LAYERS, LINK, PROGRESS, SEVERAL_GPUS, Measured
from holdfast.runtime.node.children import Children
from holdfast.runtime.node.entries import EntryPoint
from holdfast.runtime.node.forks import FORKS

__all__ = ["measure_profile"]


def measure_profile(
    job: Job,
    *,
    iterations: int = 100,
    device: str = "cpu",
    gpus: Sequence[int] = (),
    on_iteration: Callable[[int], None] = lambda done: None,
) -> Profile:
    """Measures what every layer of a job and every message between workers cost.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: what is trained; its grid gives the size of a micro-batch, no more.
        iterations: how often everything is measured; at least 1.
        device: ``cpu`` or ``cuda``. Messages go over the transport that training uses in any case.
        gpus: on stages of how many GPUs layers are measured, too: numbers from 2 on, of so many processes each.
        on_iteration: called with how many are done, after each; they are ``iterations`` for each number of GPUs.

    Raises:
        ConfigError: something in the job cannot be used, or there is no such device, or layers cannot be shared.

    After failure: no process is left, also after KeyboardInterrupt.
    """
    if gpus and job.train.numerics != "fast":
        raise ConfigError(
            "by_gpus: with numerics exact a stage of several GPUs is so many workers, each of which takes as long as "
            "one; expected train.numerics: fast"
        )
    if gpus and device != "cpu":
        raise ConfigError(f"by_gpus: stages of several GPUs compute on CPUs so far; expected device cpu, got {device}")
    with _Measuring() as children:
        answer = children.start(LAYERS, job, iterations, device)
        measured = msgspec.json.decode(_answer(answer, on_iteration), type=Measured)
        layers = measured.layers
        for turn, number in enumerate(gpus, start=1):
            answer = children.start(SEVERAL_GPUS, job, iterations, number)
            text = _answer(answer, partial(_further, on_iteration, turn * iterations))
            times = msgspec.json.decode(text, type=tuple[GpuProfile, ...])
            layers = tuple(_with_times(layer, number, each) for layer, each in zip(layers, times, strict=True))
        one_end, other_end = FORKS.Pipe()
        answers = [children.start(entry, job, iterations, end) for entry, end in ((LINK, one_end), (ECHO, other_end))]
        one_end.close()
        other_end.close()
        link = msgspec.json.decode(_answer(answers[0]), type=Link)
    return Profile(layers=layers, link=link, machine=measured.machine, iterations=iterations)


def _further(on_iteration: Callable[[int], None], before: int, done: int) -> None:
    on_iteration(before + done)


def _with_times(layer: LayerProfile, gpus: int, times: GpuProfile) -> LayerProfile:
    return replace(layer, by_gpus={**layer.by_gpus, str(gpus): times})


class _Measuring(contextlib.AbstractContextManager["_Measuring"]):
    """Processes that are ended with the context, however it ends."""

    def __init__(self) -> None:
        self._children = Children()

    def start(self, entry: EntryPoint, *arguments: Any) -> Connection:
        """Starts a process; returns where its answer comes."""
        ours, theirs = FORKS.Pipe(duplex=False)
        self._children.attend(self._children.start(entry, *arguments, theirs, name=entry.name))
        theirs.close()
        return ours

    def __exit__(self, *_: object) -> None:
        self._children.end()


def _answer(answer: Connection, on_iteration: Callable[[int], None] = lambda done: None) -> str:
    for kind, text in _words(answer):
        match kind:
            case "ok":
                return text
            case "error":
                raise ConfigError(text)
            case kind if kind == PROGRESS:
                on_iteration(int(text))
            case _:
                raise InternalError(text)
    raise InternalError("a process that measures ended without an answer")


def _words(answer: Connection) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(EOFError):
        while True:
            kind, _, text = answer.recv_bytes().decode().partition(" ")
            yield kind, text
