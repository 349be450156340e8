"""Holdfast trains PyTorch models on a grid of workers and keeps training, bitwise exactly, while workers die."""

from __future__ import annotations

from importlib import import_module

from holdfast.version import __version__

TYPE_CHECKING = False  # typing's own would have to load typing
if TYPE_CHECKING:
    from holdfast.config.job import Job
    from holdfast.config.load import load_job, parse_job
    from holdfast.config.profiles import load_profile
    from holdfast.core.faults import Fault
    from holdfast.runtime.loop.failing import SimulatedFailure
    from holdfast.runtime.loop.session import Session, Step, session
    from holdfast.runtime.train import Summary, train
    from holdfast.trackers.port import Tracker

__all__ = [
    "Fault",
    "Job",
    "Session",
    "SimulatedFailure",
    "Step",
    "Summary",
    "Tracker",
    "__version__",
    "load_job",
    "load_profile",
    "parse_job",
    "session",
    "train",
]

_HOMES = {
    "Fault": "holdfast.core.faults",
    "Job": "holdfast.config.job",
    "Session": "holdfast.runtime.loop.session",
    "SimulatedFailure": "holdfast.runtime.loop.failing",
    "Step": "holdfast.runtime.loop.session",
    "Summary": "holdfast.runtime.train",
    "Tracker": "holdfast.trackers.port",
    "load_job": "holdfast.config.load",
    "load_profile": "holdfast.config.profiles",
    "parse_job": "holdfast.config.load",
    "session": "holdfast.runtime.loop.session",
    "train": "holdfast.runtime.train",
}
"""Where each public name is. Loaded when it is first asked for: the command must be able to answer a signal before."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
