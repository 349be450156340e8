"""The thread of a worker's driver: it makes every call that may wait, and waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from holdfast.runtime.driver import Driver
from holdfast.runtime.tensors import settle_thread

__all__ = ["drive", "drive_beside"]


def drive(driver: Driver) -> None:
    """Runs a driver to its end, in a thread of its own; raises what ends it.

    The thread that calls this, the main one, does nothing meanwhile but answer signals.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    drive_beside(driver, ended.put)
    if (problem := ended.get()) is not None:
        raise problem


def drive_beside(driver: Driver, on_end: Callable[[BaseException | None], None]) -> None:
    """Runs a driver in a thread of its own, while the thread that calls this goes on.

    Args:
        driver: runs to its end.
        on_end: called then, in that thread, with what has ended it; None if that is its protocol.
    """
    threading.Thread(target=lambda: on_end(_make_calls(driver)), name="driver", daemon=True).start()


def _make_calls(driver: Driver) -> BaseException | None:
    """Returns what ends the driver, None if that is its protocol."""
    settle_thread()
    calls = driver.run()
    try:
        call = next(calls)
        while True:
            try:
                result = call()
            except BaseException as problem:  # noqa: BLE001 - thrown into the driver, where the call was yielded
                call = calls.throw(problem)
            else:
                del call  # it may keep more in memory than its result
                call = calls.send(result)
    except StopIteration:
        return None
    except BaseException as problem:  # noqa: BLE001 - handed to the thread that waits
        return problem
