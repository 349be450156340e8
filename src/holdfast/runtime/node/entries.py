"""Entry points of processes, by name.

Whoever has a process started imports this, and not what runs there: the agent never loads torch. In the process, which
is forked from a server that has all of it loaded, the name is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = [
    "COORDINATOR",
    "DIGEST",
    "FIND",
    "FIT",
    "LIBRARY",
    "MODEL",
    "PROBE",
    "SCRIPT",
    "SCRIPT_PROBE",
    "STRIKE_COORDINATOR",
    "STRIKE_WORKER",
    "WORKER",
    "EntryPoint",
]


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """What runs in a process.

    Attributes:
        name: of the process, for people.
        function: ``module:function``, looked up when it is called.
    """

    name: str
    function: str

    def __call__(self, *args: Any) -> None:
        """Calls the function."""
        module, _, function = self.function.partition(":")
        getattr(import_module(module), function)(*args)


WORKER = EntryPoint("worker", "holdfast.runtime.main.worker:run_worker")
SCRIPT = EntryPoint("worker", "holdfast.runtime.main.script:run_script_worker")
STRIKE_WORKER = EntryPoint("faults", "holdfast.runtime.injection.worker:strike_worker")
STRIKE_COORDINATOR = EntryPoint("faults", "holdfast.runtime.injection.coordinator:strike_coordinator")
COORDINATOR = EntryPoint("coordinator", "holdfast.runtime.main.coordinator:run_coordinator")
LIBRARY = EntryPoint("library", "holdfast.runtime.main.library:run_library")
PROBE = EntryPoint("probe", "holdfast.runtime.main.lookups:run_probe")
SCRIPT_PROBE = EntryPoint("probe", "holdfast.runtime.main.lookups:run_script_probe")
FIT = EntryPoint("probe", "holdfast.runtime.main.lookups:run_fit")
FIND = EntryPoint("find", "holdfast.runtime.main.lookups:run_find")
DIGEST = EntryPoint("digest", "holdfast.runtime.main.lookups:run_digest")
MODEL = EntryPoint("model", "holdfast.runtime.main.lookups:run_model")
