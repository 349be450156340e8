"""Mutual TLS over real gRPC: who is answered, and who is not."""

import asyncio
import contextlib
import queue
import stat
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
from tests.decisions import leading_in
from tests.processes import process_of
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.config.job import Tls
from holdfast.config.load import parse_job
from holdfast.control.certificates import ANY_HOST, make_certificates, make_node_certificates
from holdfast.control.client import ControlClient
from holdfast.control.coordinator import METHOD, SERVICE, Coordinator, serve
from holdfast.control.membership import GridState, Membership
from holdfast.control.messages import Attached, Hello, encode, pack
from holdfast.control.tls import channel_credentials, check_node, check_tls, server_credentials
from holdfast.core.nodes import NodeId, Process
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError, CoordinatorUnavailable
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import EventLog, Notice, read_events

PLAN = regular_plan(2, split_evenly(2, 1), 1)
A = PLAN.workers[0]
HOST = "127.0.0.1"


def certificates(folder, **options):
    ca, cert, key = make_certificates(folder, (HOST,), **options)
    return Tls(ca=str(ca), cert=str(cert), key=str(key))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("ours") / "certs")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("theirs") / "certs")


@pytest.fixture(scope="module")
def expired(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("expired") / "certs", days=-1)


def coordinator_in(folder, leading):
    return Coordinator(
        membership=Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=3)),
        leading=leading,
        log=EventLog(folder / "events.jsonl"),
        clock=time.monotonic,
        awake=time.monotonic,
    )


class Service:
    """A coordinator with a certificate, in a thread of its own."""

    def __init__(self, folder, tls):
        self._folder, self._tls = folder, tls
        self._ports = queue.SimpleQueue()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self.address = f"{HOST}:{self._ports.get(timeout=LIMIT_S)}"

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        leading = leading_in(self._folder / "control.db")
        self.coordinator = coordinator_in(self._folder, leading)
        credentials = server_credentials(self._tls)
        await serve(self.coordinator, host=HOST, port=0, token="t", ready=self._ports.put, credentials=credentials)
        leading.chain.close()
        self.coordinator.decider.log.close()

    def end(self):
        self._loop.call_soon_threadsafe(self.coordinator._goodbye.set)
        self._thread.join(LIMIT_S)


@pytest.fixture
def service(tmp_path, ours):
    made = Service(tmp_path, ours)
    made.coordinator._agents_here.set()
    yield made
    made.end()


def outcome(service, tls, token="t", process=None):
    """The first that a client gets: a command, or why it gave up."""
    heard = queue.SimpleQueue()
    with attached(service, tls, Hello(worker=A, process=process or process_of(A, 1)), token, heard.put):
        return heard.get(timeout=LIMIT_S)


@contextlib.contextmanager
def attached(service, tls, hello, token="t", heard=lambda what: None):
    client = ControlClient(
        service.address, token, hello=lambda: hello, on_command=heard, on_closed=heard, reattach_s=0.5, tls=tls
    )
    client.start()
    try:
        yield client
    finally:
        client.close()


def test_who_has_certificate_and_token_is_answered(service, ours):
    assert outcome(service, ours) == Attached()


