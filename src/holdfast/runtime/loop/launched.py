"""Scripts that another launcher has started, several times at once: one of them becomes the job's agent.

torchrun ends the whole group when one of its processes dies, and all of them would lose what they hold. So the workers
are no children of it: the process of rank 0 becomes ``holdfast run``, and the others end, which torchrun takes as done.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from holdfast.errors import ConfigError

__all__ = ["OPTIONS", "command_of", "give_way"]

OPTIONS = "HOLDFAST_RUN"
"""The environment variable with what ``holdfast run`` is told besides: such as ``--set checkpoint.every=100``."""
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_THEIRS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Workers must not take these for what they are themselves."""


def give_way() -> None:
    """Returns if this process was started by itself; else the process becomes the agent, or ends.

    Raises:
        ConfigError: it was started in a way that cannot be taken over.
    """
    if _BY_TORCHRUN not in os.environ:
        return
    main = sys.modules["__main__"]
    script = None if getattr(main, "__spec__", None) is not None else getattr(main, "__file__", None)
    command = command_of(os.environ, script, sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if command is None:
        os._exit(0)
    environment = {k: v for k, v in os.environ.items() if k not in _THEIRS and not k.startswith("TORCHELASTIC_")}
    environment["PYTHONUNBUFFERED"] = "1"  # as torchrun has started us
    os.execve(sys.executable, [sys.executable, *command], environment)


def command_of(environment: Mapping[str, str], script: str | None, arguments: Sequence[str]) -> tuple[str, ...] | None:
    """Returns what Python is told to run the script on as many workers as torchrun has started; None if another does.

    Args:
        environment: as torchrun has set it.
        script: the script's path; None if Python was not given a file.
        arguments: those of the script.

    Raises:
        ConfigError: there are several machines, or there is no file.
    """
    if environment["WORLD_SIZE"] != environment["LOCAL_WORLD_SIZE"]:
        raise ConfigError(
            f"torchrun: {environment['WORLD_SIZE']} processes on several machines; expected all on one: --nnodes=1"
        )
    if script is None:
        raise ConfigError("torchrun: a module was started with -m; expected the path of a script")
    if environment["LOCAL_RANK"] != "0":
        return None
    try:
        options = shlex.split(environment.get(OPTIONS, ""))
    except ValueError as error:
        raise ConfigError(f"{OPTIONS}={environment[OPTIONS]}: {error}") from None
    return ("-m", "holdfast", "run", "--workers", environment["WORLD_SIZE"], *options, script, *arguments)
