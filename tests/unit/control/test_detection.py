"""Who is hung, from heartbeats alone: what raises an alarm, and what must not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.detection import (
    STALL_S,
    Watch,
    deadlocked,
    forget,
    hear,
    interrupted,
    needed,
    overdue,
    pass_time,
    slow,
)
from holdfast.control.messages import Heartbeat
from holdfast.core.ids import WorkerId
from holdfast.core.work import Busy

A, B = WorkerId(0, 0), WorkerId(0, 1)
BOTH = ((A, B),)
"""The owners of the one layer."""
ANYONE = WorkerId(9, 9)
LIMIT_S = 2.0
BEAT_S = 0.25
COLD = 15.0
SLOWER = 8.0


LOAD_S, COMPILE_S = 20.0, 40.0


def beat(worker=A, *, moves=1, busy_s=0.0, slowest_s=0.05, step=3, doing=Busy.COMPUTING):
    told = {"busy_s": busy_s, "slowest_s": slowest_s, "doing": doing}
    return Heartbeat(worker=worker, generation=1, step=step, op=0, moves=moves, **told)


class Clock:
    """A coordinator that looks every fifth of a second and hears what it is told to."""

    def __init__(self, *members):
        self.members = members or (A,)
        self.now = 100.0
        watch = Watch(limit_s=LIMIT_S, load_s=LOAD_S, compile_s=COMPILE_S)
        self.watch = pass_time(watch, self.members, self.now)

    def hear(self, *beats):
        for each in beats:
            self.watch = hear(self.watch, each, self.now)
        return self

    def wait(self, seconds, beats=lambda passed: (), *, others=True):
        """Lets time pass; ``beats`` says what is heard after so many seconds of it, beside what ``others`` say."""
        start = self.now
        while self.now < start + seconds - 1e-9:
            self.now += 0.2
            self.hear(*beats(self.now - start), *([beat(ANYONE)] if others else []))
            self.watch = pass_time(self.watch, self.members, self.now)
        return self

    def overdue(self, *, running=True, owners=(), suspected=()):
        return overdue(self.watch, self.members, running=running, owners=owners, suspected=suspected)

    def needed(self, owners):
        return needed(self.watch, self.members, owners)

    def slow(self):
        return slow(self.watch, self.members)


def test_silence_is_an_alarm_after_the_limit_and_not_before():
    clock = Clock().hear(beat()).wait(LIMIT_S - 0.2)
    assert clock.overdue() == {}
    clock.wait(0.4)
    assert clock.overdue() == {A: "no sign of life for 2.2 s"}


def test_who_cannot_be_reached_by_others_either_is_held_for_lost_in_half_the_time():
    clock = Clock(A, B).hear(beat(), beat(B)).wait(LIMIT_S / 2 - 0.2)
    assert clock.overdue(suspected={A}) == {}
    clock.wait(0.4)
    assert clock.overdue(suspected={A}) == {A: "no sign of life for 1.2 s, and others cannot reach it"}
    clock.hear(beat(moves=2))
    assert clock.overdue(suspected={A}) == {}, "we can, so it lives"
    assert clock.overdue(running=False) == clock.overdue(), "nobody may be silent, whatever is going on"


def test_only_the_silent_one_is_overdue():
    clock = Clock(A, B).hear(beat(A), beat(B)).wait(3.0, lambda _: [beat(B)])
    assert clock.overdue().keys() == {A}


def test_a_worker_that_beats_but_is_busy_with_one_thing_for_too_long_is_stuck():
    clock = Clock().wait(1.8, lambda passed: [beat(busy_s=passed)])
    assert clock.overdue() == {}
    clock.wait(0.4, lambda passed: [beat(busy_s=1.8 + passed)])
    assert clock.overdue() == {A: "stuck in step 3 for 2.2 s"}


def test_while_no_steps_are_run_anything_may_take_its_time():
    clock = Clock().wait(20.0, lambda passed: [beat(busy_s=passed)])
    assert clock.overdue(running=False) == {}


@pytest.mark.parametrize("slowest_s", [0.3, 1.0, 5.0])
def test_slow_is_not_stuck(slowest_s):
    """An operation may take eight times as long as the slowest one so far."""
    allowed = SLOWER * slowest_s
    clock = Clock().hear(beat(busy_s=allowed * 0.99, slowest_s=slowest_s))
    assert clock.overdue() == {}
    clock.hear(beat(busy_s=allowed * 1.01, slowest_s=slowest_s))
    assert clock.overdue().keys() == {A}


def test_the_first_step_may_take_long_but_not_for_ever():
    clock = Clock().wait(COLD * LIMIT_S - 1.0, lambda passed: [beat(busy_s=passed, slowest_s=0.0)])
    assert clock.overdue() == {}
    clock.wait(1.4, lambda passed: [beat(busy_s=COLD * LIMIT_S - 1.0 + passed, slowest_s=0.0)])
    assert "stuck" in clock.overdue()[A]


@pytest.mark.parametrize("first", [[], [beat(slowest_s=0.0)]], ids=["never heard", "heard cold"])
def test_silence_before_the_first_step_is_done_is_borne_longer(first):
    clock = Clock().hear(*first).wait(COLD * LIMIT_S - 0.4)
    assert clock.overdue() == {}
    clock.wait(0.8)
    assert "no sign of life" in clock.overdue()[A]


@pytest.mark.parametrize("slowest_s", [0.0, 0.05])
@pytest.mark.parametrize(("doing", "limit_s"), [(Busy.LOADING, LOAD_S), (Busy.COMPILING, COMPILE_S)])
def test_loading_and_compiling_have_limits_of_their_own(doing, limit_s, slowest_s):
    clock = Clock().hear(beat(busy_s=limit_s * 0.99, doing=doing, slowest_s=slowest_s))
    assert clock.overdue() == {}
    clock.hear(beat(busy_s=limit_s * 1.01, doing=doing, slowest_s=slowest_s))
    assert clock.overdue() == {A: f"stuck in step 3, {doing} for {limit_s * 1.01:.1f} s"}


def test_a_limit_of_loading_that_is_less_than_that_of_computing_says_nothing():
    clock = Clock()
    clock.watch = pass_time(Watch(limit_s=LIMIT_S, load_s=0.1), clock.members, clock.now)
    assert clock.hear(beat(busy_s=LIMIT_S * 0.99, doing=Busy.LOADING)).overdue() == {}
    assert clock.hear(beat(busy_s=LIMIT_S * 1.01, doing=Busy.LOADING)).overdue().keys() == {A}


def test_who_loads_and_falls_silent_is_lost_as_fast_as_ever():
    clock = Clock().hear(beat(busy_s=1.0, doing=Busy.LOADING)).wait(LIMIT_S + 0.2)
    assert clock.overdue(owners=((A,),)) == {A: "no sign of life for 2.2 s"}


def test_one_that_is_stuck_while_the_other_owners_wait_is_lost_as_fast_as_ever():
    clock = Clock(A, B).wait(1.8, lambda passed: [beat(A, busy_s=passed), beat(B)])
    assert clock.overdue(owners=BOTH) == {}
    clock.wait(0.4, lambda passed: [beat(A, busy_s=1.8 + passed), beat(B, busy_s=0.1)])
    assert clock.overdue(owners=BOTH) == {A: "stuck in step 3 for 2.2 s"}
    assert clock.needed(BOTH) == {}


def test_nobody_is_lost_for_being_stuck_when_all_owners_of_a_layer_are():
    """B began its operation somewhat later, and could not take over either."""
    clock = Clock(A, B).wait(3.0, lambda passed: [beat(A, busy_s=passed), beat(B, busy_s=max(0.0, passed - 0.8))])
    assert clock.overdue(owners=BOTH) == {}
    assert clock.needed(BOTH) == {A: "computing in step 3 for 3.0 s", B: "computing in step 3 for 2.2 s"}
    clock.wait(600.0, lambda passed: [beat(A, busy_s=3.0 + passed), beat(B, busy_s=2.2 + passed)])
    assert clock.overdue(owners=BOTH) == {}
    clock.wait(LIMIT_S - 0.2, lambda passed: [beat(A, busy_s=700.0), beat(B, moves=2)])
    assert clock.overdue(owners=BOTH) == {}, "B has come back, and so may A any moment"
    clock.wait(0.4, lambda passed: [beat(A, busy_s=700.0), beat(B, moves=3)])
    assert clock.overdue(owners=BOTH).keys() == {A}, "B works again, and can do without A"


def test_only_who_is_needed_is_kept():
    """C has the second layer alone with B, which works; A has the first one by itself."""
    c = WorkerId(1, 1)
    clock = Clock(A, B, c).hear(beat(A, busy_s=3.0), beat(B), beat(c, busy_s=3.0))
    owners = ((A,), (B, c))
    assert clock.overdue(owners=owners) == {c: "stuck in step 3 for 3.0 s"}
    assert clock.needed(owners).keys() == {A}


def test_an_owner_that_was_not_heard_of_for_a_while_replaces_nobody():
    clock = Clock(A, B).hear(beat(B)).wait(LIMIT_S * 0.7, lambda passed: [beat(A, busy_s=5.0)])
    assert clock.overdue(owners=BOTH) == {}
    clock.wait(LIMIT_S * 0.4, lambda passed: [beat(A, busy_s=6.0)])
    assert clock.overdue(owners=BOTH).keys() == {B}, "the silent one, and nobody else"


@pytest.mark.parametrize("doing", Busy)
def test_slow_is_told_before_stuck(doing):
    unusual = {Busy.COMPUTING: LIMIT_S / 2, Busy.LOADING: LIMIT_S, Busy.COMPILING: LIMIT_S}[doing]
    clock = Clock().hear(beat(busy_s=unusual * 0.99, doing=doing))
    assert clock.slow() == {}
    clock.hear(beat(busy_s=unusual * 1.01, doing=doing))
    assert clock.slow() == {A: f"{doing} in step 3 for {unusual * 1.01:.1f} s"}
    assert clock.overdue() == {}
    assert clock.hear(beat(busy_s=unusual * 1.01, doing=doing, slowest_s=1.0)).slow() == {}, "it is used to that"


@pytest.mark.parametrize("doing", [Busy.LOADING, Busy.COMPILING])
def test_a_first_one_that_takes_long_is_not_told_at_once(doing):
    assert Clock().hear(beat(busy_s=3 * LIMIT_S, doing=doing, slowest_s=0.0)).slow() == {}


def test_waiting_for_others_is_neither_silence_nor_being_stuck():
    clock = Clock(A, B).wait(60.0, lambda passed: [beat(A), beat(B, moves=int(passed * 5))])
    assert clock.overdue() == {}
    assert not deadlocked(clock.watch, (A, B)), "B moves"


def test_when_all_wait_and_nobody_moves_they_are_deadlocked():
    clock = Clock(A, B).wait(2 * LIMIT_S, lambda _: [beat(A), beat(B)])
    assert not deadlocked(clock.watch, (A, B))
    clock.wait(0.4, lambda _: [beat(A), beat(B)])
    assert deadlocked(clock.watch, (A, B))
    assert clock.overdue() == {}, "nobody of them is to blame"


@pytest.mark.parametrize(
    "last", [beat(B, busy_s=0.1), beat(B, moves=2), beat(B, step=4)], ids=["busy", "moves", "step"]
)
def test_one_that_works_or_moves_ends_a_deadlock(last):
    clock = Clock(A, B).wait(3 * LIMIT_S, lambda _: [beat(A), beat(B)])
    assert deadlocked(clock.watch, (A, B))
    assert not deadlocked(clock.hear(last).watch, (A, B))


def test_who_waited_for_one_that_is_lost_is_not_deadlocked_as_all_begin_anew():
    """That is found after as long as a first step may take; the survivors' next heartbeats are yet to come."""
    clock = Clock(A, B).wait(3 * LIMIT_S, lambda _: [beat(A), beat(B)])
    clock.watch = interrupted(clock.watch)
    assert not deadlocked(clock.watch, (A, B))
    assert deadlocked(clock.wait(2 * LIMIT_S + 0.4, lambda _: [beat(A), beat(B)]).watch, (A, B)), "they still wait"


