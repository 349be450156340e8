"""What every store of decisions promises: of all that are put under a number, one is there, for ever."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from tests.lossy import LossyProxy
from tests.waiting import LIMIT_S, until

from holdfast.control.chain.blobs import BlobChain
from holdfast.control.chain.opening import open_chain
from holdfast.errors import MissingBlob, StoreAway
from holdfast.storage.blobs import LocalStore

WRITERS, NUMBERS = 5, 12
LOST = 0.3


@pytest.fixture(params=["database", "folder", "s3", "etcd"])
def url(request, tmp_path):
    """Of a chain that has no entry yet."""
    match request.param:
        case "database":
            return str(tmp_path / "control.db")
        case "folder":
            return f"file://{tmp_path}/chain"
        case "s3":
            return request.getfixturevalue("bucket")
        case _:
            return f"{request.getfixturevalue('shared_etcd')}/{uuid.uuid4().hex}"


@pytest.fixture
def chain(url):
    opened = open_chain(url)
    yield opened
    opened.close()


@pytest.fixture(params=["s3", "etcd"])
def lossy(request, monkeypatch):
    """The url of a chain behind a server whose answers get lost, and that server's proxy."""
    if request.param == "s3":
        url, endpoint = request.getfixturevalue("bucket"), request.getfixturevalue("s3_endpoint")
        proxy = LossyProxy(urlsplit(endpoint).port, LOST)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    else:
        shared = urlsplit(request.getfixturevalue("shared_etcd"))
        proxy = LossyProxy(shared.port, LOST)
        url = f"etcd://127.0.0.1:{proxy.port}/{uuid.uuid4().hex}"
    yield url, proxy
    proxy.close()


def test_entries_are_numbered_and_the_newest_is_found_however_many_there_are(url, chain):
    assert chain.newest() is None
    other = open_chain(url)
    for number in range(1, 21):
        assert chain.put(number, b"entry %d" % number)
        assert other.newest() == (number, b"entry %d" % number)
    other.close()


def test_a_number_is_put_once_and_whose_answer_was_lost_may_ask_again(url, chain):
    other = open_chain(url)
    assert chain.put(1, b"ours")
    assert chain.put(1, b"ours"), "as if the answer had been lost"
    assert not other.put(1, b"theirs")
    assert chain.newest() == other.newest() == (1, b"ours")
    assert other.put(2, b"theirs")
    assert not chain.put(2, b"ours")
    assert chain.newest() == (2, b"theirs")
    other.close()


def test_who_is_far_behind_puts_nothing(url, chain):
    other = open_chain(url)
    for number in (1, 2, 3):
        assert chain.put(number, b"ours")
    for number in (1, 2, 3):
        assert not other.put(number, b"theirs")
    assert other.newest() == (3, b"ours")
    other.close()


def test_large_entries_come_back_whole(chain):
    body = bytes(range(256)) * 8000
    assert chain.put(1, body)
    assert chain.newest() == (1, body)


def write(url, name, won, limit):
    """Puts entries until there are enough, each again and again until it is known what became of it."""
    chain = open_chain(url)

    def known(call):
        while True:
            try:
                return call()
            except StoreAway:
                pass

    while True:
        found = known(chain.newest)
        number = 0 if found is None else found.number
        if number >= limit:
            return chain.close()
        body = f"{name} {number + 1}".encode()
        if known(lambda: chain.put(number + 1, body)):  # noqa: B023 - called at once
            won.append((number + 1, name))


def race(url):
    """Several write at once; returns who put which number, as they know it themselves."""
    won, begin = [], threading.Barrier(WRITERS)

    def one(name):
        begin.wait(LIMIT_S)
        write(url, name, won, NUMBERS)

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(one, name) for name in range(WRITERS)]:
            done.result(LIMIT_S)
    return won


def test_of_several_that_put_one_number_one_has_it(url, chain):
    won = race(url)
    assert sorted(number for number, _ in won) == list(range(1, len(won) + 1))
    number, body = chain.newest()
    assert number == len(won) >= NUMBERS
    assert body.decode() == f"{dict(won)[number]} {number}"


