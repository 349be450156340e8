"""How the coordinators of a job are reached, as its run directory says."""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.config.job import Tls
from holdfast.config.load import load_job
from holdfast.control.chain.leading import how_it_ended, leads_at
from holdfast.control.chain.opening import open_chain
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.control.token import is_token
from holdfast.errors import CoordinatorUnavailable, HoldfastError
from holdfast.runtime.launch.directory import TOKEN, seen_by_others

__all__ = ["AttemptEnded", "reach_in"]


class AttemptEnded(CoordinatorUnavailable):
    """The newest attempt at a job has ended, and nobody has begun another one so far."""

    def __init__(self, run_dir: Path, ended: Ended) -> None:
        self.ended = ended
        detail = f", {ended.detail}" if ended.detail else ""
        super().__init__(f"{run_dir}: its job has ended ({ended.outcome}{detail}), and was not begun again so far")


def reach_in(run_dir: Path, *, token: str = "", tls: Tls | None = None) -> Reach:
    """Returns how the coordinator is reached that leads the job of a run directory, or led it last.

    Args:
        run_dir: the directory; the job need not have begun.
        token: the job's; empty: that in the directory.
        tls: certificates; None: those of its job, if it has any.

    Raises:
        AttemptEnded: the job has.
        CoordinatorUnavailable: nobody has said so far where one is, or what else is needed cannot be read now.
    """
    address, ended = "", None
    try:
        if (url := seen_by_others(run_dir)) is not None:
            with contextlib.closing(open_chain(url)) as chain:
                address = leads_at(chain)
                ended = how_it_ended(chain) if address else None
        job = load_job(run_dir / "job.yaml") if address else None
    except (HoldfastError, OSError) as error:  # it may be made anew just now
        raise CoordinatorUnavailable(f"{run_dir}: {error}") from None
    if ended is not None:
        raise AttemptEnded(run_dir, ended)
    if not address:
        raise CoordinatorUnavailable(
            f"{run_dir}: no coordinator has said there where it listens (that of a job begun by `holdfast train "
            "--listen` does)"
        )
    if tls is None and job is not None:
        tls = job.control.tls
    return Reach(addresses=address, token=token or _token_in(run_dir), tls=tls, read=True)


def _token_in(run_dir: Path) -> str:
    path = run_dir / TOKEN
    try:
        if is_token(token := path.read_text().strip()):
            return token
        why = "holds no token"
    except (OSError, UnicodeError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise CoordinatorUnavailable(
        f"{path}: {why}; expected that of the job, or --token-file, or HOLDFAST_TOKEN in the environment"
    )
