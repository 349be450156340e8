"""What ``holdfast inspect`` says of every kind of event."""

from __future__ import annotations

import json
import re
import typing
from xml.etree import ElementTree

import msgspec
import pytest

from holdfast.cli import inspect as inspecting
from holdfast.cli.inspect import narrate, sum_up
from holdfast.cli.main import main
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CheckpointFailed,
    CheckpointRejected,
    Chosen,
    ClockCompared,
    CoordinatorLost,
    CoordinatorReady,
    Detected,
    Evaluated,
    Event,
    EventLog,
    EventsMissing,
    ExceptionRaised,
    FaultInjected,
    HandingOver,
    Held,
    Installed,
    JobEnded,
    JobStarted,
    Judged,
    LibraryFilled,
    Loaded,
    MadeAgain,
    Migrating,
    Notice,
    Parted,
    Pinned,
    PlanImproved,
    Predicted,
    Preparing,
    Ran,
    Reattached,
    Rebuilt,
    Replaying,
    Resumed,
    Scheduled,
    Seated,
    StepOmitted,
    StepOps,
    Summed,
    Suspected,
    Synced,
    WorkerReady,
)


def fault(kind, worker, point="start"):
    return FaultInjected(worker=worker, kind=kind, step=5, point=point, spec="")


def step(*, loss=1.5, omitted=False, **more):
    return StepOps(worker="1.0", generation=1, step=3, loss=loss, omitted=omitted, ops=(), **more)


