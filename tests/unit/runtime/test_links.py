"""The parts of links that do no I/O."""

import pytest
from tests.processes import process_of

from holdfast.control.messages import Hello, Here, Peer
from holdfast.control.peer_directory import PeerDirectory
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Reduction
from holdfast.errors import PeerLost
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.handshake import UNKNOWN, Met, Turn, dialing, listening, mark
from holdfast.runtime.transport.links.inbox import Inbox
from holdfast.runtime.transport.links.outbox import Outbox
from holdfast.runtime.transport.links.sealing import Share
from holdfast.runtime.transport.links.wire import (
    CHUNK_BYTES,
    HEADER_BYTES,
    BadFrame,
    Chunk,
    Kind,
    Label,
    label_of,
    label_of_sum,
)
from holdfast.runtime.transport.port import MessageKey, SumKey

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)
NONCES = {A: b"a" * 16, B: b"b" * 16, C: b"c" * 16}


def label(kind=Kind.ACTIVATION, generation=1, microbatch=0):
    return Label(generation, 3, kind, microbatch, 2)


def chunks(outbox):
    """All that an outbox sends, as (header, bytes)."""
    found = []
    while parts := outbox.next():
        data, at = b"".join(parts), 0
        outbox.took(len(data))
        while at < len(data):
            chunk, begin = Chunk.unpack(data, at), at + HEADER_BYTES
            at = begin + chunk.size
            found.append((chunk, data[begin:at]))
    return found


def test_a_header_says_what_it_said():
    chunk = Chunk(label(), 10, 4, 6, (1 << 32) - 1)
    assert Chunk.unpack(b"x" + chunk.pack(), 1) == chunk
    assert len(chunk.pack()) == HEADER_BYTES


@pytest.mark.parametrize("chunk", [(8, 0, 9), (8, 4, 5), (8, 0, 0), (1 << 62, 0, 1), (1 << 40, 0, CHUNK_BYTES + 1)])
def test_a_header_that_contradicts_itself_is_none(chunk):
    with pytest.raises(BadFrame, match="no such chunk"):
        Chunk.unpack(Chunk(label(), *chunk).pack())


def test_an_unknown_kind_is_none():
    data = bytearray(Chunk(label(), 8, 0, 8).pack())
    data[16] = 77
    with pytest.raises(BadFrame, match="kind 77"):
        Chunk.unpack(data)


def test_labels_tell_messages_and_sums_apart():
    keys = [MessageKey(1, 2, payload, m, b) for payload in Payload for m in range(2) for b in range(2)]
    sums = [SumKey(1, 2, Reduction(layers, (A, B))) for layers in ((0,), (1,), (0, 1), (0, 11), (0, 1, 1))]
    found = [*map(label_of, keys), *(label_of_sum(each, kind) for each in sums for kind in (Kind.PART, Kind.TOTAL))]
    assert len(set(found)) == len(keys) + 2 * len(sums)


def test_a_long_message_goes_in_chunks():
    outbox, body = Outbox(), bytes(range(256)) * 10_000
    outbox.put(label(), memoryview(body))
    found = chunks(outbox)
    assert [chunk.size for chunk, _ in found] == [CHUNK_BYTES, CHUNK_BYTES, len(body) - 2 * CHUNK_BYTES]
    assert b"".join(data for _, data in found) == body
    assert [chunk.number for chunk, _ in found] == [0, 1, 2]
    assert outbox.empty


def test_a_carried_message_goes_as_its_header_alone_and_is_carried_when_its_turn_has_come():
    outbox, carried = Outbox(), []
    long = bytes(2 * CHUNK_BYTES)
    outbox.announce(label(Kind.PART, microbatch=1), len(long), lambda: carried.append("part"))
    outbox.announce(label(Kind.ACTIVATION, microbatch=2), len(long), lambda: carried.append("activation"))
    assert (carried, outbox.owes) == ([], True)
    found = b"".join(outbox.next())
    assert carried == ["activation", "part"], "the more urgent one first, in the order of the headers"
    heads = [Chunk.unpack(found, at) for at in range(0, len(found), HEADER_BYTES)]
    assert [(head.label.microbatch, head.total, head.size, head.carried) for head in heads] == [
        (2, len(long), 0, True),
        (1, len(long), 0, True),
    ]
    outbox.took(len(found))
    assert outbox.empty


def test_what_cannot_be_carried_is_not_announced():
    outbox = Outbox()

    def carry():
        raise ConnectionAbortedError("the carrier is over")

    outbox.put(label(Kind.VOTE), memoryview(b"vote"))
    outbox.announce(label(Kind.PART), 3, carry)
    with pytest.raises(ConnectionAbortedError):
        outbox.next()
    found = b"".join(outbox.next())
    assert Chunk.unpack(found).label.kind is Kind.VOTE
    assert len(found) == HEADER_BYTES + len(b"vote")
    outbox.took(len(found))
    with pytest.raises(ConnectionAbortedError):
        outbox.next()
    assert outbox.owes, "whoever drains it has not sent all"


