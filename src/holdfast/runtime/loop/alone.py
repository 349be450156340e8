"""One worker without a job: a script that was started by itself."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.core.ids import MicroBatch
from holdfast.core.instructions import Compute
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import Op, OpKind
from holdfast.core.summing import add_up
from holdfast.devices.device import HOST, Device
from holdfast.errors import StepVoid
from holdfast.runtime.loop.hosting import Loop, host
from holdfast.runtime.loop.stage import LoopStage
from holdfast.runtime.loop.turns import RunsItems, Turns
from holdfast.runtime.tensors import settle_thread

__all__ = ["LEFT", "Alone", "run_step", "whole_stage"]

LEFT = (
    "left its loop before the last step was over, and others wait for it; expected hf.stop() instead of `break`: all "
    "workers end behind the same step then"
)


class Alone:
    """Carries a loop in this process, with the bits that any number of workers would have."""

    def __init__(self) -> None:
        self.worker, self.per_gradient, self.untried, self.deadline = "0.0", False, True, math.inf
        self.device = HOST
        torch.set_num_threads(1)  # sums over several threads have other bits

    def is_first(self) -> bool:
        """There is no other."""
        return True

    def ended(self) -> None:
        """The loop has come to its end."""
        atexit.unregister(_end_wrong)

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """Begins to take turns, in a thread.

        A script that ends before its loop has ends with 2, as ``holdfast run`` does: others would wait there.
        """
        if host() is self:
            atexit.register(_end_wrong)
        stage = whole_stage(loop, turns)
        threading.Thread(target=_drive, args=(stage, loop, turns), name="driver", daemon=True).start()
        return lambda: stage


def _end_wrong() -> None:
    if hasattr(sys, "last_value"):
        return
    print(f"holdfast: the script {LEFT}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)  # nothing else changes what a process ends with once its script is over


def whole_stage(loop: Loop, turns: RunsItems, device: Device = HOST) -> LoopStage:
    """Returns an engine that holds all of a loop's model, which is on the device."""
    return LoopStage(
        prepared=loop.prepared,
        turns=turns,
        owned=range(len(loop.prepared.buckets)),
        num_microbatches=loop.microbatches,
        chunks=loop.sum_chunks,
        logs=loop.logs,
        device=device,
    )


def _drive(stage: LoopStage, loop: Loop, turns: Turns) -> None:
    settle_thread()
    try:
        for step in range(loop.steps):
            if stage.ends is not None:
                break
            turns.between(step)
            with suppress(StepVoid):
                run_step(stage, loop, step)
        turns.between(loop.steps if stage.ends is None else stage.ends, 0.0, begins=False)
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
        turns.end(error)
    else:
        turns.end()


def run_step(stage: LoopStage, loop: Loop, step: int) -> None:
    """Runs a step with all its items; one in which a failure is simulated that is answered by a replay, twice."""
    _run_once(stage, loop, step)
    failing = loop.prepared.failing
    if failing is not None and failing.replays and failing.step == step:
        stage.count_back()
        _run_once(stage, loop, step)


def _run_once(stage: LoopStage, loop: Loop, step: int) -> None:
    layers = LayerRange(0, stage.num_layers)
    stage.begin(step)
    names = (MicroBatch(number, 0, number) for number in range(loop.microbatches))
    pairs = ((Op(OpKind.F, name), Op(OpKind.B, name)) for name in names)
    stage.run(step, [Compute(op, layers) for pair in pairs for op in pair], lambda _: True)
    for reduction in stage.reductions:
        stage.accept(reduction, add_up((stage.message(reduction),)))
    stage.conclude(stage.vote())
    for layer in stage.layers:
        stage.update(layer)
        stage.swap(layer)
