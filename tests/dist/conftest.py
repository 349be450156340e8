"""Runs of real processes, shared by the tests: each distinct failure-free run is made once, for all test processes."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.ports import free_port
from tests.waiting import LIMIT_S

from holdfast import Fault, Job, Summary, parse_job, train
from holdfast.control.chain.opening import plans_in
from holdfast.core.faults import FaultKind
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.optim.digest import load_layer
from holdfast.runtime.launch.directory import decisions_of
from holdfast.telemetry.events import Agreed, CoordinatorReady, StepOps, read_events
from holdfast.telemetry.report import FATAL_KINDS, RunReport, report
from holdfast.telemetry.story import read_story

TEXT = f"{Path(sysconfig.get_paths()['stdlib']) / 'asyncio'}/*.py"
"""Half a megabyte in some files. Of all of Python's own sources every process would shuffle millions of windows."""

PADDED = Path(__file__).with_name("padded_models.py")

JOBS = {
    "gpt": {
        "name": "gpt",
        "model": {"kind": "gpt", "layers": 3, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"kind": "text", "path": TEXT},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 2},
        "optimizer": {"kind": "adamw", "lr": 1.0e-3, "weight_decay": 0.01},
        "train": {"steps": 4, "seed": 7},
    },
    "llama": {
        "name": "llama",
        "model": {
            "kind": "huggingface",
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "attention_dropout": 0.1,
            },
        },
        "data": {"kind": "text", "path": TEXT, "context": 16},
        "grid": {"pipelines": 2, "stages": 2, "microbatches": 4, "microbatch_size": 2},
        "optimizer": {"kind": "adamw", "lr": 1.0e-3, "weight_decay": 0.01},
        "train": {"steps": 8, "seed": 7, "clip_norm": 0.5},
    },
    "bert": {
        "name": "bert",
        "model": {"kind": "bert", "layers": 3, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 2},
        "optimizer": {"kind": "adam", "lr": 1.0e-3},
        "train": {"steps": 4, "seed": 11},
    },
    "vit": {
        "name": "vit",
        "model": {"kind": "vit", "layers": 3, "width": 16, "heads": 2, "patch": 4, "dropout": 0.1},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 4},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {"steps": 4, "seed": 5},
    },
    "convnet": {
        "name": "convnet",
        "model": {"kind": "convnet", "width": 4},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 8},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {"steps": 4, "seed": 3},
    },
    "resnet": {
        "name": "resnet",
        "model": {"kind": "resnet", "width": 4},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 8},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {"steps": 4, "seed": 3},
    },
    "nt3": {
        "name": "nt3",
        "model": {"kind": "nt3", "width": 8},
        "data": {"kind": "breast-cancer"},
        "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 4},
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"steps": 4, "seed": 3},
    },
    "unlike": {
        "name": "unlike",
        "model": {"kind": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"kind": "text", "path": TEXT},
        "grid": {
            "layout": [{"stages": [3, 3], "microbatches": 5}, {"stages": [2, 2, 2], "microbatches": 3}],
            "microbatch_size": 2,
        },
        "optimizer": {"kind": "adamw", "lr": 1.0e-3, "weight_decay": 0.01},
        "train": {"steps": 4, "seed": 7},
    },
    "poisoned": {
        "name": "poisoned",
        "model": {
            "kind": "python",
            "target": f"{Path(__file__).with_name('poisoned_model.py')}:build",
            "loss": f"{Path(__file__).with_name('poisoned_model.py')}:loss",
            "arguments": {"layer": 0, "one_in": 15},
        },
        "data": {"kind": "digits"},
        "grid": {"pipelines": 2, "stages": 4, "microbatches": 4, "microbatch_size": 4},
        "optimizer": {"kind": "adamw", "lr": 1.0e-2},
        "train": {"steps": 8, "seed": 3},
    },
    "unrepeatable": {
        "name": "unrepeatable",
        "model": {
            "kind": "python",
            "target": f"{Path(__file__).with_name('unrepeatable_model.py')}:build",
            "loss": f"{Path(__file__).with_name('unrepeatable_model.py')}:loss",
        },
        "data": {"kind": "digits"},
        "grid": {"pipelines": 1, "stages": 4, "microbatches": 4, "microbatch_size": 4},
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"steps": 9, "seed": 3},
    },
    "halved": {
        "name": "halved",
        "model": {
            "kind": "python",
            "target": f"{Path(__file__).with_name('halved_model.py')}:build",
            "loss": "torch.nn:CrossEntropyLoss",
        },
        "data": {"kind": "digits"},
        "grid": {"layout": [{"stages": [5], "microbatches": 8}]},
        "optimizer": {"kind": "adamw", "lr": 1.0e-2},
        "train": {"steps": 4, "seed": 5},
    },
    "foreign": {
        "name": "foreign",
        "model": {
            "kind": "python",
            "target": f"{Path(__file__).with_name('foreign_models.py')}:build",
            "loss": "torch.nn:CrossEntropyLoss",
        },
        "data": {"kind": "python", "target": f"{Path(__file__).with_name('foreign_models.py')}:dataset"},
        "grid": {"pipelines": 2, "stages": 3, "microbatches": 2, "microbatch_size": 3},
        "optimizer": {"kind": "adamw", "lr": 1.0e-2},
        "train": {"steps": 4, "seed": 5},
    },
    "padded": {
        "name": "padded",
        "model": {"kind": "python", "target": f"{PADDED}:build", "split": "blocks"},
        "data": {"kind": "python", "target": f"{PADDED}:pairs"},
        "grid": {"pipelines": 2, "stages": 3, "microbatches": 2, "microbatch_size": 4},
        "optimizer": {"kind": "adamw", "lr": 1.0e-2},
        "train": {"steps": 8, "seed": 5},
    },
    "classified": {
        "name": "classified",
        "model": {
            "kind": "huggingface",
            "task": "sequence-classification",
            "labels": 3,
            "config": {
                "model_type": "bert",
                "vocab_size": 40,
                "hidden_size": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 16,
            },
        },
        "data": {"kind": "python", "target": f"{PADDED}:labelled"},
        "grid": {"pipelines": 2, "stages": 2, "microbatches": 4, "microbatch_size": 2},
        "optimizer": {"kind": "adamw", "lr": 1.0e-2},
        "train": {"steps": 8, "seed": 7},
    },
    "small": {
        "name": "small",
        "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
        "data": {"kind": "text", "path": TEXT},
        "grid": {"pipelines": 3, "stages": 2, "microbatches": 2},
        "optimizer": {"kind": "adamw", "lr": 1.0e-3},
        "train": {"steps": 60, "seed": 1},
    },
}

