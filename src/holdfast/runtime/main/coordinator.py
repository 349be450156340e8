"""The process of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.config.job import Control
from holdfast.control.advice import Adviser
from holdfast.control.awake import AwakeClock
from holdfast.control.chain.leading import UNREAD, Leading, lead, show_life
from holdfast.control.chain.opening import is_database, open_chain
from holdfast.control.coordinator import Committer, Coordinator, serve
from holdfast.control.decider import Remarks
from holdfast.control.detection import Watch
from holdfast.control.membership import (
    HEARD_S,
    Contact,
    Membership,
    Phase,
    Restoring,
    Starting,
    StoredDecision,
    Vacancies,
    restore,
)
from holdfast.control.membership.forgotten import gone_before
from holdfast.control.messages import StateAt
from holdfast.control.peer_directory import PeerDirectory
from holdfast.control.plan_lookup import PlanLookup
from holdfast.control.reshaper import Reshaper
from holdfast.control.standbys import Standbys
from holdfast.control.tls import server_credentials
from holdfast.errors import (
    ConfigError,
    CorruptBlob,
    StorageError,
    StoreAway,
)
from holdfast.planning.library import PlanLibrary
from holdfast.runtime.specs import CoordinatorSpec
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints
from holdfast.telemetry.events import (
    EventLog,
    Notice,
    read_events,
)

__all__ = ["run_coordinator"]

_SUPERSEDED = 3
_SWITCH_S = 0.0005
"""A thread that prepares plans gives way this soon to messages that have come."""


def run_coordinator(spec: CoordinatorSpec, answer: Connection) -> None:
    """Runs the coordinator to the end of the job; sends its port, or what went wrong, into ``answer`` first.

    After failure: started again with the same store and port, it goes on where the decisions in the store end. Where
    several machines see them it stands by until it leads, and exits with 3 when another one leads instead.
    """
    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group, it is for the agent to answer
    control, remarks, listens = spec.job.control, Remarks(), _Listens(spec.host)
    log = EventLog(spec.events, complain=lambda kind, text: remarks.put((kind, text)))
    waiting = _Waiting(log)
    make = partial(_coordinator, spec, log, remarks, waiting, listens)
    try:  # where nobody else can lead, there is nothing to stand by for
        coordinator: Coordinator | Callable[[], Coordinator] = make() if is_database(spec.store) else make
    except StoreAway as error:  # such as a full disk: it is tried again for a while, if we were to go on
        answer.send_bytes(f"error control.store: {error}".encode())
        os._exit(2)
    gc.freeze()

    def ready(port: int) -> None:
        answer.send_bytes(b"ok %d" % port)
        listens.port = port

    try:
        credentials = server_credentials(control.tls) if control.tls else None
        service = serve(
            coordinator,
            host=spec.host,
            port=spec.port,
            token=spec.token,
            ready=ready,
            credentials=credentials,
            also=spec.socket,
            waits_for=waiting,
            brief=spec.brief,
            invitation=spec.invitation,
            silent_s=control.silent_s,
        )
        os._exit(0 if asyncio.run(service) else _SUPERSEDED)
    except (ConfigError, StorageError) as error:
        if listens() or isinstance(error, StorageError):  # while it stood by: its agent has its answer already
            _note(log, f"ends itself: {error}")
            os._exit(1)
        answer.send_bytes(b"error " + str(error).encode())
        os._exit(2)


def _note(log: EventLog, text: str) -> None:
    log.write(time.monotonic(), Notice(worker="coordinator", text=text))


@dataclass(slots=True)
class _Listens:
    """Where we listen, and where all coordinators do that we know of; the port is 0 as long as we do not."""

    host: str
    port: int = 0
    standbys: Standbys | None = None

    def __call__(self) -> str:
        if not self.port:
            return ""
        others = () if self.standbys is None else self.standbys.at.addresses
        return ",".join(dict.fromkeys((f"{self.host}:{self.port}", *others)))


class _Waiting:
    """What keeps us from leading, besides that another one leads."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._why = ""

    def note(self, text: str, away: bool) -> None:
        """A store is waited for, or answers again."""
        self._why = text if away else ""
        _note(self._log, text)

    def __call__(self) -> str:
        return self._why


