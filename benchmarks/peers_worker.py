"""One worker of another system, in the environment of ``peers.py``: the model and data of Holdfast's own run.

Not meant to be started by hand. It appends JSON lines to an event file and kills itself where it was told to.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.data.sampler import load_microbatch
from holdfast.runtime.engine.datasets import build_dataset
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.optimizing import build_optimizer
from torchft_manager import make_manager

_PR_SET_PDEATHSIG = 1
_TIMEOUT = timedelta(seconds=20)
_CHECKPOINT_EVERY = 5


class Trainer:
    """One data-parallel replica of the job's model; gradients lie in one flat buffer."""

    def __init__(self, job: Job, rank: int, options: argparse.Namespace) -> None:
        self.job, self.rank, self.options = job, rank, options
        model = build_model(job)
        assert not model.ties or job.grid.stages == 1
        self.model = torch.nn.Sequential(*_retied(model.layers, model.ties))
        self.loss, self.dataset = model.loss, build_dataset(job)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(job)(self.parameters)
        self.flat = torch.zeros(sum(parameter.numel() for parameter in self.parameters))
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def accumulate(self, step: int) -> None:
        """Sums the gradients of our micro-batches; here, half-way through, is where we may be killed."""
        self.flat.zero_()
        count = self.job.grid.microbatches
        for index in range(count):
            self.loss(*self._forward(step, self.rank * count + index)).backward()
            if index == count // 2:
                self._maybe_die(step)
        self.flat.div_(count)

    def _forward(self, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = load_microbatch(
            self.dataset,
            seed=self.job.train.seed,
            step=step,
            microbatch=number,
            num_microbatches=self.job.global_microbatches,
            microbatch_size=self.job.grid.microbatch_size,
        )
        return self.model(inputs), targets

    def _maybe_die(self, step: int) -> None:
        marker = Path(self.options.events).with_suffix(".killed")
        if self.rank != self.options.kill_rank or step != self.options.kill_step or marker.exists():
            return
        marker.touch()
        self.log("kill", step=step)
        os.kill(os.getpid(), signal.SIGKILL)

    def log(self, event: str, **values: Any) -> None:
        """Appends one line; the clock is the machine's, the same in all processes."""
        line = json.dumps({"time": time.monotonic(), "event": event, "rank": self.rank, **values}) + "\n"
        file = os.open(self.options.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line.encode())
        os.close(file)

    def state(self) -> dict[str, Any]:
        """Model and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned elsewhere."""
        self.log("load")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def finish(self) -> None:
        """Tells the hash of the weights."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().tobytes())
        self.log("done", sha256=digest.hexdigest())


def _retied(layers: Any, ties: Any) -> Any:
    """The layers with tied weights tied again: the whole model lives in one process."""
    for tie in ties:
        (first, name), *others = tie.places
        for layer, other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(layers[layer].get_submodule(owner), leaf, layers[first].get_parameter(name))
    return layers


def run_lighthouse(options: argparse.Namespace) -> None:
    """Serves torchft's lighthouse until standard input closes; prints its port."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        heartbeat_timeout_ms=options.heartbeat_ms,
        join_timeout_ms=options.join_ms,
        quorum_tick_ms=100,
    )
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.read()
    server.shutdown()


def run_torchft(trainer: Trainer, options: argparse.Namespace) -> None:
    """Trains under torchft's manager: a step that fails is not committed and is tried again by whoever is left."""
    manager = make_manager(
        rank=options.rank,
        lighthouse=options.lighthouse,
        least=2,
        timeout=_TIMEOUT,
        state=trainer.state,
        load=trainer.load_state,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    while manager.current_step() < trainer.job.train.steps:
        step = manager.current_step()
        manager.start_quorum()
        trainer.accumulate(step)
        manager.allreduce(trainer.flat).wait()
        if manager.should_commit():
            trainer.optimizer.step()
            trainer.log("commit", step=step, members=manager.num_participants())
        else:
            trainer.log("discard", step=step)
    trainer.finish()
    print("done", flush=True)
    sys.stdin.readline()  # who leaves early would break the last step of the others


def run_torchrun(trainer: Trainer, options: argparse.Namespace) -> None:
    """Trains under torchrun, which starts all workers anew when one dies; they go on from the last checkpoint."""
    if options.own_prefix:
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(f"restart-{restart}", dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT))
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=trainer.rank, world_size=world, timeout=_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    path = Path(options.events).with_suffix(".checkpoint")
    for step in range(_load(trainer, path), trainer.job.train.steps):
        trainer.accumulate(step)
        dist.all_reduce(trainer.flat)
        trainer.flat.div_(dist.get_world_size())
        trainer.optimizer.step()
        trainer.log("commit", step=step, members=dist.get_world_size())
        if trainer.rank == 0 and (step + 1) % _CHECKPOINT_EVERY == 0:
            _save(trainer, path, step + 1)
    trainer.finish()
    dist.barrier()


def _save(trainer: Trainer, path: Path, step: int) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, **trainer.state()}, temporary)
    temporary.replace(path)


def _load(trainer: Trainer, path: Path) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    trainer.load_state(state)
    return int(state["step"])


def main() -> None:
    """Runs the part that the first argument names."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["lighthouse", "torchft", "torchrun"])
    parser.add_argument("--job", help="the resolved job file")
    parser.add_argument("--events", help="file to append events to")
    parser.add_argument("--rank", type=int, help="default: torchrun's RANK")
    parser.add_argument("--kill-rank", type=int, default=-1, help="who dies; -1 for nobody")
    parser.add_argument("--kill-step", type=int, default=-1, help="in which step")
    parser.add_argument("--lighthouse", help="address of torchft's lighthouse")
    parser.add_argument("--heartbeat-ms", type=int, default=5000, help="of torchft's lighthouse")
    parser.add_argument("--join-ms", type=int, default=60000, help="of torchft's lighthouse")
    parser.add_argument("--own-prefix", action="store_true", help="torchrun: fresh store keys per restart")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "lighthouse":
        run_lighthouse(options)
        os._exit(0)
    rank = int(os.environ["RANK"]) if options.rank is None else options.rank
    trainer = Trainer(load_job(options.job), rank, options)
    run = run_torchft if options.part == "torchft" else run_torchrun
    run(trainer, options)
    os._exit(0)  # threads of the systems' own would keep the process


if __name__ == "__main__":
    main()