def test_what_is_asked_for_may_be_too_much_but_not_what_builds_a_group():
    outbox = Outbox()
    for place in range(100):
        outbox.put(label(Kind.SLICE)._replace(place=place), memoryview(b"slice"))
        outbox.put(label(Kind.CARRIER)._replace(place=place), memoryview(b"value"))
    kinds = [message.label.kind for _, _, message in outbox._waiting]
    assert kinds.count(Kind.CARRIER) == 100
    assert kinds.count(Kind.SLICE) < 20


@pytest.mark.parametrize("kind", [Kind.ENTER, Kind.VOTE, Kind.HEADER, Kind.SLICE, Kind.CARRIER])
def test_what_has_to_be_read_on_the_link_is_not_carried(kind):
    with pytest.raises(BadFrame, match="there is no such chunk"):
        Chunk.unpack(Chunk(label(kind), 4, 0, 0, carried=True).pack())


def test_what_is_dropped_before_it_is_announced_is_not_carried():
    outbox, carried = Outbox(), []
    outbox.announce(label(Kind.PART, generation=1), 3, lambda: carried.append(1))
    outbox.announce(label(Kind.PART, generation=2), 3, lambda: carried.append(2))
    outbox.drop(1)
    outbox.next()
    assert carried == [2]


@pytest.mark.parametrize(("offset", "size"), [(8, 0), (0, 8), (8, 8)])
def test_a_carried_message_has_nothing_on_the_link(offset, size):
    with pytest.raises(BadFrame, match="there is no such chunk"):
        Chunk.unpack(Chunk(label(), 16, offset, size, carried=True).pack())


def test_an_empty_message_goes_too():
    outbox = Outbox()
    outbox.put(label(Kind.ENTER), memoryview(b""))
    assert chunks(outbox) == [(Chunk(label(Kind.ENTER), 0, 0, 0), b"")]


def test_what_is_urgent_goes_between_two_chunks_and_equals_in_their_order():
    outbox = Outbox()
    outbox.put(label(Kind.PART), memoryview(bytes(2 * CHUNK_BYTES)))
    outbox.took(len(outbox.next()[0]) + 5)  # it has begun
    outbox.put(label(Kind.ACTIVATION, microbatch=1), memoryview(b"one"))
    outbox.put(label(Kind.GRADIENT, microbatch=2), memoryview(b"two"))
    outbox.put(label(Kind.VERDICT), memoryview(b"now"))
    rest = b"".join(outbox.next())
    assert len(rest) == CHUNK_BYTES - 5
    outbox.took(len(rest))
    kinds = [chunk.label.kind for chunk, _ in chunks(outbox)]
    assert kinds == [Kind.VERDICT, Kind.ACTIVATION, Kind.GRADIENT, Kind.PART]


def test_what_is_short_goes_with_what_follows():
    outbox, long = Outbox(), bytes(2 * CHUNK_BYTES)
    outbox.put(label(Kind.HEADER), memoryview(b"header"))
    outbox.put(label(Kind.PART), memoryview(long))
    together = outbox.next()
    assert [len(each) for each in together] == [HEADER_BYTES, 6, HEADER_BYTES, CHUNK_BYTES]
    outbox.took(HEADER_BYTES + 4)
    assert outbox.next()[0] == b"er", "whatever was not taken stays"
    outbox.took(sum(map(len, outbox.next())))
    assert outbox.owes
    assert [len(each) for each in outbox.next()] == [HEADER_BYTES, CHUNK_BYTES]


def test_slices_go_when_nothing_else_does():
    outbox = Outbox()
    outbox.put(label(Kind.SLICE, microbatch=1), memoryview(bytes(CHUNK_BYTES)))
    outbox.put(label(Kind.ASK, microbatch=2), memoryview(b"more"))
    outbox.put(label(Kind.TOTAL), memoryview(bytes(3 * CHUNK_BYTES)))
    outbox.put(label(Kind.VERDICT), memoryview(b"now"))
    kinds = [chunk.label.kind for chunk, _ in chunks(outbox)]
    assert kinds == [Kind.VERDICT, *[Kind.TOTAL] * 3, Kind.SLICE, Kind.ASK]


