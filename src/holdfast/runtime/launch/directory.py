"""The directory of a run: made its own, and described."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from holdfast.config.job import Tls
from holdfast.config.load import dump_job, load_job
from holdfast.config.profiles import dump_profile
from holdfast.control.chain.leading import end_for_good, how_it_ended, is_led
from holdfast.control.chain.opening import DATABASE, chain_of_attempt, open_chain
from holdfast.control.membership import StoredDecision
from holdfast.control.messages import Ended
from holdfast.control.token import is_token
from holdfast.errors import ConfigError, HoldfastError, LedElsewhere, StorageError
from holdfast.runtime.hardening import make_private, write_private
from holdfast.runtime.launch.request import DECISIONS, RunRequest
from holdfast.runtime.rundir import RunDirLock

__all__ = [
    "INTERRUPTED",
    "JOB_ID",
    "SUPERSEDED",
    "TOKEN",
    "decisions_of",
    "end_attempt",
    "end_the_one_before",
    "led_elsewhere",
    "seen_by_others",
    "take_directory",
    "token_in",
]

JOB_ID, TOKEN = "job-id", "token"
"""Files for agents of other machines: by the one they see that it is the same directory; the other they are given."""
INTERRUPTED, SUPERSEDED = "interrupted", "superseded"
"""How an attempt has ended that somebody has ended by a signal, or behind which there is another one."""


def take_directory(request: RunRequest, claim: RunDirLock) -> None:
    """Makes the run directory ours, for as long as we live; what an earlier attempt left there is set aside.

    Args:
        request: the run.
        claim: of its directory; whoever gives it closes it.

    Raises:
        ConfigError: it is another's, holds something, or cannot be written.
    """
    try:
        claim.take()
        if request.again:
            claim.set_aside()
        else:
            claim.check_empty()
        make_private(request.run_dir)
        _describe(request, request.run_dir / "job.yaml")
    except OSError as error:
        raise ConfigError(f"--run-dir {request.run_dir}: cannot be written: {error.strerror}") from None


def decisions_of(run_dir: Path) -> str | None:
    """Returns where the decisions of the newest attempt in a directory are kept, as ``open_chain`` takes it.

    None: it is not known, as where coordinators on one machine had a store that others could see.
    """
    if (run_dir / DATABASE).is_file():
        return str(run_dir / DATABASE)
    try:
        job_id, job = (run_dir / JOB_ID).read_text(), load_job(run_dir / "job.yaml")
    except (OSError, HoldfastError):
        return None
    of_run = run_dir.parents[1] if run_dir.parent.name == "attempts" else run_dir
    store = str(of_run.absolute() / DECISIONS) if job.control.store == "auto" else job.control.store
    return None if store == "sqlite" else chain_of_attempt(store, job.name, job_id)


def led_elsewhere(run_dir: Path) -> bool:
    """Returns whether the newest attempt in a directory that nobody here runs is led by others; it may take seconds.

    Raises:
        StorageError: it cannot be found out.
    """
    url = seen_by_others(run_dir)
    return url is not None and _is_led(url)


def _is_led(url: str) -> bool:
    with contextlib.closing(open_chain(url)) as chain:
        return is_led(chain)


def token_in(run_dir: Path) -> str:
    """Returns the token of the job of a run directory, which agents may know.

    Raises:
        ConfigError: there is none.
    """
    try:
        if is_token(token := (run_dir / TOKEN).read_text().strip()):
            return token
        why = "holds no token"
    except (OSError, UnicodeError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise ConfigError(f"{TOKEN} {why}; expected that of the job, or --token-file, or HOLDFAST_TOKEN")


def seen_by_others(run_dir: Path) -> str | None:
    """Returns where the decisions of the newest attempt are kept, if coordinators of other machines see them there."""
    url = decisions_of(run_dir)
    return None if url == str(run_dir / DATABASE) else url


def end_the_one_before(run_dir: Path) -> bool:
    """Sees to it that nobody goes on with the attempt before, on another machine: two would write the same files.

    It may take seconds where nobody leads any more.

    Returns:
        Whether it was done there.

    Raises:
        ConfigError: somebody goes on with it, or it cannot be found out.
    """
    if (url := seen_by_others(run_dir)) is None:
        return False
    try:
        if _is_led(url):
            raise LedElsewhere(
                f"--run-dir {run_dir}: its job goes on, led by a coordinator on another machine; wait until it has "
                "ended there (`holdfast inspect --follow` tells), end it (`holdfast stop`), or take part in it "
                "(--listen)"
            )
        with contextlib.closing(open_chain(url)) as chain:
            ended = how_it_ended(chain)
        if ended is None:
            end_attempt(url, SUPERSEDED, "it was begun anew")
        return ended is not None and ended.outcome == "done"
    except StorageError as error:
        raise ConfigError(
            f"--run-dir {run_dir}: whether its job goes on elsewhere is not known: {error}; if it cannot, as that "
            f"is gone for good, remove {run_dir / JOB_ID}"
        ) from None


def end_attempt(url: str, outcome: str, detail: str, begins: StoredDecision | None = None) -> None:
    """Decides that an attempt has ended, whoever leads it.

    Args:
        url: where its decisions are, as ``open_chain`` takes it.
        outcome, detail: how.
        begins: see :func:`holdfast.control.chain.leading.end_for_good`.

    Raises:
        StorageError: that cannot be decided.
    """
    why = Ended(outcome=outcome, detail=detail, step=0, directory="", generations=0, lost_layers=())
    with contextlib.closing(open_chain(url)) as chain:
        end_for_good(chain, secrets.token_hex(8), why, begins)


def _describe(request: RunRequest, path: Path) -> None:
    """Writes what is run, whole or not at all: with room on its disk, the same command finds nothing in its way."""
    control = request.job.control
    if control.tls is not None:  # whoever reads it may be in another folder
        files = {name: os.path.abspath(file) for name, file in msgspec.structs.asdict(control.tls).items()}
        control = msgspec.structs.replace(control, tls=Tls(**files))
    write_private(path, dump_job(msgspec.structs.replace(request.job, control=control)).encode())
    try:
        if request.emulate is not None:
            write_private(request.run_dir / "profile.json", dump_profile(request.emulate))
    except OSError:
        path.unlink()
        raise
