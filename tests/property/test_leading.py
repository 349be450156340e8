"""Several coordinators that each hold themselves for the one: answers get lost, whoever was away comes back."""

import itertools
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.chain.database import DatabaseChain
from holdfast.control.chain.entry import Entry
from holdfast.control.chain.leading import Stored, lead
from holdfast.control.membership import GridState, StoredDecision
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable, StoreAway
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(1, split_evenly(1, 1), 1)
FATES = ("told", "told", "lost before", "lost behind")


class Lossy:
    """A chain whose next put fares as is said: what was put may be there though nobody hears of it."""

    def __init__(self, chain):
        self._chain, self.fate = chain, "told"
        self.beat_s, self.newest = None, chain.newest  # it is not waited for

    def put(self, number, body):
        fate, self.fate = self.fate, "told"
        if fate == "lost before":
            raise StoreAway("it was not asked")
        put = self._chain.put(number, body)
        if fate == "lost behind":
            raise StoreAway("it did not answer")
        return put


class Coordinator:
    """One process: it leads as far as it knows, and what it decided is known to be stored or not yet."""

    def __init__(self, chain, name):
        self.chain, self._names, self._lives = Lossy(chain), name, 0
        self.leading, self.decided = None, None

    def begin(self):
        """A new process of it takes over, or does not come to it."""
        self._lives += 1
        self.leading, self.decided = None, None
        by = f"{self._names}{self._lives:015x}"
        try:
            self.leading, _ = lead(self.chain, job="", by=by, alone=True, note=print)
        except StoreAway:
            return

    def decide(self, revision):
        """Puts what it has decided, or decides something; returns its number, once that is known to be there."""
        self.decided = self.decided or StoredDecision(revision=revision, generation=1, grid=GridState(baseline=PLAN))
        stored = self.leading.put(self.decided)
        if stored.away:
            return None
        decided, self.decided = self.decided, None
        if stored != Stored():
            assert isinstance(stored.error, CoordinatorUnavailable)
            self.leading = None
            return None
        return self.leading.number, self.leading.by, decided


def newest(chain):
    return Entry.decoded(chain.newest().body)


MOVES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["begin", "decide", "decide", "decide"]), st.sampled_from(FATES)),
    min_size=10,
    max_size=60,
)


@settings(max_examples=300)
@given(moves=MOVES)
def test_one_history_whoever_believes_to_lead(moves):
    with closing(DatabaseChain(":memory:")) as chain:
        all_of_them = [Coordinator(chain, name) for name in "abc"]
        told, firsts = [], {}
        for revision, (who, what, fate) in enumerate(moves, start=1):
            one = all_of_them[who]
            one.chain.fate = fate
            if what == "begin":
                one.begin()
                if one.leading is not None and newest(chain).by == one.leading.by:  # else it has yet to put it
                    firsts[one.leading.by] = one.leading.first
            elif one.leading is not None and (known := one.decide(revision)):
                told.append(known)
                own = firsts.setdefault(known[1], one.leading.first)
                later = [first for first in firsts.values() if first > own]
                assert known[0] < min(later, default=known[0] + 1), "who was superseded decides nothing more"
        entries = dict(enumerate(map(Entry.decoded, chain.bodies()), start=1))
        for number, by, decided in told:
            assert (entries[number].by, entries[number].decision) == (by, decided), "what was told is there for ever"
        assert len({number for number, _, _ in told}) == len(told)
        for (_, before), (_, entry) in itertools.pairwise(entries.items()):
            if entry.by != before.by:
                assert entry.decision == before.decision, "who begins goes on from what was decided"
