"""Who leads: whoever put the newest entry. When others may try, what the one before learns, how decisions are put."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from holdfast.control.chain.entry import Entry, read_entry
from holdfast.control.chain.port import Chain
from holdfast.control.membership.storing import StoredDecision
from holdfast.control.messages import Ended
from holdfast.errors import CoordinatorUnavailable, CorruptBlob, HoldfastError, StoreAway

__all__ = ["UNREAD", "Leading", "Stored", "end_for_good", "how_it_ended", "is_led", "lead", "leads_at", "show_life"]

UNREAD = 2**62
"""A number that no entry has: of who leads, to save what lives, though what was decided cannot be read."""
_SILENT_BEATS = 5
_POLLS = 8
"""How often a sign of life is looked for while one is due."""
_SEEN_S = 6.0
"""What is written on one machine is seen on others by then, on usual file servers."""
_RETRY_S = 0.05
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What became of a decision that was to be stored.

    Attributes:
        away: why it is not known yet: it is put again until it is. "": it is known.
        error: why it is not stored, nor will be; None: it is, durably.
    """

    away: str = ""
    error: Exception | None = None


class _Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sign of life: of who put the entry ``number`` when it began to lead; ``count`` tells one sign from the next.

    ``address``: where it listens, and others that stand by, joined by commas; empty: that is not known yet.
    """

    number: int
    by: str
    count: int
    address: str = ""


@dataclass(slots=True, kw_only=True)
class Leading:
    """The chain of a coordinator that leads.

    Attributes:
        chain: to which it puts.
        by: 16 hexadecimal digits that it has drawn.
        first: the number of the entry by which it began to lead; :data:`UNREAD` where none could be read.
        number: that of the newest entry that it knows to be there.
        shown_at: when it could give a sign of life last, or was to begin with it.
        owed: entries that are not known to be there, in order: that by which it began to lead, and those of decisions.
    """

    chain: Chain
    by: str
    first: int
    number: int
    shown_at: float = field(default_factory=lambda: time.monotonic())
    owed: deque[bytes] = field(default_factory=deque)
    _tried: StoredDecision | None = None

    @property
    def is_seen(self) -> bool:
        """Whether signs of life can be given: where they cannot, others are to follow."""
        beat_s = self.chain.beat_s
        return beat_s is None or time.monotonic() - self.shown_at < _SILENT_BEATS * beat_s

    def put(self, decision: StoredDecision) -> Stored:
        """Puts a decision, once; may be called in any thread, by one at a time, and again with the same decision."""
        try:
            if decision != self._tried:
                self.owed.append(Entry(by=self.by, decision=decision).encoded)
                self._tried = decision
            while self.owed:
                self._put(self.owed[0])
                self.owed.popleft()
        except StoreAway as error:
            return Stored(away=str(error))
        except Exception as error:  # noqa: BLE001 - whoever waits for the answer would wait for ever
            return Stored(error=error)
        return Stored()

    def _put(self, body: bytes) -> None:
        if not self.chain.put(self.number + 1, body):
            text = f"{self.chain}: another coordinator leads; the decision of this one was not stored"
            raise CoordinatorUnavailable(text)
        self.number += 1


def lead(
    chain: Chain,
    *,
    job: str,
    by: str,
    alone: bool,
    note: Callable[[str, bool], None],
    heard: Callable[[], object] = lambda: None,
) -> tuple[Leading, StoredDecision | None]:
    """Returns, once we lead, how to go on with the chain, and the decision in force; None: nothing was decided so far.

    Args:
        chain: of the job.
        job: which it is.
        by: see :class:`Leading`.
        alone: whether whoever led is dead. Else their signs of life, where there are any, are waited for first.
        note: told once when the store is waited for (True), and once when it answers again (False).
        heard: returns what changes whenever whoever leads is heard of otherwise than through the chain.

    A store that several machines share is waited for. One of this machine alone that can be read but not written, as on
    a full disk, keeps nobody from leading: the first decision waits then.

    Raises:
        StoreAway: one of this machine cannot be read, or nothing is in it.
        CorruptBlob: the newest entry is none, or of another job; we lead nothing.
        StorageError: the store refuses what is needed.
    """
    shared = chain.beat_s is not None
    calls, silent = _Calls(note=note, patient=shared), ""
    while True:
        waits = shared and not alone
        empty = waits and calls.answered(partial(_is_empty, chain))
        if waits and not empty:
            said = _sign(_wait_for_silence(chain, calls, heard))
        found = None if empty else calls.answered(chain.newest)
        number, leads, decision = (0, "", None) if found is None else (found.number, *_read(chain, job, found.body))
        if waits and not empty and leads not in (silent, said and said.by):
            silent = leads  # it began to lead while we waited for another one, and may be yet to give a sign of life
            continue
        ours = Entry(by=by, decision=decision).encoded
        first = number + 1
        try:
            if calls.answered(partial(chain.put, first, ours)):
                return Leading(chain=chain, by=by, first=first, number=first), decision
        except StoreAway:
            if found is None:
                raise
            return Leading(chain=chain, by=by, first=first, number=number, owed=deque([ours])), decision
        alone = False  # somebody was before us


def _is_empty(chain: Chain) -> bool:
    """Whether nobody has led so far."""
    try:
        return chain.newest() is None
    except CorruptBlob:
        return False


def _read(chain: Chain, job: str, body: bytes) -> tuple[str, StoredDecision | None]:
    """Who put an entry, and its decision."""
    entry = read_entry(body, str(chain))
    if entry.decision is not None and entry.decision.job != job:
        raise CorruptBlob(str(chain), "the decisions of this job", "those of another")
    return entry.by, entry.decision


def _sign(said: bytes | None) -> _Sign | None:
    """What is said, if that is a sign of life."""
    try:
        return None if said is None else msgspec.json.decode(said, type=_Sign)
    except msgspec.MsgspecError:
        return None


@dataclass(slots=True, kw_only=True)
class _Calls:
    """Calls to a store that may be away.

    Attributes:
        note: told once when it is waited for (True), and once when it answers again (False).
        patient: whether to wait at all.
        away: whether it is waited for.
    """

    note: Callable[[str, bool], None]
    patient: bool
    away: bool = False

    def answered(self, call: Callable[[], _Found]) -> _Found:
        """Returns what a call returns, however long the store is away, if we are patient."""
        while True:
            try:
                found = call()
            except StoreAway as error:
                if not self.patient:
                    raise
                if not self.away:
                    self.note(f"{error}; waiting for it", True)
                self.away = True
                time.sleep(_RETRY_S)
            else:
                if self.away:
                    self.note("the store of decisions answers again", False)
                self.away = False
                return found


def _wait_for_silence(chain: Chain, calls: _Calls, heard: Callable[[], object]) -> bytes | None:
    """Returns the last sign of life, once whoever leads has given none for so long that it seems dead.

    While the store is away nobody can give one: that is no silence.
    """
    assert chain.beat_s is not None, "nobody else can lead where nobody sees signs of life"
    known: tuple[bytes | None, object] = (None, heard())
    since = looked = time.monotonic()
    beat_s = chain.beat_s

    def look() -> bool:
        nonlocal known, since, looked
        at = time.monotonic()  # before the look: for how long we are stopped behind it is nobody's silence
        if at - looked > beat_s:  # so are we before it, and whoever leads may have been, too
            since = at
        looked = at
        try:
            said = (chain.said(), heard())
        except StoreAway:
            since = time.monotonic()
            raise
        if said != known:
            known, since = said, time.monotonic()
        return at - since >= _SILENT_BEATS * beat_s

    while not calls.answered(look):
        time.sleep(beat_s / _POLLS)
    return known[0]


def leads_at(chain: Chain) -> str:
    """Returns where whoever leads, or led last, listens, and others stand by, joined by commas; "": it is not known.

    Raises:
        StoreAway: the store cannot be used now.
    """
    said = _sign(chain.said())
    return "" if said is None else said.address


def how_it_ended(chain: Chain) -> Ended | None:
    """Returns how the job has ended; None: it has not, as far as was decided.

    Raises:
        StoreAway: the store cannot be used now.
        CorruptBlob: the newest entry is none.
    """
    decision = _newest(chain)[1]
    return None if decision is None else decision.ended


def is_led(chain: Chain) -> bool:
    """Whether somebody leads and gives signs of life; where the job has not ended, it may take seconds to know.

    Raises:
        StoreAway: the store cannot be used now.
        CorruptBlob: the newest entry is none.
    """
    ended, known = how_it_ended(chain), chain.said()
    if chain.beat_s is None or known is None or ended is not None:
        return False
    until = time.monotonic() + max(_SILENT_BEATS * chain.beat_s, _SEEN_S)
    while time.monotonic() < until:
        time.sleep(chain.beat_s / _POLLS)
        if chain.said() != known:
            return True
    return False


def end_for_good(chain: Chain, by: str, why: Ended, begins: StoredDecision | None = None) -> None:
    """Puts it that the job has ended, unless it has: whoever leads ends itself, and whoever follows tells all.

    Args:
        chain: of the job.
        by: see :class:`Leading`.
        why: how it has ended.
        begins: what is decided where nothing was; None: then nobody can lead on, and nothing is put.

    Raises:
        StoreAway: the store cannot be used now.
        CorruptBlob: the newest entry is none.
    """
    put = False
    while not put:
        number, decision = _newest(chain)
        decision = decision or begins
        if decision is None or decision.ended is not None:
            return
        put = chain.put(number + 1, Entry(by=by, decision=msgspec.structs.replace(decision, ended=why)).encoded)
    for count in range(2 * _POLLS if chain.beat_s else 0):  # whoever leads looks once a beat, and may write over it
        chain.say(msgspec.json.encode(_Sign(number + 1, by, count)))
        time.sleep((chain.beat_s or 0.0) / _POLLS)


def _newest(chain: Chain) -> tuple[int, StoredDecision | None]:
    """The number of the newest entry, 0 if there is none, and the decision that it has."""
    found = chain.newest()
    return (0, None) if found is None else (found.number, read_entry(found.body, str(chain)).decision)


def show_life(leading: Leading, deposed: Callable[[], None], address: Callable[[], str] = lambda: "") -> None:
    """Gives signs of life for as long as we lead, then returns. For a thread of its own.

    Args:
        leading: how we lead.
        deposed: called once another one leads.
        address: returns where we listen, and others that stand by, joined by commas; empty as long as we do not.
    """
    chain = leading.chain
    if chain.beat_s is None:
        return
    for count in itertools.count():
        with contextlib.suppress(HoldfastError):  # what cannot be said now is said later; puts tell what is wrong
            said = _sign(chain.said())
            if said is not None and said.number > leading.first:  # of one who began to lead after us
                break
            chain.say(msgspec.json.encode(_Sign(leading.first, leading.by, count, address())))
            leading.shown_at = time.monotonic()
        time.sleep(chain.beat_s)
    deposed()
