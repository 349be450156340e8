"""Measures what each layer of a job costs, by training it: every layer is a stage of its own, in one process.

So what is timed is what a worker runs: graphs cut at each layer, seeds, the split backward pass, sums and their
ledger, the update on a copy. One iteration is one step with two micro-batches: one goes through F, I and W, the other
through F and B.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import TypeVar

from torch import Tensor

from holdfast.config.job import Job
from holdfast.core.profile import LayerProfile
from holdfast.core.schedule import OpKind
from holdfast.core.summing import Contribution, Total, add_up
from holdfast.data.items import Inputs
from holdfast.devices.device import Device
from holdfast.errors import ConfigError
from holdfast.profiling.activation_memory import ActivationMemory
from holdfast.profiling.samples import spread
from holdfast.profiling.timers import Timer, timer_for
from holdfast.runtime.engine.build import checkpointed_layers
from holdfast.runtime.engine.datasets import build_dataset, microbatch_loader
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.optimizing import build_optimizer
from holdfast.runtime.engine.precision import PRECISIONS
from holdfast.runtime.engine.probing import probe
from holdfast.runtime.engine.stage import Stage
from holdfast.runtime.engine.stepped import ReducedLayers
from holdfast.runtime.tensors import num_bytes

__all__ = ["WARM_UP", "JobLayers", "LayerBench", "measure_layers"]

WARM_UP = 3
"""Iterations that are not timed."""
_MICROBATCHES = 2
_NAMES = {
    OpKind.F: "forward_s",
    OpKind.I: "backward_input_s",
    OpKind.W: "backward_weight_s",
    OpKind.B: "backward_s",
}
_OPTIMIZER = "optimizer_s"

S = TypeVar("S", bound=Stage)


def measure_layers(
    job: Job, *, iterations: int, device: Device, on_iteration: Callable[[int], None]
) -> tuple[LayerProfile, ...]:
    """Returns what each layer costs.

    Args:
        job: whose model, data, optimizer and numerics; its grid gives the size of a micro-batch.
        iterations: how often everything is timed, after a few times to get warm; at least 1.
        device: where.
        on_iteration: called after every iteration with how many are done.

    Raises:
        ConfigError: something in the job cannot be used; a gradient was not finite.
    """
    bench = LayerBench(job, device)
    for _ in range(WARM_UP):
        bench.iterate()
    held = bench.held_bytes()
    bench.timer.forget()
    for done in range(1, iterations + 1):
        bench.iterate()
        on_iteration(done)
    return bench.profiles(held)


class JobLayers:
    """The layers of a job's model, each of which may become a stage of its own, once.

    Args:
        job: see :func:`measure_layers`.
        device: where to compute.

    Attributes:
        model: the model.
        boundaries: what every layer hands on.
        kept: a micro-batch that is used for all, if it is not None.
    """

    def __init__(self, job: Job, device: Device) -> None:
        self._job, self._device = job, device
        self.model = build_model(job)
        self.boundaries = probe(job, device).boundaries
        self.kept: tuple[Inputs, Tensor] | None = None
        self._job_load = microbatch_loader(job, cache(lambda: build_dataset(job)))

    def stage(self, index: int, make: Callable[..., S]) -> S:
        """Returns what ``make`` makes of a layer, by the names that :class:`Stage` has for what it takes."""
        job, model = self._job, self.model
        return make(
            layers=[model.layers[index]],
            owned=(index,),
            num_layers=len(model.layers),
            ties=model.ties,
            loss=model.loss,
            optimizer=build_optimizer(job),
            lr_scale=lambda step: 1.0,
            seed=job.train.seed,
            num_microbatches=_MICROBATCHES,
            load=self.load,
            clip_norm=job.train.clip_norm,
            commit=job.resilience.commit,
            device=self._device,
            checkpointed=checkpointed_layers(job, len(model.layers)),
            outputs=self.boundaries,
            precision=PRECISIONS[job.train.precision],
        )

    def load(self, step: int, microbatch: int) -> tuple[Inputs, Tensor]:
        """Returns the samples of a micro-batch."""
        number = step * _MICROBATCHES + microbatch
        return self.kept or self._job_load(*divmod(number, self._job.global_microbatches))


class LayerBench:
    """All layers of a job's model, ready to be timed.

    Args:
        job: see :func:`measure_layers`.
        device: where to compute.

    Attributes:
        timer: what was timed so far; names are (layer, name of the time).
    """

    def __init__(self, job: Job, device: Device) -> None:
        self._layers = layers = JobLayers(job, device)
        self._names = tuple(f"{index}.{type(layer).__name__}" for index, layer in enumerate(layers.model.layers))
        self._stages = tuple(layers.stage(index, Stage) for index in range(len(layers.model.layers)))
        self._step = 0
        self.timer: Timer = timer_for(device.torch)

    def iterate(self) -> None:
        """Trains one step, and times it.

        Raises:
            ConfigError: a gradient was not finite, so that there is no optimizer step to time.
        """
        for stage in self._stages:
            stage.begin(self._step)
        self._run(0, OpKind.I, OpKind.W)
        self._run(1, OpKind.B)
        self._finish()
        self._step += 1

    def _run(self, microbatch: int, *kinds: OpKind) -> None:
        step, value = self._step, None
        for index, stage in enumerate(self._stages):
            value = self._time(index, OpKind.F, partial(stage.forward, step, microbatch, value))
        for kind in kinds:
            value = None
            for index, stage in reversed(tuple(enumerate(self._stages))):
                value = self._time(index, kind, partial(stage.backward, kind, step, microbatch, value))
        self.timer.settle()

    def _time(self, index: int, kind: OpKind, work: Callable[[], Tensor | None]) -> Tensor | None:
        return self.timer.time((index, _NAMES[kind]), work)

    def _finish(self) -> None:
        """Does and times what a layer costs at the end of a step, apart from what others are waited for."""
        sums = self._reduce()
        for index, stage in enumerate(self._stages):
            for reduction in stage.reductions:
                self.timer.time((index, _OPTIMIZER), partial(stage.accept, reduction, sums[reduction]))
        vote = reduce(Stage.merge_votes, [stage.vote() for stage in self._stages])
        for index, stage in enumerate(self._stages):
            stage.conclude(vote)
            if stage.omitted:
                raise ConfigError(
                    f"a gradient was not finite in iteration {self._step}: there is no optimizer step to time; "
                    "check the data, or lower optimizer.lr"
                )
            self.timer.time((index, _OPTIMIZER), partial(stage.update, index))
            self.timer.time((index, _OPTIMIZER), partial(stage.swap, index))
        self.timer.settle()

    def _reduce(self) -> dict[ReducedLayers, Total]:
        told: dict[ReducedLayers, list[Contribution]] = defaultdict(list)
        for index, stage in enumerate(self._stages):
            for reduction in stage.reductions:
                told[reduction].append(self.timer.time((index, _OPTIMIZER), partial(stage.message, reduction)))
        return {reduction: add_up(each) for reduction, each in told.items()}

    def held_bytes(self) -> tuple[tuple[int, int], ...]:
        """Returns what one micro-batch holds in each layer after F, and after I. The step is thrown away."""
        self._layers.kept = self._layers.load(self._step, 0)  # so that what the data set holds is not counted
        after_forward, watches, value = [], [], None
        for stage in self._stages:
            stage.begin(self._step)
            watch = ActivationMemory(_tensors_of(stage))
            with watch:
                value = stage.forward(self._step, 0, value)
            value = None if value is None else value.clone()
            after_forward.append(watch.alive_bytes())
            watches.append(watch)
        after_input = []
        for stage, watch in reversed(tuple(zip(self._stages, watches, strict=True))):
            with watch:
                if value is not None:
                    watch.note(value)
                value = stage.backward(OpKind.I, self._step, 0, value)
            value = None if value is None else value.clone()
            after_input.append(watch.alive_bytes())
        self._layers.kept = None
        for stage in self._stages:
            stage.discard()
        return tuple(zip(after_forward, reversed(after_input), strict=True))

    def profiles(self, held: tuple[tuple[int, int], ...]) -> tuple[LayerProfile, ...]:
        """Returns the medians of what was timed, with what is held; see :meth:`held_bytes`."""
        return tuple(self._profile(index, *each) for index, each in enumerate(held))

    def _profile(self, index: int, after_forward: int, after_input: int) -> LayerProfile:
        samples = {name: self.timer.samples[index, name] for name in (*_NAMES.values(), _OPTIMIZER)}
        medians = {name: statistics.median(values) for name, values in samples.items()}
        split = medians["backward_input_s"] + medians["backward_weight_s"]
        state = self._stages[index].export(index)
        return LayerProfile(
            name=self._names[index],
            forward_s=medians["forward_s"],
            backward_input_s=medians["backward_input_s"],
            backward_weight_s=medians["backward_weight_s"],
            backward_s=medians["backward_s"],
            optimizer_s=medians[_OPTIMIZER],
            split_s=max(0.0, split - medians["backward_s"]),
            held_after_forward_bytes=after_forward,
            held_after_input_bytes=after_input,
            boundary_bytes=num_bytes(self._layers.boundaries[index]),
            parameter_bytes=state.parameter_bytes,
            optimizer_bytes=state.optimizer_bytes,
            spread={name: spread(values) for name, values in samples.items()},
        )


def _tensors_of(stage: Stage) -> list[Tensor]:
    state = stage.export(stage.layers[0])
    return [*state.parameters.values(), *state.buffers.values()]