def test_a_silent_worker_does_not_wait_although_it_said_so_last():
    """Still in its first step it may be silent for long; connecting all anew meanwhile would only forget since when."""
    last = beat(B, slowest_s=0.0)
    clock = Clock(A, B).hear(last).wait(3 * LIMIT_S, lambda _: [beat(A)])
    assert not deadlocked(clock.watch, (A, B))
    assert clock.overdue() == {}
    assert deadlocked(clock.hear(last).watch, (A, B))


def test_nothing_is_deadlocked_before_everyone_was_heard():
    clock = Clock(A, B).wait(3 * LIMIT_S, lambda _: [beat(A)])
    assert not deadlocked(clock.watch, (A, B))


@pytest.mark.parametrize("seen_s", [0.0, 1.0], ids=["our clock stood still", "our clock went on"])
@pytest.mark.parametrize("pause_s", [STALL_S + 0.3, 10.0, 3600.0])
def test_after_our_own_pause_everybody_has_the_whole_limit(pause_s, seen_s):
    """What was sent meanwhile is read a moment later than time is seen to have passed."""
    clock = Clock(A, B).hear(beat(A), beat(B)).wait(LIMIT_S - 0.2)
    clock.now += pause_s * seen_s
    clock.watch = pass_time(clock.watch, clock.members, clock.now, gap_s=pause_s)
    assert clock.overdue() == {}
    assert not deadlocked(clock.watch, (A, B))
    clock.hear(beat(A)).wait(LIMIT_S - 0.2, lambda _: [beat(A)])
    assert clock.overdue() == {}
    clock.wait(0.4, lambda _: [beat(A)])
    assert clock.overdue().keys() == {B}


