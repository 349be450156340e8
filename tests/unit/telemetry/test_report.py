import msgspec
import pytest

from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CheckpointFailed,
    Detected,
    EventsMissing,
    FaultInjected,
    Installed,
    JobStarted,
    Rebuilt,
    Resumed,
    Seated,
    StepOmitted,
    StepOps,
)
from holdfast.telemetry.report import SentPerStep, report


def installed(generation, *workers):
    return Installed(generation=generation, workers=workers, strategy="adaptive" if generation > 1 else "")


def step(worker, number, generation=1, loss=None, **more):
    more = {"omitted": False, **more}
    return StepOps(worker=worker, generation=generation, step=number, loss=loss, ops=(), **more)


def fault(worker, number, point="backward"):
    spec = f"kill:{worker}@{number}:{point}"
    return FaultInjected(worker=worker, kind="kill", step=number, point=point, spec=spec)


def detected(worker, generation):
    return Detected(worker=worker, how="signal 9", generation=generation)


def agreed(generation, number, recomputed=0):
    return Agreed(generation=generation, step=number, recomputed_microbatches=recomputed)


HEALTHY = [
    (0.0, installed(1, "a", "b")),
    (0.5, agreed(1, 0)),
    (1.0, step("a", 0)),
    (1.5, step("b", 0, loss=3.0)),
    (2.0, step("a", 1)),
    (2.5, step("b", 1, loss=2.0)),
    (4.5, step("b", 2, loss=1.0)),
    (5.5, step("a", 2)),
]


def test_nothing():
    found = report([])
    assert (found.commits, found.final_loss, found.steps_per_s, found.failures) == ((), None, None, ())


def test_a_healthy_run():
    found = report(HEALTHY)
    assert found.commits == ((0, 1.5), (1, 2.5), (2, 5.5))
    assert found.final_loss == 1.0
    assert found.steps_per_s == 2 / 4.0
    assert found.failures == found.fired == ()
    assert report(HEALTHY[:4]).steps_per_s is None


def test_a_step_that_runs_is_not_committed():
    assert report(HEALTHY[:5]).commits == ((0, 1.5),)
    assert report(HEALTHY[:7]).final_loss == 2.0


ONE = [
    *HEALTHY[:4],
    (10.0, fault("b", 1)),
    (10.1, detected("b", 1)),
    (10.2, installed(2, "a")),
    (10.3, agreed(2, 1, 7)),
    (10.4, Rebuilt(generation=2)),
    (11.0, step("a", 1, 2, loss=2.0)),
    (12.0, step("a", 2, 2, loss=1.0)),
]


def test_one_failure():
    found = report(ONE)
    assert found.commits == ((0, 1.5), (1, 11.0), (2, 12.0))
    (failure,) = found.failures
    assert (failure.worker, failure.kind, failure.step, failure.point) == ("b", "kill", 1, "backward")
    seconds = (failure.detected_s, failure.agreed_s, failure.rebuilt_s, failure.resumed_s)
    assert seconds == pytest.approx((0.1, 0.3, 0.4, 1.0))
    assert (failure.recomputed_microbatches, failure.strategy) == (7, "adaptive")
    assert found.fired == ("kill:b@1:backward",)
    assert found.failures_json()[0]["recomputed_microbatches"] == 7
    assert list(found.failures_json()[0])[:4] == ["worker", "kind", "step", "point"]


def test_how_much_may_have_been_run_again_is_what_the_event_tells_or_just_what_is_known():
    at = next(at for at, (_, event) in enumerate(ONE) if isinstance(event, Agreed) and event.generation == 2)
    told = Agreed(generation=2, step=1, recomputed_microbatches=7, recomputed_at_most=9)
    for event, at_most in ((ONE[at][1], 7), (told, 9)):
        (failure,) = report([*ONE[:at], (10.3, event), *ONE[at + 1 :]]).failures
        assert (failure.recomputed_microbatches, failure.recomputed_at_most) == (7, at_most)


def computes(worker, number, generation):
    return msgspec.structs.replace(step(worker, number, generation), ops=(("F", 0, 0, 0.0, 1.0),))


@pytest.mark.parametrize(
    ("after", "replaced"),
    [
        ([], (None, None)),
        ([(13.0, computes("b", 3, 3))], ("b", 3.0)),
        ([(11.5, Seated(worker="c", place="b"))], (None, None)),
        ([(11.5, Seated(worker="c", place="b")), (13.0, computes("c", 3, 3))], ("c", 3.0)),
        ([(11.5, Seated(worker="c", place="a")), (13.0, computes("c", 3, 3))], (None, None)),
        ([(11.5, Seated(worker="c", place="b")), (12.5, step("c", 3, 3)), (14.0, computes("c", 4, 3))], ("c", 4.0)),
        (
            [
                (11.5, Seated(worker="c", place="b")),
                (12.1, detected("c", 3)),
                (12.2, Seated(worker="d", place="c")),
                (14.0, computes("d", 4, 5)),
            ],
            ("d", 4.0),
        ),
        ([(10.6, computes("b", 1, 1))], (None, None)),
    ],
    ids=[
        "nobody",
        "a later process",
        "a spare that is yet to compute",
        "a spare",
        "a spare in another place",
        "a spare that takes part before it computes",
        "the spare of a spare",
        "what it had done before",
    ],
)
def test_who_has_computed_in_the_place_of_a_lost_one_and_when(after, replaced):
    failure = report([*ONE, *after]).failures[0]
    assert (failure.replaced_by, failure.replaced_s) == (replaced[0], pytest.approx(replaced[1]))


