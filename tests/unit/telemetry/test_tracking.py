"""What trackers are told: each step once, in order, with all that is known of it."""

import random

from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    Evaluated,
    Installed,
    JobEnded,
    JobStarted,
    Judged,
    Ran,
    Rebuilt,
    Resumed,
    StepOps,
)
from holdfast.telemetry.tracking import Stepped, Tracking

BOTH = ("0.0", "1.0")
STARTED = JobStarted(name="j", workers=2, steps=1000, samples_per_step=8, wall_time=77.0)


def installed(generation=1, workers=BOTH):
    return Installed(generation=generation, workers=workers, strategy="", owners=len(workers))


def swapped(step, loss=1.0, generation=1, workers=BOTH, memory=(5, 7)):
    known = {"generation": generation, "step": step, "omitted": False, "ops": ()}
    return [
        StepOps(worker=each, loss=loss if n == 0 else None, knows_loss=n == 0, memory=memory[n], **known)
        for n, each in enumerate(workers)
    ]


def settled(step, norm=0.5, rate=0.1, generation=1):
    return Judged(worker="0.0", generation=generation, step=step, norm=norm, rate=rate)


def agreed(step, generation=2):
    return Agreed(generation=generation, step=step, recomputed_microbatches=0)


def told(*events):
    """What is told, of events a second apart."""
    tracking = Tracking()
    return [each for at, event in enumerate(events) for each in tracking.hear(float(at), event)]


def steps(found):
    return [(each.step, each.again) for each in found if isinstance(each, Stepped)]


def test_a_step_is_told_with_all_that_is_known_of_it():
    found = told(STARTED, installed(), *swapped(0), settled(0), *swapped(1, loss=3.0), settled(1, norm=None, rate=None))
    known = {"memory": 7, "workers": 2, "again": False}
    assert found[0] == STARTED
    assert found[1:] == [
        Stepped(step=0, samples_per_s=None, wall_time=80.0, **known | {"loss": 1.0, "norm": 0.5, "rate": 0.1}),
        Stepped(step=1, samples_per_s=8 / 3, wall_time=83.0, **known | {"loss": 3.0, "norm": None, "rate": None}),
    ]


def test_a_step_that_is_settled_before_all_have_swapped_or_after_the_next_has_begun_is_told_the_same():
    first, second = swapped(0)
    early = told(STARTED, installed(), first, settled(0), second, *swapped(1), JobEnded(outcome="done", step=2))
    late = told(STARTED, installed(), *swapped(0), swapped(1)[0], settled(0), swapped(1)[1], settled(1))
    for found in (early, late):
        assert next(each.norm for each in found if isinstance(each, Stepped)) == 0.5
        assert steps(found) == [(0, False), (1, False)]


def test_a_step_of_which_nothing_more_is_said_is_told_with_the_next_one_or_the_end():
    events = [STARTED, installed(), *swapped(0), *swapped(1), *swapped(2)]
    assert steps(told(*events)) == [(0, False), (1, False)]
    found = told(*events, JobEnded(outcome="done", step=3))
    assert steps(found) == [(0, False), (1, False), (2, False)]
    assert isinstance(found[-1], JobEnded)


def test_steps_that_are_done_again_say_so():
    lost = [Detected(worker="1.0", how="h", generation=1), installed(2, ("0.0",)), agreed(1), Rebuilt(generation=2)]
    again = [event for step in (1, 2, 3) for event in (*swapped(step, generation=2, workers=("0.0",)), settled(step))]
    before = [event for step in range(3) for event in (*swapped(step), settled(step))]
    found = told(STARTED, installed(), *before, *lost, *again)
    assert steps(found) == [(0, False), (1, False), (2, False), (1, True), (2, True), (3, False)]
    assert [each.how for each in found if isinstance(each, Detected)] == ["h"]


def test_a_step_that_was_taken_back_before_it_was_told_is_told_once():
    lost = [Detected(worker="1.0", how="h", generation=1), installed(2, ("0.0",)), agreed(0)]
    found = told(STARTED, installed(), *swapped(0, loss=9.0), *lost, *swapped(0, 1.0, 2, ("0.0",)), settled(0))
    assert [(each.step, each.loss, each.again) for each in found if isinstance(each, Stepped)] == [(0, 1.0, False)]


def test_a_step_that_was_concluded_has_the_loss_that_is_told_behind_it():
    lost = [Detected(worker="1.0", how="h", generation=1), installed(2, ("0.0",))]
    concluded = Agreed(generation=2, step=0, recomputed_microbatches=0, concluded=True)
    found = told(STARTED, installed(), *lost, concluded, *swapped(0, 2.0, 2, ("0.0",)), settled(0, generation=2))
    assert [(each.loss, each.norm) for each in found if isinstance(each, Stepped)] == [(2.0, 0.5)]


def test_a_step_is_told_before_what_comes_behind_it():
    first, second = swapped(0)
    found = told(STARTED, installed(), first, settled(0), second, Checkpointed(step=1, url="u"))
    assert [type(each) for each in found] == [JobStarted, Stepped, Checkpointed]


def test_very_many_simulated_steps_take_no_long():
    ran = Ran(generation=1, first=0, stop=200_000, step_s=0.5, workers=BOTH)
    assert len(told(STARTED, installed(), ran, JobEnded(outcome="done", step=200_000))) == 200_002


def test_what_goes_on_from_a_checkpoint_begins_there():
    resumed = Resumed(step=40, url="u")
    found = told(STARTED, resumed, installed(), *swapped(40), settled(40))
    assert found[1] == resumed
    assert steps(found) == [(40, False)]


def test_whatever_else_happens_is_told_as_it_is():
    events = [
        Evaluated(step=0, scores=(("loss", 1.0),), microbatches=1, of=1),
        Checkpointed(step=0, url="u"),
        JobEnded(outcome="lost", step=0),
    ]
    assert told(STARTED, *events) == [STARTED, *events]


def test_steps_of_simulated_jobs_are_told():
    ran = Ran(generation=1, first=0, stop=4, step_s=0.5, workers=BOTH)
    assert steps(told(STARTED, installed(), ran, JobEnded(outcome="done", step=4))) == [(n, False) for n in range(4)]


def test_another_attempt_is_told_from_its_beginning():
    events = [STARTED, installed(), *swapped(0), settled(0), *swapped(1), settled(1)]
    assert steps(told(*events, *events)) == [(0, False), (1, False)] * 2


def test_in_whatever_order_things_come_steps_are_told_once_and_in_order():
    for seed in range(50):
        choose = random.Random(seed)
        events, step, generation = [STARTED, installed()], 0, 1
        for _ in range(60):
            kind = choose.choice(("step", "step", "step", "late", "back"))
            workers = BOTH if generation == 1 else ("0.0",)
            if kind == "back":
                generation, step = generation + 1, max(0, step - choose.randrange(4))
                events += [installed(generation, ("0.0",)), agreed(step, generation)]
                continue
            events += swapped(step, generation=generation, workers=workers)
            if kind == "step":
                events.append(settled(step, generation=generation))
            step += 1
        found = steps(told(*events, JobEnded(outcome="done", step=step)))
        first = [number for number, again in found if not again]
        assert first == list(range(len(first)))
        assert all(again == (number in [each for each, _ in found[:n]]) for n, (number, again) in enumerate(found))
        assert len(first) >= step
