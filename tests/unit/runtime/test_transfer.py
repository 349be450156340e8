"""State transfer over real links; holders that die, hang or lie are processes of their own."""

import contextlib
import hashlib
import os
import queue
import runpy
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import LIMIT_S, until

from holdfast.core.ids import WorkerId
from holdfast.errors import ReplicaDiverged, StaleGeneration, StateUnavailable
from holdfast.runtime.node.forks import FORKS, ForkedProcess
from holdfast.runtime.transport import transfer
from holdfast.runtime.transport.links.transport import LinkTransport
from holdfast.runtime.transport.links.wire import Kind, Label
from holdfast.runtime.transport.transfer import OfferedLayer, StateOffer, fetch, offer

HOLDER = Path(__file__).with_name("state_holder.py")
HELPER = runpy.run_path(str(HOLDER))
layer_bytes, contact = HELPER["layer_bytes"], HELPER["contact"]
A, B, C = HOLDERS = WorkerId(0, 0), WorkerId(1, 0), WorkerId(2, 0)
READER = WorkerId(9, 0)
STRETCH = 1 << 10


class Holder:
    """A test's end of one holder, and what it offers."""

    def __init__(self, worker, reader, *layers, lies="no", gate=0):
        self.worker = worker
        self._connection, theirs = FORKS.Pipe()
        given = (worker, READER, reader.here.address, reader.here.nonce, lies, gate, layers)
        told = {"init_globals": {"connection": theirs, "given": given}, "run_name": "state_holder"}
        self.process = ForkedProcess(target=runpy.run_path, args=(str(HOLDER),), kwargs=told, daemon=True)
        self.process.start()
        theirs.close()
        self.address, nonce, self.offer = self._connection.recv()
        reader.meet([contact((READER, reader.here.nonce), worker, self.address, nonce)])
        self._told = queue.SimpleQueue()
        self._asked = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                self._told.put(self._connection.recv())

    def wait_for_slice(self, number):
        """Waits until that slice was asked for."""
        while self._asked < number:
            self._told.get(timeout=LIMIT_S)
            self._asked += 1

    def asked(self):
        """How many slices it was asked for in all, once it is dead."""
        self.process.join(LIMIT_S)
        self._thread.join(LIMIT_S)
        return self._asked + self._told.qsize()

    def release(self):
        self._connection.send(None)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def stop(self):
        """Stops it; returns when it really is."""
        self.signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def end(self):
        self.process.kill()
        self.process.join(LIMIT_S)
        self._thread.join(LIMIT_S)  # it has read all that was told
        self._connection.close()


class Near:
    """A holder in this process."""

    def __init__(self, worker, reader, **how):
        self.worker = worker
        self.links = LinkTransport(worker, **how)
        introduce((READER, reader), (worker, self.links))

    def keep(self, layers, key="state", inexact=()):
        self.offer = offer(self.links.slices, key, layers, inexact)
        return self


def introduce(*ends):
    """Two workers and their links are told of each other."""
    for (one, ours), (other, theirs) in (ends, ends[::-1]):
        ours.meet([contact((one, ours.here.nonce), other, theirs.here.address, theirs.here.nonce)])


@pytest.fixture
def reader():
    """Whoever fetches."""
    links = LinkTransport(READER)
    yield links
    links.close()


@pytest.fixture
def start(reader):
    holders = []

    def make(*layers, **how):
        holders.append(Holder(HOLDERS[len(holders)], reader, *layers, **how))
        return holders[-1]

    yield make
    for holder in holders:
        holder.end()


@pytest.fixture
def near(reader):
    """Two holders in this process."""
    made = [Near(worker, reader) for worker in (A, B)]
    yield made
    for holder in made:
        holder.links.close()


@pytest.fixture
def get(reader):
    """Fetches layers from some holders."""

    def begin(holders, layers, *, stop=None, generation=1, **how):
        offers = {holder.worker: holder.offer for holder in holders}
        given = {"stretch_bytes": STRETCH, "stop": stop or threading.Event(), "generation": generation, **how}
        return {layer: bytes(data) for layer, data in fetch(reader.slices, offers, layers, **given).items()}

    return begin


@pytest.fixture
def fetching(get):
    """Fetches in a thread of its own; returns the future and the event that stops it."""
    with ThreadPoolExecutor(1) as pool:

        def begin(holders, layers, **how):
            stop = threading.Event()
            return pool.submit(get, holders, layers, stop=stop, **how), stop

        yield begin