CHOSEN = Chosen(
    way="checkpoint",
    advised="log",
    why="logging.use: off",
    reasons=("no other node has an owner of layer(s) 0-1", "8 bytes cross nodes"),
    logging=False,
    alone=(0, 1),
    spares=0,
    crossing_bytes=8,
    state_bytes=9,
    copy_s=None,
    bubble_s=None,
    step_log=True,
    step_log_bytes=4,
)
SCHEDULED = Scheduled(technique="decoupled", in_flight=4, why="2 s a step by the profile, 3 s by 1f1b")
TOLD = [
    (SCHEDULED, "steps are scheduled by decoupled: 2 s a step by the profile, 3 s by 1f1b"),
    (
        JobStarted(name="j", workers=4, steps=9, samples_per_step=8, wall_time=0.0),
        "job j: 4 workers, 9 steps of 8 samples",
    ),
    (CHOSEN, "for the loss of a node: checkpoint (logging.use: off; the figures speak for log)"),
    (WorkerReady(worker="1.0", pid=7), "worker 1.0 ready (process 7)"),
    (WorkerReady(worker="1.0", pid=7, node="n1"), "worker 1.0 ready on node n1 (process 7)"),
    (Notice(worker="agent on n1", text="look"), "agent on n1: look"),
    (Preparing(text="planning", waited_s=3.0), "planning"),
    (Notice(worker="1.0", text="look"), "worker 1.0: look"),
    (Notice(worker="coordinator", text="look"), "coordinator: look"),
    (fault("kill", "1.0", "commit"), "FAULT kill strikes worker 1.0 in step 5 at commit"),
    (fault("kill", "1.0", ""), "FAULT kill strikes worker 1.0 in step 5"),
    (Ran(generation=1, first=3, stop=9, step_s=0.5, workers=("1.0",)), "steps 3 to 8 done, in 0.5 s each"),
    (fault("join", "1.0", ""), "JOIN: worker 1.0 is offered again from step 5 on"),
    (fault("join", "new", ""), "JOIN: a new worker is offered from step 5 on"),
    (Detected(worker="1.0", how="signal 9", generation=1), "worker 1.0 is lost: signal 9"),
    (
        Detected(worker="3.0", how="signal 9", generation=1, spare=True),
        "worker 3.0, a spare, is lost: signal 9",
    ),
    (Seated(worker="3.0", place="1.0"), "worker 3.0 takes the place of 1.0"),
    (
        ExceptionRaised(
            worker="1.0",
            generation=1,
            step=4,
            phase="forward",
            layer=3,
            item=None,
            microbatch=5,
            error="KeyError: 'x'",
        ),
        "worker 1.0 stopped in step 4, forward of layer 3, micro-batch 5: KeyError: 'x'",
    ),
    (Suspected(worker="1.0", peer="", generation=1, detail="reset"), "worker 1.0 cannot reach a peer: reset"),
    (Suspected(worker="1.0", peer="0.0", generation=1, detail="reset"), "worker 1.0 cannot reach 0.0: reset"),
    (Installed(generation=1, workers=("0.0", "1.0"), strategy=""), "generation 1: 2 workers"),
    (Installed(generation=2, workers=("0.0",), strategy="adaptive"), "generation 2: 1 workers, by adaptive"),
    (Installed(generation=3, workers=("0.0",), strategy="boundary"), "generation 3: 1 workers, between two steps"),
    (Agreed(generation=2, step=4, recomputed_microbatches=1), "generation 2 runs from step 4"),
    (Rebuilt(generation=2), "generation 2 is connected"),
    (
        Replaying(generation=2, layers=(4, 8), workers=("0.0", "0.2"), start=4, stop=7),
        "0.0, 0.2 replay(s) 3 step(s) of layers 4-7, from the checkpoint of step 4",
    ),
    (
        PlanImproved(generation=4, before=30.0, period=27.0),
        "a plan whose steps are 10.0% shorter was found: generation 4",
    ),
    (
        Evaluated(step=10, scores=(("loss", 2.5),), microbatches=4, of=4),
        "evaluated before step 10: loss 2.5",
    ),
    (
        Evaluated(step=10, scores=(("loss", None), ("accuracy", 0.75)), microbatches=3, of=4),
        "evaluated before step 10: loss not finite, accuracy 0.75 (1 of 4 parts were lost)",
    ),
    (LibraryFilled(failures=3), "the plan library is complete, for 1 to 3 failures"),
    (
        Migrating(generation=5, moves=(("2.3", "0.1"),), before=5.4, meanwhile=6.0, period=2.7),
        "2.3 takes the place of 0.1, for steps that are 50.0% shorter: generation 5",
    ),
    (
        HandingOver(generation=5, takes=(("0.1", "2:4"), ("1.0", "1:2"))),
        "0.1 takes layers 2:4 over, 1.0 takes layers 1:2 over: generation 5",
    ),
    (
        Predicted(chosen="load", steps=(("replay, by neighbours", 12.0), ("load", 1234.5)), until_s=3600.0),
        "load: 1234 step(s) until the next failure, in 3600 s on average; compared with replay, by neighbours: 12",
    ),
    (
        Held(chosen="load", seconds=51.2, expected=8.25, made=8),
        "load: 8 step(s) were made in 51.2 s, 8.25 were expected",
    ),
    (MadeAgain(step=4, generation=2, why="too large"), "the updates of step 4 are made again: too large"),
    (Parted(worker="1.0", step=6), "worker 1.0 has left before step 6"),
    (
        Synced(worker="1.0", entered=6, step=8, bytes=1_234_567),
        "worker 1.0 has caught up before step 8: it entered before step 6 and was given 1.2 MB",
    ),
    (
        Synced(worker="1.0", entered=6, step=8, bytes=1234),
        "worker 1.0 has caught up before step 8: it entered before step 6 and was given 1234 bytes",
    ),
    (Summed(worker="1.0", step=3, sums=4), "worker 1.0 holds 4 sum(s) of step 3"),
    (Summed(worker="1.0", step=3, sums=0), "worker 1.0 begins step 3"),
    (step(), "step 3 done by 1.0, loss 1.5000"),
    (step(omitted=True), "step 3 done by 1.0, loss 1.5000, OMITTED: a gradient was not finite"),
    (step(loss=None, omitted=True, knows_loss=True), "step 3 done by 1.0, OMITTED: the loss was not finite"),
    (
        Judged(worker="1.0", generation=2, step=4, norm=0.12345, rate=1e-3),
        "step 4 judged, norm of its gradient 0.1235, learning rate 0.001",
    ),
    (
        Judged(worker="1.0", generation=2, step=4, norm=None, rate=None),
        "step 4 judged, norm of its gradient not known",
    ),
    (
        StepOmitted(worker="1.0", generation=2, step=4),
        "step 4, updated ahead of its verdict, is OMITTED: a gradient was not finite",
    ),
    (
        EventsMissing(count=3, why="No space left on device"),
        "3 events before this one are missing, they could not be written: No space left on device",
    ),
    (Pinned(worker="1.0", step=4, seconds=0.012), "worker 1.0 pinned its part of checkpoint 4 in 12 ms"),
    (
        Loaded(worker="1.0", step=4, layers=(0,), seconds=0.012),
        "worker 1.0 loaded its layers of before step 4 in 12 ms",
    ),
    (Checkpointed(step=4, url="u"), "checkpoint of step 4 is complete"),
    (
        CheckpointFailed(step=4, worker="1.0", detail="full"),
        "checkpoint of step 4 could not be written by worker 1.0: full",
    ),
    (CheckpointFailed(step=4, worker="", detail="full"), "checkpoint of step 4 could not be written: full"),
    (CheckpointRejected(step=4, reason="torn"), "checkpoint of step 4 is not used: torn"),
    (Resumed(step=4, url="u"), "goes on from the checkpoint of step 4 in u"),
    (
        fault("kill-coordinator", "coordinator", "persist"),
        "FAULT kill-coordinator strikes the coordinator in step 5 at persist",
    ),
    (CoordinatorLost(how="signal 9"), "the coordinator is gone: signal 9"),
    (CoordinatorReady(pid=7, generation=0), "coordinator ready (process 7)"),
    (CoordinatorReady(pid=7, generation=0, node="n1"), "coordinator ready on node n1 (process 7)"),
    (
        ClockCompared(mine="a1", other="b2", ahead_s=3600.25, within_s=0.0013),
        "clock b2 is 3600.250000 s ahead of a1, the coordinator's, within 1.3 ms",
    ),
    (CoordinatorReady(pid=7, generation=3), "coordinator ready (process 7), it remembers generation 3"),
    (Reattached(generation=3, adopted=True), "all are back at the coordinator in generation 3: all go on"),
    (Reattached(generation=3, adopted=False), "all are back at the coordinator in generation 3: a new one follows"),
    (JobEnded(outcome="done", step=9), "ended: done at step 9"),
]


