"""The state of a run as plain PyTorch has it: ``state_dict`` of the model and of its optimizers."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.config.job import HuggingFaceModel, Job, PythonModel
from holdfast.config.load import load_job
from holdfast.errors import ConfigError, StorageError
from holdfast.optim.digest import LayerState, decode_layer, load_layer
from holdfast.runtime.engine.optimizing import build_optimizer
from holdfast.runtime.hardening import settle
from holdfast.runtime.loop.prepared import ToldState, told_state
from holdfast.runtime.resume import parse_resume
from holdfast.runtime.rundir import job_files
from holdfast.storage.blobs import open_store, synchronise
from holdfast.storage.checkpoints import Checkpoints

__all__ = ["Exported", "check_target", "export", "write"]

_FILES = (".pt", ".pth")
_AT_STEP = re.compile(r"(?P<place>.+)@(?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)
_COMPILED = "_orig_mod."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is to be written.

    Attributes:
        step: how many steps were made.
        model: the model's ``state_dict``.
        optimizers: the ``state_dict`` of each optimizer; empty if they cannot be told.
        schedulers: those of schedulers.
        objects: those of what was given to ``hf.state``.
        save: writes the model into a folder, as its library reads it; None: as ``model.safetensors``.
        notes: what is missing, for people.
    """

    step: int
    model: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    schedulers: list[Any]
    objects: list[Any]
    save: Callable[[Path], None] | None = None
    notes: tuple[str, ...] = ()

    def besides(self) -> dict[str, Any]:
        """Returns all but the model."""
        return {
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "state": self.objects,
            "step": self.step,
        }


def export(run: str) -> Exported:
    """Returns the state of a run.

    Args:
        run: a run directory, for the layers that it ended with; with ``@STEP`` behind it, for one of its checkpoints.

    Raises:
        ConfigError: it is no run directory, or has no such state.
        StorageError: the state is damaged or cannot be read.
    """
    match = _AT_STEP.fullmatch(run)
    place, step = (match["place"], int(match["step"])) if match and not Path(run).is_dir() else (run, None)
    files = job_files(Path(place))
    if not files:
        raise ConfigError(f"{place}: is no run directory, it has no job.yaml; expected RUN_DIR or RUN_DIR@STEP")
    job = load_job(files[0])
    states = _final(Path(place)) if step is None else _checkpoint(place, step)
    if not states or [state.layer for state in states] != list(range(len(states))):
        layers = ", ".join(str(state.layer) for state in states) or "none"
        raise ConfigError(f"{run}: holds layers {layers}; expected all of the model{_checkpoints_of(place)}")
    if len(steps := {state.step for state in states}) > 1:
        raise ConfigError(f"{run}: layers are of steps {sorted(steps)}, as of a job that was cut off; expected of one")
    return _of_script(states) if job.loops else _of_job(states, job)


def _final(run_dir: Path) -> list[LayerState]:
    return [load_layer(path) for path in sorted((run_dir / "final").glob("layer-*.safetensors"))]


def _checkpoint(place: str, step: int) -> list[LayerState]:
    checkpoints = Checkpoints(open_store(parse_resume(place).url))
    try:
        manifest = checkpoints.newest_sound(step).manifest
    except StorageError as error:
        raise ConfigError(f"{place}@{step}: {error}{_checkpoints_of(place)}") from error
    layers = range(len(manifest.shards))
    return [decode_layer(checkpoints.read_shard(manifest, layer), name=f"layer {layer}") for layer in layers]


def _checkpoints_of(place: str) -> str:
    """What else could be exported."""
    try:
        steps = Checkpoints(open_store(parse_resume(place).url)).steps()
    except StorageError:
        return ""
    return (
        f"; its checkpoints are {place}@{f', {place}@'.join(map(str, steps))}" if steps else "; it has no checkpoints"
    )


# --- a script ---------------------------------------------------------------------------------------------------------


def _of_script(states: Sequence[LayerState]) -> Exported:
    last = states[-1]
    parameters = {
        name: value for state in states for name, value in (*state.parameters.items(), *state.buffers.items())
    }
    entries = {name: entry for state in states for name, entry in state.optimizer.items()}
    told, names = told_state(ToldState(last.extra, last.extra_tensors)), last.about.get("names")
    known = last.about.get("groups")
    notes = () if known is not None else ("an older Holdfast made it, which told no names by optimizer: none is there",)
    pairs = zip(told["groups"], known or (), strict=known is not None)
    return Exported(
        step=last.step,
        model={
            name.replace(_COMPILED, ""): parameters[ours]
            for name, ours in names or [(each, each) for each in parameters]
        },
        optimizers=[_optimizer(groups, rows, entries) for groups, rows in pairs],
        schedulers=told["schedulers"],
        objects=told["objects"],
        notes=notes,
    )