def expected(*layers):
    return {layer: layer_bytes(layer, size) for layer, size in layers}


def fetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]


def test_one_holder_gives_everything(start, get):
    holder = start((0, 10 * STRETCH), (3, 5))
    assert get([holder], [0, 3]) == expected((0, 10 * STRETCH), (3, 5))
    holder.end()
    assert holder.asked() == 11
    assert not fetch_threads()


def test_several_holders_share_one_layer(start, fetching):
    holders = [start((0, 30 * STRETCH), gate=1) for _ in range(3)]
    result, _ = fetching(holders, [0])
    for holder in holders:
        holder.wait_for_slice(1)  # all of them at work at the same time
    for holder in holders:
        holder.release()
    assert result.result(LIMIT_S) == expected((0, 30 * STRETCH))
    for holder in holders:
        holder.end()
    assert sum(holder.asked() for holder in holders) == 30, "no slice was given twice"


def test_holders_of_different_layers_complete_each_other(start, get):
    a, b = start((0, 3 * STRETCH), (1, 2 * STRETCH)), start((1, 2 * STRETCH), (2, STRETCH + 1))
    layers = [(0, 3 * STRETCH), (1, 2 * STRETCH), (2, STRETCH + 1)]
    assert get([a, b], [0, 1, 2]) == expected(*layers)


def test_only_what_is_asked_for_is_fetched(start, get):
    holder = start((0, STRETCH), (1, STRETCH))
    assert get([holder], [1]) == expected((1, STRETCH))
    assert get([holder], []) == {}
    holder.end()
    assert holder.asked() == 1


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4), stretch=st.integers(1, 128))
def test_any_sizes_in_any_stretches(sizes, stretch):
    reader = LinkTransport(READER)
    layers = dict(enumerate(layer_bytes(index, size) for index, size in enumerate(sizes)))
    holders = [Near(worker, reader).keep(layers) for worker in (A, B)]
    try:
        offers = {holder.worker: holder.offer for holder in holders}
        stop = threading.Event()
        found = fetch(reader.slices, offers, layers, generation=1, stop=stop, stretch_bytes=stretch)
        assert {layer: bytes(data) for layer, data in found.items()} == layers
    finally:
        for links in (reader, *(holder.links for holder in holders)):
            links.close()


def test_a_holder_killed_in_mid_transfer_is_replaced_by_the_other(start, fetching):
    a, b = start((0, 40 * STRETCH), gate=4), start((0, 40 * STRETCH), gate=4)
    result, _ = fetching([a, b], [0])
    for holder in (a, b):
        holder.wait_for_slice(4)
    a.signal(signal.SIGKILL)
    assert a.asked() == 4, "it died while it owed its fourth slice"
    assert not result.done()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 40 * STRETCH))
    b.end()
    assert b.asked() == 40 - 3, "all but what had come from the dead one"


def test_all_holders_killed_in_mid_transfer(start, fetching):
    holders = [start((0, 40 * STRETCH), (1, STRETCH), gate=4) for _ in range(2)]
    result, _ = fetching(holders, [0, 1])
    for holder in holders:
        holder.wait_for_slice(4)
        holder.signal(signal.SIGKILL)
    error = result.exception(LIMIT_S)
    assert isinstance(error, StateUnavailable)
    assert error.layers == (0, 1)
    assert "worker 0.0: it closed its connection" in str(error) or "worker 0.0: its connection broke" in str(error)


def test_a_stopped_holder_is_given_up_after_the_time_for_one_slice(start, fetching):
    a, b = start((0, 40 * STRETCH), gate=4), start((0, 40 * STRETCH), gate=4)
    result, _ = fetching([a, b], [0], timeout_s=1.0)
    for holder in (a, b):
        holder.wait_for_slice(4)
    a.stop()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 40 * STRETCH))
    b.end()
    assert b.asked() == 40 - 3


def test_a_stopped_only_holder_is_named(start, fetching):
    holder = start((0, 40 * STRETCH), gate=4)
    result, _ = fetching([holder], [0], timeout_s=0.5)
    holder.wait_for_slice(4)
    holder.stop()
    error = result.exception(LIMIT_S)
    assert isinstance(error, StateUnavailable)
    assert "worker 0.0: gave nothing for 0.5 s" in str(error)


