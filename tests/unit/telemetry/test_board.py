"""What a board shows of a run, and what has changed of it."""

import random

import msgspec
import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement, split_evenly
from holdfast.telemetry import board as module
from holdfast.telemetry.board import Board, Job, Worker, cover
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    Detected,
    Evaluated,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Migrating,
    Notice,
    Parted,
    Rebuilt,
    StepOps,
    Synced,
    WorkerReady,
)
from holdfast.telemetry.timeline import Mode

BOTH = ("0.0", "1.0")


def started(workers=2, steps=1000):
    return JobStarted(name="j", workers=workers, steps=steps, samples_per_step=8, wall_time=77.0)


def installed(generation=1, workers=BOTH, strategy=""):
    return Installed(generation=generation, workers=workers, strategy=strategy, owners=len(workers))


def swapped(step, loss=None, generation=1, workers=BOTH):
    known = {"generation": generation, "step": step, "omitted": False, "ops": ()}
    return [StepOps(worker=each, loss=loss, knows_loss=loss is not None, **known) for each in workers]


def agreed(step, generation=2, pairs=3):
    return Agreed(generation=generation, step=step, recomputed_microbatches=pairs)


def tell(event, beginning):
    return None if isinstance(event, StepOps) else type(event).__name__


class Shown:
    """What somebody sees who applies news to what was shown before."""

    def __init__(self):
        self.run, self.tick = 0, 0
        self._forget()

    def _forget(self):
        self.workers, self.points, self.marks, self.scores = {}, [], [], {}
        self.recoveries, self.holding, self.lines = {}, None, []

    def look(self, board, now=100.0):
        news = board.told(self.run, self.tick, now)
        if news.run != self.run:
            self._forget()
        self.run, self.tick, self.job = news.run, news.tick, news.job
        self.workers |= news.workers
        if news.curve is not None:
            points = zip(news.curve.steps, news.curve.losses, news.curve.rates, strict=True)
            assert news.curve.first <= len(self.points)
            self.points = [*self.points[: news.curve.first], *points]
        self.marks += news.marks
        self.scores |= {each.step: each for each in news.scores}
        self.recoveries |= {each.number: each for each in news.recoveries}
        self.holding = news.holding or self.holding
        self.lines += news.lines
        return news


def board_of(*timed):
    board = Board(tell)
    board.hear(timed)
    return board


def at(seconds, events):
    return [(seconds, event) for event in events]


def test_a_job_is_told_as_a_whole():
    board = board_of(
        (0.0, started()),
        (1.0, installed()),
        *at(2.0, swapped(0, 4.0)),
        *at(3.0, swapped(1, 3.0)),
        (3.5, Checkpointed(step=2, url="u")),
        *at(4.0, swapped(2, 2.0)),
    )
    job = board.told(0, 0, 5.0).job
    assert job == Job(
        name="j",
        began=77.0,
        elapsed_s=5.0,
        done=3,
        steps=1000,
        loss=2.0,
        samples_per_s=pytest.approx(8 * 2 / 3),  # two steps from the first commit until now
        left_s=pytest.approx(997 * 1.5),
        idle_s=1.0,
        present=2,
        workers=2,
        owners=2,
        goodput=pytest.approx(3 / 5),
        checkpoint=2,
        checkpoint_age_s=1.5,
    )


def test_a_curve_has_the_loss_and_the_speed_of_each_step_but_the_speed_of_the_first():
    shown = Shown()
    board = board_of((0.0, started()), (1.0, installed()), *at(9.0, swapped(0, 4.0)), *at(11.0, swapped(1, 3.0)))
    shown.look(board)
    assert shown.points == [(0, 4.0, None), (1, 3.0, 4.0)]
    board.hear(at(12.0, swapped(2)))
    assert shown.look(board).curve.first == 2
    assert shown.points[2:] == [(2, None, 8.0)]


def test_steps_that_a_fall_back_takes_back_are_no_more():
    shown = Shown()
    board = board_of((0.0, started()), (1.0, installed()), *(p for n in range(5) for p in at(2.0 + n, swapped(n, 5.0))))
    shown.look(board)
    board.hear([(8.0, Detected(worker="1.0", how="h", generation=1)), (8.1, installed(2, ("0.0",)))])
    board.hear([(8.2, agreed(2)), *at(9.0, swapped(2, 1.5, 2, ("0.0",)))])
    shown.look(board)
    assert [step for step, *_ in shown.points] == [0, 1, 2]
    assert shown.points[2][1] == 1.5
    assert shown.job.done == 3


