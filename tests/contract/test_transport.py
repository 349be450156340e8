"""What every transport must do: one suite over the real one and the one in memory."""

import pytest
from tests.waiting import until

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.runtime.transport.port import MessageKey

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)


def key(microbatch=0, payload=Payload.ACTIVATION, step=0, generation=1, boundary=0):
    return MessageKey(generation=generation, step=step, payload=payload, microbatch=microbatch, boundary=boundary)


def built(cluster, *workers, generation=1):
    """Starts workers that are all connected, in pairs and as one group."""
    peers = [cluster.start(worker) for worker in workers]
    rebuild(peers, generation)
    return peers


def rebuild(peers, generation):
    for call in [peer.call("build", generation, groups_of(peers)) for peer in peers]:
        call.result()


def groups_of(peers):
    ids = [peer.worker for peer in peers]
    pairs = {(a, b) for a in ids for b in ids if a < b}
    return tuple(sorted(pairs | {tuple(ids)}))


def unblocks(call, abort):
    """Whether a call that really waits ends with StaleGeneration after ``abort``."""
    assert call.is_blocked()
    abort()
    assert isinstance(call.error(), StaleGeneration)


def test_messages_match_by_key_whatever_the_order(cluster):
    a, b = built(cluster, A, B)
    keys = [key(m, payload) for m in range(3) for payload in (Payload.ACTIVATION, Payload.VOTE)]
    for number, sent in enumerate(keys):
        a.do("send", sent, B, "float32", [number, -number])
    for number, wanted in reversed(list(enumerate(keys))):
        b.do("post", number, wanted, A, "float32", (2,))
    for number in (3, 0, 5, 1, 4, 2):
        assert b.do("wait", number) == ("float32", [number, -number])


def test_both_directions_at_once(cluster):
    a, b = built(cluster, A, B)
    for peer, other in ((a, B), (b, A)):
        peer.do("post", "in", key(), other, "int64", (1,))
    a.do("send", key(), B, "int64", [1])
    b.do("send", key(), A, "int64", [2])
    assert (a.do("wait", "in"), b.do("wait", "in")) == (("int64", [2]), ("int64", [1]))


def test_shapes_survive_and_empty_tensors_travel(cluster):
    a, b = built(cluster, A, B)
    a.do("send", key(0), B, "float64", [[[0.1], [1e300]]])
    a.do("send", key(1), B, "float32", [])
    a.do("send", key(2), B, "bfloat16", [[0.5], [-2.0]])
    b.do("post", 0, key(0), A, "float64", (1, 2, 1))
    b.do("post", 1, key(1), A, "float32", (0,))
    b.do("post", 2, key(2), A, "bfloat16", (2, 1))
    assert b.do("wait", 0) == ("float64", [[[0.1], [1e300]]])
    assert b.do("wait", 1) == ("float32", [])
    assert b.do("wait", 2) == ("bfloat16", [[0.5], [-2.0]])


def test_steps_do_not_mix(cluster):
    a, b = built(cluster, A, B)
    for step in range(6):
        a.do("send", key(step=step), B, "int64", [step])
        b.do("post", "in", key(step=step), A, "int64", (1,))
        assert b.do("wait", "in") == ("int64", [step])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", [[2**62, -1], [1, 5], [3, -7]]),
        ("float32", [[0.5, -1.0], [0.25, 2.0], [4.0, 8.0]]),
        ("float64", [[2.0**-40, 1.0], [1.0, 2.0**-40], [0.0, 3.0]]),
    ],
)
def test_all_reduce_sums_and_leaves_its_argument(cluster, dtype, values):
    peers = built(cluster, A, B, C)
    for peer, own in zip(peers, values, strict=True):
        peer.do("reduce", "sum", (A, B, C), dtype, own)
    total = [sum(column) for column in zip(*values, strict=True)]
    assert [peer.do("wait", "sum") for peer in peers] == [(dtype, total)] * 3
    assert [peer.do("argument", "sum") for peer in peers] == values


@pytest.mark.parametrize("count", [8_191, 70_001, 300_000])
@pytest.mark.parametrize(("dtype", "unit"), [("int64", 3), ("float32", 0.1), ("bfloat16", 0.5)])
def test_long_sums_have_the_same_bits_for_all(cluster, dtype, unit, count):
    """As many as are sent whole, in parts, and in parts of several chunks; sums of rounded numbers, too."""
    peers = built(cluster, A, B, C)
    for number, peer in enumerate(peers):
        peer.do("reduce", "sum", (A, B, C), dtype, [unit * ((number + 1) * k % 1000) for k in range(count)])
    (_, first), *others = [peer.do("wait", "sum") for peer in peers]
    assert all(total == first for _, total in others)
    expected = [sum(unit * ((n + 1) * k % 1000) for n in range(3)) for k in range(0, count, 997)]
    assert first[::997] == pytest.approx(expected, rel=0.02)