def test_nobody_recovers_from_the_loss_of_a_spare():
    lost = (9.0, Detected(worker="c", how="signal 9", generation=1, spare=True))
    spare, _ = report([*HEALTHY[:4], lost, *ONE[4:]]).failures
    assert (spare.worker, spare.kind, spare.step, spare.strategy) == ("c", "death", -1, "")
    assert (spare.agreed_s, spare.recomputed_microbatches) == (None, 0)


def test_a_real_failure_has_no_injection_to_count_from():
    (failure,) = report([pair for pair in ONE if not isinstance(pair[1], FaultInjected)]).failures
    assert (failure.kind, failure.step, failure.point) == ("death", 1, "")
    assert failure.detected_s is failure.agreed_s is failure.rebuilt_s is failure.resumed_s is None
    assert failure.recomputed_microbatches == 7


def test_a_failure_that_was_never_recovered_from():
    (failure,) = report(ONE[:6]).failures
    assert failure.detected_s == pytest.approx(0.1)
    assert failure.agreed_s is failure.resumed_s is None
    assert failure.recomputed_microbatches == 0


def test_a_step_swapped_in_part_counts_when_it_is_done_again():
    events = [*HEALTHY[:5], *ONE[4:]]
    assert report(events).commits == ((0, 1.5), (1, 11.0), (2, 12.0))


def test_a_step_whose_last_worker_died_behind_its_swap_counts_once():
    events = [*HEALTHY[:5], (9.0, detected("b", 1)), (9.1, installed(2, "a")), (9.2, agreed(2, 2))]
    assert report(events).commits == ((0, 1.5), (1, 2.0))


def test_a_step_taken_back_to_save_was_not_committed():
    events = [*HEALTHY[:5], (9.0, detected("b", 1)), (9.1, installed(2, "a")), (9.2, agreed(2, 1))]
    found = report([*events[:-4], (2.0, step("a", 1, loss=9.0)), *events[-3:]])
    assert found.commits == ((0, 1.5),)
    assert found.final_loss == 3.0


THREE = [
    (0.0, installed(1, "a", "b", "c")),
    (1.0, step("a", 0)),
    (1.1, step("b", 0, loss=1.0)),
    (1.2, step("c", 0)),
    (10.0, fault("b", 1)),
    (10.1, detected("b", 1)),
    (10.2, installed(2, "a", "c")),
]


def test_two_failures_of_which_the_second_supersedes_the_first_recovery():
    """Generation 2 never knew every state; both failures are answered by generation 3."""
    events = [
        *THREE,
        (10.25, fault("c", 1, "detect")),
        (10.3, detected("c", 2)),
        (10.4, installed(3, "a")),
        (10.5, agreed(3, 1, 5)),
        (10.6, Rebuilt(generation=3)),
        (11.0, step("a", 1, 3, loss=0.5)),
    ]
    first, second = report(events).failures
    assert (first.worker, second.worker) == ("b", "c")
    assert (first.agreed_s, first.rebuilt_s, first.resumed_s) == pytest.approx((0.5, 0.6, 1.0))
    assert (second.detected_s, second.agreed_s, second.resumed_s) == pytest.approx((0.05, 0.25, 0.75))


def test_a_second_failure_while_the_step_is_run_again():
    """Generation 2 agreed and was connected, but what it began was committed by generation 3."""
    events = [
        *THREE,
        (10.3, agreed(2, 1, 6)),
        (10.4, Rebuilt(generation=2)),
        (10.5, step("a", 1, 2, loss=0.5)),
        (10.6, fault("c", 1, "commit")),
        (10.7, detected("c", 2)),
        (10.8, installed(3, "a")),
        (10.9, agreed(3, 1, 2)),
        (11.0, Rebuilt(generation=3)),
        (12.0, step("a", 1, 3, loss=0.5)),
    ]
    found = report(events)
    assert found.commits == ((0, 1.2), (1, 12.0))
    first, second = found.failures
    assert (first.agreed_s, first.rebuilt_s, first.resumed_s) == pytest.approx((0.3, 0.4, 2.0))
    assert (second.agreed_s, second.rebuilt_s, second.resumed_s) == pytest.approx((0.3, 0.4, 1.4))
    assert (first.recomputed_microbatches, second.recomputed_microbatches) == (6, 2)


