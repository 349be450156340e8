"""Leadership and decisions in a real etcd."""

import base64
import queue
import re
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest
from tests.waiting import LIMIT_S

from holdfast.config.load import parse_job
from holdfast.control.etcd import Etcd, EtcdStore, Leadership, parse_store_url
from holdfast.control.membership import GridState, Roster, Running, Upcoming
from holdfast.control.store import StoredDecision
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError, CoordinatorUnavailable, CorruptBlob, StorageError, StoreAway
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


class Coordinator:
    """What of a coordinator speaks to etcd."""

    def __init__(self, server, **options):
        etcd = Etcd(host="127.0.0.1", port=server.port, **options)
        self.lost = threading.Event()
        self.leadership = Leadership(etcd, "job", self.lost.set)
        self.store = EtcdStore(etcd, "job", self.leadership)


def expire(server):
    """Lets the leader's lease run out at once, as if it had been stopped for long."""
    for lease in server.etcd.call("lease/leases", {})["leases"]:
        server.etcd.call("lease/revoke", {"ID": lease["ID"]})


def test_decisions_are_remembered_in_order(etcd_server):
    one = Coordinator(etcd_server)
    assert one.store.latest() is None
    one.leadership.win()
    for number in (1, 2, 10):
        one.store.put(decision(number))
    assert one.store.latest() == decision(10)
    assert Coordinator(etcd_server).store.latest() == decision(10)