def test_a_certificate_without_the_token_is_refused(service, ours):
    assert isinstance(outcome(service, ours, token="wrong"), ConfigError)
    with grpc.secure_channel(service.address, channel_credentials(ours).credentials) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(
            iter([pack([encode(Hello(worker=A, process=process_of(A, 1)))])])
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.coordinator.decider.membership.roster.processes == {}


def test_a_certificate_of_another_authority_is_refused(service, ours, theirs):
    assert isinstance(outcome(service, theirs), CoordinatorUnavailable), "it does not trust the server"
    mixed = Tls(ca=ours.ca, cert=theirs.cert, key=theirs.key)
    assert isinstance(outcome(service, mixed), CoordinatorUnavailable), "the server does not trust it"
    assert service.coordinator.decider.membership.roster.processes == {}


def test_no_certificate_is_refused(service, ours):
    with open(ours.ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(root_certificates=file.read())
    assert refused(service, grpc.secure_channel(service.address, credentials))


def test_plain_text_is_refused(service):
    assert isinstance(outcome(service, None), CoordinatorUnavailable)
    assert refused(service, grpc.insecure_channel(service.address))


def refused(service, channel):
    with channel:
        attach = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        call = attach(
            iter([pack([encode(Hello(worker=A, process=process_of(A, 1)))])]),
            metadata=(("holdfast-token", "t"),),
            timeout=LIMIT_S,
        )
        with pytest.raises(grpc.RpcError):
            next(call)
    return service.coordinator.decider.membership.roster.processes == {}


def test_an_expired_certificate_is_refused(tmp_path, expired):
    service = Service(tmp_path, expired)
    service.coordinator._agents_here.set()
    assert isinstance(outcome(service, expired), CoordinatorUnavailable)
    service.end()


# What is wrong is told before anything is started.


def test_good_ones_pass(ours):
    check_tls(ours, HOST)


def changed(tls, **fields):
    return Tls(**{"ca": tls.ca, "cert": tls.cert, "key": tls.key, **fields})


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_missing_file_is_named_with_its_key(ours, name):
    with pytest.raises(ConfigError, match=rf"^control\.tls\.{name}: /nowhere: No such file or directory$"):
        check_tls(changed(ours, **{name: "/nowhere"}), HOST)


AEAD = "cryptography.hazmat.primitives.ciphers.aead"


@pytest.mark.parametrize(
    ("there", "wanted"),
    [(None, "the package cryptography; pip install"), (SimpleNamespace(AESGCM=object), "cryptography, 47 or newer")],
    ids=["none", "an old one"],
)
def test_certificates_of_ones_own_need_what_seals_links(ours, monkeypatch, there, wanted):
    monkeypatch.setitem(sys.modules, AEAD, there)
    with pytest.raises(ConfigError, match=rf"^control\.tls: needs .*{wanted}.* 'holdfast\[tls\]'"):
        check_tls(ours, HOST)


def test_files_that_do_not_fit_are_named(ours, theirs, expired, tmp_path):
    text = tmp_path / "text"
    text.write_text("hello")
    wrong = [
        (changed(ours, key=theirs.key), rf"^control\.tls\.key: {theirs.key} is not the key of the certificate"),
        (changed(ours, key=str(text)), r"^control\.tls\.key: .* cannot be used with the certificate"),
        (changed(ours, ca=str(text)), r"^control\.tls\.ca: .* holds no certificate in PEM form$"),
        (changed(ours, ca=theirs.ca), r"^control\.tls\.cert: .* is not accepted for 127\.0\.0\.1: .*"),
        (expired, r"^control\.tls\.cert: .* is not accepted for 127\.0\.0\.1: certificate has expired; "),
    ]
    for tls, line in wrong:
        with pytest.raises(ConfigError, match=line) as caught:
            check_tls(tls, HOST)
        assert "\n" not in str(caught.value)


def test_a_certificate_of_another_host_is_named(ours):
    with pytest.raises(ConfigError, match=r"not accepted for 10\.0\.0\.1: IP address mismatch"):
        check_tls(ours, "10.0.0.1")


# One certificate for all hosts


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anywhere") / "certs"
    assert main(["certs", "--out", str(folder)]) == 0
    return Tls(**{name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")})


def test_of_no_host_in_particular_it_is_good_for_all(tmp_path, anywhere):
    for host in (HOST, "10.0.0.1", "n1.cluster"):
        check_tls(anywhere, host)
    service = Service(tmp_path, anywhere)
    service.coordinator._agents_here.set()
    assert outcome(service, anywhere) == Attached()
    service.end()


def test_of_no_host_in_particular_it_must_still_be_of_our_authority(tmp_path, anywhere, theirs, ours):
    service = Service(tmp_path, theirs)
    service.coordinator._agents_here.set()
    assert isinstance(outcome(service, anywhere), CoordinatorUnavailable)
    service.end()
    with pytest.raises(ConfigError, match="is not accepted for n1"):
        check_tls(changed(anywhere, ca=ours.ca), "n1")


# One certificate for each node


def node_certificates(folder, *nodes):
    folders = make_node_certificates(folder, (ANY_HOST,), nodes)
    return [Tls(**{name: str(each / f"{name}.pem") for name in ("ca", "cert", "key")}) for each in folders]


@pytest.fixture
def nodes(tmp_path):
    """A coordinator, and the certificates of two nodes."""
    n1, n2 = node_certificates(tmp_path / "certs", "n1", "n2")
    made = Service(tmp_path, n1)
    made.coordinator._agents_here.set()
    yield made, n1, n2
    made.end()


def on(name, nonce="a", number=1):
    return Process(NodeId(name=name, nonce=16 * nonce), 7, f"{number:016x}")


def test_a_nodes_certificate_speaks_for_its_processes(nodes):
    service, n1, n2 = nodes
    assert outcome(service, n2, process=on("n2")) == Attached()
    assert service.coordinator.decider.membership.roster.processes == {A: on("n2")}
    check_node(n1, "n1")


def test_it_speaks_for_no_other_node(nodes):
    service, _, n2 = nodes
    assert isinstance(outcome(service, n2, process=on("n1")), ConfigError)
    assert service.coordinator.decider.membership.roster.processes == {}
    said = [event.text for _, event in read_events(service._folder / "events.jsonl") if isinstance(event, Notice)]
    assert any("spoke for n1: refused" in text for text in said)
    with pytest.raises(
        ConfigError, match=r"^control\.tls\.cert: .*/n2/cert\.pem speaks for node n2 alone, and this is n1"
    ):
        check_node(n2, "n1")


def test_nor_by_the_number_that_another_node_has_drawn(nodes):
    """By it a coordinator knows which processes an agent may tell of."""
    service, n1, n2 = nodes
    hello = Hello(worker=None, process=on("n1"))
    with attached(service, n1, hello):
        until(lambda: on("n1") in service.coordinator._agents)
        assert isinstance(outcome(service, n2, process=on("n2", number=2)), ConfigError)
    assert service.coordinator.decider.membership.roster.processes == {}


@pytest.mark.parametrize("names", ["n1,n1", "n1,,n2", "n1,../n2", "..", "n 1"])
def test_what_is_no_name_of_a_node_makes_nothing(tmp_path, capsys, names):
    folder = tmp_path / "certs"
    assert main(["certs", "--out", str(folder), f"--nodes={names}"]) == 2
    assert "expected names of nodes, each once" in capsys.readouterr().err
    assert not folder.exists()


def test_the_command_makes_a_folder_for_each_node(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert main(["certs", "--out", str(folder), "--nodes", "n1,rack-2.b"]) == 0
    assert {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {
        "n1": 0o700,
        "rack-2.b": 0o700,
    }
    told = capsys.readouterr().out
    assert f"--certs {folder}/rack-2.b" in told
    assert f"cert: {folder}/n1/cert.pem" in told
    tls = Tls(**{name: str(folder / "rack-2.b" / f"{name}.pem") for name in ("ca", "cert", "key")})
    check_tls(tls, "10.9.8.7")
    check_node(tls, "rack-2.b")


# holdfast certs


def test_the_command_makes_files_that_only_their_owner_can_read(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert main(["certs", "--out", str(folder), "--host", "10.1.2.3", "--host", "trainer.example"]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "ca.pem": 0o600,
        "cert.pem": 0o600,
        "key.pem": 0o600,
    }
    tls = Tls(ca=str(folder / "ca.pem"), cert=str(folder / "cert.pem"), key=str(folder / "key.pem"))
    for host in ("10.1.2.3", "trainer.example"):
        check_tls(tls, host)
    assert f"cert: {folder}/cert.pem" in capsys.readouterr().out
    before = (folder / "key.pem").read_bytes()
    assert main(["certs", "--out", str(folder)]) == 2
    assert (folder / "key.pem").read_bytes() == before
    assert "is not empty; choose a new folder" in capsys.readouterr().err


def test_a_folder_that_holds_anything_is_left_as_it_is(tmp_path, capsys):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "cert.pem").write_text("somebody's")
    assert main(["certs", "--out", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: --out {folder}: is not empty")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    assert [path.name for path in folder.iterdir()] == ["cert.pem"]
    assert (folder / "cert.pem").read_text() == "somebody's"


def test_an_empty_folder_becomes_private(tmp_path):
    folder = tmp_path / "certs"
    folder.mkdir(mode=0o755)
    assert main(["certs", "--out", str(folder)]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--days", each) for each in ("1e9", "1e300", "inf", "nan", "0", "-1")]
    + [("--host", each) for each in ("\u00fc.example", "", "a b", "a..b", "https://a", "x" * 64)],
)
def test_what_cannot_be_in_a_certificate_is_one_line_and_makes_nothing(tmp_path, capsys, flag, value):
    folder = tmp_path / "certs"
    assert main(["certs", "--out", str(folder), f"{flag}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"holdfast: {flag}: expected ")
    assert not folder.exists()


def test_the_keys_of_the_section_are_checked():
    tree = {
        "model": {"kind": "gpt"},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
        "control": {"tls": {"ca": "a", "cert": "b", "kye": "c"}},
    }
    with pytest.raises(ConfigError, match=r"control\.tls\.kye: unknown key; did you mean key\?"):
        parse_job(tree)
    del tree["control"]["tls"]["kye"]
    with pytest.raises(ConfigError, match=r"control\.tls\.key: is missing and has no default"):
        parse_job(tree)
