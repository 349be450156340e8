"""The process of one worker that runs a user's script: the script's thread loops, another one drives."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

import torch

from holdfast.config.deciding import compare_told, spelled
from holdfast.config.job import ScriptModel
from holdfast.control.messages import StateAt
from holdfast.core.plan import Plan
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError
from holdfast.protocol.worker import Engine
from holdfast.runtime.driver import SpecOf
from holdfast.runtime.engine.build import StageParts
from holdfast.runtime.loop.alone import LEFT
from holdfast.runtime.loop.facts import source_files
from holdfast.runtime.loop.hosting import Loop, hosted
from holdfast.runtime.loop.probing import script_facts, sums_gradients
from holdfast.runtime.loop.script import print_trace, run_script, told
from holdfast.runtime.loop.stage import HANDED_ON, Gradients, LoopStage
from holdfast.runtime.loop.turns import Item, LoopAbandoned, Turns
from holdfast.runtime.main.driving import drive_beside
from holdfast.runtime.main.worker import WorkerProcess
from holdfast.runtime.sockets import leading_to, opened
from holdfast.runtime.specs import WorkerSpec, check_sources
from holdfast.runtime.transport.links.loop import watched
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints

__all__ = ["ScriptProcess", "run_script_worker"]


def run_script_worker(spec: WorkerSpec) -> None:
    """Runs one worker of a script to its end; exits with 0 after an orderly shutdown."""
    torch.set_num_threads(1)
    ScriptProcess(spec).run()


class ScriptProcess(WorkerProcess):
    """One worker's process that runs a script; it carries the script's session."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, None)
        assert isinstance(spec.job.model, ScriptModel), "only a script is run"
        self._script = spec.job.model
        self._loop: Loop | None = None
        self._turns: Turns | None = None
        self._problem: BaseException | None = None

    # --- for the session ----------------------------------------------------------------------------------------------

    @property
    def per_gradient(self) -> bool:
        """Whether each gradient is summed by itself."""
        return sums_gradients(self._spec.job)

    @property
    def worker(self) -> str:
        """Who this is."""
        return str(self._spec.worker)

    def is_first(self) -> bool:
        """Whether no member of the generation that runs comes before this worker."""
        plan = None if self._driver is None else self._driver.protocol.plan
        holders = self._spec.plan.workers if plan is None else plan.placement.owners(0)
        return min(holders) == self._spec.worker

    @property
    def untried(self) -> bool:
        """The probe has tried it."""
        return False

    @property
    def deadline(self) -> float:
        """When the loop is to be stopped, in seconds since the epoch."""
        return self._spec.deadline

    def ended(self) -> None:
        """Whether it was, is asked when the script ends."""

    def begin(self, loop: Loop, turns: Turns) -> Callable[[], LoopStage]:
        """The script has reached its loop: from now on this worker takes part in the job."""
        self._check(loop)
        if self._spec.job.train.numerics == "exact":
            self.device.settle()  # whatever the script has set since
        self._loop, self._turns = loop, turns
        try:
            driver = self._begin()
        except BaseException as error:  # nothing will drive: this ends the worker, whatever the script makes of it
            self._problem = error
            turns.end(error)
            raise
        driver.asks, driver.outside_s = turns.between, self._spec.job.control.outside_s
        driver.protocol.asked = True

        def on_end(problem: BaseException | None) -> None:
            self._problem = problem
            try:
                if problem is None:
                    self._end(driver)
            finally:
                turns.end(problem, finished=driver.protocol.standing[1] == "finished")

        drive_beside(driver, on_end)
        return self._stage

    def _check(self, loop: Loop) -> None:
        """What was planned by must be what this process runs.

        Raises:
            ConfigError: it is not the same in each process.
        """
        job = self._spec.job
        train = job.train
        ours = (loop.microbatches, loop.size, loop.steps, loop.seed, loop.sum_chunks)
        planned = (job.global_microbatches, job.grid.microbatch_size, train.steps, train.seed, train.sum_chunks)
        if ours != planned:
            raise ConfigError(
                f"hf.steps: microbatches, size, steps, seed and sum_chunks are {ours} here, and were {planned} when "
                "the script was tried; expected the same in every process"
            )
        if loop.prepared.fingerprint() != self._spec.model:
            raise ConfigError(
                "hf.prepare: the model begins with other weights than when the script was tried, or an optimizer with "
                "another state; build it after holdfast.session(), which seeds torch, numpy and random, and draw from "
                "these"
            )
        if differences := compare_told(self._spec.script, spelled(script_facts(loop))):
            texts = [each.told("the process that tried the script") for each in differences]
            raise ConfigError(f"{'; '.join(texts)}; expected the same in every process")

    def _check_code(self) -> None:
        check_sources(self._spec.sources, source_files(self._script.path))

    # --- the process --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._open_device()
        hosted(self)
        problem: BaseException | None = None
        try:
            run_script(self._script, self._descriptors)
        except LoopAbandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - nobody can know what somebody else's script raises
            problem = error
        sys.stdout.flush()
        if self._turns is None:
            if problem is None:
                raise ConfigError(f"{self._script.path}: came to its end without a loop over hf.steps(...)")
            raise ConfigError(told(self._script, problem)) from problem
        if problem is None and not self._turns.over:
            problem = ConfigError(f"{self._script.path}: {LEFT}")
        if problem is not None and problem is not self._problem:
            print_trace(problem)
            sys.stderr.flush()
            self._turns.fail(problem)
            self._turns.wait()
        if self._problem is not None:
            raise self._problem
        if problem is not None:
            os._exit(1)

    def _descriptors(self) -> Iterator[int]:
        """What no process that the script forks is to have: links, the control connection, the event log."""
        yield from watched()
        yield from leading_to(set(self._client.addresses.split(",")))
        yield from opened(self._spec.events)

    def _build(self, plan: Plan) -> StageParts:
        """The stage of the place that we have in a plan: all of the model, or nothing of it."""
        assert self._loop is not None, "nothing is built before the loop"
        assert self._turns is not None, "nothing is built before the loop"
        job, num_layers = self._spec.job, len(self._loop.prepared.buckets)
        stage = LoopStage(
            prepared=self._loop.prepared,
            turns=self._turns,
            owned=plan.placement.layers_of(self._spec.worker) if self._spec.worker in plan.workers else (),
            num_microbatches=job.global_microbatches,
            chunks=job.train.sum_chunks,
            logs=self._loop.logs,
            watch=self._compare,
            loading=self._monitor.loading,
            device=self.device,
        )
        return StageParts(
            stage=stage,
            boundaries=(HANDED_ON,) * num_layers,
            vote=TensorSpec(shape=(num_layers, 3), dtype="float64"),
        )

    def _tell_beside(self, step: int) -> bytes:
        """From where its data can be read on, if they are a stream."""
        mark = self._stage().mark_of(step)
        return b"" if mark is None else json.dumps(mark).encode()

    def _learn_beside(self, told: bytes) -> None:
        self._stage().learn_mark(json.loads(told))

    def _stage(self) -> LoopStage:
        assert self._driver is not None, "it takes part in the job"
        now = self._driver.protocol.stage
        assert isinstance(now, LoopStage), "a script's loop runs its operations"
        return now

    @property
    def _compiles(self) -> bool:
        return self._loop is not None and self._loop.prepared.compiled

    def _compare(self, item: Item, found: Gradients) -> None:
        """The probe has run the first item, too; if it has other bits here, so may every one that is lost.

        Raises:
            ConfigError: it has, and nothing that is known of explains it.
        """
        wanted = self._spec.first_item
        if not wanted or (item.step, item.number) != (0, 0) or found.digest == wanted:
            return
        text = "the first item has other bits in another process: weights may differ from a run without failures"
        if self._compiles:
            text += "; the model is compiled"
        elif self._spec.job.train.numerics == "exact":
            raise ConfigError(
                "the first item has other bits in this process than when the script was tried: the model, the loop or "
                "the data depend on the process, on the time, or on hf.is_first; expected the same in every process"
            )
        self._note(text)
        self._complain("bits", f"worker {self.worker}: {text}")

    def _rebuild(self, plan: Plan, state: StateAt | None) -> tuple[Engine, SpecOf]:
        parts = self._build(plan)
        if state is not None and state.url is not None:
            self._load(parts.stage, state.url, state.step)
        return parts.stage, parts.spec_of

    def _load(self, stage: Engine, url: str, step: int) -> None:
        assert self._loop is not None, "nothing is loaded before the loop"
        with self._loop.prepared.as_of(Checkpoints(open_store(url)).read(step).facts.script):
            super()._load(stage, url, step)