def _coordinator(
    spec: CoordinatorSpec, log: EventLog, remarks: Remarks, waiting: _Waiting, listens: _Listens
) -> Coordinator:
    """Returns, once it leads, one that begins the job, or goes on with what its store remembers."""
    control, (leading, stored, unknown) = spec.job.control, _recall(spec, waiting, listens)
    checkpoints = Checkpoints(open_store(spec.checkpoints), spec.job.checkpoint.keep)
    awake = AwakeClock()
    follows = spec.again or (leading is not None and leading.first > 1)
    membership = _membership(
        spec,
        stored,
        Contact(
            reattach_until=awake() + control.reattach_s,
            seats_from=awake() + HEARD_S if follows else 0.0,
            home=spec.node,
            others_lead=control.coordinators > 1,
            alone_at=awake(),  # that we lead is stored
            patience_s=control.reattach_s,
        ),
    )
    if stored is None:  # this is the beginning, or what was decided is lost
        membership = replace(membership, contact=replace(membership.contact, told_gone=_told_gone(spec)))
    if follows and control.coordinators > 1:
        text = f"the coordinator on node {spec.node} leads now"
        remarks.put((text, text))
    if unknown:
        remarks.put(("store", f"{unknown}: what lives is saved, and the job ends"))
        membership = replace(membership, past_lost=unknown, phase=Phase.REATTACHING)
    listens.standbys = Standbys(control.coordinators)
    coordinator = Coordinator(
        membership=membership,
        recorded=() if stored is None else stored.recorded,
        leading=leading,
        log=log,
        remarks=remarks,
        clock=time.monotonic,
        awake=awake,
        committer=Committer(checkpoints=checkpoints, facts=spec.facts),
        directory=PeerDirectory(spec.token),
        standbys=listens.standbys,
        advisers=_advisers(spec, log),
        job=spec.job.name,
    )
    for put_around in spec.around:
        put_around(coordinator.decider)
    return coordinator


def _advisers(spec: CoordinatorSpec, log: EventLog) -> tuple[Adviser, ...]:
    shapes = spec.rules.shapes
    found: tuple[Adviser, ...] = () if shapes is None else (Reshaper(shapes),)
    if spec.library is not None:
        found += (PlanLookup(PlanLibrary(Path(spec.library), lambda text: _note(log, text))),)
    return found


def _recall(
    spec: CoordinatorSpec, waiting: _Waiting, listens: _Listens
) -> tuple[Leading | None, StoredDecision | None, str]:
    """The chain to go on with and the decision in force; or why neither is to be used: it was damaged, or exchanged."""
    by = secrets.token_hex(8)
    try:
        chain = open_chain(spec.store)
    except CorruptBlob as error:
        return None, None, str(error)
    leading, stored, unknown = Leading(chain=chain, by=by, first=UNREAD, number=UNREAD), None, ""
    try:
        alone = spec.job.control.coordinators <= 1
        heard = partial(_heard_at, spec.heard)
        leading, stored = lead(chain, job=spec.rules.job, by=by, alone=alone, note=waiting.note, heard=heard)
    except CorruptBlob as error:
        unknown = str(error)
    signs = partial(show_life, leading, lambda: os._exit(_SUPERSEDED), listens)
    threading.Thread(target=signs, name="signs of life", daemon=True).start()
    return (None, None, unknown) if unknown else (leading, stored, "")


def _heard_at(path: str | None) -> int | None:
    """When our agent heard of who leads; None if it has not, or cannot tell."""
    with contextlib.suppress(OSError):
        return None if path is None else os.stat(path).st_mtime_ns
    return None


def _told_gone(spec: CoordinatorSpec) -> frozenset[str]:
    """Who was told to be gone before; if the log cannot be read, that is told twice."""
    with contextlib.suppress(StorageError):
        return gone_before(event for _, event in read_events(spec.events))
    return frozenset()


def _watch(control: Control) -> Watch:
    return Watch(limit_s=control.hang_s, load_s=control.load_s, compile_s=control.compile_s, beat_s=control.heartbeat_s)


def _membership(spec: CoordinatorSpec, stored: StoredDecision | None, contact: Contact) -> Membership:
    begins = Membership.before(
        spec.rules,
        spec.plan,
        contact=contact,
        vacancies=Vacancies(starting=Starting(limit_s=spec.job.control.start_s)),
        restoring=Restoring(restorable=_restorable(spec)),
        watch=_watch(spec.job.control),
    )
    if (resume := spec.resume) is not None and resume.step:  # what lies before was evaluated by another attempt
        best = () if resume.best is None else (resume.best,)
        begins = replace(begins, running=replace(begins.running, evaluated=resume.step - 1, best=best))
    return begins if stored is None else restore(begins, stored, reattach_until=contact.reattach_until)


def _restorable(spec: CoordinatorSpec) -> tuple[StateAt, ...]:
    """What can be loaded before the first checkpoint: what was resumed from, else the start if any will follow."""
    if spec.resume is not None and spec.resume.step is not None:
        return (StateAt(url=spec.resume.url, step=spec.resume.step),)
    return (StateAt(url=None, step=0),) if spec.rules.checkpoint_every else ()