def test_when_everyone_is_silent_at_once_it_is_the_machine():
    """All of them starve for three seconds; then one after another is heard again."""
    clock = Clock(A, B).hear(beat(A), beat(B)).wait(3.2, others=False)
    assert clock.overdue() == {}
    clock.hear(beat(A)).wait(LIMIT_S - 0.2)
    assert clock.overdue() == {}, "B has as much time as ever"
    clock.hear(beat(A)).wait(0.4)
    assert clock.overdue().keys() == {B}


@pytest.mark.parametrize("apart_s", [1.4, 1.8])
def test_the_silences_of_a_machine_that_is_too_busy_hide_nobody_for_ever(apart_s):
    """B starves again and again, and nobody is heard meanwhile; A has hung."""
    clock, passed = Clock(A, B).hear(beat(A), beat(B)), 0.0
    while not clock.overdue():
        clock.wait(apart_s, others=False).hear(beat(B))
        passed += apart_s
        assert passed < COLD * LIMIT_S + 2 * LIMIT_S
    assert clock.overdue().keys() == {A}
    assert passed > COLD * LIMIT_S


def test_our_own_pauses_hide_nobody_for_ever():
    """We are stopped again and again, and hear only A in between."""
    clock, looks = Clock(A, B).hear(beat(A), beat(B)), 0
    while not clock.overdue():
        clock.now += 1.5 * STALL_S
        clock.watch = pass_time(clock.hear(beat(A)).watch, clock.members, clock.now)
        looks += 1
        assert looks < COLD * LIMIT_S / STALL_S + 2 * LIMIT_S
    assert clock.overdue().keys() == {B}


