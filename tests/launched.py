"""A job that ``holdfast launch`` has started, on nodes that are processes of this machine."""

import contextlib
import json
from pathlib import Path

import psutil
from tests.dist.conftest import JOBS
from tests.dist.test_agents import Cluster
from tests.waiting import until

from holdfast import parse_job
from holdfast.config.load import dump_job
from holdfast.telemetry.events import Detected

LONGER = "train.steps=260"


class Launched(Cluster):
    """It writes into ``runs/small``."""

    def __init__(self, folder):
        super().__init__(folder)
        self.run_dir = folder / "runs" / "small"

    def events(self, kind):
        return super().events(kind) if (self.run_dir / "events.jsonl").exists() else []

    def lost(self):
        return {event.worker for event in self.events(Detected)}

    def processes_of(self, node):
        """Those of the job, if this machine has all nodes."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder) and process.environ().get("HOLDFAST_NODE") == node:
                    found.append(process)
        return found

    def lose(self, node):
        """It has no power any more."""
        while found := self.processes_of(node):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def summary(self):
        """What is told of the job, once it has ended."""
        until((self.run_dir / "summary.json").exists, self.story)
        return json.loads((self.run_dir / "summary.json").read_text())


def write_job(steps=LONGER):
    """Writes the job's file, ``small.yaml``, into this folder: six workers, whose job waits for one that is held."""
    job = parse_job(JOBS["small"], (steps, "control.hang_s=200", "checkpoint.every=100"))
    Path("small.yaml").write_text(dump_job(job))