def test_lost_answers_leave_no_doubt_in_the_end(lossy):
    """One may not learn that an entry was its own, if another came behind it; nobody takes another's for its own."""
    url, proxy = lossy
    won = race(url)
    numbers = [number for number, _ in won]
    assert len(numbers) == len(set(numbers))
    assert proxy.fates["lost"] > 0
    chain = open_chain(url)
    found = []
    until(lambda: read(chain, found), "an answer that is not lost")
    owners = dict(won)
    (number, body) = found[0]
    assert body.decode() == f"{owners.get(number, body.decode().split()[0])} {number}"
    chain.close()


def read(chain, found):
    try:
        found.append(chain.newest())
    except StoreAway:
        return False
    return True


def test_who_leads_gives_signs_of_life_that_others_see(url, chain):
    if chain.beat_s is None:
        chain.say(b"one")
        assert chain.said() is None, "nobody else could see them, so nobody is to wait for them"
        return
    other = open_chain(url)
    assert other.said() is None
    for sign in (b"one", b"two", b""):
        chain.say(sign)
        assert other.said() == sign
    assert other.newest() is None, "a sign is no entry"
    other.close()


def test_a_server_that_does_not_answer_is_away(lossy):
    url, proxy = lossy
    chain = open_chain(url)
    proxy.close()
    for call in (chain.newest, chain.said, lambda: chain.put(1, b"entry"), lambda: chain.say(b"sign")):
        with pytest.raises(StoreAway):
            call()
    chain.close()


def test_a_folder_that_is_none_now_is_away_and_may_come_back(tmp_path):
    place = tmp_path / "chain"
    place.write_text("a file, where a folder is to be mounted")
    chain = open_chain(f"file://{place}")
    with pytest.raises(StoreAway, match="cannot be written: File exists"):
        chain.put(1, b"entry")
    place.unlink()
    assert chain.put(1, b"entry")


def test_what_was_put_in_a_folder_survives_a_power_cut(tmp_path, power_cuts):
    chain = open_chain(f"file://{tmp_path}/chain")
    assert chain.put(1, b"entry")
    assert not open_chain(f"file://{tmp_path}/chain").put(1, b"another")
    (path,) = (tmp_path / "chain").iterdir()
    assert power_cuts.spare(path)


class _Stale(LocalStore):
    """A folder as another machine sees it at first: what is new has a name there, and nothing behind it."""

    fresh = False

    def get(self, name, *sizes):
        if self.fresh:
            return super().get(name, *sizes)
        self.fresh = True
        raise MissingBlob(name)


def test_an_entry_that_is_seen_and_cannot_be_read_yet_is_asked_for_again(tmp_path):
    writes, reads = BlobChain(LocalStore(tmp_path)), BlobChain(_Stale(tmp_path))
    assert writes.put(1, b"ours")
    with pytest.raises(StoreAway):
        reads.newest()
    assert reads.newest() == (1, b"ours")
    reads = BlobChain(_Stale(tmp_path))
    with pytest.raises(StoreAway):
        reads.put(1, b"theirs")
    assert not reads.put(1, b"theirs")
    assert reads.said() is None, "no sign is no error"


def test_what_is_kept_is_read_in_order_the_newest_last(chain):
    bodies = [f"entry {number}".encode() for number in range(1, 4)]
    for number, body in enumerate(bodies, start=1):
        assert chain.put(number, body)
    assert list(chain.bodies()) in (bodies, bodies[-1:])


def test_what_a_process_that_was_killed_had_half_written_is_no_entry(tmp_path):
    folder = BlobChain(LocalStore(tmp_path, reserved_bytes=0))
    assert folder.put(1, b"one")
    for name in ("sign.tmp-abc", "decision-000000000002.tmp-abc"):
        (tmp_path / name).write_bytes(b"half")
    assert list(folder.bodies()) == [b"one"]