@pytest.mark.parametrize(("event", "text"), TOLD, ids=[type(event).__name__ for event, _ in TOLD])
def test_every_event_is_told(event, text):
    assert narrate([(3.0, event)]).splitlines()[0] == f"    0.000 s  {text}"


def test_no_kind_of_event_is_missing_above():
    assert {type(event) for event, _ in TOLD} == set(typing.get_args(Event))


def test_a_step_is_told_by_those_who_know_its_loss():
    assert narrate([(3.0, step(loss=None))]) == ""


RUN = [
    (10.0, JobStarted(name="j", workers=2, steps=3, samples_per_step=8, wall_time=0.0)),
    (11.0, WorkerReady(worker="0.0", pid=7)),
    (12.0, WorkerReady(worker="1.0", pid=8)),
    (12.5, Installed(generation=1, workers=("0.0", "1.0"), strategy="")),
    (12.6, Agreed(generation=1, step=0, recomputed_microbatches=0)),
    (13.0, StepOps(worker="0.0", generation=1, step=0, loss=2.0, omitted=False, ops=())),
    (13.0, StepOps(worker="1.0", generation=1, step=0, loss=2.0, omitted=False, ops=())),
    (13.5, FaultInjected(worker="1.0", kind="kill", step=1, point="backward", spec="kill:1.0@1:backward")),
    (13.6, Suspected(worker="0.0", peer="1.0", generation=1, detail="reset")),
    (13.7, Detected(worker="1.0", how="signal 9", generation=1)),
    (13.7, Installed(generation=2, workers=("0.0",), strategy="adaptive")),
    (13.8, Agreed(generation=2, step=1, recomputed_microbatches=4)),
    (13.9, Rebuilt(generation=2)),
    (14.5, StepOps(worker="0.0", generation=2, step=1, loss=1.5, omitted=False, ops=())),
    (15.0, WorkerReady(worker="1.0", pid=9)),
    (16.5, StepOps(worker="0.0", generation=2, step=2, loss=1.25, omitted=True, ops=())),
    (16.55, next(event for event, _ in TOLD if isinstance(event, ExceptionRaised))),
    (16.6, Notice(worker="probe", text="layer 1 gives other bits")),
    (16.7, JobEnded(outcome="done", step=3)),
]