def test_two_at_once_share_a_recovery():
    events = [
        *THREE[:5],
        (10.05, fault("c", 1)),
        (10.1, detected("b", 1)),
        (10.1, installed(2, "a", "c")),
        (10.2, detected("c", 2)),
        (10.2, installed(3, "a")),
        (10.4, agreed(3, 1, 9)),
        (10.5, Rebuilt(generation=3)),
        (11.0, step("a", 1, 3)),
    ]
    assert [failure.agreed_s for failure in report(events).failures] == pytest.approx([0.4, 0.35])


def test_checkpoints_and_where_the_run_went_on_from():
    events = [
        (0.0, Resumed(step=4, url="u")),
        (1.0, Checkpointed(step=8, url="u")),
        (2.0, CheckpointFailed(step=10, worker="0.1", detail="no space")),
        (3.0, Checkpointed(step=6, url="u")),
        (4.0, Checkpointed(step=8, url="u")),
    ]
    found = report(events)
    assert found.resumed_from == 4
    assert found.checkpoints == (6, 8)
    assert report(HEALTHY).resumed_from is None
    assert report(HEALTHY).checkpoints == ()


def ending(*last):
    """Two steps of which the last is as given, by the worker that knows the loss."""
    return [*HEALTHY[:4], (2.0, step("a", 1, omitted=last[0].omitted)), *((2.5, event) for event in last)]


def test_a_last_step_whose_loss_is_not_finite_has_no_loss_and_says_so():
    found = report(ending(step("b", 1, omitted=True, knows_loss=True)))
    assert found.final_loss is None, "not that of the step before"
    assert found.no_loss == "step 1, the last one, was omitted: its loss was not finite"
    assert found.omitted == (1,)
    assert found.tell_omitted() == (
        "1 of 2 steps changed nothing: the loss or a gradient was not finite; the last 1 among them"
    )


def test_a_last_step_that_is_omitted_for_a_gradient_tells_its_loss_in_the_reason():
    found = report(ending(step("b", 1, loss=2.25, omitted=True, knows_loss=True)))
    assert found.final_loss is None
    assert found.no_loss == "step 1, the last one, was omitted: a gradient was not finite; its loss was 2.25"


def test_omitted_steps_before_the_end_leave_the_loss():
    events = [
        *HEALTHY[:2],
        (1.0, step("a", 0, omitted=True)),
        (1.5, step("b", 0, omitted=True, knows_loss=True)),
        *HEALTHY[4:6],
    ]
    found = report(events)
    assert (found.final_loss, found.no_loss, found.omitted, found.omitted_at_end) == (2.0, "", (0,), 0)
    assert found.tell_omitted() == "1 of 2 steps changed nothing: the loss or a gradient was not finite"


def test_a_step_that_was_run_again_is_omitted_as_the_newest_generation_says():
    assert report([*ONE, (11.5, step("b", 1, 1, omitted=True))]).omitted == ()
    assert report([*ONE, (11.5, StepOmitted(worker="a", generation=2, step=1))]).omitted == (1,)


def test_the_last_steps_in_a_row_count_as_the_end():
    events = [(0.0, installed(1, "b"))]
    events += [(float(n), step("b", n, omitted=n in (1, 3, 4), knows_loss=True, loss=1.0)) for n in range(5)]
    found = report(events)
    assert (found.omitted, found.omitted_at_end) == ((1, 3, 4), 2)


def test_missing_events_are_told():
    started = (0.0, JobStarted(name="j", workers=2, steps=3, samples_per_step=1, wall_time=0.0))
    assert report([started, *HEALTHY]).missing == ""
    assert report(HEALTHY).missing == "the events of the beginning are gone"
    gap = (3.0, EventsMissing(count=4, why="No space left on device"))
    assert report([started, *HEALTHY, gap]).missing == "4 events could not be written: No space left on device"


def test_a_step_that_nobody_tells_the_loss_of_takes_no_other_steps():
    found = report([*HEALTHY[:5], (2.5, step("b", 1))])
    assert (found.final_loss, found.no_loss) == (None, "no event tells the loss of step 1")


def test_what_is_sent_for_a_step_is_told_of_steps_that_count():
    """Of a step that was run again, what its last run sent."""
    sent = [
        (1.0, step("a", 0, sent_messages=100, sent_sums=10)),
        (1.5, step("b", 0, sent_messages=50, sent_sums=20)),
        (2.0, step("a", 1, sent_messages=7777)),
        (10.2, installed(2, "a")),
        (10.3, agreed(2, 1)),
        (11.0, step("a", 1, generation=2, sent_messages=200, sent_sums=31)),
        (12.0, step("a", 2, generation=1, sent_messages=5555)),
    ]
    found = report([*HEALTHY[:2], *sent])
    assert [number for number, _ in found.commits] == [0, 1]
    assert found.sent_per_step == SentPerStep(messages=175, sums=30)
    assert report(HEALTHY).sent_per_step is None, "nobody counted"
