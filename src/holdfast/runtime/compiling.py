"""When torch compiles a model, as far as it tells: that takes longer than anything else that a worker does."""

from __future__ import annotations

import sys

from holdfast.core.work import Busy
from holdfast.protocol.progress_monitor import ProgressMonitor

__all__ = ["watch_compiling"]


def watch_compiling(monitor: ProgressMonitor) -> bool:
    """From now on, whatever this process compiles counts as compiling; returns whether torch tells of it.

    What has not imported torch's compiler compiles nothing, and does not import it for this.
    """
    if "torch._dynamo" not in sys.modules:
        return True
    tells = sys.modules.get("torch._dynamo.callback")
    on_start, on_end = getattr(tells, "on_compile_start", None), getattr(tells, "on_compile_end", None)
    if on_start is None or on_end is None:  # it promises neither
        return False
    on_start(lambda *_: monitor.turn_to(Busy.COMPILING))
    on_end(lambda *_: monitor.turn_to(Busy.COMPUTING))
    return True