@pytest.mark.parametrize("limit_s", [0.3, 0.8])
def test_a_pause_of_everybody_shows_before_anybody_is_overdue(limit_s):
    clock = Clock(A, B)
    clock.watch = Watch(limit_s=limit_s)
    for _ in range(100):
        clock.now += 0.05
        clock.watch = pass_time(clock.watch, clock.members, clock.now)
        if clock.now < 101.0:
            clock.hear(beat(A), beat(B))
        assert clock.now > 101.0 + COLD * limit_s or clock.overdue() == {}


def test_when_everyone_is_silent_for_ever_they_are_lost():
    clock = Clock(A, B).hear(beat(A), beat(B)).wait(COLD * LIMIT_S - 0.4, others=False)
    assert clock.overdue() == {}
    clock.wait(LIMIT_S + 0.4, others=False)
    assert clock.overdue().keys() == {A, B}


def test_a_look_that_is_a_little_late_is_no_pause():
    clock = Clock().hear(beat())
    for _ in range(3):
        clock.now += STALL_S
        clock.hear(beat(ANYONE))
        clock.watch = pass_time(clock.watch, clock.members, clock.now)
    assert clock.overdue().keys() == {A}


def test_who_is_forgotten_begins_anew():
    clock = Clock().hear(beat()).wait(3.0)
    assert clock.overdue().keys() == {A}
    clock.watch = pass_time(forget(clock.watch, [A]), clock.members, clock.now)
    assert clock.overdue() == {}


