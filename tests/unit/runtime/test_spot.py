"""What metadata services say of a machine's end, and what becomes of that."""

import queue
import signal
import threading
from dataclasses import replace

import pytest
from tests.metadata import metadata_of
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

from holdfast.errors import ConfigError
from holdfast.runtime.node import spot
from holdfast.runtime.node.spot import CLOUDS, find, watched

SAID = {
    "aws": "it is to terminate at 2026-11-30T08:22:00Z",
    "gcp": "it is preempted",
    "azure": "Preempt, not before Mon, 30 Nov 2026 18:29:47 GMT",
}


@pytest.fixture(params=CLOUDS)
def name(request):
    return request.param


@pytest.fixture
def server(name):
    with metadata_of(name) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is."""
    monkeypatch.setattr(spot, "_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(spot, "_EVERY_S", 0.01)


@pytest.fixture
def sigterm():
    """How often the signal came, so far."""
    times = []
    before = signal.signal(signal.SIGTERM, lambda *_: times.append(1))
    yield lambda: len(times)
    signal.signal(signal.SIGTERM, before)


def nobody_asks():
    return all(thread.name != "spot" for thread in threading.enumerate())


def test_it_says_nothing_until_this_machine_is_to_be_taken_away(name, server):
    cloud = find(f"{name}={server.url}/")
    assert cloud.ask() == ""
    server.taken = True
    assert cloud.ask() == SAID[name]


@pytest.mark.parametrize("answer", [(200, "<html>"), (200, ""), (200, "[]"), (200, '{"Events": 3}'), (500, "no")])
def test_an_answer_of_another_kind_is_no_notice(name, server, answer):
    server.taken, server.broken = True, answer
    with pytest.raises((OSError, ValueError)):
        find(f"{name}={server.url}").ask()


def test_the_process_is_told_once(name, server, sigterm):
    told = queue.SimpleQueue()
    with watched(find(f"{name}={server.url}"), told.put):
        until(lambda: server.asked > 2)
        assert told.empty()
        server.taken = True
        assert told.get(timeout=LIMIT_S) == f"{name} takes this machine away: {SAID[name]}"
        until(nobody_asks)
    assert told.empty()
    assert sigterm() == 1


def test_a_service_that_does_not_answer_is_told_once_and_asked_again(name, server, sigterm):
    told = queue.SimpleQueue()
    server.broken = 503, "busy"
    with watched(find(f"{name}={server.url}"), told.put):
        text = told.get(timeout=LIMIT_S)
        assert text.startswith(f"{name} does not say whether this machine is to be taken away: {server.url}/")
        assert "503" in text
        server.taken, server.broken = True, None
        assert told.get(timeout=LIMIT_S).endswith(SAID[name])
        assert sigterm() == 1


def test_nobody_asks_once_it_is_left(server, name):
    with watched(find(f"{name}={server.url}"), lambda text: None):
        until(lambda: server.asked)
    until(nobody_asks)


def test_nobody_is_asked_where_no_cloud_was_named():
    before = threading.active_count()
    with watched(None, pytest.fail):
        assert threading.active_count() == before


def test_the_cloud_is_found_that_answers(name, server, monkeypatch):
    nobody = f"http://127.0.0.1:{free_port()}"
    others = {each: replace(CLOUDS[each], url=server.url if each == name else nobody) for each in CLOUDS}
    monkeypatch.setattr(spot, "CLOUDS", others)
    assert find("auto").name == name
    monkeypatch.setattr(spot, "CLOUDS", {each: replace(CLOUDS[each], url=nobody) for each in CLOUDS})
    with pytest.raises(ConfigError, match="--preempt auto: no metadata service answers; expected a machine of aws"):
        find("auto")


def test_who_cannot_be_told_is_given_notice_all_the_same(name, server, sigterm):
    def broken(text):
        raise OSError("no space left")

    server.taken = True
    with watched(find(f"{name}={server.url}"), broken):
        until(sigterm)
        until(nobody_asks)


@pytest.mark.parametrize("text", ["", "ec2", "AWS", "auto=http://x", "=http://x"])
def test_another_cloud_is_refused(text):
    with pytest.raises(ConfigError, match=f"--preempt {text}: expected aws, gcp, azure or auto"):
        find(text)


@pytest.mark.parametrize("url", ["", "127.0.0.1", "https://127.0.0.1"])
def test_another_url_is_refused(url):
    with pytest.raises(ConfigError, match=f"--preempt aws={url}: expected aws=http://HOST"):
        find(f"aws={url}")