@pytest.mark.parametrize("lies", ["bits", "short"])
def test_a_holder_that_gives_wrong_bytes_is_dropped(start, fetching, lies):
    a, b = start((0, 20 * STRETCH), lies=lies, gate=2), start((0, 20 * STRETCH), gate=2)
    result, _ = fetching([a, b], [0])
    a.wait_for_slice(1)
    b.wait_for_slice(2)
    a.release()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 20 * STRETCH))


def test_many_layers_next_to_a_liar_are_all_right(start, get):
    layers = [(layer, 3 * STRETCH) for layer in range(12)]
    holders = [start(*layers, lies="bits"), start(*layers), start(*layers, lies="short")]
    assert get(holders, range(12)) == expected(*layers)


@pytest.mark.parametrize(
    ("lies", "told"),
    [("bits", "gave layer 0 with bits other than it offered"), ("short", "gave 1023 bytes instead of 1024")],
)
def test_wrong_bytes_are_never_accepted_though_nobody_else_is_there(start, lies, told, get):
    holder = start((0, 20 * STRETCH), lies=lies)
    with pytest.raises(StateUnavailable, match=told) as caught:
        get([holder], [0])
    assert caught.value.layers == (0,)


def test_equal_sizes_are_not_equal_bits(near, get):
    """The same number of bytes of one layer, of which one differs: whose would be right, nobody can say."""
    data = layer_bytes(1, STRETCH)
    a, b = near[0].keep({1: data}), near[1].keep({1: data[:-1] + bytes([data[-1] ^ 1])})
    with pytest.raises(
        ReplicaDiverged, match=r"layer 1: worker 0\.0 offers 1024 bytes.*, worker 1\.0 offers 1024 bytes"
    ):
        get([a, b], [1])
    assert get([a], [1]) == {1: data}, "each by itself is as good as the other"


def test_what_an_inverted_step_left_may_differ_and_is_taken_of_one(near, get):
    """Exact bytes before all; never a layer whose halves are two holders'."""
    mine, other = layer_bytes(1, 4 * STRETCH), layer_bytes(2, 4 * STRETCH)
    a, b = near[0].keep({1: mine}, inexact={1}), near[1].keep({1: other})
    assert get([a, b], [1]) == {1: other}
    a, b = near[0].keep({1: mine}, inexact={1}), near[1].keep({1: other}, inexact={1})
    assert get([a, b], [1]) == {1: mine}
    a, b = near[0].keep({1: mine}), near[1].keep({1: mine}, inexact={1})
    assert get([a, b], [1]) == {1: mine}


def test_what_most_hold_is_taken_where_nobody_is_exact():
    """So it comes from several at once, and who is lost is made up for."""
    told = [transfer.offered_layer(0, data, exact=False) for data in (b"one", b"two", b"two")]
    assert transfer.chosen_offer(dict(zip(HOLDERS, told, strict=True)), 0) == told[1]


def test_holders_that_differ_are_told_before_anything_is_fetched(start, get):
    a, b = start((0, STRETCH), (1, STRETCH)), start((0, STRETCH), (1, STRETCH + 1))
    told = r"layer 1: worker 0\.0 offers 1024 bytes with SHA-256 \w+\.\.\., worker 1\.0 offers 1025 bytes"
    with pytest.raises(ReplicaDiverged, match=told):
        get([a, b], [0, 1])
    assert get([a, b], [0]) == expected((0, STRETCH)), "what nobody asked for may differ"
    for holder in (a, b):
        holder.end()
    assert a.asked() + b.asked() == 1


def test_nothing_is_given_to_who_does_not_know_the_key_of_the_pair(reader, near, get):
    holder = near[0].keep({0: b"secret"})
    reader.meet(
        [contact((READER, reader.here.nonce), A, holder.links.here.address, holder.links.here.nonce, "another")]
    )
    with pytest.raises(StateUnavailable, match=r"worker 0\.0: it cannot be connected with"):
        get([holder], [0])


def test_long_layers_go_in_slices_of_a_chunk(start, get):
    size = (1 << 20) + 5
    holder = start((0, size), (1, 7))
    assert get([holder], [0, 1], stretch_bytes=4 << 20) == expected((0, size), (1, 7))
    holder.end()
    assert holder.asked() == 6