def test_hearing_twice_the_same_is_no_move():
    clock = Clock().hear(beat()).wait(1.0).hear(beat())
    vital = clock.watch.vitals[A]
    assert (vital.heard_at, vital.moved_at) == (clock.now, pytest.approx(clock.now - 1.0))
    assert clock.hear(beat(moves=2)).watch.vitals[A].moved_at == clock.now


course = st.lists(
    st.fixed_dictionaries(
        {
            "gap_s": st.floats(0.01, LIMIT_S * 0.99),
            "busy_s": st.floats(0.0, LIMIT_S * 0.99),
            "look": st.floats(0.0, 1.0),
            "pause_s": st.just(0.0) | st.floats(STALL_S * 1.01, 1000.0),
            "awake": st.booleans(),
        }
    ),
    min_size=1,
    max_size=40,
)


@given(course, st.booleans())
def test_who_beats_in_time_and_moves_is_never_overdue(course, cold):
    """Whenever we look between two beats, and for however long we are stopped, whether our clock sees it or not."""
    now, watch = 50.0, pass_time(Watch(limit_s=LIMIT_S), [A], 50.0)
    for number, each in enumerate(course):
        seen_s = each["gap_s"] + each["pause_s"] * each["awake"]
        looked_s = each["look"] * each["gap_s"]
        for at, gap_s in ((now + looked_s, looked_s), (now + seen_s, each["gap_s"] + each["pause_s"])):
            watch = pass_time(watch, [A], at, gap_s=gap_s)
            assert overdue(watch, [A], running=True) == {}
        now += seen_s
        watch = hear(watch, beat(moves=number, busy_s=each["busy_s"], slowest_s=0.0 if cold else 0.05), now)
        assert overdue(watch, [A], running=True) == {}
        assert not deadlocked(watch, [A])


@given(course, st.floats(0.01, 10.0))
def test_who_falls_silent_is_always_found(course, extra_s):
    now, watch = 50.0, pass_time(Watch(limit_s=LIMIT_S), [A], 50.0)
    for number, each in enumerate(course):
        now += each["gap_s"]
        watch = pass_time(hear(watch, beat(moves=number), now), [A], now)
    end = now + LIMIT_S + extra_s
    while now < end:
        now += 0.5
        watch = hear(watch, beat(ANYONE), now)
        watch = pass_time(watch, [A], now)
    assert overdue(watch, [A], running=True).keys() == {A}


LOOK_S, MARGIN_S = 0.2, 0.5
phases = st.lists(
    st.fixed_dictionaries(
        {
            "runs_s": st.floats(0.5, 6.0),
            "stopped_s": st.floats(0.0, LIMIT_S - MARGIN_S) | st.floats(LIMIT_S + MARGIN_S, COLD * LIMIT_S / 2),
            "who": st.sampled_from(["everybody", "workers", "coordinator", "some"]),
            "some": st.sets(st.integers(0, 3), min_size=1, max_size=3),
            "thaw_s": st.lists(st.floats(0.0, 0.3), min_size=4, max_size=4),
        }
    ),
    min_size=1,
    max_size=6,
)


