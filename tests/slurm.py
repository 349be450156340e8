"""A Slurm of several nodes on this machine: its real daemons, in a folder and on ports of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess

import psutil
import pytest
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

__all__ = ["SlurmCluster", "needs_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

needs_slurm = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, PROGRAMS)),
    reason="needs root and Slurm; Debian: apt-get install munge slurmctld slurmd slurm-client",
)

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=20
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=16
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class SlurmCluster:
    """Nodes n0, n1 and so on, all idle once this is made. Commands find it by ``environment``."""

    def __init__(self, folder, nodes):
        self.folder, self.nodes = folder, [f"n{number}" for number in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self):
        munge = self.folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        places = {name: f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")}
        self._run("munged", "--foreground", "--force", f"--socket={munge}/socket", *places.values())
        until((munge / "socket").exists, self.said, self._daemons[-1])
        port, *ports = (free_port() for _ in range(len(self.nodes) + 1))
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname(),
                port=port,
                nodes=f"n[0-{len(self.nodes) - 1}]",
                ports=f"[{','.join(map(str, ports))}]",
            )
        )
        self._run("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._run("slurmd", "-D", "-N", node)
        until(self._all_idle, self.said)

    def _all_idle(self):
        assert all(daemon.poll() is None for daemon in self._daemons), self.said()
        return self.states() == dict.fromkeys(self.nodes, "idle")

    def _run(self, *words):
        with (self.folder / "daemons.txt").open("ab") as out:
            self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=out, stderr=out))

    def said(self):
        return (self.folder / "daemons.txt").read_text()[-3000:]

    def ask(self, *words, check=True):
        """What a command of Slurm says."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}{self.said()}"
        return done.stdout.strip()

    def states(self):
        """The state of each node, once there are any."""
        return dict(line.split() for line in self.ask("sinfo", "-hN", "-o", "%N %T", check=False).splitlines())

    def job_states(self):
        """The state of each job that has not ended."""
        return dict(line.split() for line in self.ask("squeue", "-h", "-o", "%i %T").splitlines())

    def processes_of(self, node):
        """Those of jobs on a node, and Slurm's own there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") != node:
                    continue
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found += [process, *filter(_is_slurms, process.parents())]
        return set(found)

    def kill_node(self, node):
        """The node is gone, with all that runs there; Slurm is told, which otherwise finds out in minutes."""
        self._daemons[2 + self.nodes.index(node)].kill()
        assert self.processes_of(node), "something runs there"
        self._kill(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=gone")

    def _kill(self, node):
        """As if its power were cut: nobody there sees, and tells, how another one has ended.

        A daemon would tell how the job's script did; it is stopped first. Each ``srun`` has a second process, which
        cancels the step when the first is gone, and would be woken by its end: they end as one group.
        """
        while found := self.processes_of(node):  # what is about to be started, too
            daemons = {process for process in found if _is_slurms(process)}
            groups = {group for process in found - daemons if (group := _group_of(process))}
            for daemon in daemons:
                with contextlib.suppress(psutil.NoSuchProcess):
                    daemon.suspend()
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            for daemon in daemons:
                with contextlib.suppress(psutil.NoSuchProcess):
                    daemon.kill()

    def close(self):
        """Ends all daemons and jobs, with what they have started."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(LIMIT_S)
        for node in self.nodes:
            self._kill(node)
        for process in psutil.process_iter():  # that of a step whose processes have ended waits for a daemon
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and process.name().startswith("slurmstepd"):
                    process.kill()


@pytest.fixture
def slurm(tmp_path_factory):
    """Makes a cluster of so many nodes."""
    with contextlib.ExitStack() as stack:

        def make(nodes):
            return stack.enter_context(contextlib.closing(SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes)))

        yield make


def _is_slurms(process):
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("slurmstepd")
    return False


def _group_of(process):
    """The group of a process; None if it is gone. Never our own: jobs have theirs."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(process.pid)
        assert group != os.getpgrp(), process
        return group
    return None
