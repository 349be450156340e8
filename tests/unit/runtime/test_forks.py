"""Our processes come from a server of our own, whatever the program did before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.plain import plain

PROGRAM = """
import multiprocessing

print("main runs", flush=True)
tell = None

if __name__ == "__main__":
    import helper
    from holdfast.runtime.node.forks import FORKS, ForkedProcess

    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=helper.nothing)
    process.start()
    process.join()
    ours, theirs = FORKS.Pipe(duplex=False)
    process = ForkedProcess(target=helper.tell, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    print(ours.recv_bytes().decode())
    process.join()
    print(process.exitcode)
"""

HELPER = """
import sys


def nothing():
    pass


def tell(connection):
    main = sys.modules["__main__"]
    loaded = "holdfast.runtime.preload" in sys.modules
    connection.send_bytes(f"loaded {loaded}, main {hasattr(main, 'tell')}".encode())
"""


@pytest.fixture
def printed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text(HELPER)
    run = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_all_is_loaded_though_the_program_has_a_fork_server_already(printed):
    assert printed[-2:] == ["loaded True, main False", "0"]


def test_only_the_programs_own_server_runs_its_main_module_again(printed):
    assert printed.count("main runs") == 2, "once itself, once in the process that it started by itself"


def test_texts_have_the_same_hashes_in_every_run(tmp_path):
    """So the order of a set of words, a vocabulary's for instance, is that of the run which is gone on with."""
    (script := tmp_path / "words.py").write_text("print(hash('words'), list(set('a vocabulary of words'.split())))")
    other = {"PYTHONHASHSEED": "0", **os.environ}
    ended = subprocess.run([sys.executable, script], env=other, capture_output=True, text=True, check=True)
    assert plain(script).stdout == ended.stdout
    assert "PYTHONHASHSEED" in other
    assert os.environ.get("PYTHONHASHSEED") in (None, other["PYTHONHASHSEED"]), "it is nobody else's"