def test_who_takes_the_place_of_a_lost_one_is_told():
    assert "\nworker 3.0 takes the place of 1.0\n" in sum_up([*RUN, (16.8, Seated(worker="3.0", place="1.0"))])


def test_the_loss_of_a_spare_is_told_without_a_step():
    lost = Detected(worker="3.0", how="signal 9", generation=1, spare=True)
    assert "worker 3.0 lost (death); 0 (layer, micro-batch) pairs run again" in sum_up([*RUN, (16.8, lost)])


def test_what_matters_comes_first_in_a_few_lines():
    assert sum_up(RUN).splitlines() == [
        "job j: 2 workers, 3 steps of 8 samples",
        "ended: done at step 3",
        "3 steps committed, 0.57 steps/s, loss 2.0000 in step 0, 1.2500 in step 2",
        "worker 1.0 lost in step 1 (kill at backward): detected 200 ms, agreed 300 ms, rebuilt 400 ms, next commit "
        "1000 ms after the kill; 4 (layer, micro-batch) pairs run again",
        "worker 1.0 stopped in step 4, forward of layer 3, micro-batch 5: KeyError: 'x'",
        "OMITTED: 1 of 3 steps changed nothing: the loss or a gradient was not finite; the last 1 among them",
        "probe: layer 1 gives other bits",
    ]


def test_what_may_have_been_run_again_besides_is_told():
    at = next(at for at, (_, event) in enumerate(RUN) if isinstance(event, Agreed) and event.generation == 2)
    agreed = Agreed(generation=2, step=1, recomputed_microbatches=4, recomputed_at_most=6)
    assert "; 4 to 6 (layer, micro-batch) pairs run again" in sum_up([*RUN[:at], (13.8, agreed), *RUN[at + 1 :]])


def test_the_way_is_told_with_all_reasons():
    told = sum_up([*RUN[:1], (10.0, CHOSEN), *RUN[1:]]).splitlines()
    begin = told.index("for the loss of a node: checkpoint (logging.use: off; the figures speak for log)")
    assert told[begin + 1 : begin + 3] == [f"  {reason}" for reason in CHOSEN.reasons]
    alike = msgspec.structs.replace(CHOSEN, way="log", why="8 bytes cross nodes")
    assert "\nfor the loss of a node: log\n  no other node" in sum_up([*RUN, (17.0, alike)])


