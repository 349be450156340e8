"""Whether other machines reach the address that a job is begun at."""

import socket

import pytest

from holdfast.runtime.launch.launcher import _own_alone


@pytest.mark.parametrize(
    ("host", "address", "alone"),
    [
        ("n1", "127.0.1.1", "127.0.1.1"),
        ("n1", "10.0.0.1", ""),
        ("10.0.0.1", "10.0.0.1", ""),
        ("127.0.0.1", "127.0.0.1", ""),
        ("localhost", "127.0.0.1", ""),
    ],
)
def test_a_name_that_is_this_machines_own_alone_is_found_out(host, address, alone, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    assert _own_alone(host) == alone


def test_a_name_that_nobody_knows_is_told_by_whoever_needs_it(monkeypatch):
    def unknown(name):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert _own_alone("n1") == ""
