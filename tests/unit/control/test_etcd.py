"""Decisions in a real etcd: what it alone does, or refuses. For the rest see tests/contract/test_chain.py."""

import base64
import random
import zlib

import msgspec
import pytest

from holdfast.control.chain.entry import Entry
from holdfast.control.chain.etcd import parse_etcd_url
from holdfast.control.chain.leading import Stored, lead
from holdfast.control.chain.opening import open_chain
from holdfast.control.membership import GridState, Roster, Running, StoredDecision, Upcoming
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError, CorruptBlob, StorageError, StoreAway
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.schedule.builders import regular_plan
from holdfast.strategies.adaptive import adaptive

PLAN = regular_plan(2, split_evenly(2, 1), 1)


def decision(number, lost=()):
    return StoredDecision(
        revision=number,
        generation=1,
        grid=GridState(baseline=PLAN),
        running=Running(plan=PLAN),
        roster=Roster(lost=frozenset(lost)),
    )


@pytest.fixture
def chain(etcd_server):
    return open_chain(f"{etcd_server.url}/job")


def refused(chain):
    """What is said of a decision that etcd will never take; it would be waited for for ever, were it asked again."""
    with pytest.raises(StorageError) as caught:
        chain.put(1, random.Random(0).randbytes(1000))
    assert not isinstance(caught.value, StoreAway)
    return str(caught.value)


def test_a_decision_that_is_too_large_is_refused_with_what_would_help(etcd_server, chain):
    etcd_server.kill()
    etcd_server.start("--max-request-bytes", "200")
    text = refused(chain)
    assert "etcdserver: request is too large; start etcd with a larger --max-request-bytes" in text
    assert chain.newest() is None


def test_a_full_etcd_is_told_with_what_would_help(etcd_server, chain):
    etcd_server.etcd.call(
        "maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE", "memberID": member(etcd_server)}
    )
    assert "etcdserver: mvcc: database space exceeded; compact and defragment etcd" in refused(chain)


def member(server):
    return server.etcd.call("maintenance/status", {})["header"]["member_id"]


def test_a_server_that_is_no_etcd_is_told(etcd_server):
    for wrong in ("nowhere", "../metrics"):
        with pytest.raises(StorageError, match=r"HTTP status \d+, and no answer of etcd") as caught:
            etcd_server.etcd.call(wrong, {})
        assert not isinstance(caught.value, StoreAway)


ENTRY = Entry(by=16 * "a", decision=decision(1)).encoded
SPOILT = {
    "nothing at all": b"",
    "not compressed": b"no decision",
    "cut": zlib.compress(ENTRY)[:-9],
    "no JSON": zlib.compress(b'{"revision": 1, "gener'),
    "another struct": zlib.compress(b'{"revision": 1}'),
    "a plan that none can be": zlib.compress(ENTRY.replace(b'"stage":0', b'"stage":-1')),
}


@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
def test_what_is_no_decision_is_named_as_that(etcd_server, chain, value):
    assert chain.put(1, ENTRY)
    etcd_server.etcd.call("kv/put", {"key": key("test/job/newest"), "value": base64.b64encode(value).decode()})
    said = rf"^etcd at 127\.0\.0\.1:{etcd_server.port}, test/job/newest is corrupt: expected a decision, found .+$"
    with pytest.raises(CorruptBlob, match=said):
        lead(chain, job="", by=16 * "b", alone=True, note=pytest.fail)


def test_only_the_newest_decision_is_kept(etcd_server, chain):
    for number in range(1, 12):
        assert chain.put(number, b"entry %d" % number)
    query = {"key": key("test/job/"), "range_end": key("test/job0")}
    (left,) = etcd_server.etcd.call("kv/range", query)["kvs"]
    assert (left["key"], left["version"]) == (key("test/job/newest"), "11")


def key(text):
    return base64.b64encode(text.encode()).decode()


def test_the_plans_of_a_large_grid_fit(chain):
    """Its JSON is larger than any request that etcd takes by default."""
    plan = regular_plan(16, split_evenly(32, 16), 64)
    lost = adaptive(ClusterView(rules=JobRules(steps=9), baseline=plan, lost=frozenset([WorkerId(1, 1)]))).plan
    prepared = Upcoming(generation=3, plan=plan, entering=frozenset({WorkerId(1, 1)}))
    large = StoredDecision(
        revision=1, generation=2, grid=GridState(baseline=plan), running=Running(plan=lost, upcoming=prepared)
    )
    assert len(msgspec.json.encode(large)) > 1.5 * 2**20
    leading, _ = lead(chain, job="", by=16 * "a", alone=True, note=pytest.fail)
    assert leading.put(large) == Stored()
    assert Entry.decoded(chain.newest().body).decision == large


def test_the_form_of_the_address():
    assert parse_etcd_url("etcd://127.0.0.1:2379") == ("127.0.0.1", 2379, "holdfast")
    assert parse_etcd_url("etcd://etcd.example:2379/team/jobs/") == ("etcd.example", 2379, "team/jobs")
    for wrong in ("etcd://:1", "etcd://host", "etcd://host:x", "http://host:1", "postgres"):
        with pytest.raises(ConfigError, match=r"^control\.store: expected etcd://HOST:PORT\[/PREFIX\], got '"):
            parse_etcd_url(wrong)
