"""The processes that measure: one for the layers, d for them on d GPUs, two for the link between workers.

Each has one compute thread.
"""

from __future__ import annotations

import os
import platform
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from holdfast.config.job import Job
from holdfast.devices.device import Device
from holdfast.devices.named import opened
from holdfast.profiling.layers import measure_layers
from holdfast.profiling.link import answer_messages, measure_link
from holdfast.profiling.processes import PROGRESS, Measured
from holdfast.profiling.several_gpus import measure_on_gpus
from holdfast.runtime.main.lookups import answering

__all__ = ["run_echo", "run_layers", "run_link", "run_several_gpus"]

_SAME_S = 2.0
"""Within so many seconds of an exception here, the end of another process is the cause."""


def run_layers(job: Job, iterations: int, device: str, answer: Connection) -> None:
    """Sends how many iterations are done after each, then ``ok`` and Measured; or ``error`` and what to change."""
    torch.set_num_threads(1)

    def measure() -> str:
        chosen = opened(device, exact=job.train.numerics == "exact", key="--device")
        machine = _machine(chosen)
        layers = measure_layers(
            job,
            iterations=iterations,
            device=chosen,
            on_iteration=partial(_tell, answer),
        )
        return msgspec.json.encode(Measured(layers=layers, machine=machine)).decode()

    answering(answer, measure)


def run_several_gpus(job: Job, iterations: int, gpus: int, answer: Connection) -> None:
    """Sends how many iterations are done after each, then ``ok`` and a GpuProfile per layer; or what went wrong."""
    torch.set_num_threads(1)

    def lost(why: str) -> None:
        answer.send_bytes(f"lost {why}".encode())
        os._exit(1)

    def measure() -> str:
        told = partial(_tell, answer)
        try:
            found = measure_on_gpus(job, gpus, iterations=iterations, on_iteration=told, on_lost=lost)
        except RuntimeError:  # of Gloo, if another process is lost: that is what is to be told
            threading.Event().wait(_SAME_S)
            raise
        return msgspec.json.encode(found).decode()

    answering(answer, measure)


def _tell(answer: Connection, done: int) -> None:
    answer.send_bytes(b"%s %d" % (PROGRESS.encode(), done))


def run_link(job: Job, rounds: int, pipe: Connection, answer: Connection) -> None:
    """Sends ``ok`` and the link."""
    torch.set_num_threads(1)
    answering(answer, lambda: msgspec.json.encode(measure_link(job, pipe, rounds)).decode())


def run_echo(job: Job, rounds: int, pipe: Connection, answer: Connection) -> None:
    """Sends ``ok`` when every message was sent back."""
    torch.set_num_threads(1)

    def echo() -> str:
        answer_messages(job, pipe, rounds)
        return ""

    answering(answer, echo)


def _machine(device: Device) -> dict[str, str | int | float]:
    return {
        "device": device.identity,
        "processor": _processor(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    """The name that Linux gives to the processor, else what Python knows."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.processor() or platform.machine())