SHARED = [((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)), ((7, 3, 11), (), (0, 1, 2, 4, 5, 6, 8, 9, 10))]
"""Who has which of 12: neighbours, or anything."""


@pytest.mark.parametrize("size", [7, 300_000])
@pytest.mark.parametrize("shared", SHARED)
def test_sums_of_gradients_have_the_bits_of_one_worker_alone(cluster, size, shared):
    """Of contributions of several parts, of one and of none; also of those that come before they are asked for."""
    peers = a, b, c = built(cluster, A, B, C)
    a.do("reduce_gradients", "alone", (A,), size, 12, range(12), 1)
    a.do("reduce_gradients", "sum", (A, B, C), size, 12, shared[0])
    c.do("reduce_gradients", "sum", (A, B, C), size, 12, shared[2])
    b.do("reduce_gradients", "sum", (A, B, C), size, 12, shared[1])
    alone = a.do("wait", "alone")
    assert [peer.do("wait", "sum") for peer in peers] == [alone] * 3


@pytest.mark.parametrize("size", [7, 300_000])
def test_where_all_is_left_out_the_sum_is_zero(cluster, size):
    peers = built(cluster, A, B, C)
    for peer in peers:
        peer.do("reduce_gradients", "sum", (A, B, C), size, 2, (), 0, (0, 1))
    assert [peer.do("wait", "sum") for peer in peers] == [("float32", [0.0] * size)] * 3


@pytest.mark.parametrize("size", [7, 300_000])
def test_what_makes_no_sum_is_told_to_all(cluster, size):
    peers = built(cluster, A, B, C)
    for peer, numbers in zip(peers, ((0, 1), (1, 2), (3,)), strict=True):
        peer.do("reduce_gradients", "sum", (A, B, C), size, 4, numbers)
    for peer in peers:
        error = peer.call("wait", "sum").error()
        assert "layer 0 counts micro-batch 1 2 times" in str(error)


def test_a_sum_tells_when_it_is_there(cluster):
    a, b = built(cluster, A, B)
    a.do("reduce", "sum", (A, B), "int64", [1])
    assert a.do("ready", "sum") is False
    b.do("reduce", "sum", (A, B), "int64", [2])
    assert b.do("wait", "sum") == ("int64", [3])
    until(lambda: a.do("ready", "sum"))
    assert a.do("wait", "sum") == ("int64", [3])
    a.do("reduce", "alone", (A,), "int64", [7])
    assert a.do("ready", "alone") is True


@pytest.mark.parametrize("cluster", ["links", "sealed", "memory"], indirect=True)
def test_what_has_come_outlives_its_generation(cluster):
    """Also while another message is still awaited."""
    a, b = built(cluster, A, B)
    b.do("post", "in", key(0), A, "int64", (2,))
    b.do("post", "never", key(1), A, "int64", (2,))
    assert b.do("kept", "never") is None
    a.do("send", key(0), B, "int64", [3, 4])
    a.do("send", key(2), B, "int64", [5])
    b.do("post", "behind", key(2), A, "int64", (1,))
    assert b.do("wait", "behind") == ("int64", [5]), "what was sent before is here, too"
    b.abort(1)
    assert b.do("kept", "in") == [3, 4]
    assert b.do("kept", "never") is None


def test_what_is_said_before_anybody_asks_is_kept(cluster):
    a, b = built(cluster, A, B)
    values = list(range(200_000))
    a.do("send", key(), B, "int64", values)
    a.do("reduce", "sum", (A, B), "int64", values)
    b.do("post", "in", key(), A, "int64", (len(values),))
    b.do("reduce", "sum", (A, B), "int64", values)
    assert b.do("wait", "in") == ("int64", values)
    assert b.do("wait", "sum") == a.do("wait", "sum") == ("int64", [2 * value for value in values])


def test_integer_sums_wrap_around(cluster):
    peers = built(cluster, A, B)
    for peer in peers:
        peer.do("reduce", "sum", (A, B), "int64", [2**63 - 1])
    assert [peer.do("wait", "sum") for peer in peers] == [("int64", [-2])] * 2


def test_reductions_match_in_the_order_of_submission(cluster):
    peers = built(cluster, A, B)
    for number in range(4):
        for peer in peers:
            peer.do("reduce", number, (A, B), "int64", [10**number] * (number + 1), number)
    for number in (2, 3, 0, 1):
        assert [peer.do("wait", number) for peer in peers] == [("int64", [2 * 10**number] * (number + 1))] * 2


