"""What the tests of decisions have in common: a membership, what happens to it, and what that leads to."""

from __future__ import annotations

from dataclasses import replace

from tests.decisions import as_read
from tests.processes import NODE, process_of

from holdfast.control.membership import GridState, Membership, Record, Tell, decide, restore, to_store
from holdfast.control.messages import Hello, Joined, Status
from holdfast.recovery.rules import JobRules


class DecidedJob:
    """A membership, and what its last events led to: who was told what, what was recorded, and stored.

    Args:
        plan: of the whole grid.
        steps: of the job.
        strategy: what answers a loss.
        wait_s: how long it waits for workers.
        state: more of the membership.
    """

    def __init__(self, plan, *, steps=9, strategy="auto", wait_s=0.0, **state):
        rules = JobRules(steps=steps, strategy=strategy, directory="out", wait_s=wait_s)
        self.blank = Membership(grid=GridState(baseline=plan), rules=rules, **state)
        self.state = replace(self.blank, contact=self.blank.contact.with_agent(NODE, 0.0))
        self.stored = None
        self.told, self.recorded = [], []

    def give(self, *events, now=0.0):
        self.told, self.recorded = [], []
        for event in events:
            before = self.state
            self.state, outputs = decide(before, event, now=now)
            self.stored = to_store(before, self.state) or self.stored
            self.told += [(o.to, o.command) for o in outputs if isinstance(o, Tell)]
            self.recorded += [o.event for o in outputs if isinstance(o, Record)]
        return self

    def begun(self, step=0):
        """All attach, and run from ``step`` on."""
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in self.state.grid.baseline.workers))
        return self.agreed(step)

    def statuses(self, step=0, workers=None, **more):
        """All members, or these, say that they hold what is theirs, at ``step``."""
        return self.give(*(self.status_of(worker, step, **more) for worker in workers or self.state.alive))

    def status_of(self, worker, step, **more):
        """What a worker says that holds what is its own, at ``step``."""
        held = tuple((layer, step) for layer in self.state.grid.baseline.placement.layers_of(worker))
        told = {"layer_steps": held, "executed": (), **more}
        return Status(worker=worker, generation=self.state.generation, **told)

    def agreed(self, step):
        """All members say what they hold, and connect."""
        return self.statuses(step).joined()

    def joined(self, step=None):
        """All members say that they are connected; with a step, those of the prepared generation at its boundary."""
        if step is None:
            generation, workers = self.state.generation, self.state.alive
        else:
            generation, workers = self.state.running.upcoming.generation, self.state.running.upcoming.plan.workers
        return self.give(*(Joined(worker=w, generation=generation, step=step) for w in workers))

    def restarted(self):
        """Another coordinator finds what was stored."""
        stored = as_read(self.stored) if self.stored else None
        self.state = restore(self.blank, stored, reattach_until=60.0) if stored else self.blank
        return self

    def commands(self, kind):
        return {to: command for to, command in self.told if isinstance(command, kind)}
