"""What is particular to links: they stay, they are proved, and somebody may sit on the line."""

import concurrent.futures
import contextlib
import hmac
import os
import random
import signal
import socket
import threading
import time
from functools import partial

import pytest
from tests.waiting import LIMIT_S, until

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.instructions import Payload, Receive, Reduction
from holdfast.core.summing import SumSize
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.transport.links import sealing
from holdfast.runtime.transport.links.handshake import dialing, mark
from holdfast.runtime.transport.links.wire import HEADER_BYTES, Chunk, Kind, Label
from holdfast.runtime.transport.port import Expected, MessageKey

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)
HELLO = {False: b"holdfast link 1\n", True: b"holdfast seal 1\n"}
PROOF_BYTES = 32
SEAL_BYTES = 4 + 16
"""A record of a sealed link is longer than what it holds by its size and its tag."""


def key(microbatch=0, generation=1, step=0):
    return MessageKey(generation=generation, step=step, payload=Payload.ACTIVATION, microbatch=microbatch, boundary=1)


def begin(peers, generation, *given):
    ids = [peer.worker for peer in peers]
    pairs = tuple((a, b) for a in ids for b in ids if a < b)
    return [peer.call("build", generation, pairs, *given) for peer in peers]


def build(peers, generation, *given):
    for call in begin(peers, generation, *given):
        call.result()


def again(peers, generation):
    for peer in peers:
        peer.abort(generation - 1)
    build(peers, generation)


def exchange(a, b, generation, values=(1, 2, 3)):
    for one, other in ((a, b), (b, a)):
        one.do("send", key(generation=generation), other.worker, "int64", list(values))
    for one, other in ((a, b), (b, a)):
        one.do("post", "in", key(generation=generation), other.worker, "int64", (len(values),))
        assert one.do("wait", "in") == ("int64", list(values))


def name(worker):
    return str(worker).encode().ljust(16, b"\0")


def here(links, worker):
    """Where a worker listens, and its number, as soon as it has told."""
    until(lambda: worker in links.here_now)
    return links.here_now[worker]


