"""Measures a job in processes of its own; imports no torch itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from holdfast.config.job import Job
from holdfast.core.profile import Link, Profile
from holdfast.errors import ConfigError, InternalError
from holdfast.profiling.processes import ECHO, LAYERS, LINK, PROGRESS, Measured
from holdfast.runtime.node.children import Children
from holdfast.runtime.node.entries import Entry
from holdfast.runtime.node.forks import FORKS

__all__ = ["measure_profile"]


def measure_profile(
    job: Job,
    *,
    iterations: int = 100,
    device: str = "cpu",
    on_iteration: Callable[[int], None] = lambda done: None,
) -> Profile:
    """Measures what every layer of a job and every message between workers cost.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: what is trained; its grid gives the size of a micro-batch, no more.
        iterations: how often everything is measured; at least 1.
        device: ``cpu`` or ``cuda``. Messages go over the transport that training uses in any case.
        on_iteration: called with how many are done, after each.

    Raises:
        ConfigError: something in the job cannot be used, or there is no such device.

    After failure: no process is left, also after KeyboardInterrupt.
    """
    with _Measuring() as children:
        answer = children.start(LAYERS, job, iterations, device)
        measured = msgspec.json.decode(_answer(answer, on_iteration), type=Measured)
        one_end, other_end = FORKS.Pipe()
        answers = [children.start(entry, job, iterations, end) for entry, end in ((LINK, one_end), (ECHO, other_end))]
        one_end.close()
        other_end.close()
        link = msgspec.json.decode(_answer(answers[0]), type=Link)
    return Profile(layers=measured.layers, link=link, machine=measured.machine, iterations=iterations)


class _Measuring(contextlib.AbstractContextManager["_Measuring"]):
    """Processes that are ended with the context, however it ends."""

    def __init__(self) -> None:
        self._children = Children()

    def start(self, entry: Entry, *arguments: Any) -> Connection:
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