def test_slices_are_nothing_that_a_step_waits_for():
    outbox = Outbox()
    outbox.put(label(Kind.SLICE), memoryview(bytes(CHUNK_BYTES)))
    assert (outbox.owes, outbox.empty) == (False, False)
    outbox.took(len(outbox.next()[0]) + 5)
    assert not outbox.owes, "it has begun"
    outbox.put(label(Kind.VOTE), memoryview(b"yes"))
    assert outbox.owes
    outbox.took(sum(map(len, outbox.next())))
    assert outbox.owes
    outbox.took(len(outbox.next()[0]))
    assert outbox.owes, "but for its last bytes it has left"
    outbox.took(len(outbox.next()[0]))
    assert (outbox.owes, outbox.empty) == (False, True)


def test_no_more_than_sixteen_slices_wait():
    outbox, kinds = Outbox(), [Kind.SLICE] * 40 + [Kind.ACTIVATION] * 40
    for number, kind in enumerate(kinds):
        outbox.put(label(kind, microbatch=number), memoryview(b"x"))
    sent = [chunk.label.kind for chunk, _ in chunks(outbox)]
    assert (sent.count(Kind.SLICE), sent.count(Kind.ACTIVATION)) == (16, 40)


def test_what_is_over_is_dropped_but_for_the_chunk_that_has_begun():
    outbox = Outbox()
    outbox.put(label(microbatch=1), memoryview(bytes(2 * CHUNK_BYTES)))
    outbox.took(len(outbox.next()[0]) + 5)
    outbox.put(label(microbatch=2), memoryview(b"two"))
    outbox.put(label(generation=2), memoryview(b"new"))
    outbox.drop(1)
    rest = b"".join(outbox.next())
    assert len(rest) == CHUNK_BYTES - 5
    outbox.took(len(rest))
    assert [data for _, data in chunks(outbox)] == [b"new"]


def test_what_was_lent_may_change_once_it_is_given_back():
    outbox, body = Outbox(), bytearray(b"x" * (CHUNK_BYTES + 10))
    outbox.put(label(), memoryview(body), lent=True)
    outbox.took(len(outbox.next()[0]) + 7)
    outbox.give_back()
    body[:] = b"y" * len(body)
    assert b"".join(outbox.next()) == b"x" * (CHUNK_BYTES - 7)
    outbox.took(CHUNK_BYTES - 7)
    assert chunks(outbox)[0][1] == b"x" * 10


def test_a_link_that_only_an_older_generation_has_used_may_break():
    """Another one is made for ENTER, which is still to be said."""
    inbox = Inbox()
    inbox.enter(2, Allowance())
    inbox.lose(B, "broken", since=1)
    inbox.check(2, (B,))
    inbox.lose(B, "broken", since=2)
    with pytest.raises(PeerLost, match="broken"):
        inbox.check(2, (B,))


def peer(worker, key=b"k" * 32):
    return Peer(worker=worker, here=Here(address="127.0.0.1:1", nonce=NONCES[worker]), key=key)


def shake(caller, listener):
    """Lets both ends speak; returns what each makes of it."""
    ends, came, found = {"caller": caller, "listener": listener}, {"caller": b"", "listener": b""}, {}
    turns = {name: end.send(None) for name, end in ends.items()}
    for _ in range(10):
        for name, other in (("caller", "listener"), ("listener", "caller")):
            if name in found or not isinstance(turns[name], Turn):
                continue
            came[other] += turns[name].send
            turn = turns[name] = Turn(b"", turns[name].read)
            if len(came[name]) >= turn.read:
                data, came[name] = came[name][: turn.read], came[name][turn.read :]
                try:
                    turns[name] = ends[name].send(data)
                except StopIteration as end:
                    found[name] = end.value
    return found


def known(*peers):
    return lambda worker, marked: next(
        (each for each in peers if (each.worker, mark(each.here.nonce)) == (worker, marked)), None
    )


def test_two_that_know_their_key_find_each_other():
    found = shake(dialing(A, NONCES[A], peer(B)), listening(B, NONCES[B], known(peer(A))))
    assert found == {"caller": Met(peer(B), None), "listener": Met(peer(A), None)}


def test_and_agree_on_a_key_where_links_are_sealed():
    ends = dialing(A, NONCES[A], peer(B), Share), listening(B, NONCES[B], known(peer(A)), Share)
    found = shake(*ends)
    assert {name: met.peer for name, met in found.items()} == {"caller": peer(B), "listener": peer(A)}
    keys = {met.seal._key for met in found.values()}
    assert len(keys) == 1
    again = shake(dialing(A, NONCES[A], peer(B), Share), listening(B, NONCES[B], known(peer(A)), Share))
    assert keys != {met.seal._key for met in again.values()}, "each connection has its own"


@pytest.mark.parametrize(("one", "other"), [(Share, None), (None, Share)])
def test_a_sealed_end_and_one_in_the_clear_do_not_meet(one, other):
    with pytest.raises(BadFrame, match="does not speak as a worker"):
        shake(dialing(A, NONCES[A], peer(B), one), listening(B, NONCES[B], known(peer(A)), other))