class History:
    """Four workers and a coordinator in virtual time, who are stopped and go on; each has a clock of its own."""

    def __init__(self, offsets):
        self.members = [WorkerId(0, index) for index in range(4)]
        self.now, self.awake, self.looked_at = 100.0, 0.0, 100.0
        self.next_beat = [self.now + offset for offset in offsets]
        self.watch, self.found = Watch(limit_s=LIMIT_S), set()

    def go_on(self, until, stopped=(), thaws=(0.0,) * 4, *, we_run=True):
        """Time passes in steps of 50 ms; whoever goes on after a pause does so a moment later."""
        mailbox = []
        ready = [self.now + thaw for thaw in thaws]
        while self.now < until - 1e-9:
            step = min(0.05, until - self.now)
            self.now += step
            for index, worker in enumerate(self.members):
                if index not in stopped and self.now >= max(self.next_beat[index], ready[index]):
                    self.next_beat[index] = self.now + BEAT_S
                    mailbox.append(beat(worker, moves=round(self.now * 100)))
            if we_run:
                self.awake += step
                self._look(mailbox)
                self._read(mailbox)
        return mailbox

    def _read(self, mailbox):
        for each in mailbox:
            self.watch = hear(self.watch, each, self.awake)
        mailbox.clear()

    def _look(self, mailbox):
        """What came while we were stopped is read after it, what comes while we run before the next one."""
        if self.now - self.looked_at < LOOK_S - 1e-9:
            return
        self.watch = pass_time(self.watch, self.members, self.awake, gap_s=self.now - self.looked_at)
        self.looked_at = self.now
        self.found |= overdue(self.watch, [w for w in self.members if w not in self.found], running=True).keys()
        assert not deadlocked(self.watch, self.members)


@settings(max_examples=50)
@given(phases, st.lists(st.floats(0.0, BEAT_S), min_size=4, max_size=4))
def test_a_pause_of_everybody_is_nobodys_fault_and_of_some_is_theirs(phases, offsets):
    history, theirs = History(offsets), set()
    history.go_on(history.now + 1.0)
    for phase in phases:
        everyone = range(4)
        stopped = phase["some"] if phase["who"] == "some" else () if phase["who"] == "coordinator" else everyone
        we_run = phase["who"] in ("workers", "some")
        history.go_on(history.now + phase["stopped_s"], stopped, we_run=we_run)
        if phase["who"] == "some" and phase["stopped_s"] > LIMIT_S:
            theirs |= {history.members[index] for index in stopped}
        history.go_on(history.now + 0.3 + phase["runs_s"], (), phase["thaw_s"])
        assert history.found == theirs


@pytest.mark.parametrize(("beat_s", "limit_s"), [(0.25, 2.0), (1.0, 3.0), (1.5, 5.0), (2.0, 10.0), (5.0, 20.0)])
def test_rare_heartbeats_are_no_pause_of_everybody(beat_s, limit_s):
    """Workers start together, so that nobody is heard between their heartbeats; who hangs is found in time."""
    members = [WorkerId(0, index) for index in range(4)]
    hung_at, next_beat = 10 * beat_s, {worker: 0.05 * index for index, worker in enumerate(members)}
    watch, now, hung, stuck_at = Watch(limit_s=limit_s, beat_s=beat_s), 0.0, {}, None
    while not (hung and stuck_at) and now < hung_at + 10 * limit_s:
        now += LOOK_S
        for worker, due in next_beat.items():
            if due <= now and (worker != members[0] or now < hung_at):
                next_beat[worker] = due + beat_s
                watch = hear(watch, beat(worker, moves=1, slowest_s=0.01), now)
        watch = pass_time(watch, members, now, gap_s=LOOK_S)
        hung = hung or dict.fromkeys(overdue(watch, members, running=True), now)
        stuck_at = stuck_at or (now if deadlocked(watch, members[1:]) else None)
    assert list(hung) == [members[0]]
    assert hung[members[0]] - hung_at <= limit_s + 2 * LOOK_S
    assert stuck_at is not None
    assert stuck_at <= 2 * limit_s + beat_s + 2 * LOOK_S
