import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
from tests.decisions import leading_in, newest_in, put_in
from tests.processes import process_of

from holdfast.control.chain.database import DatabaseChain
from holdfast.control.chain.entry import Entry
from holdfast.control.chain.leading import Stored
from holdfast.control.chain.opening import plans_in
from holdfast.control.membership import GridState, Roster, Running, StoredDecision, Upcoming
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import CorruptBlob, StoreAway
from holdfast.schedule.builders import adaptive_plan, regular_plan

PLAN = adaptive_plan(regular_plan(2, split_evenly(4, 2), 2), [WorkerId(0, 1)])

WRITER = """
import sys
from holdfast.control.chain.database import DatabaseChain
chain = DatabaseChain(sys.argv[1])
for number in range(1, 10**6):
    assert chain.put(number, bytes(5000))
    print(number, flush=True)
"""


def decision(revision, plan=PLAN):
    upcoming = Upcoming(generation=8, plan=PLAN, entering=frozenset({WorkerId(1, 1)}))
    return StoredDecision(
        revision=revision,
        generation=7,
        grid=GridState(baseline=PLAN),
        running=Running(plan=plan, upcoming=upcoming),
        roster=Roster(lost=frozenset({WorkerId(0, 1)})),
        processes=((WorkerId(0, 0), process_of(WorkerId(0, 0), 123)),),
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.db"


def test_nothing_is_decided_in_a_new_one(path):
    assert (newest_in(path), plans_in(path)) == (None, {})
    leading_in(path).chain.close()
    assert (newest_in(path), plans_in(path)) == (None, {}), "somebody leads, and has decided nothing so far"


def test_decisions_are_there_after_reopening(path):
    for number in (1, 2):
        put_in(path, decision(number))
    assert newest_in(path) == decision(2)
    put_in(path, decision(3, plan=None))
    assert newest_in(path) == decision(3, plan=None)
    leading_in(path).chain.close()
    assert newest_in(path) == decision(3, plan=None), "who leads knows what is decided"
    assert plans_in(path) == {7: PLAN, 8: PLAN}


def test_whole_numbers_are_as_good_as_others(path):
    """A period in units of one operation is whole; read, it is a float."""
    planned = decision(1)
    put_in(path, msgspec.structs.replace(planned, running=replace(planned.running, period=21)))
    assert newest_in(path).running.period == 21.0


def test_it_can_be_read_while_it_is_written(path):
    leading = leading_in(path)
    assert leading.put(decision(1)) == Stored()
    assert newest_in(path) == decision(1)
    leading.chain.close()


def test_what_put_returned_from_survives_a_kill(path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    with closing(DatabaseChain(path)) as chain, closing(sqlite3.connect(path)) as db:
        stored = [number for (number,) in db.execute("SELECT number FROM decisions ORDER BY number")]
        assert stored[: len(acknowledged)] == acknowledged
        assert len(stored) <= len(acknowledged) + 1
        assert chain.newest() == (stored[-1], bytes(5000))


def test_what_is_no_database_is_named(path):
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(CorruptBlob, match=r"db is corrupt: expected a database of decisions, found file is not"):
        DatabaseChain(path)


def test_the_database_of_another_program_is_named_and_left_as_it_is(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(CorruptBlob, match="expected a database of decisions, found one of bookmarks"):
        DatabaseChain(path)
    assert path.read_bytes() == before


def test_a_table_of_other_columns_is_named(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE decisions (verdict TEXT)")
    with pytest.raises(CorruptBlob, match="no such column"):
        newest_in(path)


EARLIER = b'{"by": "aaaaaaaaaaaaaaaa", "decision": {"revision": 1, "generation": 1, "healthy": {}, "lost": []}}'


def test_one_decision_is_always_the_same_bytes():
    """Sets have no order, and that of their values is another in every process."""
    workers = [WorkerId(p, s) for p in range(9) for s in range(9)]
    one, other = (
        StoredDecision(revision=1, generation=1, grid=GridState(baseline=PLAN), roster=Roster(lost=frozenset(w)))
        for w in (workers, reversed(workers))
    )
    one, other = (Entry(by=16 * "a", decision=each).encoded for each in (one, other))
    assert one == other
    assert b'"lost":[{"pipeline":0,"stage":0},{"pipeline":0,"stage":1}' in one


LATER = Entry(by=16 * "a", decision=decision(1)).encoded.replace(b'"lost":', b'"loved":[],"lost":')


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"revision": 1}', b"\xff", EARLIER, LATER])
def test_a_decision_that_is_none_is_named(path, body):
    DatabaseChain(path).close()
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("INSERT INTO decisions VALUES (1, ?)", (body,))
        opened.commit()
    for read in (newest_in, plans_in, leading_in):
        with pytest.raises(CorruptBlob, match=r"control\.db is corrupt"):
            read(path)


def test_a_full_disk_is_told_from_damage_and_takes_decisions_again_later(make_disk):
    disk = make_disk("256k")
    path, filler = disk / "control.db", disk / "filler"
    leading = leading_in(path)
    assert leading.put(decision(1)) == Stored()
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * (1 << 18))

    for number in range(2, 200):  # its last page has room yet
        if (stored := leading.put(decision(number))) != Stored():
            break
    assert stored.away == f"{path}: database or disk is full"
    leading.chain.close()
    leading = leading_in(path, since=decision(number - 1))
    assert leading.put(decision(number)).away, "a coordinator that dies now is followed by one that leads, and waits"
    filler.unlink()
    assert leading.put(decision(500)) == Stored()
    assert newest_in(path) == decision(500)
    leading.chain.close()


def test_one_that_cannot_be_opened_now_is_away(tmp_path):
    with pytest.raises(StoreAway, match="unable to open database file"):
        DatabaseChain(tmp_path / "nowhere" / "control.db")
