"""A run in figures, as events tell it one after another."""

import pytest

from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    Installed,
    JobEnded,
    JobStarted,
    Ran,
    Rebuilt,
    Resumed,
    StepOps,
    Synced,
    WorkerReady,
)
from holdfast.telemetry.figures import Figures, Histogram, failure_kind

STARTED = (0.0, JobStarted(name="j", workers=2, steps=1000, samples_per_step=8, wall_time=0.0))
BOTH = ("0.0", "1.0")


def formed(at, generation=1, workers=BOTH, owners=2):
    return at, Installed(generation=generation, workers=workers, strategy="", owners=owners)


def steps(times, first=0, generation=1, workers=BOTH):
    return [
        (time, StepOps(worker=worker, generation=generation, step=number, loss=1.0, omitted=False, ops=()))
        for number, time in enumerate(times, first)
        for worker in workers
    ]


def heard(*timed):
    figures = Figures()
    for at, event in timed:
        figures.hear(at, event)
    return figures


def observed(histogram):
    return sum(histogram.counts), pytest.approx(histogram.total)


def lost(at, how="process ended: signal 9", worker="1.0", spare=False):
    return at, Detected(worker=worker, how=how, generation=1, spare=spare)


def test_a_step_is_done_once_all_have_swapped():
    figures = heard(STARTED, formed(1.0), *steps([2.0, 4.0, 5.0])[:-1])
    assert (figures.job, figures.steps, figures.workers, figures.missing) == ("j", 1000, 2, 0)
    assert figures.done == 2
    assert observed(figures.step_s) == (1, 2.0)
    assert figures.idle(7.0) == 3.0


def test_what_is_run_again_counts_once():
    figures = heard(STARTED, formed(1.0), *steps([2.0, 3.0]), formed(3.5, 2), *steps([5.0, 6.0], 1, 2))
    assert (figures.done, figures.committed) == (3, 3)
    assert observed(figures.step_s) == (2, 4.0)


def test_a_job_that_goes_back_to_a_checkpoint_has_done_less():
    back = (5.0, Agreed(generation=2, step=1, recomputed_microbatches=0))
    timed = [STARTED, formed(1.0), *steps([2.0, 3.0, 4.0]), lost(4.5), formed(4.6, 2, ("0.0",), 1), back]
    figures = heard(*timed)
    assert (figures.done, figures.committed) == (1, 3)
    for at, event in steps([6.0, 7.0, 8.0], 1, 2, ("0.0",)):
        figures.hear(at, event)
    assert (figures.done, figures.committed, figures.idle(9.0)) == (4, 6, 1.0)
    assert observed(figures.recovery_s["resume"]) == (1, 1.0), "until the first of the steps that are run again"


def test_what_another_generation_had_rebuilt_is_no_part_of_a_recovery():
    again = (3.0, Agreed(generation=3, step=0, recomputed_microbatches=0))
    timed = [STARTED, formed(1.0), lost(2.0), formed(2.1, 2, ("0.0",), 1), (2.2, Rebuilt(generation=2)), again]
    figures = heard(*timed, (2.9, Rebuilt(generation=3)), formed(3.0, 3, ("0.0",), 1), *steps([4.0], 0, 3, ("0.0",)))
    parts = {part: observed(each) for part, each in figures.recovery_s.items()}
    assert parts == {"agree": (1, 1.0), "rebuild": (1, 0.0), "resume": (1, 1.0)}


def test_an_event_that_is_seen_late_makes_no_step_shorter_than_nothing():
    late = (1.5, steps([1.5], 1)[1][1])
    figures = heard(STARTED, formed(1.0), *steps([2.0]), (1.4, steps([1.4], 1)[0][1]), late)
    assert (figures.done, figures.idle(2.0)) == (2, 0.0)
    assert observed(figures.step_s) == (1, 0.0)


def test_a_step_that_others_go_on_behind_is_done_though_somebody_died_in_it():
    whole, half = steps([2.0, 3.0])[:2], steps([3.0], 1, workers=("0.0",))
    behind = (3.2, Agreed(generation=2, step=1, recomputed_microbatches=0, concluded=True))
    alone = formed(3.1, 2, ("0.0",), 1)
    figures = heard(STARTED, formed(1.0), *whole, *half, lost(3.05), alone, behind)
    assert (figures.done, figures.missing, figures.owners) == (2, 1, 1)


def test_a_recovery_has_three_parts():
    agreed = (10.3, Agreed(generation=2, step=1, recomputed_microbatches=0))
    timed = [STARTED, formed(1.0), *steps([9.0]), lost(10.0), lost(10.1, worker="7.0", spare=True)]
    timed += [formed(10.2, 2, ("0.0",), 1), agreed, (10.4, Rebuilt(generation=2))]
    figures = heard(*timed)
    assert [observed(each)[0] for each in figures.recovery_s.values()] == [0, 0, 0]
    for at, event in steps([10.9, 11.9], 1, 2, ("0.0",)):
        figures.hear(at, event)
    parts = {part: observed(each) for part, each in figures.recovery_s.items()}
    assert parts == {"agree": (1, 0.3), "rebuild": (1, 0.1), "resume": (1, 0.5)}
    assert figures.failures["process"] == 2


