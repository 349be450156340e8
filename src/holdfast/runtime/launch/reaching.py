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
from holdfast.errors import CoordinatorUnavailable, HoldfastError
from holdfast.runtime.launch.directory import seen_by_others, token_in

__all__ = ["reach_in"]


def reach_in(run_dir: Path, *, token: str = "", tls: Tls | None = None) -> Reach | Ended:
    """Returns how the coordinator is reached that leads the job of a run directory, or led it last; or how it ended.

    Args:
        run_dir: the directory; the job need not have begun.
        token: the job's; empty: that in the directory.
        tls: certificates; None: those of its job, if it has any.

    Raises:
        CoordinatorUnavailable: nobody has said so far where one is, or what else is needed cannot be read now.
    """
    try:
        if (url := seen_by_others(run_dir)) is not None:
            with contextlib.closing(open_chain(url)) as chain:
                if (ended := how_it_ended(chain)) is not None:
                    return ended
                if address := leads_at(chain):
                    tls = tls or load_job(run_dir / "job.yaml").control.tls
                    return Reach(addresses=address, token=token or token_in(run_dir), tls=tls, read=True)
    except (HoldfastError, OSError) as error:  # it may be made anew just now
        raise CoordinatorUnavailable(f"{run_dir}: {error}") from None
    raise CoordinatorUnavailable(
        f"{run_dir}: no coordinator has said there where it listens (that of a job begun by `holdfast train --listen` "
        "does)"
    )
