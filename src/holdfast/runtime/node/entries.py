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
    "LIBRARY",
    "PROBE",
    "SCRIPT",
    "SCRIPT_PROBE",
    "STRIKE_COORDINATOR",
    "STRIKE_WORKER",
    "WORKER",
    "Entry",
]


@dataclass(frozen=True, slots=True)
class Entry:
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


WORKER = Entry("worker", "holdfast.runtime.main.worker:run_worker")
SCRIPT = Entry("worker", "holdfast.runtime.main.script:run_script_worker")
STRIKE_WORKER = Entry("faults", "holdfast.runtime.injection.worker:strike_worker")
STRIKE_COORDINATOR = Entry("faults", "holdfast.runtime.injection.coordinator:strike_coordinator")
COORDINATOR = Entry("coordinator", "holdfast.runtime.main.coordinator:run_coordinator")
LIBRARY = Entry("library", "holdfast.runtime.main.library:run_library")
PROBE = Entry("probe", "holdfast.runtime.main.lookups:run_probe")
SCRIPT_PROBE = Entry("probe", "holdfast.runtime.main.lookups:run_script_probe")
FIND = Entry("find", "holdfast.runtime.main.lookups:run_find")
DIGEST = Entry("digest", "holdfast.runtime.main.lookups:run_digest")
