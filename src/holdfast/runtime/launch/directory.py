"""The directory of a run: made its own, and described."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.load import dump_job
from holdfast.config.profiles import dump_profile
from holdfast.errors import ConfigError
from holdfast.runtime.hardening import make_private, write_private
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.rundir import RunDirLock

__all__ = ["JOB_ID", "TOKEN", "take_directory"]

JOB_ID, TOKEN = "job-id", "token"
"""Files for agents of other machines: by the one they see that it is the same directory; the other they are given."""


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


def _describe(request: RunRequest, path: Path) -> None:
    """Writes what is run, whole or not at all: with room on its disk, the same command finds nothing in its way."""
    write_private(path, dump_job(request.job).encode())
    try:
        if request.emulate is not None:
            write_private(request.run_dir / "profile.json", dump_profile(request.emulate))
    except OSError:
        path.unlink()
        raise
