"""A worker that raised, while something else happens to it or to everybody."""

import pytest
from tests.processes import process_of

from holdfast.control.membership import Contact, GridState, Membership, Phase, Tell, Tick, decide
from holdfast.control.membership.watching import OTHERS_S
from holdfast.control.messages import Ended, Exited, Failure, Hello, Joined, Raised, Save, Saved, Status
from holdfast.core.placement import split_evenly
from holdfast.core.work import WorkPhase
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(3, split_evenly(3, 2), 2)
W00, W01, W10, W11, W20, W21 = PLAN.workers


class Job:
    """A job that runs from step 1 on, and what its last events led to."""

    def __init__(self):
        self.state = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=9, directory="out"))
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers)).settle()

    def give(self, *events, now=0.0):
        self.told = []
        for event in events:
            self.state, outputs = decide(self.state, event, now=now)
            self.told += [output.command for output in outputs if isinstance(output, Tell)]
        return self

    def settle(self, now=0.0):
        """All members say what they hold, and are connected."""
        generation, alive = self.state.generation, self.state.alive
        held = {worker: PLAN.placement.layers_of(worker) for worker in alive}
        steps = {worker: tuple((layer, 1) for layer in layers) for worker, layers in held.items()}
        given = [Status(worker=w, generation=generation, layer_steps=steps[w], executed=()) for w in alive]
        return self.give(*given, *(Joined(worker=w, generation=generation) for w in alive), now=now)


def raised(worker, generation=1, **more):
    about = {"step": 1, "phase": WorkPhase.FORWARD, "kind": "ValueError", "error": "it", "layer": 0, **more}
    return Raised(worker=worker, process=process_of(worker, 1), generation=generation, **about)


@pytest.mark.parametrize("after_s", [0.1, 0.4])
def test_whoever_raised_and_dies_before_it_is_judged_is_lost_once(after_s):
    """Nothing is left to be judged, so the half second that others had ends nothing."""
    job = (
        Job()
        .give(raised(W00), now=10.0)
        .give(Exited(worker=W00, process=process_of(W00, 1), status=-9), now=10.0 + after_s)
    )
    job.settle(now=10.5)
    assert job.state.generation == 2
    for tick in range(20):
        job.give(Tick(), now=10.5 + 0.2 * tick)
    assert (job.state.generation, job.state.phase, job.state.doubts.raised_at) == (2, Phase.RUNNING, None)


def test_the_next_to_raise_has_its_own_half_second():
    job = Job().give(raised(W00), Exited(worker=W00, process=process_of(W00, 1), status=-9), now=10.0).settle(now=10.1)
    job.give(raised(W10, generation=2, layer=1), now=10.0 + OTHERS_S).give(Tick(), now=10.1 + OTHERS_S)
    assert job.state.generation == 2
    job.give(Tick(), now=10.0 + 2 * OTHERS_S)
    assert job.state.generation == 3


@pytest.mark.parametrize(
    "ends",
    [raised(W00, generation=6), Failure(worker=W00, process=process_of(W00, 1), error="no space", user_fault=False)],
)
def test_whoever_cannot_save_what_lives_after_the_store_was_lost_is_lost_itself(ends):
    """Its layers are saved by the others that hold them."""
    job = Job()
    job.state = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(steps=9, directory="out"),
        contact=Contact(reattach_until=60.0),
    )
    back = [Hello(worker=w, process=process_of(w, 1), generation=5, activity="running", step=1) for w in PLAN.workers]
    job.give(Hello(worker=None, process=process_of(None, 9), generation=5), *back).settle()
    assert job.state.phase is Phase.SAVING
    job.give(ends, now=10.0)
    assert job.state.roster.lost == {W00}
    job.give(Tick(), now=20.0).settle()
    assert [each.layers for each in job.told if isinstance(each, Save) and each.layers] == [(2,), (0, 1)]
    generation = job.state.generation
    job.give(*(Tick() for _ in range(10)), now=30.0)
    assert job.state.generation == generation
    job.give(*(Saved(worker=w, generation=generation, digests=()) for w in job.state.alive))
    assert [each.outcome for each in job.told if isinstance(each, Ended)] == ["forgotten"]