def test_what_matters_as_data(tmp_path, capsys):
    write(tmp_path, RUN[0][1], CHOSEN, *(event for _, event in RUN[1:]))
    assert main(["inspect", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recovery"] == json.loads(json.dumps(CHOSEN.figures()))
    assert found["recovery"]["crossing_bytes"] == 8
    assert (found["name"], found["outcome"], found["steps_committed"]) == ("j", "done", 3)
    assert [failure["worker"] for failure in found["failures"]] == ["1.0"]


def test_data_of_a_run_that_says_little(tmp_path, capsys):
    write(tmp_path)
    assert main(["inspect", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["outcome"], found["recovery"]) == (None, None, None)


def test_what_was_sent_is_told_where_somebody_counted():
    told = StepOps(
        worker="0.0",
        generation=1,
        step=0,
        loss=None,
        omitted=False,
        ops=(),
        sent_messages=600_000,
        sent_sums=900,
    )
    timed = [(0.0, Installed(generation=1, workers=("0.0",), strategy="")), (1.0, told)]
    assert sum_up(timed).splitlines()[-2] == "for each step all together sent 0.6 MB in messages, 900 bytes for sums"


def test_a_run_that_was_killed_has_no_end():
    assert sum_up(RUN[:7]).splitlines()[1] == "it has not ended, or was killed"


def test_what_happens_in_every_run_is_left_out_and_counted():
    told = narrate(RUN, every=False).splitlines()
    assert [line[13:] for line in told[:-1]] == [
        "job j: 2 workers, 3 steps of 8 samples",
        "generation 1: 2 workers",
        "generation 1 runs from step 0",
        "FAULT kill strikes worker 1.0 in step 1 at backward",
        "worker 1.0 is lost: signal 9",
        "generation 2: 1 workers, by adaptive",
        "generation 2 runs from step 1",
        "generation 2 is connected",
        "worker 1.0 ready (process 9)",
        "step 2 done by 0.0, loss 1.2500, OMITTED: a gradient was not finite",
        "worker 1.0 stopped in step 4, forward of layer 3, micro-batch 5: KeyError: 'x'",
        "probe: layer 1 gives other bits",
        "ended: done at step 3",
    ]
    assert told[-1] == "6 lines of every run are left out; --all tells them"
    assert len(narrate(RUN).splitlines()) == len(RUN)


def write(folder, *events):
    folder.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder / "events.jsonl")
    for second, event in enumerate(events):
        log.write(float(second), event)
    log.close()


def began(wall_time):
    return JobStarted(name="j", workers=1, steps=1, samples_per_step=1, wall_time=wall_time)


def nested(line):
    return line[:-1] + b',"more":' + b"[" * 5000 + b"]" * 5000 + b"}"


DAMAGES = {
    "no event": lambda line: b"garbage",
    "no text": lambda line: line.replace(b'"j"', b'"\xff"'),
    "nested": nested,
    "another kind": lambda line: line.replace(b"job_started", b"job_stopped"),
    "in 10^300 seconds": lambda line: line.replace(b"1234.5", b"1e300"),
    "at no time": lambda line: line.replace(b"1234.5", b"null"),
}


def damage(folder, how):
    log = folder / "events.jsonl"
    lines = log.read_bytes().splitlines()
    changed = DAMAGES[how](lines[0])
    assert changed != lines[0]
    log.write_bytes(b"\n".join([changed, *lines[1:], b""]))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_earlier_attempt_is_one_line_and_the_others_are_told(tmp_path, capsys, how):
    folders = [tmp_path / "attempts" / f"{number:04}" for number in (1, 2)]
    for folder in (*folders, tmp_path):
        write(folder, began(1234.5), JobEnded(outcome="done", step=1))
    damage(folders[0], how)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"attempt 1: {folders[0]}/events.jsonl: ")
    assert shown[1].startswith("attempt 2 began 1970-")
    assert shown[2:4] == ["attempt 3:", "job j: 1 workers, 1 steps of 1 samples"]


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "in 10^300 seconds"])
def test_a_damaged_log_is_one_line(tmp_path, capsys, how):
    write(tmp_path, began(1234.5))
    damage(tmp_path, how)
    assert main(["inspect", str(tmp_path)]) == 2
    assert re.fullmatch(
        rf"holdfast: {re.escape(str(tmp_path))}/events\.jsonl: is no log of events: .+\n", capsys.readouterr().err
    )


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\n 0.000 s  ended: done\u202e\ufeff b"


@pytest.mark.parametrize("form", ["text", "svg", "json"])
def test_a_log_that_was_written_by_somebody_else_commands_no_terminal_and_forges_no_line(tmp_path, capsys, form):
    log = EventLog(tmp_path / "events.jsonl")
    told = [
        JobStarted(name=HOSTILE, workers=1, steps=1, samples_per_step=1, wall_time=0.0),
        msgspec.structs.replace(CHOSEN, way=HOSTILE, why=HOSTILE, reasons=(HOSTILE,)),
        WorkerReady(worker=HOSTILE, pid=1),
        Installed(generation=1, workers=(HOSTILE,), strategy=HOSTILE),
        FaultInjected(worker=HOSTILE, kind=HOSTILE, step=0, point=HOSTILE, spec=HOSTILE),
        StepOps(worker=HOSTILE, generation=1, step=0, loss=1.0, omitted=False, ops=(("F", 0, 0, 1.0, 2.0),)),
        Notice(worker=HOSTILE, text=HOSTILE),
        JobEnded(outcome=HOSTILE, step=1),
    ]
    for second, event in enumerate(told):
        log.write(float(second), event)
    log.close()
    assert main(["inspect", str(tmp_path), "--format", form]) == 0
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ufeff]", shown)
    assert not re.search(r"^ *0\.000 s  ended", shown, re.MULTILINE)
    if form == "svg":
        ElementTree.fromstring(shown)


@pytest.mark.parametrize("began", [1e300, 1e17])
def test_what_is_no_time_of_any_calendar_is_one_kind_of_error(began):
    with pytest.raises(OverflowError):
        inspecting._when(began)


def test_an_attempt_is_told_with_its_time():
    assert inspecting._when(86400.0 * 365).startswith(" began 197")