class OnTheLine:
    """Sits between a worker that sends and one that takes, and does with what goes by what ``change`` says.

    Attributes:
        heard: what went by, from the sender, on each connection.
        ends: set when the connections that stand are to be cut, once, after what is just being passed on.
    """

    def __init__(self, address, change=None):
        self._to = address
        self._change = change or (lambda data: data)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = []
        self.ends, self.ended = threading.Event(), threading.Event()
        self._open = []
        self._threads = []
        self._start(self._accept)

    def _start(self, target, *given):
        self._threads.append(threading.Thread(target=target, args=given, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._to.rpartition(":")
            ours = socket.create_connection((host, int(port)))
            self._open += [theirs, ours]
            self.heard.append(bytearray())
            self._start(self._pass, theirs, ours, partial(self._changed, self.heard[-1]), self._cut_if_due)
            self._start(self._pass, ours, theirs, _pieces, lambda: None)

    def _pass(self, source, target, changed, then):
        with contextlib.suppress(OSError):
            for data in changed(source):
                target.sendall(data)
                then()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _changed(self, heard, source):
        """What of the sender's bytes is passed on."""
        for data in _pieces(source):
            heard += data
            yield self._change(data)

    def _cut_if_due(self):
        """By the one thread that passes on what the sender says: a second one might cut what was made anew."""
        if self.ends.is_set() and not self.ended.is_set():
            self.ended.set()
            self.cut()

    def cut(self, how=socket.SHUT_RDWR):
        for each in tuple(self._open):  # whoever calls again meanwhile is another
            with contextlib.suppress(OSError):
                each.shutdown(how)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(LIMIT_S)
        for each in (self._listener, *self._open):
            each.close()


def _pieces(source):
    while data := source.recv(1 << 16):
        yield data


@contextlib.contextmanager
def listened_to(links, change=None, sits=OnTheLine):
    """A and B, and somebody between A and B, as A sees it."""
    b = links.start(B)
    line = sits(here(links, B).address, change)
    links.via[A, B] = line.address
    a = links.start(A)
    try:
        yield a, b, line
    finally:
        line.close()


def test_links_stay_while_generations_come_and_go(either):
    peers = a, b = [either.start(worker) for worker in (A, B)]
    build(peers, 1)
    exchange(a, b, 1)
    again(peers, 2)
    before = [(peer.do("open_files"), peer.do("threads"), memory(peer)) for peer in peers]
    for generation in range(3, 203):
        again(peers, generation)
        exchange(a, b, generation)
    after = [(peer.do("open_files"), peer.do("threads"), memory(peer)) for peer in peers]
    for (files, threads, used), (files_now, threads_now, used_now) in zip(before, after, strict=True):
        assert (files_now, threads_now) == (files, threads)
        assert used_now < used + (16 << 20)


def memory(peer):
    with open(f"/proc/{peer.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_new_process_of_a_worker_takes_the_place_of_the_old_one(links):
    a, b = [links.start(worker) for worker in (A, B)]
    build([a, b], 1)
    links.kill(B)
    assert links.died(B)
    a.do("post", "in", key(), B, "int64", (1,))
    assert isinstance(a.call("wait", "in").error(), PeerLost)
    a.abort(1)
    del links.here_now[B]
    b = links.start(B)
    assert here(links, B)
    build([a, b], 2)
    exchange(a, b, 2)


def test_a_generation_may_be_known_before_the_new_process_that_takes_part_in_it(links):
    """What was said to nobody yet but that we have come is said to the new process, though the old one was called."""
    a, b = [links.start(worker) for worker in (A, B)]
    build([a, b], 1)
    links.kill(B)
    assert links.died(B)
    a.abort(1)
    del links.here_now[B], links.peers[A]
    b = links.start(B)
    assert here(links, B)
    calls = begin([a, b], 2)
    assert all(call.is_blocked() for call in calls)
    links.peers[A] = a
    links.tell_all()
    for call in calls:
        call.result()
    exchange(a, b, 2)


def test_that_the_old_process_had_come_says_nothing_of_the_new_one(links):
    a, b = [links.start(worker) for worker in (A, B)]
    build([a, b], 1)
    for peer in (a, b):
        peer.abort(1)
    assert b.call("build", 2, ((A, B),)).is_blocked(), "it has come, and waits for us"
    links.kill(B)
    assert links.died(B)
    del links.here_now[B]
    b = links.start(B)
    assert here(links, B)
    links.tell_all()
    call = a.call("build", 2, ((A, B),))
    assert call.is_blocked(), "the new one has yet to come"
    b.do("build", 2, ((A, B),))
    call.result()
    exchange(a, b, 2)


def test_a_stranger_who_says_what_a_worker_said_is_sent_away(either):
    """A recorded handshake is worth nothing: the other end draws another number each time."""
    with listened_to(either) as (a, b, line):
        build([a, b], 1)
        exchange(a, b, 1)
        (heard,) = line.heard
        size = either.hello_bytes
        hello, proof = bytes(heard[:size]), bytes(heard[size : size + PROOF_BYTES])
        before = b.do("open_files")
        for said in (hello + proof, hello + bytes(PROOF_BYTES)):
            with caller(either, B) as stranger:
                stranger.sendall(said)
                assert len(receive(stranger, either.answer_bytes)) == either.answer_bytes
                assert receive(stranger, 1) == b"", "it is hung up on"
        until(lambda: b.do("open_files") == before)
        again([a, b], 2)
        exchange(a, b, 2)


def test_a_worker_cannot_speak_as_another(either):
    """C knows the key that it shares with B; that proves nothing of A."""
    a, b, _ = peers = [either.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    to_b = either.told[C][B]
    with caller(either, B) as stranger:
        share = sealing.Share().public if either.sealed else b""
        said = HELLO[either.sealed] + name(A) + mark(here(either, A).nonce) + bytes(16) + share
        stranger.sendall(said)
        said += name(B) + to_b.here.nonce + receive(stranger, either.answer_bytes)[:-PROOF_BYTES]
        stranger.sendall(hmac.digest(to_b.key, b"dialer" + said, "sha256"))
        assert receive(stranger, 1) == b"", "hung up on"
    handshake(either, C, here(either, C).nonce, to_b).close()
    again([a, b], 2)
    exchange(a, b, 2)


def handshake(links, worker, nonce, peer, then=b""):
    """Calls as somebody whose key we know, and says something; returns the open connection."""
    stranger = caller(links, peer.worker)
    speaking, came = dialing(worker, nonce, peer, sealing.Share if links.sealed else None), None
    try:
        while True:
            turn = speaking.send(came)
            stranger.sendall(turn.send)
            came = receive(stranger, turn.read)
    except StopIteration as end:
        if links.sealed and then:
            end.value.seal.sending(stranger).sendmsg([memoryview(then)])
        else:
            stranger.sendall(then)
        return stranger


def caller(links, worker, source="127.0.0.1"):
    host, _, port = here(links, worker).address.rpartition(":")
    made = socket.create_connection((host, int(port)), source_address=(source, 0))
    made.settimeout(LIMIT_S)
    return made


def receive(connection, size):
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < size and (came := connection.recv(size - len(found))):
            found += came
    return found


GARBAGE = random.Random(0)


def test_garbage_and_silence_cost_little_and_disturb_nobody(either):
    peers = a, b = [either.start(worker) for worker in (A, B)]
    build(peers, 1)
    for peer in peers:
        peer.do("limit_files", 1024)
    exchange(a, b, 1)
    before = [(peer.do("open_files"), memory(peer)) for peer in peers]
    with contextlib.ExitStack() as silent:
        for number in range(1100):
            for worker in (A, B):
                connection = silent.enter_context(caller(either, worker))
                if number % 2:
                    connection.sendall(GARBAGE.randbytes(number % 50))
        for number in range(10_000):
            with caller(either, (A, B)[number % 2]) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(GARBAGE.randbytes(100))
        for peer, (files, used) in zip(peers, before, strict=True):
            assert peer.do("open_files") <= files + 64 + 1, "and one who is just being let in"
            assert memory(peer) < used + (16 << 20)
        again(peers, 2)
        exchange(a, b, 2)
    newcomer = either.start(C)
    again([a, b, newcomer], 3)
    exchange(a, newcomer, 3)


def test_stolen_hellos_do_not_keep_a_worker_from_its_peers(either):
    """48 who say what A has said, from its address and from others, and then nothing."""
    with listened_to(either) as (a, b, line):
        build([a, b], 1)
        stolen, before = bytes(line.heard[0][: either.hello_bytes]), b.do("open_files")
        with contextlib.ExitStack() as strangers:
            open_ones = []
            for number in range(48):
                open_ones.append(strangers.enter_context(caller(either, B, f"127.0.0.{1 + number % 3}")))
                open_ones[-1].sendall(stolen)
            answers = {receive(each, either.answer_bytes) for each in open_ones}
            assert len(answers) == 48, "each is asked something else"
            line.cut()
            for generation in (2, 3):
                again([a, b], heal([a, b], 10 * generation) + 1)
            c = either.start(C)
            again([a, b, c], 40)
            exchange(c, b, 40)
            assert {receive(each, 1) for each in open_ones} == {b""}, "hung up on"
        links_of_c = 2
        until(lambda: b.do("open_files") <= before + links_of_c)


def test_a_worker_without_descriptors_waits_for_some_and_lets_others_in_then(either):
    peers = a, b = [either.start(worker) for worker in (A, B)]
    build(peers, 1)
    b.do("limit_files", b.do("open_files") + 6)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(caller(either, B))
        c = either.start(C)
        assert here(either, C)
        again(peers, 2)
        exchange(a, b, 2)
        for peer in peers:
            peer.abort(2)
        builds = begin([a, b, c], 3)
        began, used = time.monotonic(), processor_time(b)
        assert builds[2].is_blocked(), "B cannot let it in"
        while time.monotonic() < began + 0.5:
            time.sleep(0.05)
        assert processor_time(b) - used < 0.2, "it does not try all the time"
    for each in builds:
        each.result()
    exchange(c, b, 3)


def processor_time(peer):
    """Seconds."""
    with open(f"/proc/{peer.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("how", [socket.SHUT_RDWR, socket.SHUT_WR], ids=["cut", "half-closed"])
def test_a_link_that_is_cut_ends_its_generation_and_no_more(links, how):
    with listened_to(links) as (a, b, line):
        build([a, b], 1)
        exchange(a, b, 1)
        b.do("post", "in", key(5), A, "int64", (1,))
        waiting = b.call("wait", "in")
        assert waiting.is_blocked()
        line.cut(how)
        assert isinstance(waiting.error(), PeerLost)
        until(lambda: a.call("send", key(6), B, "int64", [1]).error() is not None)
        again([a, b], 2)
        exchange(a, b, 2)


@pytest.mark.parametrize("after", [10, 70, 100, 140, 200, 5_000, 70_000, 300_000])
def test_what_was_cut_off_is_not_taken_for_whole(either, after):
    """In the greeting, in a header, in the middle of a message; the next generation connects anew."""
    passed, values = 0, list(range(100_000))

    def change(data):
        nonlocal passed
        if line.ends.is_set():
            return data
        passed += len(data)
        if passed < after:
            return data
        line.ends.set()
        return data[: len(data) - (passed - after)]

    with listened_to(either, change) as (a, b, line):
        builds = begin([a, b], 1)
        greeting = either.hello_bytes + PROOF_BYTES
        if after > greeting + HEADER_BYTES + (SEAL_BYTES if either.sealed else 0):
            assert [build.error() for build in builds] == [None, None]
            b.do("post", "in", key(), A, "int64", (len(values),))
            a.call("send", key(), B, "int64", values).error()
            assert isinstance(b.call("wait", "in").error(), PeerLost)
            until(lambda: a.call("send", key(9), B, "int64", [1]).error() is not None)
        assert line.ended.wait(LIMIT_S)
        for peer in (a, b):
            peer.abort(1)
        exchange(a, b, heal([a, b], 2), values)


def test_bytes_that_change_their_order_are_not_taken(links):
    """Two chunks of a message, the second one first."""
    seen = bytearray()

    def change(data):
        seen.extend(data)
        begin_at = links.hello_bytes + PROOF_BYTES + HEADER_BYTES
        chunk = HEADER_BYTES + (1 << 20)
        if len(seen) <= begin_at:
            return data
        if len(seen) < begin_at + 2 * chunk:
            return bytes(data[: max(0, begin_at - (len(seen) - len(data)))])
        first, second, rest = (bytes(seen[begin_at + k * chunk : begin_at + (k + 1) * chunk]) for k in range(3))
        return second + first + rest

    with listened_to(links, change) as (a, b, _line):
        build([a, b], 1)
        b.do("post", "in", key(), A, "int64", (400_000,))
        a.do("send", key(), B, "int64", list(range(400_000)))
        error = b.call("wait", "in").error()
        assert isinstance(error, PeerLost)
        assert "chunk 2 where 1 was to come" in str(error)


def test_only_both_ends_can_read_what_goes_over_a_sealed_link(either):
    secret = random.Random(0).randbytes(4096)
    values = [secret[at] for at in range(len(secret))]
    with listened_to(either) as (a, b, line):
        build([a, b], 1)
        a.do("send", key(), B, "uint8", values)
        b.do("post", "in", key(), A, "uint8", (len(values),))
        assert b.do("wait", "in") == ("uint8", values)
        (heard,) = line.heard
        assert (secret in heard, secret[:16] in heard) == (not either.sealed, not either.sealed)


def test_messages_on_a_slow_line_come_whole(either):
    def change(data):
        time.sleep(0.002)
        return data

    with listened_to(either, change) as (a, b, _line):
        build([a, b], 1)
        for generation in (1, 2):
            exchange(a, b, generation, tuple(range(30_000)))
            again([a, b], generation + 1)


def test_whoever_does_not_read_holds_nobody_up(either):
    peers = a, b = [either.start(worker) for worker in (A, B)]
    build(peers, 1)
    values = list(range(100_000))
    os.kill(b.pid, signal.SIGSTOP)
    for number in range(20):
        a.do("send", key(number), B, "int64", values)
    os.kill(b.pid, signal.SIGCONT)
    for number in range(20):
        b.do("post", number, key(number), A, "int64", (len(values),))
    assert all(b.do("wait", number) == ("int64", values) for number in range(20))


@pytest.fixture
def stopped(either):
    """A that has more to send than goes on the line, and B that reads nothing; B goes on by a signal."""
    peers = a, b = [either.start(worker) for worker in (A, B)]
    build(peers, 1)
    os.kill(b.pid, signal.SIGSTOP)
    for number in range(20):
        a.do("send", key(number), B, "int64", [number] * 100_000)
    yield a, b
    with contextlib.suppress(ProcessLookupError):
        os.kill(b.pid, signal.SIGCONT)


def test_draining_ends_once_all_has_left(stopped):
    a, b = stopped
    draining = a.call("drain")
    assert draining.is_blocked()
    os.kill(b.pid, signal.SIGCONT)
    assert draining.error() is None
    for number in range(20):
        assert b.do("receive", key(number), A, "int64", (100_000,)) == ("int64", [number] * 100_000)
    a.do("drain")


def test_draining_ends_with_its_generation(stopped):
    a, _ = stopped
    draining = a.call("drain")
    assert draining.is_blocked()
    a.abort(1)
    assert isinstance(draining.error(), StaleGeneration)


def test_draining_tells_what_was_lost(stopped, either):
    """Also what was lost before anybody asked; what is said in the next generation is whole."""
    a, _ = stopped
    draining = a.call("drain")
    assert draining.is_blocked()
    either.kill(B)
    assert isinstance(draining.error(), PeerLost)
    assert isinstance(a.call("drain").error(), PeerLost)
    a.abort(1)
    build([a], 2)
    a.do("drain")


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(Label(1, 0, Kind.ACTIVATION, 0, 1), 8, 0, 9),
        Chunk(Label(1, 0, Kind.ACTIVATION, 0, 1), 1 << 60, 0, 8),
        Chunk(Label(1, 0, Kind.ACTIVATION, 0, 1), 16, 8, 8),
        Chunk(Label(1, 0, Kind.ACTIVATION, 0, 1), 2 << 20, 0, 2 << 20),
        Chunk(Label(2, 0, Kind.ACTIVATION, 0, 1), 8, 0, 8),
        Chunk(Label(1, 0, Kind.ENTER), 8, 0, 8),
        Chunk(Label(1, 0, Kind.ASK), 300, 0, 300),
        Chunk(Label(1, 0, Kind.SLICE), 1 << 20, 0, 1 << 20),
    ],
    ids=[
        "more than announced",
        "endless",
        "without a beginning",
        "too long",
        "of the future",
        "enter with bytes",
        "a long question",
        "a long slice",
    ],
)
def test_a_worker_that_says_what_cannot_be_is_hung_up_on(either, chunk):
    """Somebody who knows C's key speaks as C."""
    a, b = [either.start(worker) for worker in (A, B)]
    assert here(either, B)
    to_b = either.pretend(C)[B]
    before = memory(b)
    build([a, b], 1)
    with handshake(either, C, bytes(16), to_b, chunk.pack() + bytes(64)) as speaking:
        assert receive(speaking, 1) == b""
    assert memory(b) < before + (64 << 20)
    exchange(a, b, 1)


def expected(*messages, sums=()):
    """A plan in which each of these micro-batches comes from A with so many int64."""
    receives = [
        (Receive(Payload.ACTIVATION, MicroBatch(m, 0, m), A, 1), TensorSpec(shape=(size,), dtype="int64"))
        for m, size in messages
    ]
    return Expected(messages=tuple(receives), sums=sums)


UNPLANNED = {
    "no such message": ([key(2)], 1000, "micro-batch 2: the plan has no such message"),
    "longer": ([key(0)], 1001, "micro-batch 0 of 8008 bytes: the plan gives it 8000"),
    "three steps": (
        [key(m, step=s) for s in range(3) for m in range(2)],
        1000,
        "4 messages of 32000 bytes wait, and no more may",
    ),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_what_the_plan_does_not_have_ends_the_link(either, case):
    keys, size, why = UNPLANNED[case]
    a, b = [either.start(worker) for worker in (A, B)]
    builds = begin([a, b], 1, None, expected((0, 1000), (1, 1000)))
    assert [each.error() for each in builds] == [None, None]
    b.do("post", "awaited", key(1, step=9), A, "int64", (1000,))
    waiting = b.call("wait", "awaited")
    for each in keys:
        a.call("send", each, B, "int64", list(range(size))).error()
    error = waiting.error()
    assert isinstance(error, PeerLost)
    assert why in str(error)
    again([a, b], 2)
    exchange(a, b, 2)


def test_two_steps_of_a_plan_may_come_before_they_are_asked_for(links):
    """Its sums too, in parts; what was asked for leaves room for what comes after it."""
    size = 300_000
    peers = a, b, c = [links.start(worker) for worker in (A, B, C)]
    sums = ((Reduction((0,), (A, B, C)), SumSize(header=0, part=8 * size)),)
    build(peers, 1, None, expected((0, 1000), (1, 1000), sums=sums))
    for step in range(3):
        for peer in (a, c):
            peer.do("reduce", f"sum {step}", (A, B, C), "int64", [step] * size, 0, 1, step)
        for m in range(2):
            a.do("send", key(m, step=step), B, "int64", [step] * 1000)
        for m in range(2):
            b.do("post", m, key(m, step=step), A, "int64", (1000,))
            assert b.do("wait", m) == ("int64", [step] * 1000)
        if step:
            b.do("reduce", "sum", (A, B, C), "int64", [step - 1] * size, 0, 1, step - 1)
            assert b.do("wait", "sum") == ("int64", [3 * (step - 1)] * size)


def test_whoever_comes_before_another_step_is_found_out(links):
    a, b = peers = [links.start(worker) for worker in (A, B)]
    for call in (a.call("build", 1, ((A, B),), 7), b.call("build", 1, ((A, B),), 8)):
        error = call.error()
        assert isinstance(error, InternalError)
        assert "comes to generation 1 before step" in str(error)
    for peer in peers:
        peer.abort(1)
    builds = [a.call("build", 2, ((A, B),), 7), b.call("build", 2, ((A, B),))]
    assert [each.error() for each in builds] == [None, None], "one of them is yet to be told"
    exchange(a, b, 2)


class Tamperer(OnTheLine):
    """Strikes one chunk that A sends, or one record, counted from when it is armed.

    Attributes:
        struck: whether it did.
    """

    def __init__(self, address, unit):
        self._unit = unit
        self._action, self._left = None, -1
        self.struck = False
        super().__init__(address)

    def arm(self, action, index):
        self._action, self._left, self.struck = action, index, False

    def _changed(self, heard, source):
        held = b""
        for unit in self._unit(source):
            self._left -= 1
            if self._left != -1:
                yield unit + held
                held = b""
                continue
            self.struck = True
            match self._action:
                case "delay":
                    time.sleep(0.05)
                    yield unit
                case "reorder":
                    held = unit
                case "cut":
                    self.ends.set()
                    self.ended.clear()
                    yield unit[: len(unit) // 2]
                case "change":
                    at = len(unit) // 2
                    yield unit[:at] + bytes([unit[at] ^ 1]) + unit[at + 1 :]
                case "half-close":
                    yield unit[: len(unit) // 2]
                    return


def exactly(source, size):
    data = b""
    while len(data) < size:
        if not (came := source.recv(size - len(data))):
            raise ConnectionError
        data += came
    return data


def units(links):
    """What is struck as a whole: the greeting, then each chunk, or each record of a sealed link."""

    def each(source):
        yield exactly(source, links.hello_bytes)
        yield exactly(source, PROOF_BYTES)
        while True:
            header = exactly(source, 4 if links.sealed else HEADER_BYTES)
            size = int.from_bytes(header, "big") if links.sealed else Chunk.unpack(header).size
            yield header + exactly(source, size)

    return each


LONG = 40_000


def talk(a, b, generation, size, *, to_the_end=False):
    """All kinds of messages from A to B, and a sum; returns what is done and what has to come of it.

    Nobody waits for the last one, unless all is waited for ``to_the_end``: nobody would tell that it is missing.
    """
    first, second, third = (key(m, generation) for m in range(3))
    votes = [MessageKey(generation=generation, step=0, payload=Payload.VOTE, microbatch=m) for m in range(2)]
    long, total = [generation] * size, ("int64", [3 * generation] * 100)
    done = [(peer.call("build", generation, ((A, B),)), None) for peer in (a, b)]
    done += [(a.call("send", first, B, "int64", [generation]), None)]
    done += [(a.call("send", second, B, "int64", long), None)]
    done += [(a.call("sum", (A, B), "int64", [generation] * 100, 0, generation), total)]
    done += [(a.call("send", third, B, "float32", [generation]), None)]
    done += [(a.call("send", vote, B, "float64", [generation]), None) for vote in votes]
    done += [(b.call("receive", first, A, "int64", (1,)), ("int64", [generation]))]
    done += [(b.call("sum", (A, B), "int64", [2 * generation] * 100, 0, generation), total)]
    done += [(b.call("receive", second, A, "int64", (size,)), ("int64", long))]
    done += [(b.call("receive", third, A, "float32", (1,)), ("float32", [generation]))]
    for vote in votes if to_the_end else votes[:1]:
        done += [(b.call("receive", vote, A, "float64", (1,)), ("float64", [generation]))]
    return done


def come_of(done, peers, generation):
    """Waits for all that is done; the first who loses another has the generation aborted, as the coordinator would."""
    failed = []
    for call in concurrent.futures.as_completed([call._result for call, _ in done], LIMIT_S):
        if call.exception() is not None:
            failed.append(call.exception())
            for peer in peers:
                peer.abort(generation)
    assert all(isinstance(error, PeerLost | StaleGeneration) for error in failed), failed
    for call, wanted in done:
        if call.error() is None:
            assert call.result() == wanted
    return failed


@pytest.mark.parametrize("waits", [True, False], ids=["awaited", "not yet awaited"])
def test_enter_is_said_again_where_the_link_breaks_under_it(either, waits):
    """As one does that was broken for long, and nobody knew: the first who sends on it finds out.

    Nor is anything lost for who waits for the other already: nothing of this generation was said on that link.
    """
    with listened_to(either, units(either), Tamperer) as (a, b, line):
        build([a, b], 1)
        exchange(a, b, 1)
        for peer in (a, b):
            peer.abort(1)
        second = b.call("build", 2, ((A, B),)) if waits else None
        assert second is None or second.is_blocked()
        line.arm("cut", 0)
        first = a.call("build", 2, ((A, B),))
        until(lambda: line.struck)
        until(lambda: len(line.heard) > 1)
        second = second or b.call("build", 2, ((A, B),))
        assert [first.error(), second.error()] == [None, None]
        exchange(a, b, 2)


def heal(peers, generation):
    """Builds until a generation stands, which is returned: the next message may tell that one is missing."""
    for _ in range(2):
        if not come_of([(call, None) for call in begin(peers, generation)], peers, generation):
            return generation
        generation += 1
    raise AssertionError("no generation stands")


@pytest.mark.parametrize("action", ["drop", "delay", "reorder", "cut", "half-close"])
def test_whatever_is_done_to_any_message_gives_the_right_bits_or_an_error(either, action):
    """Of what is dropped, the next message tells; there always is one, if only ENTER of the next generation."""
    strike_each(either, action)


def test_what_is_changed_on_its_way_is_found_out(sealed):
    strike_each(sealed, "change")


def strike_each(links, action):
    """Does it to one chunk or record after another of a generation of its own, until there is none more to strike."""
    with listened_to(links, units(links), Tamperer) as (a, b, line):
        generation, index, line.struck = 1, -1, True
        while line.struck:
            generation = heal([a, b], generation)
            exchange(a, b, generation)
            for peer in (a, b):
                peer.abort(generation)
            index, generation = index + 1, generation + 1
            line.arm(action, index)
            calls = len(line.heard)
            failed = come_of(talk(a, b, generation, LONG, to_the_end=action == "change"), (a, b), generation)
            assert action != "delay" or not failed
            if action == "change" and line.struck:
                assert failed or len(line.heard) > calls, "the link ends, if only to be made again"
            for peer in (a, b):
                peer.abort(generation)
            generation += 1
        assert index > 6, "so many messages there are at least"


def test_what_is_sent_is_counted(links):
    a, b, _ = peers = [links.start(worker) for worker in (A, B, C)]
    build(peers, 1)
    exchange(a, b, 1, range(100))
    sums = [peer.call("sum", (A, B, C), "int64", [1] * 50, 0, 1) for peer in peers]
    assert all(each.result() == ("int64", [3] * 50) for each in sums)
    assert [peer.do("sent") for peer in peers] == [(800, 808), (800, 808), (0, 808)], "a part, and a header of 4 bytes"
    sums = [peer.call("sum", (A, B, C), "int64", [1] * 300_000, 1, 1) for peer in peers]
    assert all(each.result()[1][0] == 3 for each in sums)
    assert [peer.do("sent")[1] - 816 for peer in peers] == [2 * 2 * 800_000] * 3, "two shares, and ours to two others"