def test_reductions_of_different_groups_do_not_wait_for_each_other(cluster):
    a, b, c = built(cluster, A, B, C)
    a.do("reduce", "all", (A, B, C), "int64", [1])
    a.do("reduce", "pair", (A, B), "int64", [10], 1)
    b.do("reduce", "pair", (A, B), "int64", [20], 1)
    assert a.do("wait", "pair") == b.do("wait", "pair") == ("int64", [30])
    for peer in (b, c):
        peer.do("reduce", "all", (A, B, C), "int64", [1])
    assert a.do("wait", "all") == ("int64", [3])


def test_a_reduction_of_one_is_the_argument(cluster):
    (a,) = built(cluster, A)
    a.do("reduce", "sum", (A,), "float32", [1.5])
    assert a.do("wait", "sum") == ("float32", [1.5])


def test_a_worker_in_no_group_is_built_at_once(cluster):
    assert cluster.start(A).do("build", 1, ((B, C),)) is None


def test_abort_unblocks_a_receive(cluster):
    _, b = built(cluster, A, B)
    b.do("post", "in", key(), A, "float32", (2,))
    unblocks(b.call("wait", "in"), lambda: b.abort(1))


def test_abort_unblocks_a_reduction(cluster):
    a, b, _ = built(cluster, A, B, C)
    for peer in (a, b):
        peer.do("reduce", "sum", (A, B, C), "int64", [1])
    waits = [peer.call("wait", "sum") for peer in (a, b)]
    assert waits[1].is_blocked()
    unblocks(waits[0], lambda: a.abort(1))
    b.abort(1)
    assert isinstance(waits[1].error(), StaleGeneration | PeerLost), "a's connection may close before b is aborted"


def test_abort_unblocks_a_build_that_waits_for_someone(cluster):
    a = cluster.start(A)
    unblocks(a.call("build", 1, ((A, B),)), lambda: a.abort(1))


def test_the_next_generation_works_after_an_abort(cluster):
    peers = a, b, _c = built(cluster, A, B, C)
    b.do("post", "in", key(), A, "float32", (2,))
    a.do("reduce", "sum", (A, B, C), "int64", [1])
    a.do("send", key(), C, "int64", [7])
    for peer in peers:
        peer.abort(1)
    assert isinstance(b.call("wait", "in").error(), StaleGeneration)
    rebuild([a, b], 2)
    a.do("send", key(generation=2), B, "float32", [3, 4])
    b.do("post", "in", key(generation=2), A, "float32", (2,))
    assert b.do("wait", "in") == ("float32", [3, 4])
    for peer in (a, b):
        peer.do("reduce", "sum", (A, B), "int64", [5], 0, 2)
    assert a.do("wait", "sum") == b.do("wait", "sum") == ("int64", [10])


def test_an_ended_generation_is_refused(cluster):
    a, b = built(cluster, A, B)
    a.abort(4)
    a.do("threads")
    for generation in (1, 4):
        assert isinstance(a.call("build", generation, ((A, B),)).error(), StaleGeneration)
    b.abort(4)
    rebuild([a, b], 5)


def test_an_abort_of_an_older_generation_changes_nothing(cluster):
    a, b = built(cluster, A, B, generation=3)
    for peer in (a, b):
        peer.abort(2)
    a.do("send", key(generation=3), B, "int64", [1])
    b.do("post", "in", key(generation=3), A, "int64", (1,))
    assert b.do("wait", "in") == ("int64", [1])


def test_a_dead_peer_is_seen_or_at_least_given_up_on_abort(cluster):
    _a, b, _ = built(cluster, A, B, C)
    b.do("post", "in", key(), A, "float32", (2,))
    waiting = b.call("wait", "in")
    assert waiting.is_blocked()
    cluster.kill(A)
    error = waiting.error()
    assert isinstance(error, PeerLost)
    b.abort(1)
    rebuild([b, cluster.peers[C]], 2)


def test_a_dead_peer_ends_a_reduction(cluster):
    _a, b, _ = built(cluster, A, B, C)
    b.do("reduce", "sum", (A, B, C), "float32", [1.0])
    waiting = b.call("wait", "sum")
    assert waiting.is_blocked()
    cluster.kill(A)
    if waiting.is_blocked():  # whoever is told of it late is woken by what the coordinator makes of it
        b.abort(1)
    assert isinstance(waiting.error(), PeerLost | StaleGeneration)


def test_a_message_that_is_too_short_is_refused(cluster):
    a, b = built(cluster, A, B)
    a.do("send", key(), B, "float32", [1.0])
    b.do("post", "in", key(), A, "float32", (2,))
    assert isinstance(b.call("wait", "in").error(), InternalError)


def test_whom_no_group_connects_with_us_is_sent_nothing(links):
    """To say so is our bug, not a loss."""
    a, _ = built(links, A, B)
    error = a.call("send", key(), C, "int64", [1]).error()
    assert isinstance(error, InternalError)
    assert "1.0" in str(error)
