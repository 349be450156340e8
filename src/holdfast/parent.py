"""A process that does not outlive the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["PR_SET_PDEATHSIG", "end_with"]

PR_SET_PDEATHSIG = 1
"""Of ``prctl(2)``: the signal that this process gets when its parent ends. Linux alone has it."""


def end_with(parent: int) -> None:
    """Sees to it that SIGKILL ends this process when its parent ends; if ``parent`` has ended already, now."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we had asked
        os._exit(1)
