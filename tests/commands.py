"""The command ``holdfast`` in this process: as people run it, but for the seconds in which it would load PyTorch."""

from __future__ import annotations

import contextlib
import io
import subprocess

from holdfast.cli.commands import run_command


def holdfast(*flags: object) -> subprocess.CompletedProcess[str]:
    """Does what the command does with these flags; what it says is text."""
    words = list(map(str, flags))
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = run_command(words)
        except SystemExit as ended:  # of the parser
            code = ended.code
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
