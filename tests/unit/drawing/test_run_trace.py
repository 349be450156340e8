"""A run beside its plan."""

import json

from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.drawing.run_trace import run_to_trace
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, Installed, Rebuilt, StepOps
from holdfast.testing.traces import trace_faults

PLAN = regular_plan(1, split_evenly(4, 2), 1)
FIRST = (("F", 0, 0, 10.0, 10.2), ("B", 0, 0, 10.9, 11.3))
LAST = (("F", 0, 0, 10.25, 10.5), ("B", 0, 0, 10.5, 10.9))


def step(worker, ops, number=3):
    return 11.5, StepOps(worker=worker, generation=1, step=number, loss=None, omitted=False, ops=ops)


TIMED = [
    (9.0, Installed(generation=1, workers=("0.0", "0.1"), strategy="")),
    (9.5, FaultInjected(worker="0.1", kind="slow", step=3, point="start", spec="slow:0.1@3:2x")),
    step("0.0", FIRST),
    step("0.1", LAST),
]


def spans(text, pid):
    events = json.loads(text)["traceEvents"]
    return [(e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X" and e["pid"] == pid]


def test_what_ran_is_shown_in_microseconds_from_the_first_event():
    text = run_to_trace(TIMED, {})
    assert spans(text, 0) == [("F0.0", 1_000_000, 200_000), ("B0.0", 1_900_000, 400_000)]
    assert spans(text, 1) == [("F0.0", 1_250_000, 250_000), ("B0.0", 1_500_000, 400_000)]
    assert spans(text, 1000) == []


def test_beside_it_stands_the_plan_from_the_start_of_the_same_step():
    text = run_to_trace(TIMED, {1: PLAN})
    assert spans(text, 1000) == [("F0.0", 1_000_000, 200_000), ("B0.0", 1_850_000, 400_000)]
    assert spans(text, 1001) == [("F0.0", 1_200_000, 250_000), ("B0.0", 1_450_000, 400_000)]


def test_planned_steps_that_overlap_stand_side_by_side():
    """A staggered step begins before the one before is over, and a plan may take longer than the step it stands by."""
    again = tuple(
        (11.5, StepOps(worker=w, generation=1, step=n, loss=None, omitted=False, ops=tuple(shifted(ops, n - 3))))
        for n in (3, 4, 5)
        for w, ops in (("0.0", FIRST), ("0.1", LAST))
    )
    text = run_to_trace([TIMED[0], *again], {1: PLAN}, unit_costs(4))
    assert trace_faults(text) == []
    planned = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1000]
    assert {(e["tid"], e["args"]["step"]) for e in planned} == {(0, 3), (1000, 4), (2000, 5)}
    names = [
        e["args"]["name"] for e in json.loads(text)["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 1000
    ]
    assert names == ["worker 0.0"] + ["worker 0.0, overlapping steps"] * 2


def shifted(ops, seconds):
    return [(kind, pipeline, index, since + seconds, until + seconds) for kind, pipeline, index, since, until in ops]


def test_a_profile_times_the_plan_instead():
    text = run_to_trace(TIMED, {1: PLAN}, unit_costs(4))
    assert spans(text, 1001) == [("F0.0", 3_000_000, 2_000_000), ("B0.0", 5_000_000, 4_000_000)]


def test_stages_are_named_and_sorted_with_their_plans_beside_them():
    events = json.loads(run_to_trace(TIMED, {1: PLAN}))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        0: "workers *.0, measured",
        1000: "workers *.0, planned",
        1: "workers *.1, measured",
        1001: "workers *.1, planned",
        2000: "the job",
    }
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [2000, 0, 1000, 1, 1001]
    assert {e["name"] for e in events if e["ph"] == "i"} == {"generation 1", "slow 0.1"}


def test_an_empty_run_is_an_empty_trace():
    assert json.loads(run_to_trace([], {}))["traceEvents"] == []


# A step, and then a death of 0.1, of which 1.1 takes over: two pipelines of two stages.
TWO = regular_plan(2, split_evenly(2, 2), 1)
WORKERS = tuple(map(str, TWO.workers))


def ran(worker, time, number, generation=1, *, microbatches=None, loss=None):
    """A step of one second: F at the start, B at the end, a sum of 0.1 s and an update of 0.05 s."""
    pipeline, stage = map(int, worker.split("."))
    ops, microbatches = [], microbatches or (pipeline,)
    for place, microbatch in enumerate(microbatches):
        ops.append(("F", microbatch, 0, time + 0.1 * stage + 0.2 * place, time + 0.1 * stage + 0.2 * place + 0.1))
    for place, microbatch in enumerate(microbatches):
        ops.append(("B", microbatch, 0, time + 0.6 - 0.1 * stage + 0.2 * place, time + 0.7 - 0.1 * stage + 0.2 * place))
    besides = (("reduce", (stage,), time + 1.0, time + 1.1), ("update", (), time + 1.1, time + 1.15))
    event = StepOps(
        worker=worker,
        generation=generation,
        step=number,
        loss=loss,
        omitted=False,
        ops=tuple(ops),
        besides=besides,
        memory=5_000_000 + number,
    )
    return time + 1.2, event


LOST = [
    (9.0, Installed(generation=1, workers=WORKERS, strategy="")),
    *(ran(worker, 10.0, 0, loss=2.5 if worker.endswith("1") else None) for worker in WORKERS),
    (11.5, FaultInjected(worker="0.1", kind="kill", step=1, point="forward", spec="kill:0.1@1:forward")),
    (11.6, Detected(worker="0.1", how="signal 9", generation=1)),
    (11.6, Installed(generation=2, workers=("0.0", "1.0", "1.1"), strategy="adaptive")),
    (11.7, Agreed(generation=2, step=1, recomputed_microbatches=2)),
    (11.8, Rebuilt(generation=2)),
    *(ran(worker, 11.79, 1, 2, microbatches=m) for worker, m in (("0.0", (0,)), ("1.0", (1,)), ("1.1", (1, 0)))),
]


def find(text, **wanted):
    events = json.loads(text)["traceEvents"]
    return [event for event in events if all(event.get(key) == value for key, value in wanted.items())]


def test_a_trace_keeps_the_rules_of_its_format():
    for timed, plans in ((LOST, {1: TWO}), (TIMED, {1: PLAN}), (TIMED, {}), ([], {})):
        assert trace_faults(run_to_trace(timed, plans)) == []


def test_sums_and_updates_are_slices_of_their_worker():
    text = run_to_trace(LOST, {1: TWO})
    (one,) = find(text, cat="reduce", pid=1, tid=0)
    assert (one["name"], round(one["ts"]), round(one["dur"])) == ("reduce 1", 2_000_000, 100_000)
    assert one["args"] == {"step": 0, "layers": [1]}
    assert [round(event["ts"]) for event in find(text, cat="update", pid=1, tid=1)] == [2_100_000, 3_890_000]


def test_messages_are_arrows_from_what_made_them_to_what_took_them():
    text = run_to_trace(LOST, {1: TWO})
    arrows = {}
    for event in find(text, cat="message"):
        arrows.setdefault(event["id"], {})[event["ph"]] = (
            event["name"],
            event["pid"],
            event["tid"],
            round(event["ts"]),
        )
    found = sorted(tuple(arrow[end] for end in "sf") for arrow in arrows.values())
    assert found == [
        (("activation", 0, pipeline, 1_100_000), ("activation", 1, pipeline, 1_100_000)) for pipeline in (0, 1)
    ] + [(("gradient", 1, pipeline, 1_600_000), ("gradient", 0, pipeline, 1_600_000)) for pipeline in (0, 1)]


def test_a_recovery_is_a_slice_of_the_job_and_what_was_given_up_one_of_each_survivor():
    text = run_to_trace(LOST, {})
    parts = [(e["name"], round(e["ts"]), round(e["dur"])) for e in find(text, pid=2000, ph="X")]
    assert parts == [
        ("recovery, generation 2", 2_600_000, 1_390_000),
        ("agree", 2_600_000, 100_000),
        ("connect", 2_700_000, 100_000),
        ("run the step again", 2_800_000, 1_190_000),
    ]
    given_up = {
        (e["pid"], e["tid"]): (round(e["ts"]), round(e["dur"])) for e in find(text, cat="recovery") if e["pid"] < 9
    }
    assert given_up[0, 0] == (2_200_000, 590_000), "it computes again before all are known to be connected"
    assert set(given_up) == {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_loss_and_memory_are_counters():
    text = run_to_trace(LOST, {})
    (loss,) = find(text, ph="C", name="loss")
    assert (loss["args"], round(loss["ts"])) == ({"loss": 2.5}, 2_200_000)
    memory = find(text, ph="C", name="memory of 1.1")
    assert [event["args"] for event in memory] == [{"MB": 5.0}, {"MB": 5.000001}]


def test_a_loss_that_is_no_number_leaves_the_trace_readable():
    assert trace_faults(run_to_trace([TIMED[0], ran("0.0", 10.0, 0, loss=float("nan"))], {})) == []
