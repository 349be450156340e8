"""What is found of this process's own sockets, and closed to strangers."""

import contextlib
import socket

import pytest

from holdfast.runtime.sockets import deaf_to_strangers, leading_to, opened


@pytest.fixture
def stack():
    with contextlib.ExitStack() as made:
        yield made


def called(stack, server):
    """A connection that is made or not at once, as on loopback; whether it is."""
    caller = stack.enter_context(socket.socket())
    caller.setblocking(False)
    caller.connect_ex(server.getsockname())
    try:
        caller.getpeername()
    except OSError:
        return None
    return caller


def test_who_listens_within_hears_nobody_afterwards_but_those_who_had_come(stack):
    before = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    with deaf_to_strangers():
        within = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        known = called(stack, within)
    accepted = stack.enter_context(within.accept()[0])
    assert called(stack, within) is None
    assert called(stack, before) is not None
    known.sendall(b"as before")
    assert accepted.recv(9) == b"as before"


def test_connections_to_a_port_and_files_are_found(stack, tmp_path):
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    caller = called(stack, server)
    assert list(leading_to({f"127.0.0.1:{server.getsockname()[1]}"})) == [caller.fileno()]
    file = stack.enter_context((tmp_path / "log").open("w"))
    assert list(opened(str(tmp_path / "log"))) == [file.fileno()]