def _optimizer(
    groups: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[str]], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The state of an optimizer as torch numbers its parameters: group by group, in their order."""
    numbers = {name: number for number, name in enumerate(name for row in rows for name in row)}
    settings = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()} for group in groups
    ]
    return {
        "state": {number: dict(entries[name]) for name, number in numbers.items() if name in entries},
        "param_groups": [
            {**group, "params": [numbers[name] for name in row]} for group, row in zip(settings, rows, strict=True)
        ],
    }


# --- a list of layers -------------------------------------------------------------------------------------------------


def _of_job(states: Sequence[LayerState], job: Job) -> Exported:
    """Names are those of the list of the model's layers, as ``nn.Sequential`` has them, or those of its one module."""
    whole = isinstance(job.model, HuggingFaceModel) or (isinstance(job.model, PythonModel) and bool(job.model.split))
    # Uses of a weight in several layers have one name where names are those of one module.
    called = (lambda _, name: name) if whole else (lambda state, name: f"{state.layer}.{name}")
    named = {
        called(state, name): value
        for state in states
        for name, value in (*state.parameters.items(), *state.buffers.items())
    }
    entries = {called(state, name): entry for state in states for name, entry in state.optimizer.items()}
    counted = [called(state, name) for state in states for name in state.parameters if name not in state.tied]
    trained = [name for name in counted if name in entries] or counted
    optimizers: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    try:
        made = build_optimizer(job)([nn.Parameter(torch.empty_like(named[name])) for name in trained])
        optimizers.append(_optimizer(made.param_groups, [trained], entries))
    except ConfigError as error:
        notes = (f"the optimizer cannot be made, and is not there: {error}",)
    save = partial(_save, job, named) if isinstance(job.model, HuggingFaceModel) else None
    return Exported(
        step=states[0].step, model=named, optimizers=optimizers, schedulers=[], objects=[], save=save, notes=notes
    )


def _save(job: Job, weights: Mapping[str, Tensor], folder: Path) -> None:
    from holdfast.runtime.engine.slots.hugging_face import save

    save(job, weights, folder)


# --- files ------------------------------------------------------------------------------------------------------------


def check_target(to: Path) -> None:
    """Checks that something can be written there, before anything is read.

    Raises:
        ConfigError: it is there already, has no folder to be in, or its name says neither file nor folder.
    """
    if to.exists() or to.is_symlink():
        raise ConfigError(f"--to {to}: exists already, and nothing was overwritten; choose another name")
    if not to.parent.is_dir():
        raise ConfigError(f"--to {to}: there is no folder {to.parent}")
    if to.suffix and to.suffix not in _FILES:
        raise ConfigError(
            f"--to {to}: expected a name that ends in {' or '.join(_FILES)}, or without a dot for a folder"
        )


def write(exported: Exported, to: Path) -> None:
    """Writes it: to one file for ``torch.load``, or to a folder with ``model.safetensors`` and ``optimizer.pt``.

    Only their owner can read them.

    Raises:
        ConfigError: see `check_target`; or it cannot be written.

    After failure: there is nothing of that name; a kill may leave a folder ``.NAME.tmp-...`` beside it.
    """
    check_target(to)
    try:
        with _beside(to) as folder:
            if to.suffix in _FILES:
                made = folder / to.name
                torch.save({"model": exported.model, **exported.besides()}, made)
            else:
                made = folder / "made"
                made.mkdir(mode=0o700)
                if exported.save is not None:
                    exported.save(made)
                else:
                    named = {name: value.clone() for name, value in exported.model.items()}
                    save_file(named, made / "model.safetensors")
                torch.save(exported.besides(), made / "optimizer.pt")
            settle(made)
            check_target(to)
            made.rename(to)
        synchronise(to.parent)
    except OSError as error:
        raise ConfigError(f"--to {to}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _beside(to: Path) -> Iterator[Path]:
    """A folder that only we can read, on the same disk; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.tmp-", dir=to.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
