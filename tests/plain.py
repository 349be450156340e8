"""A script by itself, as ``python SCRIPT`` runs it, in a process that is forked where PyTorch is loaded already.

Loading it takes most of the time of such a script, and is the same each time. ``test_loops`` starts one as people do.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.waiting import LIMIT_S

from holdfast.runtime.node.forks import ForkedProcess


def plain(script: object, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end; what it wrote is text. With ``check`` it must have ended with 0."""
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder) / name for name in ("output", "errors")]
        process = ForkedProcess(target=runpy.run_path, args=(__file__, {"words": words, "written": written}, "forked"))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
        ended = subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in written))
    assert ended.returncode is not None, f"it did not end within {LIMIT_S:g} s: {ended.stderr}"
    assert not (check and ended.returncode), ended.stderr
    return ended


def _become(words: list[str], written: list[Path]) -> None:
    """Goes on as the interpreter would that had been started with these words."""
    for descriptor, path in zip((1, 2), written, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "forked":
    _become(globals()["words"], globals()["written"])
