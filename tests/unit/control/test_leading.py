"""Who leads, when another may try, what the one before learns: by a chain in a folder, in a time of our own."""

import heapq
import itertools
from functools import partial

import msgspec
import pytest
from tests.decisions import leading_in

from holdfast.control.chain import leading as module
from holdfast.control.chain.entry import Entry
from holdfast.control.chain.leading import UNREAD, Leading, Stored, lead, show_life
from holdfast.control.chain.opening import open_chain
from holdfast.control.membership import GridState, Roster, Running, StoredDecision
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable, CorruptBlob, StorageError, StoreAway
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(2, split_evenly(2, 1), 1)
ONE, TWO = (16 * digit for digit in "12")
SILENT_BEATS = 5


def decision(number, lost=(), job=""):
    return StoredDecision(
        revision=number,
        generation=1,
        job=job,
        grid=GridState(baseline=PLAN),
        running=Running(plan=PLAN),
        roster=Roster(lost=frozenset(lost)),
    )


class Time:
    """What passes while somebody sleeps, and what happens meanwhile."""

    def __init__(self):
        self.now, self._due, self._count = 0.0, [], itertools.count()

    def monotonic(self):
        return self.now

    def at(self, moment, act):
        heapq.heappush(self._due, (moment, next(self._count), act))

    def sleep(self, seconds):
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = until


@pytest.fixture
def time(monkeypatch):
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


class Gated:
    """A chain before which stands what can fail: nobody gets by while it is shut."""

    def __init__(self, chain):
        self.inner, self.beat_s, self.shut = chain, chain.beat_s, False

    def __str__(self):
        return str(self.inner)

    def __getattr__(self, name):
        if self.shut:
            raise StoreAway("the folder is away")
        return getattr(self.inner, name)


@pytest.fixture
def open_it(tmp_path):
    return lambda: Gated(open_chain(f"file://{tmp_path}/chain"))


def leads(chain, by, **options):
    return lead(chain, **{"job": "", "by": by, "alone": False, "note": pytest.fail, **options})


def sign(leading, count=0):
    """A sign of life, as whoever leads gives it."""
    leading.chain.say(msgspec.json.encode({"number": leading.first, "by": leading.by, "count": count}))


def signs(time, leading, beats):
    """From now on one sign of life every beat, so many of them."""
    for beat in range(beats):
        time.at(time.now + beat * leading.chain.beat_s, partial(sign, leading, beat))


def test_the_first_leads_at_once_and_knows_of_nothing(open_it):
    leading, stored = leads(open_it(), ONE)
    assert (leading.first, stored) == (1, None)
    assert leading.put(decision(1)) == Stored()
    assert open_it().newest() == (2, Entry(by=ONE, decision=decision(1)).encoded)


def test_another_waits_while_there_are_signs_of_life_and_takes_over_once_there_are_none(open_it, time):
    first, _ = leads(open_it(), ONE)
    first.put(decision(1))
    signs(time, first, beats=40)
    leading, stored = leads(open_it(), TWO)
    last = 39 * leading.chain.beat_s
    assert last + SILENT_BEATS * leading.chain.beat_s <= time.now < last + (SILENT_BEATS + 1) * leading.chain.beat_s
    assert (leading.first, stored) == (3, decision(1))
    assert leading.put(decision(2)) == Stored()


@pytest.mark.parametrize("beats", [0, 20])
def test_of_two_that_wait_for_one_to_be_silent_the_later_waits_for_the_other(open_it, time, beats):
    """That has put its entry, and not yet given a sign of life; if it dies before it does, it is silent as well."""
    first, _ = leads(open_it(), ONE)
    sign(first)
    beat_s, others = first.chain.beat_s, []

    def take_over():
        others.append(leads(open_it(), TWO, alone=True)[0])
        time.at(time.now + beat_s, lambda: signs(time, others[0], beats))

    time.at((SILENT_BEATS - 0.01) * beat_s, take_over)
    third, _ = leads(open_it(), 16 * "3")
    assert third.first == others[0].first + 1
    assert time.now >= (2 * SILENT_BEATS + beats) * beat_s


def test_a_pause_of_all_is_nobodys_silence(open_it, time):
    """The one that waits is awake first."""
    first, _ = leads(open_it(), ONE)
    sign(first)
    beat_s, slept = first.chain.beat_s, time.sleep

    def sleep(seconds):
        if time.now < 2 * beat_s <= time.now + seconds:
            time.now += 60.0
            signs(time, first, beats=10)
        slept(seconds)

    time.sleep = sleep
    second, _ = leads(open_it(), TWO)
    assert second.first == 2
    assert time.now >= 60.0 + (9 + SILENT_BEATS) * beat_s


def test_who_can_give_no_sign_of_life_says_so(open_it, time):
    leading, _ = leads(open_it(), ONE)
    assert leading.is_seen
    time.sleep(SILENT_BEATS * leading.chain.beat_s)
    assert not leading.is_seen


def test_who_was_away_learns_that_it_does_not_lead_any_more(open_it, time):
    old, _ = leads(open_it(), ONE)
    new, _ = leads(open_it(), TWO, alone=True)
    stored = old.put(decision(1))
    assert isinstance(stored.error, CoordinatorUnavailable)
    assert "another coordinator leads; the decision of this one was not stored" in str(stored.error)
    assert new.put(decision(1, lost=(WorkerId(0, 0),))) == Stored()
    signs(time, new, beats=2)
    deposed = []
    show_life(old, lambda: deposed.append(time.now))
    assert deposed == [old.chain.beat_s], "as soon as it looks again, it sees the signs of the other"