def test_a_sealed_link_is_sealed_at_both_ends_or_is_none(reader, get):
    layers = {0: layer_bytes(0, 3 << 20)}
    ours = LinkTransport(READER, sealed=True)
    holder = Near(A, ours, sealed=True).keep(layers)
    try:
        offers, stop = {A: holder.offer}, threading.Event()
        found = fetch(ours.slices, offers, layers, generation=1, stop=stop, stretch_bytes=1 << 20)
        assert {layer: bytes(data) for layer, data in found.items()} == layers
        introduce((READER, reader), (A, holder.links))
        with pytest.raises(StateUnavailable, match=r"worker 0\.0: it cannot be connected with"):
            get([holder], [0])
    finally:
        ours.close()
        holder.links.close()


@pytest.fixture
def held(near):
    """A holder that gives nothing before it may, and an event for when it was asked."""
    slices, asked, may = near[0].keep(expected((0, 40 * STRETCH))).links.slices, threading.Event(), threading.Event()
    give = slices._slice

    def wait(ask):
        asked.set()
        assert may.wait(LIMIT_S)
        return give(ask)

    slices._slice = wait
    yield near[0], asked, may
    may.set()


def both_enter(generation, *ends):
    pair = tuple(worker for worker, _ in ends)
    with ThreadPoolExecutor(len(ends)) as pool:
        for built in [pool.submit(links.build, generation, (pair,)) for _, links in ends]:
            built.result(LIMIT_S)


def test_a_fetch_goes_on_while_generations_begin_between_two_steps(reader, held, fetching):
    holder, asked, may = held
    ends = (A, holder.links), (READER, reader)
    both_enter(1, *ends)
    result, _ = fetching([holder], [0], generation=1)
    assert asked.wait(LIMIT_S)
    may.set()
    for generation in (2, 3, 4):
        both_enter(generation, *ends)
    assert result.result(LIMIT_S) == expected((0, 40 * STRETCH))


def test_a_generation_that_is_aborted_takes_its_transfers_with_it(reader, held, fetching, get):
    holder, asked, may = held
    result, stop = fetching([holder], [0], generation=1)
    assert asked.wait(LIMIT_S)
    holder.links.abort(1)
    may.set()
    assert not result.done()
    stop.set()
    assert isinstance(result.exception(LIMIT_S), StaleGeneration)
    with pytest.raises(StateUnavailable, match=r"gave nothing for 0\.1 s"):
        get([holder], [0], generation=1, timeout_s=0.1)
    assert get([holder], [0], generation=2) == expected((0, 40 * STRETCH))


def test_who_waits_until_all_has_left_does_not_wait_for_slices(reader, near):
    """Nor is more of them held than a few, of somebody who asks and does not read."""
    near[0].keep({0: bytes(256 << 10)})
    holder, slices = near[0].links, reader.slices
    both_enter(1, (A, holder), (READER, reader))
    begin, may = slices.begin, threading.Event()

    def stuck(source, chunk):
        assert may.wait(LIMIT_S)
        return begin(source, chunk)

    slices.begin = stuck
    for number in range(200):
        ask = msgspec.msgpack.encode(("state", 0, 0, 256 << 10))
        slices._send(A, Label(1, 0, Kind.ASK, place=number), memoryview(ask))
    outbox = holder._connections._senders[READER]._outbox
    until(lambda: len(outbox._waiting) >= 16)
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(holder.drain).result(LIMIT_S)
            assert not outbox.empty
        finally:
            may.set()


def test_what_is_no_longer_kept_is_refused(near, get):
    gone, other = near[0].keep({0: b"old"}, "step-1"), near[1].keep({0: b"old"}, "step-2")
    for _ in range(2):
        gone.links.slices.let_go("step-1")
    with pytest.raises(StateUnavailable, match=r"worker 0\.0: has no such bytes"):
        get([gone], [0])
    assert get([gone, other], [0]) == {0: b"old"}


def test_what_many_threads_keep_is_all_given(near, get):
    slices = near[0].links.slices
    with ThreadPoolExecutor(8) as pool:
        offers = list(pool.map(lambda n: offer(slices, str(n), {n: layer_bytes(n, 5 * STRETCH)}), range(16)))
    for number, made in enumerate(offers):
        near[0].offer = made
        assert get([near[0]], [number]) == expected((number, 5 * STRETCH))


def test_a_holder_that_has_ended_gives_nothing(near, get):
    near[0].keep({0: b"x"}).links.close()
    with pytest.raises(StateUnavailable, match=r"worker 0\.0: it cannot be connected with"):
        get([near[0]], [0])


def test_nobody_offers_a_layer(near, get):
    for holders, layers in (([near[0].keep({0: b"x"})], [0, 5]), ([], [5])):
        with pytest.raises(StateUnavailable, match="nobody offers them") as caught:
            get(holders, layers)
        assert caught.value.layers == (5,)