def test_a_loss_that_is_not_finite_is_none_and_is_not_the_one_before():
    board = board_of((0.0, started()), (1.0, installed()), *at(2.0, swapped(0, 4.0)))
    lost = [msgspec.structs.replace(event, knows_loss=True) for event in swapped(1)]
    board.hear(at(3.0, lost))
    news = board.told(0, 0, 4.0)
    assert (news.job.loss, news.curve.losses) == (None, [4.0, None])


def test_the_end_of_a_run_is_on_its_curve(monkeypatch):
    monkeypatch.setattr(module, "_POINTS", 5)
    shown, board = Shown(), board_of((0.0, started()), (1.0, installed()))
    for step in range(101):
        board.hear(at(2.0 + step, swapped(step, float(step))))
    shown.look(board)
    assert shown.points[-1][0] < 100
    board.hear([(200.0, JobEnded(outcome="done", step=101))])
    shown.look(board)
    assert shown.points[-1][0] == 100


def test_of_a_long_run_a_point_stands_for_many_steps(monkeypatch):
    monkeypatch.setattr(module, "_POINTS", 10)
    shown, board = Shown(), board_of((0.0, started()), (1.0, installed()))
    for step in range(1000):
        board.hear(at(2.0 + step, swapped(step, float(step))))
        shown.look(board)
    assert 10 <= len(shown.points) <= 20
    step, loss, rate = shown.points[-1]
    each = step + 1 - (shown.points[-2][0] + 1)
    assert each > 50
    assert loss == pytest.approx(step - (each - 1) / 2)
    assert rate == pytest.approx(8.0)


def test_a_recovery_is_told_part_by_part():
    shown = Shown()
    board = board_of((0.0, started()), (1.0, installed()), *at(2.0, swapped(0)), *at(3.0, swapped(1)))
    fault = FaultInjected(worker="1.0", kind="kill", step=2, point="backward", spec="kill:1.0@2")
    board.hear([(4.0, fault), (4.1, Detected(worker="1.0", how="process ended", generation=1))])
    shown.look(board)
    assert shown.job.recovering
    assert shown.recoveries[0].lost == [("1.0", "process ended")]
    assert shown.recoveries[0].parts == {"find": pytest.approx(0.1)}
    board.hear([(4.3, installed(2, ("0.0",), "adaptive")), (4.4, agreed(2)), (4.5, Rebuilt(generation=2))])
    shown.look(board)
    assert not shown.recoveries[0].over
    board.hear(at(5.0, swapped(2, 1.0, 2, ("0.0",))))
    shown.look(board)
    found = shown.recoveries[0]
    parts = {"find": 0.1, "agree": 0.3, "rebuild": 0.1, "resume": 0.5}
    assert (found.parts, found.over) == (pytest.approx(parts), True)
    assert (found.step, found.strategy, found.redone) == (2, "adaptive", 3)
    assert not shown.job.recovering
    assert [(mark.step, mark.kind, mark.worker) for mark in shown.marks] == [(2, "lost", "1.0")]
    assert not shown.look(board).recoveries


def test_a_recovery_that_never_ends_is_told_again_at_the_end_of_the_job():
    shown = Shown()
    board = board_of((0.0, started()), (1.0, installed()), (2.0, Detected(worker="1.0", how="h", generation=1)))
    shown.look(board)
    board.hear([(3.0, JobEnded(outcome="lost", step=0))])
    assert [each.over for each in shown.look(board).recoveries] == [False]


def test_a_fault_that_was_survived_is_not_the_beginning_of_a_later_loss():
    stalled = FaultInjected(worker="1.0", kind="stall", step=0, point="start", spec="stall:1.0@0")
    board = board_of((0.0, started()), (1.0, installed()), (1.5, stalled), *at(2.0, swapped(0)), *at(3.0, swapped(1)))
    board.hear([(9.0, Detected(worker="1.0", how="h", generation=1)), (9.5, agreed(2))])
    assert list(board.told(0, 0, 10.0).recoveries[0].parts) == ["agree"]


