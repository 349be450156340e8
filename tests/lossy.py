"""A server whose answers get lost: what it is asked is done, and whoever asked does not hear of it."""

import contextlib
import random
import socket
import threading
from collections import Counter

__all__ = ["LossyProxy"]


class LossyProxy:
    """Stands before a server of this machine; HTTP, one request at a time on each connection.

    Args:
        port: of the server.
        lost: the part of its answers that is lost: the connection ends instead.
        seed: of which.
    """

    def __init__(self, port, lost, seed=0):
        self._to, self._lost, self._random = port, lost, random.Random(seed)
        self.fates = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """From now on nobody is let in."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else whoever accepts would let one more in
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller):
        with caller, socket.create_connection(("127.0.0.1", self._to)) as server, contextlib.suppress(OSError):
            asking = threading.Thread(target=self._carry, args=(caller, server), daemon=True)
            asking.start()
            while data := server.recv(1 << 20):
                fate = "lost" if self._random.random() < self._lost else "told"
                self.fates[fate] += 1
                if fate == "lost":
                    break
                caller.sendall(data)
            for end in (caller, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            asking.join()

    @staticmethod
    def _carry(caller, server):
        with contextlib.suppress(OSError):
            while data := caller.recv(1 << 20):
                server.sendall(data)