def test_a_holder_that_does_not_listen_is_left_out(start, reader, near, get):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        holder = start((0, 9 * STRETCH))
        nowhere = near[1].keep(expected((0, 9 * STRETCH)))
        reader.meet([contact((READER, reader.here.nonce), B, f"127.0.0.1:{free.getsockname()[1]}", bytes(16))])
        assert get([nowhere, holder], [0]) == expected((0, 9 * STRETCH))


def test_stop_ends_a_fetch_whose_holder_hangs(start, fetching):
    holder = start((0, 40 * STRETCH), gate=4)
    result, stop = fetching([holder], [0], timeout_s=10 * LIMIT_S, generation=7)
    holder.wait_for_slice(4)
    stop.set()
    error = result.exception(LIMIT_S)
    assert isinstance(error, StaleGeneration)
    assert error.generation == 7
    assert not fetch_threads()


def test_stop_before_the_begin_ends_it_too(start, get):
    holder = start((0, STRETCH), gate=1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StaleGeneration):
        get([holder], [0], stop=stop)


def test_a_fetch_can_be_repeated_after_a_stop(start, fetching, get):
    holder = start((0, 40 * STRETCH), gate=4)
    result, stop = fetching([holder], [0])
    holder.wait_for_slice(4)
    stop.set()
    assert isinstance(result.exception(LIMIT_S), StaleGeneration)
    holder.release()
    assert get([holder], [0]) == expected((0, 40 * STRETCH))


def test_a_bug_in_a_thread_is_raised_instead_of_waited_for(near, get, monkeypatch):
    monkeypatch.setattr(transfer._Board, "put", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get([near[0].keep({0: b"x"})], [0])


def test_an_offer_travels_as_a_closed_value():
    made = StateOffer(key="k", layers=(OfferedLayer(layer=0, size=1, sha256="00"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=StateOffer) == made
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(made)[:-1] + b',"more":1}', type=StateOffer)


def forget_high_water(pid):
    """From now on, not what making up the layer took."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def high_water_bytes(pid):
    """The most memory that a process had resident since."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_large_layer_needs_little_memory_at_its_holders(start, get, capsys):
    size = 64 << 20
    holders = [start((0, size), (1, 2 * STRETCH)) for _ in range(2)]
    for holder in holders:
        get([holder], [1])  # so that all that is loaded for the first slice is there
        forget_high_water(holder.process.pid)
    before = [high_water_bytes(holder.process.pid) for holder in holders]
    begun = time.monotonic()
    found = get(holders, [0], stretch_bytes=4 << 20)
    took_s = time.monotonic() - begun
    assert found == expected((0, size))
    grown = [high_water_bytes(holder.process.pid) - first for holder, first in zip(holders, before, strict=True)]
    with capsys.disabled():
        mib = [round(each / 2**20) for each in grown]
        print(f" [64 MiB from two holders in {took_s:.2f} s, {64 / took_s:.0f} MiB/s; their memory grew by {mib} MiB]")
    assert max(grown) < 4 << 20, "layers are not copied, and slices go one after another"


def test_who_gives_up_asks_for_nothing_more():
    board = transfer._Board({0: OfferedLayer(layer=0, size=8, sha256="")}, {A: frozenset({0})}, STRETCH)
    board.end()
    assert board.take(A) is None


def taken(board, worker):
    """What a holder is given to do next, which it may have to wait for."""
    found = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(board.take(worker)), daemon=True)
    thread.start()
    return found, thread


@pytest.fixture
def board(announced):
    """What two holders are to give: one layer, in one stretch."""
    data = b"state"
    wanted = {0: OfferedLayer(layer=0, size=len(data), sha256=hashlib.sha256(data).hexdigest())}
    board = transfer._Board(wanted, {A: frozenset({0}), B: frozenset({0})}, STRETCH)
    board._changed = announced
    return board


def test_when_all_is_there_nobody_has_more_to_do(board):
    board.put(A, board.take(A), b"state")
    found, _ = taken(board, B)
    assert found.get(timeout=LIMIT_S) is None


def test_who_waits_for_something_to_do_is_told_that_there_will_be_nothing(board):
    assert board.take(A) is not None
    found, _ = taken(board, B)
    assert board._changed.waiting.wait(LIMIT_S), "the only stretch is another's"
    board.end()
    assert found.get(timeout=LIMIT_S) is None
