import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
from tests.processes import process_of

from holdfast.control.membership import GridState, Roster, Running, Upcoming
from holdfast.control.store import DecisionStore, StoredDecision
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import CorruptBlob, StoreAway
from holdfast.schedule.builders import adaptive_plan, regular_plan

PLAN = adaptive_plan(regular_plan(2, split_evenly(4, 2), 2), [WorkerId(0, 1)])

WRITER = """
import sys
from holdfast.control.membership import GridState
from holdfast.control.store import DecisionStore, StoredDecision
from holdfast.schedule.builders import regular_plan
from holdfast.core.placement import split_evenly
store, plan = DecisionStore(sys.argv[1]), regular_plan(1, split_evenly(2, 1), 1)
for revision in range(1, 10**6):
    layers = tuple(range(500))
    store.put(StoredDecision(revision=revision, generation=1, grid=GridState(baseline=plan), lost_layers=layers))
    print(revision, flush=True)
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


def test_a_new_store_is_empty(path):
    store = DecisionStore(path)
    assert store.latest() is None
    store.close()


def test_decisions_are_there_after_reopening(path):
    store = DecisionStore(path)
    for revision in (1, 2):
        store.put(decision(revision))
    store.close()
    again = DecisionStore(path)
    assert again.latest() == decision(2)
    again.put(decision(3, plan=None))
    assert again.latest() == decision(3, plan=None)
    again.close()


def test_whole_numbers_are_as_good_as_others(path):
    """A period in units of one operation is whole; read, it is a float."""
    store, planned = DecisionStore(path), decision(1)
    store.put(msgspec.structs.replace(planned, running=replace(planned.running, period=21)))
    assert store.latest().running.period == 21.0
    store.close()


def test_a_revision_is_decided_once(path):
    store = DecisionStore(path)
    store.put(decision(1))
    with pytest.raises(sqlite3.IntegrityError):
        store.put(decision(1, plan=None))
    assert store.latest() == decision(1)
    store.close()


def test_it_can_be_read_while_it_is_written(path):
    store, reader = DecisionStore(path), DecisionStore(path)
    store.put(decision(1))
    assert reader.latest() == decision(1)
    store.close()
    reader.close()


def test_what_put_returned_from_survives_a_kill(path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    store = DecisionStore(path)
    stored = [row[0] for row in sqlite_rows(path)]
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) <= len(acknowledged) + 1
    assert store.latest().revision == stored[-1]
    store.close()


def sqlite_rows(path):
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT revision FROM decisions ORDER BY revision").fetchall()
    finally:
        db.close()


def test_what_is_no_database_is_named(path):
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(CorruptBlob, match=r"db is corrupt: expected a database of decisions, found file is not"):
        DecisionStore(path)


def test_the_database_of_another_program_is_named_and_left_as_it_is(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
    before = path.read_bytes()
    with pytest.raises(CorruptBlob, match="expected a database of decisions, found one of bookmarks"):
        DecisionStore(path)
    assert path.read_bytes() == before


def test_a_table_of_other_columns_is_named(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE decisions (verdict TEXT)")
    with pytest.raises(CorruptBlob, match="no such column"):
        DecisionStore(path).latest()


EARLIER = b'{"revision": 1, "generation": 1, "healthy": {}, "plan": null, "lost": []}'


def test_one_decision_is_always_the_same_bytes():
    """Sets have no order, and that of their values is another in every process."""
    workers = [WorkerId(p, s) for p in range(9) for s in range(9)]
    one, other = (
        StoredDecision(revision=1, generation=1, grid=GridState(baseline=PLAN), roster=Roster(lost=frozenset(w)))
        for w in (workers, reversed(workers))
    )
    assert one.encoded == other.encoded
    assert b'"lost":[{"pipeline":0,"stage":0},{"pipeline":0,"stage":1}' in one.encoded


LATER = decision(1).encoded.replace(b'"lost":', b'"loved":[],"lost":')


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"revision": 1}', b"\xff", EARLIER, LATER])
def test_a_decision_that_is_none_is_named(path, body):
    DecisionStore(path).close()
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("INSERT INTO decisions VALUES (1, ?)", (body,))
        opened.commit()
    store = DecisionStore(path)
    for read in (store.latest, store.plans):
        with pytest.raises(CorruptBlob, match=r"control\.db is corrupt"):
            read()
    store.close()


def test_a_full_disk_is_told_from_damage_and_takes_decisions_again_later(make_disk):
    disk = make_disk("256k")
    path, filler = disk / "control.db", disk / "filler"
    store = DecisionStore(path)
    store.put(decision(1))
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(b"x" * (1 << 18))

    def fill():
        for revision in range(2, 200):  # its last page has room yet
            store.put(decision(revision))

    with pytest.raises(StoreAway, match=r"control\.db: database or disk is full"):
        fill()
    filler.unlink()
    store.put(decision(500))
    assert store.latest() == decision(500)
    store.close()


def test_one_that_cannot_be_opened_now_is_away(tmp_path):
    with pytest.raises(StoreAway, match="unable to open database file"):
        DecisionStore(tmp_path / "nowhere" / "control.db")