def test_the_number_of_a_process_does_not_travel():
    """Of it and the job's token the keys of its pairs are made."""
    hello = dialing(A, NONCES[A], peer(B)).send(None).send
    assert NONCES[A] not in hello
    assert mark(NONCES[A]) in hello


@pytest.mark.parametrize(
    ("called", "calls"),
    [
        (peer(B, b"?" * 32), peer(A)),
        (peer(B), peer(A, b"?" * 32)),
        (peer(C), peer(A)),
    ],
    ids=["the caller has another key", "the listener has another key", "somebody else was called"],
)
def test_nobody_else_does(called, calls):
    with pytest.raises(BadFrame, match="does not know the key of this pair"):
        shake(dialing(A, NONCES[A], called), listening(B, NONCES[B], known(calls)))


def test_a_process_that_nobody_told_of_waits():
    there = []
    end = listening(B, NONCES[B], lambda worker, nonce: there[0] if there else None)
    end.send(None)
    hello = dialing(A, NONCES[A], peer(B)).send(None).send
    assert end.send(hello) is UNKNOWN
    assert end.send(None) is UNKNOWN
    there.append(peer(A))
    assert len(end.send(None).send) == 48


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n" + bytes(48), b"holdfast link 1\n" + b"x" * 48])
def test_whoever_speaks_otherwise_is_no_worker(hello):
    end = listening(B, NONCES[B], known(peer(A)))
    assert end.send(None).read == len(hello)
    with pytest.raises(BadFrame):
        end.send(hello)


def hello(worker, pid=1, nonce=None):
    return Hello(
        worker=worker, process=process_of(worker, pid), here=Here(address=f"h:{pid}", nonce=nonce or NONCES[worker])
    )


def test_everybody_is_told_of_everybody_once_and_both_get_the_same_key():
    directory, processes = PeerDirectory("token"), {A: process_of(A, 1), B: process_of(B, 1), C: process_of(C, 1)}
    for worker in (A, B):
        directory.heard(hello(worker))
    to_a, to_b = (directory.news_for(worker, processes) for worker in (A, B))
    assert [peer.worker for peer in to_a.peers] == [B]
    assert to_a.peers[0].key == to_b.peers[0].key
    assert directory.news_for(A, processes) is None
    directory.heard(hello(C))
    (to_c,) = directory.news_for(A, processes).peers
    assert (to_c.worker, to_c.here.nonce) == (C, NONCES[C])
    assert to_c.key != to_a.peers[0].key


def test_whoever_comes_again_is_told_all_again_and_a_new_process_is_news():
    directory, processes = PeerDirectory("token"), {A: process_of(A, 1), B: process_of(B, 1)}
    for worker in (A, B):
        directory.heard(hello(worker))
        directory.news_for(worker, processes)
    directory.heard(hello(A))
    assert [peer.worker for peer in directory.news_for(A, processes).peers] == [B]
    directory.heard(hello(B, pid=2, nonce=b"B" * 16))
    assert directory.news_for(A, processes) is None, "the process that counts is another one"
    assert directory.news_for(A, {A: process_of(A, 1), B: process_of(B, 2)}).peers[0].here.nonce == b"B" * 16


def test_a_process_of_the_past_that_says_hello_takes_nobodys_place():
    directory, processes = PeerDirectory("token"), {A: process_of(A, 1), B: process_of(B, 2)}
    for one in (hello(A), hello(B, pid=2), hello(B, pid=1, nonce=b"old" + bytes(13))):
        directory.heard(one)
    assert directory.news_for(A, processes).peers[0].here.nonce == NONCES[B]
    assert directory.news_for(B, processes).peers[0].here.nonce == NONCES[A]


def test_whoever_says_that_it_is_the_process_of_another_worker_is_not_met_in_its_place():
    directory, processes = PeerDirectory("token"), {A: process_of(A, 1), B: process_of(B, 1), C: process_of(B, 1)}
    for worker in (A, B):
        directory.heard(hello(worker))
    directory.heard(Hello(worker=C, process=process_of(B, 1), here=Here(address="h:2", nonce=NONCES[C])))
    told = {peer.worker: peer.here.nonce for peer in directory.news_for(A, processes).peers}
    assert told == {B: NONCES[B], C: NONCES[C]}


def test_a_worker_without_links_is_told_nothing():
    directory = PeerDirectory("token")
    directory.heard(Hello(worker=A, process=process_of(A, 1)))
    directory.heard(Hello(worker=None, process=process_of(None, 1)))
    directory.heard(hello(B))
    processes = {A: process_of(A, 1), B: process_of(B, 1)}
    assert directory.news_for(A, processes) is None
    assert directory.news_for(B, processes) is None
