"""Who the other workers are now, as the coordinator has told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.port import Contact

__all__ = ["Contacts"]


class Contacts:
    """The newest process of every other worker; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contacts: dict[WorkerId, Contact] = {}

    def learn(self, told: Iterable[Contact]) -> None:
        """What was known of these workers holds no more."""
        with self._lock:
            self._contacts.update((contact.worker, contact) for contact in told)

    def of(self, worker: WorkerId) -> Contact | None:
        """Returns a worker's process; None if we were told of none."""
        with self._lock:
            return self._contacts.get(worker)

    def known(self, worker: WorkerId, nonce: bytes) -> Contact | None:
        """Returns a worker's process if it is the one with that nonce."""
        contact = self.of(worker)
        return contact if contact is not None and contact.nonce == nonce else None

    def is_current(self, contact: Contact) -> bool:
        """Whether it is not one of the past."""
        return self.known(contact.worker, contact.nonce) is not None

    def if_current(self, contact: Contact, act: Callable[[], None]) -> None:
        """Does something if a process is not one of the past; we learn of no other meanwhile."""
        with self._lock:
            current = self._contacts.get(contact.worker)
            if current is not None and current.nonce == contact.nonce:
                act()