@pytest.mark.parametrize("call", ["newest", "put"])
def test_who_is_beaten_to_the_first_entry_waits_for_signs_that_have_yet_to_come(open_it, time, call):
    """Another one is quicker: once the first has seen that there is no entry, or just before it puts its own."""
    chain, beaten = open_it(), []
    real = getattr(chain.inner, call)

    def late(*arguments):
        found = real(*arguments) if call == "newest" else None
        if not beaten:
            beaten.append(leads(open_it(), TWO)[0])
        return found if call == "newest" else real(*arguments)

    setattr(chain.inner, call, late)
    leading, _ = leads(chain, ONE)
    assert (beaten[0].first, leading.first) == (1, 2)
    assert time.now >= SILENT_BEATS * chain.beat_s


def test_who_is_alone_waits_for_no_signs(open_it, time):
    signs(time, leads(open_it(), ONE)[0], beats=9)
    assert leads(open_it(), TWO, alone=True)[0].first == 2
    assert time.now == 0.0


def test_a_store_that_is_away_is_no_silence_and_is_told_once(open_it, time):
    """While nobody can give a sign, nobody misses one."""
    chain, said = open_it(), []
    first, _ = leads(open_it(), ONE)
    first.chain.say(b"the last sign")
    time.at(0.1, lambda: setattr(chain, "shut", True))
    time.at(30.0, lambda: setattr(chain, "shut", False))
    assert leads(chain, TWO, note=lambda text, away: said.append((text, away)))[0].first == 2
    assert time.now >= 30.0 + SILENT_BEATS * first.chain.beat_s - chain.beat_s
    assert said == [("the folder is away; waiting for it", True), ("the store of decisions answers again", False)]


def test_signs_go_on_once_the_store_is_back(open_it, time):
    leading, _ = leads(open_it(), ONE)
    leading.chain.shut = True
    time.at(10.0, lambda: setattr(leading.chain, "shut", False))
    time.at(20.0, lambda: sign(leads(open_it(), TWO, alone=True)[0]))
    deposed = []
    show_life(leading, lambda: deposed.append(time.now))
    assert 20.0 <= deposed[0] <= 21.0


def away(number, body):
    raise StoreAway("no room")


def test_one_of_this_machine_is_not_waited_for(open_it):
    chain = open_it()
    chain.beat_s, chain.shut = None, True
    with pytest.raises(StoreAway):
        leads(chain, ONE)
    chain.shut, chain.put = False, away
    with pytest.raises(StoreAway, match="no room"):
        leads(chain, ONE)


def test_one_of_this_machine_that_can_be_read_keeps_nobody_from_leading(open_it):
    """A coordinator that dies while the disk is full: steps go on, the next decision waits."""
    old, _ = leads(open_it(), ONE)
    old.put(decision(1))
    chain = open_it()
    chain.beat_s, chain.put = None, away
    new, stored = leads(chain, TWO)
    assert stored == decision(1)
    assert new.put(decision(2)) == Stored(away="no room")
    del chain.put
    assert new.put(decision(2)) == Stored()
    assert isinstance(old.put(decision(2)).error, CoordinatorUnavailable)


def test_what_cannot_be_stored_now_may_be_stored_again_by_the_same_bytes(open_it):
    leading, _ = leads(open_it(), ONE)
    leading.chain.shut = True
    assert leading.put(decision(1)) == Stored(away="the folder is away")
    leading.chain.shut = False
    assert leading.put(decision(1)) == Stored()
    assert leading.number == 2


def refuse(error, number, body):
    raise error


def test_what_is_refused_is_told(open_it):
    leading, _ = leads(open_it(), ONE)
    for error in (StorageError("too large"), ZeroDivisionError("a bug")):
        leading.chain.put = partial(refuse, error)
        assert leading.put(decision(1)) == Stored(error=error), "else whoever asked would wait for ever"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "expected a decision, found "),
        (Entry(by=ONE, decision=decision(1, job="theirs")).encoded, "expected the decisions of this job, found those"),
    ],
    ids=["no decision", "another job's"],
)
def test_nobody_leads_by_what_it_cannot_go_on_from(open_it, time, body, said):
    chain = open_it()
    chain.inner.put(1, body)
    with pytest.raises(CorruptBlob, match=said):
        leads(chain, TWO, alone=True)
    assert chain.newest() == (1, body), "nothing is put"
    signs(time, Leading(chain=chain, by=TWO, first=UNREAD, number=UNREAD), beats=10)
    with pytest.raises(CorruptBlob, match=said):
        leads(open_it(), ONE)
    assert time.now >= (9 + SILENT_BEATS) * chain.beat_s, "one of them saves what lives, until it is dead"


def test_a_sign_that_is_none_is_replaced_and_each_is_another(open_it, time):
    leading, _ = leads(open_it(), ONE)
    leading.chain.say(b"no sign of ours")
    said = []
    for beat in range(3):
        time.at((beat + 0.5) * leading.chain.beat_s, lambda: said.append(leading.chain.said()))
    time.at(4 * leading.chain.beat_s, lambda: sign(leads(open_it(), TWO, alone=True)[0]))
    show_life(leading, lambda: None)
    told = {"number": 1, "by": ONE, "address": ""}
    assert [msgspec.json.decode(each) for each in said] == [{**told, "count": count} for count in range(3)]


def test_a_database_has_no_signs_and_whoever_opens_it_leads(tmp_path):
    first = leading_in(tmp_path / "control.db")
    show_life(first, pytest.fail)
    second = leading_in(tmp_path / "control.db")
    assert (first.first, second.first) == (1, 2)
    assert isinstance(first.put(decision(1)).error, CoordinatorUnavailable)
    for each in (first, second):
        each.chain.close()
