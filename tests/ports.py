"""Ports for servers that tests start, which bind them later."""

import secrets
import socket

_given = set()


def free_port():
    """One that nobody has, and that nobody is given who does not ask for it by its number.

    (A port that the kernel has given out may be given to somebody else as soon as it is free again.)
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # Linux gives out others: /proc/sys/net/ipv4/ip_local_port_range
        if port in _given:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given.add(port)
        return port