def test_nobody_recovers_from_the_loss_of_one_who_had_not_come():
    figures = heard(STARTED, formed(1.0, workers=("0.0",)), lost(1.5), *steps([2.0, 3.0], workers=("0.0",)))
    agreed = (9.5, Agreed(generation=2, step=2, recomputed_microbatches=0))
    for at, event in (lost(9.0, worker="0.0"), formed(9.2, 2), agreed, *steps([10.0], 2, 2)):
        figures.hear(at, event)
    assert observed(figures.recovery_s["agree"]) == (1, 0.5)
    assert figures.failures["process"] == 2


def test_what_an_older_generation_is_seen_late_to_have_done_is_not_done():
    back = (5.0, Agreed(generation=2, step=1, recomputed_microbatches=0))
    late = steps([4.0], 2)
    figures = heard(STARTED, formed(1.0), *steps([2.0, 3.0]), formed(4.6, 2), back, *late)
    assert (figures.done, figures.committed) == (1, 2)


def test_a_line_that_is_read_twice_counts_once():
    one, _ = steps([2.0])
    assert heard(STARTED, formed(1.0), one, one).done == 0


def test_goodput_is_the_share_at_the_pace_of_a_job_in_which_nothing_fails():
    figures = heard(STARTED, formed(2.0), *steps([3.0, 4.0, 5.0, 6.0]))
    assert figures.goodput(6.0) == pytest.approx(4 / 6)
    assert figures.goodput(8.0) == pytest.approx(4 / 8)
    figures.hear(8.0, lost(8.0)[1])
    for at, event in [formed(8.1, 2, ("0.0",), 1), *steps([12.0, 16.0], 4, 2, ("0.0",))]:
        figures.hear(at, event)
    assert figures.goodput(16.0) == pytest.approx(6 / 16), "slow steps of a job in need are no pace"
    figures.hear(20.0, JobEnded(outcome="done", step=6))
    assert figures.goodput(90.0) == pytest.approx(6 / 20)
    assert figures.ended == "done"


def test_a_run_that_goes_on_begins_with_what_is_done():
    figures = heard(STARTED, (0.5, Resumed(step=40, url="u")), formed(1.0), *steps([2.0, 3.0], 40))
    assert (figures.done, figures.goodput(4.0)) == (42, pytest.approx(2 / 4))
    assert figures.checkpoint_age(4.0) == 4.0
    figures.hear(3.0, Checkpointed(step=42, url="u"))
    assert figures.checkpoint_age(4.0) == 1.0


def test_before_the_first_step_little_is_known():
    figures = heard(STARTED, (0.5, WorkerReady(worker="0.0", pid=1)))
    assert (figures.missing, figures.owners, figures.done) == (1, None, 0)
    assert (figures.goodput(3.0), figures.checkpoint_age(3.0), figures.idle(3.0)) == (None, 3.0, 3.0)


def test_whoever_has_caught_up_owns_layers():
    synced = Synced(worker="1.0", entered=3, step=5, bytes=10, owners=2)
    assert heard(STARTED, formed(1.0, owners=1), (2.0, synced)).owners == 2


def test_steps_of_a_simulated_job():
    ran = Ran(generation=1, first=0, stop=4, step_s=0.5, workers=BOTH)
    figures = heard(STARTED, formed(1.0), (3.0, ran))
    assert (figures.done, observed(figures.step_s)) == (4, (3, 1.5))


def test_a_long_run_takes_no_more_room_than_a_short_one():
    figures = heard(STARTED, formed(0.0, workers=(*BOTH, "2.0")), *steps(range(1, 3000)))
    assert figures.done == 0, "the log of the third one cannot be read"
    assert len(figures._swapped) <= 201
    figures.hear(3000.0, Agreed(generation=2, step=2999, recomputed_microbatches=0))
    assert figures.done == 2999
    assert len(figures._swapped) <= 201


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("its node n3 is gone", "node"),
        ("node 1 is gone", "node"),
        ("its node n1 and n2 cannot reach each other", "node"),
        ("process ended: signal 9", "process"),
        ("it did not start within 60 s (control.start_s)", "process"),
        ("it left before it heard that it was needed again", "process"),
        ("connection closed for 2 s", "connection"),
        ("did not come back", "connection"),
        ("no sign of life for 2.1 s, and others cannot reach it", "silence"),
        ("stuck in step 4, loading for 5.0 s", "silence"),
        ("raised: ValueError: it", "exception"),
        ("computes wrong results, as audits have found twice", "wrong results"),
        ("had stopped at another step than 4, which is saved", "other"),
    ],
)
def test_failures_are_of_few_kinds(how, kind):
    assert failure_kind(how) == kind
    assert {each: number for each, number in heard(lost(1.0, how)).failures.items() if number} == {kind: 1}


def test_a_value_on_a_bound_is_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 6.0)