def test_a_decision_whose_answer_was_lost_may_be_stored_again_but_not_another_under_its_number(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(decision(1))
    one.store.put(decision(1))
    with pytest.raises(StorageError, match="decision 1 is stored already"):
        one.store.put(decision(1, lost=(WorkerId(0, 0),)))
    assert one.store.latest() == decision(1)


def test_who_leads_no_more_cannot_decide(etcd_server):
    old, new = Coordinator(etcd_server), Coordinator(etcd_server)
    old.leadership.win()
    old.store.put(decision(1))
    expire(etcd_server)
    with pytest.raises(CoordinatorUnavailable, match="does not lead any more"):
        old.store.put(decision(2))
    new.leadership.win()
    with pytest.raises(CoordinatorUnavailable, match="does not lead any more"):
        old.store.put(decision(2))
    new.store.put(decision(2, lost=(WorkerId(0, 0),)))
    assert new.store.latest() == decision(2, lost=(WorkerId(0, 0),))
    assert old.lost.wait(LIMIT_S), "it is told when it tries to renew its lease"
    assert not new.lost.is_set()


def test_only_one_leads(etcd_server):
    first, second = Coordinator(etcd_server), Coordinator(etcd_server)
    first.leadership.win()
    won = threading.Event()

    def stand_by():
        second.leadership.win()
        won.set()

    threading.Thread(target=stand_by, daemon=True).start()
    assert not won.wait(3.0), "the leader renews its lease, which would have run out by now"
    expire(etcd_server)
    assert won.wait(LIMIT_S)


def test_decisions_wait_for_an_etcd_that_is_away(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(decision(1))
    etcd_server.kill()
    stored = threading.Event()

    def put():
        one.store.put(decision(2))
        stored.set()

    threading.Thread(target=put, daemon=True).start()
    assert not stored.wait(0.5)
    etcd_server.start()
    assert stored.wait(LIMIT_S)
    assert one.store.latest() == decision(2)


def test_that_etcd_is_waited_for_is_said_once_and_that_it_is_back_too(etcd_server):
    said = queue.SimpleQueue()
    one = Coordinator(etcd_server, note=said.put)
    one.leadership.win()  # from now on a thread renews the lease, and waits for etcd, too
    etcd_server.kill()
    putting = threading.Thread(target=one.store.put, args=(decision(1),), daemon=True)
    putting.start()
    assert re.fullmatch(rf"etcd at 127\.0\.0\.1:{etcd_server.port}: .*; waiting for it", said.get(timeout=LIMIT_S))
    etcd_server.start()
    assert said.get(timeout=LIMIT_S).endswith(": it answers again")
    putting.join(LIMIT_S)
    assert one.store.latest() == decision(1)
    assert said.empty()


class Late(Etcd):
    """The first call that fails comes back only when it may."""

    failed: ClassVar[threading.Event]
    may: ClassVar[threading.Event]

    def call(self, path, body):
        try:
            return super().call(path, body)
        except StoreAway:
            if not Late.failed.is_set():
                Late.failed.set()
                assert Late.may.wait(LIMIT_S)
            raise


def test_a_failure_from_before_etcd_was_back_is_no_news(etcd_server, monkeypatch):
    monkeypatch.setattr(Late, "failed", threading.Event(), raising=False)
    monkeypatch.setattr(Late, "may", threading.Event(), raising=False)
    said = queue.SimpleQueue()
    etcd = Late(host="127.0.0.1", port=etcd_server.port, note=said.put)
    etcd_server.kill()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(etcd.patiently, "maintenance/status", {})
        assert Late.failed.wait(LIMIT_S)
        other = pool.submit(etcd.patiently, "maintenance/status", {})
        assert said.get(timeout=LIMIT_S).endswith("; waiting for it")
        etcd_server.start()
        assert other.result(LIMIT_S)
        assert said.get(timeout=LIMIT_S).endswith(": it answers again")
        Late.may.set()
        assert late.result(LIMIT_S)
    assert said.empty()


def refused(one):
    """What is said of a decision that etcd will never take; it would be waited for for ever, were it asked again."""
    with pytest.raises(StorageError) as caught:
        one.store.put(decision(1))
    assert not isinstance(caught.value, StoreAway)
    return str(caught.value)


def test_a_decision_that_is_too_large_is_refused_with_what_would_help(etcd_server):
    etcd_server.kill()
    etcd_server.start("--max-request-bytes", "200")
    one = Coordinator(etcd_server)
    one.leadership.win()
    text = refused(one)
    assert "etcdserver: request is too large; start etcd with a larger --max-request-bytes" in text
    assert one.store.latest() is None


def test_a_full_etcd_is_told_with_what_would_help(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    etcd_server.etcd.call(
        "maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE", "memberID": member(etcd_server)}
    )
    assert "etcdserver: mvcc: database space exceeded; compact and defragment etcd" in refused(one)


def member(server):
    return server.etcd.call("maintenance/status", {})["header"]["member_id"]


def test_a_server_that_is_no_etcd_is_told(etcd_server):
    for wrong in ("nowhere", "../metrics"):
        with pytest.raises(StorageError, match=r"HTTP status \d+, and no answer of etcd") as caught:
            etcd_server.etcd.patiently(wrong, {})
        assert not isinstance(caught.value, StoreAway)


class Slow(Etcd):
    """Between this one's calls the first lease runs out, as if it had been stopped."""

    granted = 0

    def call(self, path, body):
        answer = super().call(path, body)
        if path == "lease/grant":
            Slow.granted += 1
            if Slow.granted == 1:
                super().call("lease/revoke", {"ID": answer["ID"]})
        return answer


def test_who_was_stopped_while_it_became_the_leader_tries_again(etcd_server, monkeypatch):
    monkeypatch.setattr(Slow, "granted", 0)
    leadership = Leadership(Slow(host="127.0.0.1", port=etcd_server.port), "job", pytest.fail)
    leadership.win()
    assert leadership.revision > 0
    assert Slow.granted == 2


SPOILT = {
    "nothing at all": b"",
    "not compressed": b"no decision",
    "cut": zlib.compress(msgspec.json.encode(decision(1)))[:-9],
    "no JSON": zlib.compress(b'{"revision": 1, "gener'),
    "another struct": zlib.compress(b'{"revision": 1}'),
    "a plan that none can be": zlib.compress(msgspec.json.encode(decision(1)).replace(b'"stage":0', b'"stage":-1')),
}


@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
def test_what_is_no_decision_is_named_as_that(etcd_server, value):
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(decision(1))
    key = base64.b64encode(b"job/decisions/000000000001").decode()
    etcd_server.etcd.call("kv/put", {"key": key, "value": base64.b64encode(value).decode()})
    said = rf"^etcd at 127\.0\.0\.1:{etcd_server.port}, job/decisions/ is corrupt: expected a decision, found .+$"
    with pytest.raises(CorruptBlob, match=said):
        one.store.latest()


def test_only_the_newest_decision_is_kept(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    for number in range(1, 12):
        one.store.put(decision(number))
    query = {"key": key("job/decisions/"), "range_end": key("job/decisions0"), "keys_only": True}
    (left,) = etcd_server.etcd.call("kv/range", query)["kvs"]
    assert left["key"] == key("job/decisions/000000000011")
    assert etcd_server.etcd.call("kv/range", {"key": key("job/leader")})["count"] == "1"


def key(text):
    return base64.b64encode(text.encode()).decode()


def test_the_plans_of_a_large_grid_fit(etcd_server):
    """Its JSON is larger than any request that etcd takes by default."""
    plan = regular_plan(16, split_evenly(32, 16), 64)
    lost = adaptive(ClusterView(rules=JobRules(steps=9), baseline=plan, lost=frozenset([WorkerId(1, 1)]))).plan
    prepared = Upcoming(generation=3, plan=plan, entering=frozenset({WorkerId(1, 1)}))
    large = StoredDecision(
        revision=1, generation=2, grid=GridState(baseline=plan), running=Running(plan=lost, upcoming=prepared)
    )
    assert len(msgspec.json.encode(large)) > 1.5 * 2**20
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(large)
    assert one.store.latest() == large


def test_the_form_of_the_address():
    assert parse_store_url("etcd://127.0.0.1:2379") == ("127.0.0.1", 2379, "holdfast")
    assert parse_store_url("etcd://etcd.example:2379/team/jobs/") == ("etcd.example", 2379, "team/jobs")
    for wrong in ("etcd://:1", "etcd://host", "etcd://host:x", "http://host:1", "postgres"):
        with pytest.raises(ConfigError, match=r"^control\.store: expected etcd://HOST:PORT\[/PREFIX\], got '"):
            parse_store_url(wrong)


def test_several_coordinators_need_etcd():
    tree = {
        "model": {"kind": "gpt"},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
        "control": {"coordinators": 2},
    }
    with pytest.raises(ConfigError, match=r"control\.coordinators: 2 need control\.store: etcd://HOST:PORT"):
        parse_job(tree)
