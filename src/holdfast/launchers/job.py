"""A job that something else starts on several machines: what is to run there, whatever starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LaunchedJob", "filled"]

_CERTIFICATES = """# All processes of the job show this certificate, on whichever nodes they are.
[ -e "$run_dir/certs/key.pem" ] || (umask 077 && "${holdfast[@]}" certs --out "$run_dir/certs") || exit
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """What is to run, and on what.

    The parts of scripts that are made of it go by the variables of the shell ``holdfast`` (an array), ``run_dir`` and
    ``slots``.

    Attributes:
        name: of the job.
        made_by: the command that is making the file, for people.
        folder: where relative paths begin.
        run_dir: where the job writes.
        python: the interpreter that has Holdfast.
        command: the words of ``holdfast`` that begin the job, without options of where it runs.
        then: its last words, behind all options.
        nodes: how many.
        slots: workers on each of them.
        gpus: whether each worker computes on a GPU of its own.
        notice_s: seconds that a checkpoint takes at most that is made at a notice; None: none is made.
        certificates: whether connections need certificates, and there are none yet.
        options: more for whatever starts it, such as ``--time=12:00:00`` for ``sbatch``.
    """

    name: str
    made_by: str
    folder: Path
    run_dir: Path
    python: str
    command: tuple[str, ...]
    then: tuple[str, ...] = ()
    nodes: int
    slots: int
    gpus: bool = False
    notice_s: float | None = None
    certificates: bool = True
    options: tuple[str, ...] = ()

    @property
    def variables(self) -> str:
        """The lines that say what ``holdfast``, ``run_dir`` and ``slots`` are."""
        return (
            f"holdfast=({shlex.quote(self.python)} -m holdfast)\n"
            f"run_dir={shlex.quote(str(self.run_dir))}\n"
            f"slots={self.slots}  # workers on each node"
        )

    @property
    def make_certificates(self) -> str:
        """The lines that make certificates, if any are needed."""
        return _CERTIFICATES if self.certificates else ""

    def begin(self, *, listen: str, options: str = "") -> str:
        """Returns the lines that begin the job on a node, or go on with it, or take part in it.

        Args:
            listen: a word of the shell, for the address of that node.
            options: more words.
        """
        more = [f'--listen {listen} --slots "$slots"{options and " "}{options}']
        if self.certificates:
            files = ", ".join(f"{name}: '$run_dir/certs/{name}.pem'" for name in ("ca", "cert", "key"))
            more.append(f'--set "control.tls={{{files}}}"')
        words = ['"${holdfast[@]}"', shlex.join(self.command), '--run-dir "$run_dir" --resume auto']
        return " \\\n    ".join([" ".join(words), *more, *([shlex.join(self.then)] if self.then else [])])


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Returns a text with each ``@NAME@`` in it replaced, in this order."""
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text
