"""Processes forked from a server of our own, which has loaded whatever takes long to import.

Python has one fork server per program, and what it loads is settled when it is first used. Were ours the same, then in
a program that had used it before, for a data loader say, each of our processes would import torch for itself, seconds
of CPU time for every one. Python also lets every such process run the program's main module again, as nothing of ours
needs: a job names its code by module or file.
"""

from __future__ import annotations

import io
import os
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerContext, set_spawning_popen
from multiprocessing.process import BaseProcess

__all__ = ["FORKS", "ForkedProcess"]

_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(["holdfast.cli.main", "holdfast.runtime.preload"])


class _Popen(popen_forkserver.Popen):
    """As the one of the standard library, but for the server, and without the main module."""

    def _launch(self, process_obj: BaseProcess) -> None:
        told = spawn.get_preparation_data(process_obj.name)
        without_main = {key: value for key, value in told.items() if not key.startswith("init_main_")}
        body = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(without_main, body)
            reduction.dump(process_obj, body)
        finally:
            set_spawning_popen(None)
        self.sentinel, told_through = _SERVER.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parents_end = os.dup(told_through)  # the child sees it closed when we end
        self.finalizer = util.Finalize(self, util.close_fds, (parents_end, self.sentinel))  # type: ignore[attr-defined]
        with open(told_through, "wb", closefd=True) as pipe:
            pipe.write(body.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class ForkedProcess(BaseProcess):
    """A process forked from our server."""

    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = ForkedProcess  # type: ignore[assignment]


FORKS = _Context()
"""Starts processes, and makes the pipes that they are given."""
