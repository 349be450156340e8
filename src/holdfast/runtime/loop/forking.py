"""What a script's process owes to the processes that the script forks, and these to its job.

They are what they would be without Holdfast: they hold none of its connections, so a dead worker's peers see its end at
once, and they answer signals as Python does. But they end with the worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable

from holdfast.parent import end_with

__all__ = ["look_after_forks"]

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HERE = __name__.partition(".")[0]


def look_after_forks(ours: Callable[[], Iterable[int]]) -> None:
    """Sees to whatever this process forks from now on, and to whatever that forks.

    The kernel ends a process with the *thread* that has forked it, and none that the script's main thread has not
    forked is to end before the worker: these are ended by the agent, as all else that is left of the worker.

    Args:
        ours: finds the descriptors that they are not to have; called in the forked process.
    """
    worker, thread = os.getpid(), threading.local()
    ctypes.CDLL(None)  # loaded, it can be used in a process that was forked while another thread loaded something

    def before() -> None:
        thread.is_main = threading.get_native_id() == worker
        thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)  # else our handler may yet take one of them

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, thread.mask)

    def in_child() -> None:
        if thread.is_main:
            end_with(worker)
        for number in _NUMBERS:
            if _is_ours(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        _replace(ours())
        signal.pthread_sigmask(signal.SIG_SETMASK, thread.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _is_ours(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == _HERE


def _replace(descriptors: Iterable[int]) -> None:
    """What they stand for is let go. They stay open: whoever closes one later must not close another one's."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)
