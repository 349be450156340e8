"""What a process of a job owes to strangers; each in a process of its own, as limits cannot all be taken back."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys

import pytest

from holdfast.errors import ConfigError
from holdfast.runtime.hardening import make_private
from holdfast.runtime.main.lookups import answering
from holdfast.runtime.node.forks import FORKS, ForkedProcess

TOLD = """
import os, resource
from holdfast.runtime.hardening import harden
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
harden()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)[0], oct(os.umask(0)))
"""
DIES = """
import os, resource, signal, sys
from holdfast.runtime.hardening import harden
resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
if sys.argv[1] == "hardened":
    harden()
os.chdir(sys.argv[2])
os.kill(os.getpid(), signal.SIGABRT)
"""


def test_limits_and_mask():
    told = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["300", "300", "1", "0o77"]


@pytest.mark.parametrize(("how", "dumps"), [("hardened", False), ("as it was", True)])
def test_a_crash_leaves_no_core_dump(tmp_path, how, dumps):
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with open("/proc/sys/kernel/core_pattern") as file:
        if dumps and (hard != resource.RLIM_INFINITY or file.read().strip() != "core"):
            pytest.skip("this system writes no core dumps into the current folder, so none can be missing")
    ended = subprocess.run([sys.executable, "-c", DIES, how, tmp_path], check=False)
    assert ended.returncode == -signal.SIGABRT
    assert any(tmp_path.iterdir()) == dumps


def _limits(answer):
    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE))
    answering(answer, lambda: " ".join(map(str, limits)))


def test_every_process_of_a_job_begins_with_that():
    ours, theirs = FORKS.Pipe(duplex=False)
    process = ForkedProcess(target=_limits, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv_bytes().decode() == f"ok {resource.getrlimit(resource.RLIMIT_NOFILE)[1]} 1"
    process.join()


def test_a_folder_that_others_could_enter_becomes_private(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o777)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    make_private(tmp_path / "new" / "run")
    assert stat.S_IMODE((tmp_path / "new" / "run").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_somebody_else_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to us"):
        make_private(folder)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "run")