def test_whoever_moves_has_no_state_yet():
    board = board_of((0.0, started()), (1.0, installed()))
    moving = Migrating(generation=2, moves=(("1.0", "0.0"),), before=2.0, meanwhile=1.5, period=1.0)
    for events in ([moving, installed(2)], [installed(3), msgspec.structs.replace(moving, generation=3)]):
        board.hear(at(2.0, events))
        workers = board.told(0, 0, 3.0).workers
        assert (workers["1.0"].mode, workers["0.0"].mode) == (Mode.ENTERING, Mode.MEMBER)
        board.hear([(4.0, Synced(worker="1.0", entered=4, step=5, bytes=10))])


def test_marks_tell_losses_from_leaves_and_leave_spares_out():
    board = board_of((0.0, started()), (1.0, installed()), (2.0, Parted(worker="1.0", step=3)))
    board.hear([(3.0, Detected(worker="9.0", how="h", generation=1, spare=True))])
    assert [(mark.kind, mark.worker) for mark in board.told(0, 0, 4.0).marks] == [("left", "1.0")]


def test_workers_are_told_when_they_change():
    shown = Shown()
    board = board_of((0.0, started()))
    board.hear([(0.5, WorkerReady(worker=name, pid=1, node=f"n{name[0]}")) for name in BOTH])
    shown.look(board)
    assert shown.workers["1.0"] == Worker(mode=Mode.ARRIVING, node="n1")
    board.hear([(1.0, installed())])
    assert set(shown.look(board).workers) == set(BOTH)
    board.hear([(2.0, Detected(worker="1.0", how="h", generation=1))])
    assert shown.look(board).workers == {"1.0": Worker(mode=Mode.LOST, node="n1")}
    board.hear([(3.0, WorkerReady(worker="1.0", pid=2, node="n2")), (4.0, installed(3, BOTH, "boundary"))])
    shown.look(board)
    assert shown.workers["1.0"] == Worker(mode=Mode.ENTERING, node="n2")
    board.hear([(5.0, Synced(worker="1.0", entered=4, step=5, bytes=10, owners=2))])
    shown.look(board)
    assert shown.workers["1.0"].mode is Mode.MEMBER
    assert [mark.kind for mark in shown.marks] == ["lost", "came"]
    assert shown.look(board).workers == {}


def test_another_attempt_begins_with_nothing():
    shown = Shown()
    board = board_of(
        (0.0, started()), (1.0, installed()), *at(2.0, swapped(0)), (3.0, JobEnded(outcome="lost", step=1))
    )
    shown.look(board)
    assert (shown.run, shown.job.outcome, len(shown.points)) == (1, "lost", 1)
    board.hear([(4.0, started()), (5.0, installed(1, ("0.0",)))])
    shown.look(board)
    assert (shown.run, shown.job.outcome, shown.points) == (2, "", [])
    assert set(shown.workers) == {"0.0"}
    assert [line.text for line in shown.lines] == ["JobStarted", "Installed"]


def test_evaluations_and_lines_are_told_once():
    shown = Shown()
    board = board_of((0.0, started()), (1.0, Evaluated(step=0, scores=(("loss", 2.0),), microbatches=4, of=4)))
    shown.look(board)
    assert shown.scores[0].scores == {"loss": 2.0}
    better = Evaluated(step=4, scores=(("loss", None), ("right", 0.5)), microbatches=4, of=4, best=True)
    board.hear(
        [(2.0, better), (2.5, Detected(worker="0.0", how="h", generation=0)), (3.0, Notice(worker="a", text="t"))]
    )
    news = shown.look(board)
    assert [each.step for each in news.scores] == [4]
    assert [(line.at, line.text, line.kind) for line in news.lines] == [
        (2.0, "Evaluated", ""),
        (2.5, "Detected", "bad"),
        (3.0, "Notice", ""),
    ]


def grid(layers, pipelines, stages):
    return regular_placement(pipelines, split_evenly(layers, stages))


def row(worker, start, stop):
    return WorkerId.parse(worker), LayerRange(start, stop)