LOOP_SCRIPT = Path(__file__).with_name("loop_script.py")
for _variant in ("norm", "scaled", "tied", "own"):
    JOBS[f"loop-{_variant}"] = {
        "name": f"loop-{_variant}",
        "model": {"kind": "script", "path": str(LOOP_SCRIPT), "arguments": ["--variant", _variant]},
        "data": {"kind": "script"},
        "grid": {"pipelines": 4, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
    }

HARMLESS = ("control.", "grid.workers_per_node=", "logging.", "resilience.spares=", "resilience.step_log=")
"""Overrides that cannot change any bit of a run in which nothing fails."""


PATIENT = "control.hang_s=15"
"""For jobs in which nobody hangs: two tests run side by side, so the machine may be busy."""
HANGS = {FaultKind.HANG, FaultKind.STALL, FaultKind.PARTITION}


TWO_NODES = os.environ.get("HOLDFAST_TWO_NODES") == "1"
"""Whether half of each job's workers run on a second node, whose faults are all but those of emulated nodes."""


@contextlib.contextmanager
def second_node(run_dir: Path, slots: int) -> Iterator[None]:
    """An agent of another node for the job of a run directory, which ends with it."""
    words = ("agent", "--coordinator", run_dir, "--slots", slots, "--node", "second")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (run_dir.parent / f"{run_dir.name}.second.txt").open("w") as out:
        line = [sys.executable, "-m", "holdfast", *map(str, words)]
        with subprocess.Popen(line, env=environment, stdout=out, stderr=subprocess.STDOUT) as agent:
            try:
                yield
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(LIMIT_S)
                agent.kill()
            assert agent.wait() in (0, 93), out.name


class Reference:
    """A failure-free run as its ``summary.json`` tells it; another test process may have made it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.__dict__ |= json.loads((run_dir / "summary.json").read_text())

    @cached_property
    def report(self) -> RunReport:
        return report(read_events(self.run_dir / "events.jsonl"))


class Runs:
    """Trains the small jobs, with and without faults, and compares."""

    EVERY_STEP = ("checkpoint.every=1", "checkpoint.synchronous=true")
    """A checkpoint of each step but those that are superseded, however slow the disk is."""

    def __init__(self, factory) -> None:
        self._factory = factory
        base = factory.getbasetemp()
        self._shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(self) -> Path:
        return self._factory.mktemp("run")

    def absence(self, over: Callable[[list], bool]) -> Absence:
        """A run directory and overrides with which a dead coordinator comes back only after ``over`` of the events."""
        return Absence(self.folder(), over)

    def job(self, name: str, overrides: tuple[str, ...] = ()) -> Job:
        return parse_job(copy.deepcopy(JOBS[name]), overrides)

    def train(self, name: str, *faults: str, overrides: tuple[str, ...] = (), **options) -> Summary:
        """One run; what each worker executed is compared with its order, where the plans are stored in a file."""
        summary = self.train_only(name, *faults, overrides=overrides, **options)
        if self.job(name, overrides).control.store == "sqlite":
            check_executed(summary.run_dir)
        return summary

    def train_job(self, job: Job, faults: list[str]) -> Summary:
        """One run of a job that no other test has."""
        return self._run(job, faults=[Fault.parse(text) for text in faults])

    def train_only(self, name: str, *faults: str, overrides: tuple[str, ...] = (), **options) -> Summary:
        """One run, in which perhaps no step is left to be executed."""
        planned = [Fault.parse(text) for text in faults]
        hangs = any(fault.kind in HANGS for fault in planned)
        return self._run(self.job(name, overrides if hangs else (PATIENT, *overrides)), faults=planned, **options)

    def _run(self, job: Job, **options) -> Summary:
        options = {"run_dir": self.folder(), **options}
        emulated = any(fault.node is not None or fault.kind is FaultKind.PARTITION for fault in options["faults"])
        if not TWO_NODES or emulated or "slots" in options:
            return train(job, **options)
        if not job.control.coordinators:
            job = replace(job, control=replace(job.control, coordinators=1))
        here = job.most_workers // 2
        with second_node(options["run_dir"], job.most_workers - here):
            return train(job, slots=here, **options)

    def healthy(self, name: str, overrides: tuple[str, ...] = ()) -> Reference:
        """The run in which nothing fails; whoever needs it first makes it, others wait for that."""
        needed = tuple(text for text in overrides if not text.startswith(HARMLESS))
        folder = self._shared / f"healthy-{hashlib.sha256(repr((name, *needed)).encode()).hexdigest()[:16]}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "summary.json").exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one who failed at it
                self.train(name, overrides=needed, run_dir=folder)
        return Reference(folder)

    def distance(self, summary: Summary, healthy: Reference) -> float:
        """Relative L2 distance of all weights, read from the two runs' files."""
        pairs = list(zip(*(sorted((s.run_dir / "final").glob("layer-*")) for s in (summary, healthy)), strict=True))
        assert pairs
        layers = [(load_layer(one), load_layer(other)) for one, other in pairs]
        assert {state.step for pair in layers for state in pair} == {healthy.steps}
        ours, theirs = (
            torch.cat([value.double().flatten() for pair in layers for value in pair[side].parameters.values()])
            for side in (0, 1)
        )
        return float((ours - theirs).norm() / theirs.norm())

    def survives(
        self,
        name: str,
        *faults: str,
        overrides: tuple[str, ...] = (),
        healthy: Summary | Reference | None = None,
        **options,
    ) -> Summary:
        """One run with faults: each fired, only those that are to lose workers did, and the bits are right."""
        healthy = healthy or self.healthy(name, overrides)
        summary = self.train(name, *faults, overrides=overrides, **options)
        planned = [Fault.parse(text) for text in faults]
        assert summary.unfired == ()
        assert sorted(summary.report.fired) == sorted(map(str, planned))
        assert sorted(f.worker for f in summary.report.failures) == victims(self.job(name, overrides), planned)
        restarts = sum(fault.kind is FaultKind.KILL_COORDINATOR for fault in planned)
        assert summary.processes_restarted == restarts, "the coordinator's, and no worker's"
        assert summary.weights_sha256 == healthy.weights_sha256
        assert summary.state_sha256 == healthy.state_sha256
        assert summary.final_loss == healthy.final_loss
        assert summary.omitted_steps == healthy.omitted_steps
        assert summary.reasons == healthy.reasons, "why there is no final loss, if so, with the loss that there was"
        assert summary.steps == healthy.steps
        return summary


def victims(job: Job, faults: list[Fault]) -> list[str]:
    """The workers that are lost to faults; whoever is told to leave, or comes, is not lost."""
    grid = job.grid
    workers = tuple(WorkerId(p, s) for p, size in enumerate(job.sizes) for s in range(size))
    nodes = group_into_nodes((*workers, *job.spares), grid.workers_per_node)
    struck = [fault for fault in faults if fault.kind in FATAL_KINDS]
    lost = [(fault.worker,) if fault.node is None else nodes[fault.node] for fault in struck]
    return sorted(str(worker) for group in lost for worker in group)


def check_executed(run_dir: Path) -> None:
    """Every worker ran, in every step that it finished, exactly what the plan of that generation orders.

    But for steps that were gone on with after a loss, which all had agreed on.
    """
    plans = stored_plans(run_dir)
    events = [event for _, event in read_story(run_dir)]
    finished = [event for event in events if isinstance(event, StepOps)]
    assert finished
    gone_on_with = {(e.generation, e.step) for e in events if isinstance(e, Agreed) and e.goes_on}
    assert {(event.generation, event.step) for event in finished if not event.whole} <= gone_on_with
    for event in (event for event in finished if event.whole):
        order = plans[event.generation].orders.of(WorkerId.parse(event.worker))
        ran = [f"{kind}{pipeline}.{index}" for kind, pipeline, index, _, _ in event.ops]
        assert ran == [str(op) for op in order], f"{event.worker} in step {event.step}"


def stored_plans(run_dir: Path) -> dict:
    """The plans of all generations, as the coordinator stored them before it sent them."""
    return plans_in(decisions_of(run_dir))


class Absence:
    """Keeps a coordinator that died away until something has happened: its port is taken meanwhile."""

    def __init__(self, folder: Path, over: Callable[[list], bool]) -> None:
        self.run_dir = folder
        self.port = free_port()
        self.overrides = (f"control.port={self.port}", "control.restart_delay_s=1.0")
        self._over = over
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)

    def __enter__(self) -> Absence:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _events(self) -> list:
        path = self.run_dir / "events.jsonl"
        return [event for _, event in read_events(path)] if path.exists() else []

    def _await(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._ended.wait(0.01):
            pass

    def _take(self) -> None:
        self._await(lambda: any(isinstance(event, CoordinatorReady) for event in self._events()))
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections may not be quite over
            self._await(lambda: _binds(holder, self.port))
            if not self._ended.is_set():
                holder.listen(128)
            self._await(lambda: self._over(self._events()))


def _binds(holder: socket.socket, port: int) -> bool:
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def executed_as_ordered():
    return check_executed


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory)
