"""State transfer over real gRPC; holders that die, hang or lie are processes of their own."""

import contextlib
import datetime
import hashlib
import ipaddress
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control import doorkeeper
from holdfast.core.ids import WorkerId
from holdfast.errors import ReplicaDiverged, StaleGeneration, StateUnavailable
from holdfast.runtime.transport import transfer
from holdfast.runtime.transport.transfer import OfferedLayer, StateOffer, StateServer, fetch

HOLDER = Path(__file__).with_name("state_holder.py")
layer_bytes = runpy.run_path(str(HOLDER))["layer_bytes"]
A, B, C = WorkerId(0, 0), WorkerId(1, 0), WorkerId(2, 0)
TOKEN = "a-token-of-a-test"
CHUNK = 1 << 10
LIMIT_S = 20.0


class Holder:
    """A test's end of one holder."""

    def __init__(self, *layers, lies="no", gate=0):
        command = [sys.executable, str(HOLDER), TOKEN, lies, str(gate), *(f"{layer}:{size}" for layer, size in layers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.offer = msgspec.json.decode(self.process.stdout.readline(), type=StateOffer)
        self._told = queue.SimpleQueue()
        self._asked = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for _ in self.process.stdout:
            self._told.put(None)

    def wait_for_slice(self, number):
        """Waits until that slice was asked for."""
        while self._asked < number:
            self._told.get(timeout=LIMIT_S)
            self._asked += 1

    def asked(self):
        """How many slices it was asked for in all, once it is dead."""
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return self._asked + self._told.qsize()

    def release(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def stop(self):
        """Stops it; returns when it really is."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self):
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)  # it has read all that was told
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what nobody read any more
            self.process.stdin.close()


@pytest.fixture
def start():
    holders = []

    def make(*layers, **how):
        holders.append(Holder(*layers, **how))
        return holders[-1]

    yield make
    for holder in holders:
        holder.end()


@pytest.fixture
def server():
    made = StateServer("127.0.0.1", TOKEN)
    yield made
    made.close()


@pytest.fixture
def fetching():
    """Fetches in a thread of its own; returns the future and the event that stops it."""
    with ThreadPoolExecutor(1) as pool:

        def begin(offers, layers, **how):
            stop = threading.Event()
            return pool.submit(get, offers, layers, stop=stop, **how), stop

        yield begin


def get(offers, layers, *, token=TOKEN, stop=None, chunk_bytes=CHUNK, **how):
    stop = stop or threading.Event()
    return fetch(offers, layers, token=token, stop=stop, chunk_bytes=chunk_bytes, **how)


def expected(*layers):
    return {layer: layer_bytes(layer, size) for layer, size in layers}


def fetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]


def test_one_holder_gives_everything(start):
    holder = start((0, 10 * CHUNK), (3, 5))
    assert get({A: holder.offer}, [0, 3]) == expected((0, 10 * CHUNK), (3, 5))
    holder.end()
    assert holder.asked() == 11
    assert not fetch_threads()


def test_several_holders_share_one_layer(start, fetching):
    holders = [start((0, 30 * CHUNK), gate=1) for _ in range(3)]
    result, _ = fetching(dict(zip((A, B, C), (h.offer for h in holders), strict=True)), [0])
    for holder in holders:
        holder.wait_for_slice(1)  # all of them at work at the same time
    for holder in holders:
        holder.release()
    assert result.result(LIMIT_S) == expected((0, 30 * CHUNK))
    for holder in holders:
        holder.end()
    assert sum(holder.asked() for holder in holders) == 30, "no slice was given twice"


def test_holders_of_different_layers_complete_each_other(start):
    a, b = start((0, 3 * CHUNK), (1, 2 * CHUNK)), start((1, 2 * CHUNK), (2, CHUNK + 1))
    layers = [(0, 3 * CHUNK), (1, 2 * CHUNK), (2, CHUNK + 1)]
    assert get({A: a.offer, B: b.offer}, [0, 1, 2]) == expected(*layers)


def test_only_what_is_asked_for_is_fetched(start):
    holder = start((0, CHUNK), (1, CHUNK))
    assert get({A: holder.offer}, [1]) == expected((1, CHUNK))
    assert get({A: holder.offer}, []) == {}
    holder.end()
    assert holder.asked() == 1


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4), chunk=st.integers(1, 128))
def test_any_sizes_in_any_chunks(sizes, chunk):
    server = StateServer("127.0.0.1", TOKEN)
    try:
        layers = dict(enumerate(layer_bytes(index, size) for index, size in enumerate(sizes)))
        offers = {worker: server.pin(str(worker), layers) for worker in (A, B)}
        assert get(offers, layers, chunk_bytes=chunk) == layers
    finally:
        server.close()


def test_a_holder_killed_in_mid_transfer_is_replaced_by_the_other(start, fetching):
    a, b = start((0, 40 * CHUNK), gate=4), start((0, 40 * CHUNK), gate=4)
    result, _ = fetching({A: a.offer, B: b.offer}, [0])
    for holder in (a, b):
        holder.wait_for_slice(4)
    a.signal(signal.SIGKILL)
    assert a.asked() == 4, "it died while it owed its fourth slice"
    assert not result.done()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 40 * CHUNK))
    b.end()
    assert b.asked() == 40 - 3, "all but what had come from the dead one"


def test_all_holders_killed_in_mid_transfer(start, fetching):
    holders = {worker: start((0, 40 * CHUNK), (1, CHUNK), gate=4) for worker in (A, B)}
    result, _ = fetching({worker: holder.offer for worker, holder in holders.items()}, [0, 1])
    for holder in holders.values():
        holder.wait_for_slice(4)
        holder.signal(signal.SIGKILL)
    error = result.exception(LIMIT_S)
    assert isinstance(error, StateUnavailable)
    assert error.layers == (0, 1)
    assert "worker 0.0: unavailable" in str(error)
    assert "worker 1.0: unavailable" in str(error)


def test_a_stopped_holder_is_given_up_after_the_time_for_one_slice(start, fetching):
    a, b = start((0, 40 * CHUNK), gate=4), start((0, 40 * CHUNK), gate=4)
    result, _ = fetching({A: a.offer, B: b.offer}, [0], timeout_s=1.0)
    for holder in (a, b):
        holder.wait_for_slice(4)
    a.stop()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 40 * CHUNK))
    b.end()
    assert b.asked() == 40 - 3


def test_a_stopped_only_holder_is_named(start, fetching):
    holder = start((0, 40 * CHUNK), gate=4)
    result, _ = fetching({A: holder.offer}, [0], timeout_s=0.5)
    holder.wait_for_slice(4)
    holder.stop()
    error = result.exception(LIMIT_S)
    assert isinstance(error, StateUnavailable)
    assert "worker 0.0: deadline_exceeded" in str(error)


@pytest.mark.parametrize("lies", ["bits", "short"])
def test_a_holder_that_gives_wrong_bytes_is_dropped(start, fetching, lies):
    a, b = start((0, 20 * CHUNK), lies=lies, gate=2), start((0, 20 * CHUNK), gate=2)
    result, _ = fetching({A: a.offer, B: b.offer}, [0])
    a.wait_for_slice(1)
    b.wait_for_slice(2)
    a.release()
    b.release()
    assert result.result(LIMIT_S) == expected((0, 20 * CHUNK))


def test_many_layers_next_to_a_liar_are_all_right(start):
    layers = [(layer, 3 * CHUNK) for layer in range(12)]
    offers = {A: start(*layers, lies="bits").offer, B: start(*layers).offer, C: start(*layers, lies="short").offer}
    assert get(offers, range(12)) == expected(*layers)


@pytest.mark.parametrize(
    ("lies", "told"), [("bits", "gave layer 0 with bits other than it offered"), ("short", "answered 1023 bytes")]
)
def test_wrong_bytes_are_never_accepted_though_nobody_else_is_there(start, lies, told):
    holder = start((0, 20 * CHUNK), lies=lies)
    with pytest.raises(StateUnavailable, match=told) as caught:
        get({A: holder.offer}, [0])
    assert caught.value.layers == (0,)


def test_equal_sizes_are_not_equal_bits(server):
    """The same number of bytes of one layer, of which one differs: whose would be right, nobody can say."""
    data = layer_bytes(1, CHUNK)
    offers = {A: server.pin("a", {1: data}), B: server.pin("b", {1: data[:-1] + bytes([data[-1] ^ 1])})}
    with pytest.raises(
        ReplicaDiverged, match=r"layer 1: worker 0\.0 offers 1024 bytes.*, worker 1\.0 offers 1024 bytes"
    ):
        get(offers, [1])
    assert get({A: offers[A]}, [1]) == {1: data}, "each by itself is as good as the other"


def test_holders_that_differ_are_told_before_anything_is_fetched(start):
    a, b = start((0, CHUNK), (1, CHUNK)), start((0, CHUNK), (1, CHUNK + 1))
    told = r"layer 1: worker 0\.0 offers 1024 bytes with SHA-256 \w+\.\.\., worker 1\.0 offers 1025 bytes"
    with pytest.raises(ReplicaDiverged, match=told):
        get({A: a.offer, B: b.offer}, [0, 1])
    assert get({A: a.offer, B: b.offer}, [0]) == expected((0, CHUNK)), "what nobody asked for may differ"
    for holder in (a, b):
        holder.end()
    assert a.asked() + b.asked() == 1


@pytest.mark.parametrize("token", ["", "another"])
def test_nothing_is_given_without_the_token(server, token):
    offer = server.pin("state", {0: b"secret"})
    with pytest.raises(StateUnavailable, match=r"worker 0\.0: unauthenticated: wrong or missing job token"):
        get({A: offer}, [0], token=token)


def test_a_call_without_any_metadata_is_refused(server):
    offer = server.pin("state", {0: b"secret"})
    assert call(offer, msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 6}), ()) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "wrong or missing job token",
    )


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"\xc1", grpc.StatusCode.INVALID_ARGUMENT),
        (msgspec.msgpack.encode({"key": "state"}), grpc.StatusCode.INVALID_ARGUMENT),
        (
            msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 1, "more": 1}),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 4, "size": 3}), grpc.StatusCode.NOT_FOUND),
        (msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": -1, "size": 3}), grpc.StatusCode.NOT_FOUND),
        (msgspec.msgpack.encode({"key": "state", "layer": 1, "offset": 0, "size": 1}), grpc.StatusCode.NOT_FOUND),
        (msgspec.msgpack.encode({"key": "other", "layer": 0, "offset": 0, "size": 1}), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_senseless_requests_are_refused(server, request_, code):
    offer = server.pin("state", {0: b"secret"})
    assert call(offer, request_, (("holdfast-token", TOKEN),))[0] is code


def call(offer, request, metadata):
    """The code and details with which a call fails."""
    with grpc.insecure_channel(offer.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        headers = (*metadata, ("holdfast-slice-bin", request))
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/holdfast.State/Read")(b"", metadata=headers, timeout=LIMIT_S)
        return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_calls_that_are_never_finished_keep_nobody_waiting(server, token):
    """Without the token they are refused at once; with it they cost a little memory, and no thread."""
    offer = server.pin("state", {0: layer_bytes(0, 9 * CHUNK)})
    never, metadata = threading.Event(), ((("holdfast-token", token),) if token else ())
    with grpc.insecure_channel(offer.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        method = channel.stream_stream("/holdfast.State/Read")
        slice_ = msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 1})
        headers = (*metadata, ("holdfast-slice-bin", slice_))
        calls = [method(iter(never.wait, True), metadata=headers, timeout=LIMIT_S) for _ in range(40)]
        before = threading.active_count()
        assert get({A: offer}, [0]) == expected((0, 9 * CHUNK))
        assert threading.active_count() <= before
        if token is None:
            codes = {each.code() for each in calls}
            assert grpc.StatusCode.UNAUTHENTICATED in codes
            assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}, "gRPC may end it sooner"
        never.set()


def test_one_connection_has_four_calls_at_a_time(server, has_four_calls):
    """Of callers that never take their answer."""
    offer = server.pin("state", {0: bytes(4 << 20)})
    slice_ = msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 4 << 20})
    options = [("grpc.enable_http_proxy", 0), ("grpc.http2.lookahead_bytes", 1 << 10), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(offer.address, options=options) as channel:
        headers = (("holdfast-token", TOKEN), ("holdfast-slice-bin", slice_))
        has_four_calls(channel, "/holdfast.State/Read", headers)


SEND = """
import sys, grpc
options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
with grpc.insecure_channel(sys.argv[1], options=options) as channel:
    method = channel.stream_stream("/holdfast.State/Read")
    headers = (("holdfast-token", sys.argv[2]), ("holdfast-slice-bin", bytes.fromhex(sys.argv[3])))
    try:
        print(b"".join(method(iter([bytes(int(sys.argv[4]))]), metadata=headers, timeout=30)))
    except grpc.RpcError as error:
        print(error.code().name)
"""


def test_what_a_caller_says_is_never_held(start):
    """All that counts is in the headers: the call ends without what follows them."""
    holder, size = start((0, CHUNK)), 300 << 20
    slice_ = msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 4})
    forget_high_water(holder.process.pid)
    before = high_water_bytes(holder.process.pid)
    command = [sys.executable, "-c", SEND, holder.offer.address, TOKEN, slice_.hex(), str(size)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert said in ("RESOURCE_EXHAUSTED", repr(layer_bytes(0, CHUNK)[:4]))
    assert high_water_bytes(holder.process.pid) - before < size // 10


def test_a_message_longer_than_any_of_ours_would_be_refused_unread(server, monkeypatch):
    """Nobody listens for one; here somebody does, who is given the short one only."""

    async def listen(self, request, context):
        async for message in request:
            await context.write(b"%d" % len(message))

    monkeypatch.setattr(transfer._Service, "_answer", listen)
    offer = server.pin("state", {0: b"x"})
    headers, said = (("holdfast-token", TOKEN),), []
    with grpc.insecure_channel(offer.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        method = channel.stream_stream("/holdfast.State/Read")
        with pytest.raises(grpc.RpcError) as caught:
            said.extend(method(iter([bytes(4096), bytes(4097)]), metadata=headers, timeout=LIMIT_S))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"4097" not in said


def test_connections_without_a_call_are_closed(server, monkeypatch):
    """One never says a word, the other begins to speak and then asks for nothing."""
    monkeypatch.setattr(doorkeeper, "_HANDSHAKE_MS", 200)
    monkeypatch.setattr(doorkeeper, "_IDLE_MS", 200)
    offer = server.pin("state", {0: b"x"})
    host, port = offer.address.split(":")
    for words in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stranger:
            stranger.sendall(words)
            while stranger.recv(1000):
                pass  # until it is closed; else the time limit raises
    assert get({A: offer}, [0]) == {0: b"x"}


def test_a_fetch_outlives_its_connections(server, monkeypatch):
    """Connections are closed after a while, so that what callers never read is let go; no slice is lost by that."""
    ages = [("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 5_000)]
    monkeypatch.setattr(transfer, "_AGE", ages)
    layers = {0: layer_bytes(0, 400 * CHUNK)}
    offer = server.pin("state", layers)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert get({A: offer}, [0]) == layers


def test_a_slice_beyond_the_limit_is_refused(server):
    offer = server.pin("state", {0: bytes(5 << 20)})
    slice_ = msgspec.msgpack.encode({"key": "state", "layer": 0, "offset": 0, "size": 5 << 20})
    assert call(offer, slice_, (("holdfast-token", TOKEN),)) == (
        grpc.StatusCode.NOT_FOUND,
        "a slice has at most 4194304 bytes, not 5242880",
    )


@pytest.fixture(scope="module")
def certificate():
    """A private key and a certificate for 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holder")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key(), serial_number=1)
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    coded = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*coded), made.public_bytes(serialization.Encoding.PEM)


def test_with_credentials_it_speaks_tls_and_nothing_else(certificate):
    served = grpc.ssl_server_credentials([certificate], root_certificates=certificate[1], require_client_auth=True)
    server = StateServer("127.0.0.1", TOKEN, served)
    try:
        offer = server.pin("state", {0: b"secret"})
        ours = grpc.ssl_channel_credentials(certificate[1], *certificate)
        assert get({A: offer}, [0], credentials=ours) == {0: b"secret"}
        without_certificate = grpc.ssl_channel_credentials(certificate[1])
        for credentials in (None, without_certificate):
            with pytest.raises(StateUnavailable, match=r"worker 0\.0: unavailable"):
                get({A: offer}, [0], credentials=credentials)
    finally:
        server.close()


def test_what_is_no_longer_pinned_is_refused(server):
    gone, kept = server.pin("step-1", {0: b"old"}), server.pin("step-2", {0: b"old"})
    server.unpin("step-1")
    server.unpin("step-1")
    with pytest.raises(StateUnavailable, match=r"not_found: layer 0 is not pinned as 'step-1'"):
        get({A: gone}, [0])
    assert get({A: gone, B: kept}, [0]) == {0: b"old"}


def test_pins_of_many_threads_are_all_served(server):
    with ThreadPoolExecutor(8) as pool:
        offers = list(pool.map(lambda n: server.pin(str(n), {n: layer_bytes(n, 5 * CHUNK)}), range(16)))
    assert len({offer.address for offer in offers}) == 1
    held = {WorkerId(n, 0): offer for n, offer in enumerate(offers)}
    assert get(held, range(16)) == expected(*((n, 5 * CHUNK) for n in range(16)))


def test_a_closed_server_gives_nothing_and_listens_anew_at_the_next_pin(server):
    offer = server.pin("state", {0: b"x"})
    server.close()
    server.close()
    with pytest.raises(StateUnavailable, match=r"worker 0\.0: unavailable"):
        get({A: offer}, [0])
    assert get({A: server.pin("state", {0: b"x"})}, [0]) == {0: b"x"}


def test_nobody_offers_a_layer(server):
    offer = server.pin("state", {0: b"x"})
    for offers, layers in (({A: offer}, [0, 5]), ({}, [5])):
        with pytest.raises(StateUnavailable, match="nobody offers them") as caught:
            get(offers, layers)
        assert caught.value.layers == (5,)


def test_a_holder_that_does_not_listen_is_left_out(start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        holder = start((0, 9 * CHUNK))
        nowhere = msgspec.structs.replace(holder.offer, address=f"127.0.0.1:{free.getsockname()[1]}")
        assert get({A: nowhere, B: holder.offer}, [0]) == expected((0, 9 * CHUNK))


def test_stop_ends_a_fetch_whose_holder_hangs_at_once(start, fetching):
    holder = start((0, 40 * CHUNK), gate=4)
    result, stop = fetching({A: holder.offer}, [0], timeout_s=600.0, generation=7)
    holder.wait_for_slice(4)
    asked_at = time.monotonic()
    stop.set()
    error = result.exception(LIMIT_S)
    assert time.monotonic() - asked_at < 1.0
    assert isinstance(error, StaleGeneration)
    assert error.generation == 7
    assert not fetch_threads()


def test_stop_before_the_begin_ends_it_too(start):
    holder = start((0, CHUNK), gate=1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StaleGeneration):
        get({A: holder.offer}, [0], stop=stop)


def test_a_fetch_can_be_repeated_after_a_stop(start, fetching):
    holder = start((0, 40 * CHUNK), gate=4)
    result, stop = fetching({A: holder.offer}, [0])
    holder.wait_for_slice(4)
    stop.set()
    assert isinstance(result.exception(LIMIT_S), StaleGeneration)
    holder.release()
    assert get({A: holder.offer}, [0]) == expected((0, 40 * CHUNK))


def test_a_bug_in_a_thread_is_raised_instead_of_waited_for(server, monkeypatch):
    offer = server.pin("state", {0: b"x"})
    monkeypatch.setattr(transfer._Board, "put", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get({A: offer}, [0])


def test_an_offer_travels_as_a_closed_value():
    offer = StateOffer(address="127.0.0.1:1", key="k", layers=(OfferedLayer(layer=0, size=1, sha256="00"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=StateOffer) == offer
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(offer)[:-1] + b',"more":1}', type=StateOffer)


def forget_high_water(pid):
    """From now on, not what making up the layer took."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def high_water_bytes(pid):
    """The most memory that a process had resident since."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_large_layer_needs_little_memory_at_its_holders(start, capsys):
    size = 64 << 20
    holders = {A: start((0, size)), B: start((0, size))}
    for holder in holders.values():
        forget_high_water(holder.process.pid)
    before = [high_water_bytes(holder.process.pid) for holder in holders.values()]
    begun = time.monotonic()
    found = get({worker: holder.offer for worker, holder in holders.items()}, [0], chunk_bytes=4 << 20)
    took_s = time.monotonic() - begun
    assert found == expected((0, size))
    grown = [
        high_water_bytes(holder.process.pid) - first for holder, first in zip(holders.values(), before, strict=True)
    ]
    with capsys.disabled():
        mib = [round(each / 2**20) for each in grown]
        print(f" [64 MiB from two holders in {took_s:.2f} s, {64 / took_s:.0f} MiB/s; their memory grew by {mib} MiB]")
    assert max(grown) < size // 2, "slices are copied, layers are not"


def test_who_gives_up_asks_for_nothing_more():
    board = transfer._Board({0: OfferedLayer(layer=0, size=8, sha256="")}, {A: frozenset({0})}, CHUNK)
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
    board = transfer._Board(wanted, {A: frozenset({0}), B: frozenset({0})}, CHUNK)
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


def test_headers_of_others_are_not_taken_for_what_is_wanted():
    wanted = {"key": "state", "layer": 1, "offset": 2, "size": 3}
    metadata = (("trace-bin", b"\xc1"), ("holdfast-slice-bin", msgspec.msgpack.encode(wanted)))
    assert msgspec.to_builtins(transfer._wanted(metadata)) == wanted
