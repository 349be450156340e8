"""Which chain a job's ``control.store`` names."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from holdfast.control.chain.blobs import BlobChain
from holdfast.control.chain.database import DatabaseChain
from holdfast.control.chain.entry import read_entry
from holdfast.control.chain.etcd import Etcd, EtcdChain, parse_etcd_url
from holdfast.control.chain.port import Chain
from holdfast.core.plan import Plan
from holdfast.errors import ConfigError
from holdfast.storage.blobs import LocalStore, open_store

__all__ = ["DATABASE", "chain_of_attempt", "check_store_url", "is_database", "open_chain", "plans_in", "try_store"]

DATABASE = "control.db"
"""The file in the run directory that keeps decisions, if nothing else does."""

_EXPECTED = "sqlite, etcd://HOST:PORT[/PREFIX], or what all machines share: an absolute folder or s3://BUCKET/PREFIX"


def check_store_url(url: str) -> None:
    """Checks the form of what keeps decisions, other than the run directory's own database.

    Raises:
        ConfigError: it has another form, or what it needs is not installed.
    """
    if url.startswith("etcd:"):
        parse_etcd_url(url)
    elif url.startswith(("/", "file:///", "s3://")):
        open_store(url)
    else:
        raise ConfigError(f"control.store: expected {_EXPECTED}; got {url!r}")


def try_store(url: str) -> None:
    """Tries out whether what keeps decisions, other than the run directory's own database, can be used now.

    Raises:
        ConfigError: its form is wrong, or what it needs is not installed.
        StorageError: it cannot.
    """
    check_store_url(url)
    if url.startswith("etcd:"):
        host, port, _ = parse_etcd_url(url)
        Etcd(host=host, port=port).call("maintenance/status", {})
        return
    store, name = open_store(url), f"try-{secrets.token_hex(8)}"
    store.put_new(name, b"")  # as decisions are put, which not all can do
    store.delete(name)


def chain_of_attempt(url: str, job: str, job_id: str) -> str:
    """Returns what :func:`open_chain` takes for one attempt at a job.

    Args:
        url: where decisions are kept, other than in a database of their own.
        job: the name of the job.
        job_id: what no other attempt has, at this job or another.
    """
    check_store_url(url)
    name = f"{job}-{job_id[:16]}"
    if url.startswith("etcd:"):
        host, port, prefix = parse_etcd_url(url)
        return f"etcd://{host}:{port}/{prefix}/{name}"
    return f"{'file://' if url.startswith('/') else ''}{url.rstrip('/')}/{name}"


def is_database(url: str) -> bool:
    """Whether :func:`open_chain` takes this for a database file: of this machine, so nobody else can lead."""
    return not url.startswith(("etcd:", "s3:", "file:"))


def open_chain(url: str) -> Chain:
    """Opens a chain: in etcd, a bucket, a folder (``file://PATH``), or the database file of this path.

    Raises:
        StoreAway: the database cannot be opened now.
        CorruptBlob: it is none.
        ConfigError: what a bucket needs is not installed.
    """
    if url.startswith("etcd:"):
        host, port, prefix = parse_etcd_url(url)
        return EtcdChain(Etcd(host=host, port=port), prefix)
    if url.startswith("s3:"):
        return BlobChain(open_store(url))
    if url.startswith("file:"):
        return BlobChain(LocalStore(Path(url.removeprefix("file://")), reserved_bytes=0))
    return DatabaseChain(url)


def plans_in(url: str | Path) -> dict[int, Plan]:
    """Returns the plans of all generations that had one, as far as what :func:`open_chain` opens keeps them.

    Raises:
        StorageError: it cannot be read, or is none.
    """
    plans: dict[int, Plan] = {}
    found = DatabaseChain(url, only_read=True) if is_database(str(url)) else open_chain(str(url))
    with contextlib.closing(found) as chain:
        for body in chain.bodies():
            decision = read_entry(body, str(chain)).decision
            plans.update({} if decision is None else decision.plans)
    return plans
