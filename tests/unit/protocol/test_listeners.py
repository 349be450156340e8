"""Nobody goes on before those who only listen: three real lives over a board instead of connections."""

from __future__ import annotations

import pytest
from tests.processes import process_of

from holdfast.control.messages import Attached, Finished, Install, Joined, Resume
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.plan import with_listeners
from holdfast.core.profile import unit_costs
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.protocol.effects import Attach, Listen, Report
from holdfast.protocol.executor import FinishReduce, Give, Reach, Run, StartReduce, Take
from holdfast.protocol.worker import WorkerProtocol
from holdfast.recovery.rules import JobRules
from holdfast.runtime.engine.emulated import EmulatedStage
from holdfast.schedule.builders import regular_plan

MICROBATCHES, STEPS, CLOSING = 2, 6, 1
RULES = JobRules(steps=STEPS, keeping=unit_costs(4), checkpoint_every=2)
LISTENER = WorkerId(1, 1)
WHOLE = regular_plan(1, split_evenly(4, 2), MICROBATCHES)
PLAN = with_listeners(WHOLE, [(LISTENER, *WHOLE.placement.held_by(WorkerId(0, 1)))])
BLOCKED = object()


class Board:
    """All workers in one thread: each goes on until it waits for another, or is held.

    Args:
        held: at which effect the listener stops.
    """

    def __init__(self, held):
        self.held, self.holding = held, False
        self._sent, self._sums, self._stages = {}, {}, {}
        self._commands, self._waiting, self._lives = {}, {}, {}
        self.finished = set()
        for worker in PLAN.workers:
            layers = PLAN.placement.layers_of(worker)
            stage = EmulatedStage(layers=layers, num_layers=4, num_microbatches=MICROBATCHES)
            protocol = WorkerProtocol(worker=worker, stage=stage, rules=RULES, process=process_of(worker, 1))
            install = Install(generation=1, plan=PLAN, staggered=True)
            self._stages[worker] = stage
            self._commands[worker] = [Attached(), install, Resume(generation=1, step=0)]
            self._lives[worker] = protocol.run()
            self._waiting[worker] = self._lives[worker].send(None)

    def run(self):
        """Ends when all wait for one another; returns the steps of all layers."""
        moved = True
        while moved:
            moved = False
            for worker in PLAN.workers:
                while (result := self._perform(worker, self._waiting[worker])) is not BLOCKED:
                    self._waiting[worker] = self._lives[worker].send(result)
                    moved = True
        return {at for stage in self._stages.values() for at in stage.layer_steps().values()}

    def _perform(self, worker, effect):
        if worker == LISTENER and effect == self.held:
            self.holding = True
            return BLOCKED
        match effect:
            case Listen():
                return self._commands[worker].pop(0) if self._commands[worker] else BLOCKED
            case Report(message=Finished()):
                self.finished.add(worker)
            case Run(op=op, step=step, value=value, layers=layers):
                stage, number = self._stages[worker], op.microbatch.index
                if op.kind is OpKind.F:
                    return stage.forward(step, number, value, layers)
                return stage.backward(op.kind, step, number, value, layers)
            case Give(send=send, step=step, value=value):
                self._sent[send.payload, send.microbatch, step, worker, send.peer] = value.copy()
            case Take(receive=receive, step=step):
                key = (receive.payload, receive.microbatch, step, receive.peer, worker)
                return self._sent.pop(key) if key in self._sent else BLOCKED
            case StartReduce(reduction=reduction, step=step, value=value):
                self._sums.setdefault((reduction, step), {})[worker] = value
            case FinishReduce(reduction=reduction, step=step):
                parts = self._sums[reduction, step]
                return add_up(list(parts.values())) if len(parts) == len(reduction.workers) else BLOCKED
            case Attach() | Report(message=Joined()):
                pass
        return None


@pytest.mark.parametrize("point", [Point.UPDATE, Point.COMMIT, Point.VERDICT])
@pytest.mark.parametrize("step", [0, CLOSING, CLOSING + 1])
def test_nobody_is_two_steps_ahead_of_a_listener(step, point):
    board = Board(Reach(point, step))
    found = board.run()
    assert board.holding
    assert max(found) - min(found) <= 1
    board.held = None
    assert board.run() == {STEPS}
    assert board.finished == set(PLAN.workers)