def test_it_says_how_many_may_be_lost():
    board = board_of((0.0, started(12)), (0.5, installed(1, tuple(f"{p}.{s}" for p in range(3) for s in range(4)))))
    board.hold(grid(8, 3, 4))
    holding = board.told(0, 0, 1.0).holding
    assert (holding.layers, holding.any, holding.most, holding.nodes, holding.why) == (8, 2, 8, None, "")
    assert holding.held["1.2"] == [(4, 6)]
    board.hold(grid(8, 3, 4).without([WorkerId(1, 2)]))
    assert (board.told(0, 0, 1.0).holding.any, board.told(0, 0, 1.0).holding.most) == (1, 7)
    board.hear([(1.0, Detected(worker="0.2", how="h", generation=1))])  # before there is a plan without it
    holding = board.told(0, 0, 1.0).holding
    assert (holding.any, holding.most, "0.2" in holding.held) == (0, 6, False)
    board.hear([(1.0, Detected(worker="2.2", how="h", generation=1))])
    assert (board.told(0, 0, 1.0).holding.any, board.told(0, 0, 1.0).holding.most) == (-1, 0)
    board.hold(None, "the store is away")
    assert board.told(0, 0, 1.0).holding.why == "the store is away"
    assert board.told(1, board.told(0, 0, 1.0).tick, 1.0).holding is None


def test_what_comes_between_two_looks_of_the_board_at_its_run_is_told():
    shown, board = Shown(), board_of((0.0, started()), (1.0, installed()))
    shown.look(board)
    board.hold(grid(4, 2, 1))
    shown.look(board)
    assert shown.holding.layers == 4
    shown.look(board)
    board.hold(None, "away")
    shown.look(board)
    assert shown.holding.why == "away"


def test_it_says_how_many_nodes_may_be_lost():
    board = board_of((0.0, started()))
    board.hear([(0.5, WorkerReady(worker=name, pid=1, node=f"n{name[0]}")) for name in BOTH])
    board.hold(grid(4, 2, 1))
    assert board.told(0, 0, 1.0).holding.nodes == 1
    board.hear([(0.6, WorkerReady(worker="1.0", pid=1, node="n0"))])
    board.hold(grid(4, 2, 1))
    assert board.told(0, 0, 1.0).holding.nodes is None


def test_as_few_as_hold_every_layer_cover_them():
    assert cover(grid(8, 3, 4)) == 4
    rows = (row("0.0", 0, 2), row("0.1", 2, 6), row("1.0", 0, 3), row("1.1", 3, 6))
    assert cover(Placement(num_layers=6, ranges=rows)) == 2
    several = (row("0.0", 0, 1), row("0.0", 3, 4), row("1.0", 1, 3), row("2.0", 0, 1))
    assert cover(Placement(num_layers=4, ranges=tuple(sorted(several)))) in (2, 3)


@pytest.mark.parametrize("seed", range(30))
def test_who_looks_often_sees_what_is_seen_at_once(seed, monkeypatch):
    monkeypatch.setattr(module, "_POINTS", 5)
    choose = random.Random(seed)
    often, board = Shown(), Board(tell)
    now, step, generation, members = 0.0, 0, 1, [*BOTH]
    board.hear([(now, started()), (now, installed())])
    for _ in range(200):
        now += choose.random()
        kind = choose.choices(("step", "lose", "evaluate", "nothing", "again"), (12, 1, 1, 3, 0.2))[0]
        if kind == "step":
            board.hear(at(now, swapped(step, choose.random(), generation, tuple(members))))
            step += 1
        elif kind == "lose":
            generation += 1
            board.hear([(now, Detected(worker="1.0", how="h", generation=generation - 1))])
            step = max(0, step - choose.choice((0, 0, 0, 7)))
            members = choose.choice(([*BOTH], ["0.0"]))
            board.hear([(now, installed(generation, tuple(members))), (now, agreed(step, generation))])
            board.hold(grid(4, len(members), 1))
        elif kind == "evaluate":
            board.hear([(now, Evaluated(step=step, scores=(("loss", 1.0),), microbatches=1, of=1))])
        elif kind == "again":
            step, generation, members = 0, 1, [*BOTH]
            board.hear([(now, started()), (now, installed())])
        if choose.random() < 0.5:
            often.look(board, now)
    often.look(board, now)
    once = Shown()
    once.look(board, now)
    assert vars(often) == vars(once)


def test_news_can_be_sent():
    board = board_of((0.0, started()), (1.0, installed()), *at(2.0, swapped(0, float("inf"))))
    board.hold(grid(4, 2, 1))
    sent = msgspec.json.decode(msgspec.json.encode(board.told(0, 0, 3.0)))
    assert sent["curve"] == {"first": 0, "steps": [0], "losses": [None], "rates": [None]}
    assert sent["workers"]["0.0"] == {"mode": "member", "node": ""}
    assert sent["holding"]["held"] == {"0.0": [[0, 4]], "1.0": [[0, 4]]}
