"""Processes that look something up, answer, and end: what a job is like, where it can go on from, what it ended in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from holdfast.config.job import Job, ScriptModel
from holdfast.devices.device import Device
from holdfast.devices.named import arithmetic, check_alike, choose
from holdfast.errors import ConfigError, WorkFailed
from holdfast.optim.digest import digest_run, load_layer
from holdfast.runtime.engine.datasets import in_steps
from holdfast.runtime.engine.device_of import device_of
from holdfast.runtime.engine.probing import probe
from holdfast.runtime.hardening import settle
from holdfast.runtime.loop.probing import probe_script
from holdfast.runtime.resume import find
from holdfast.runtime.specs import Fit, Probed, ResumeFrom, check_sources
from holdfast.storage.checkpoints import Facts

__all__ = ["answering", "run_digest", "run_find", "run_fit", "run_model", "run_probe", "run_script_probe"]

_SAYS_WHAT_IT_IS = "config.json"
"""Comes last: where it is, all is."""


def run_probe(job: Job, workers: int, answer: Connection) -> None:
    """Builds the model and opens the data once, so that bad input is found before any worker starts.

    Sends ``ok`` and what was found, or ``error`` and what the user should change. ``workers``: that are to be here.
    """
    torch.set_num_threads(1)
    answering(answer, lambda: msgspec.json.encode(_probed(job, workers)).decode())


def _probed(job: Job, workers: int) -> Probed:
    decided, device, gpus = _on_device(job, workers)
    decided = in_steps(decided)
    probed = probe(decided, device)
    return replace(probed, job=None if decided == job else decided, gpus=gpus, arithmetic=arithmetic(device))


def _on_device(job: Job, workers: int) -> tuple[Job, Device, tuple[str, ...]]:
    """Returns the job with its device decided, that device, and the names of the GPUs that are visible.

    Raises:
        ConfigError: there is no such device, or workers would compute other bits.
    """
    exact = job.train.numerics == "exact"
    chosen, gpus = choose(job.train.device, workers)
    if exact:
        check_alike(chosen, gpus, workers)
    return job.on(chosen), device_of(chosen, exact=exact), gpus


def run_fit(job: Job, workers: int, sources: Mapping[str, str], answer: Connection) -> None:
    """Sends ``ok`` and what this machine has of what a job needs; ``error`` if its script is another one here.

    ``workers``: that are to be here.
    """
    answering(answer, lambda: msgspec.json.encode(_fit(job, workers, sources)).decode())


def _fit(job: Job, workers: int, sources: Mapping[str, str]) -> Fit:
    if isinstance(job.model, ScriptModel):
        check_sources(sources, _as_here(Path(job.model.path).resolve().parent, sources))
    _, device, gpus = _on_device(job, workers)
    return Fit(arithmetic=arithmetic(device), gpus=len(gpus))


def _as_here(folder: Path, sources: Mapping[str, str]) -> dict[str, str]:
    """Digests of these files below a folder; of one that cannot be read, none that a file has."""
    found = {}
    for name in sources:
        with contextlib.suppress(OSError):
            found[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return {name: found.get(name, "") for name in sources}


def run_script_probe(job: Job, workers: int, answer: Connection) -> None:
    """Runs a job's script as far as the first item of its loop; sends as :func:`run_probe` does."""
    torch.set_num_threads(1)

    def tell(find_out: Callable[[], Probed]) -> None:
        answering(answer, lambda: msgspec.json.encode(find_out()).decode())

    def look() -> NoReturn:
        decided, device, gpus = _on_device(job, workers)
        probe_script(decided, tell, device, gpus)

    answering(answer, look)


def run_find(
    job: Job, resume: ResumeFrom | None, checkpoints: str, facts: Facts, accept: tuple[str, ...], answer: Connection
) -> None:
    """Sends ``ok`` and the checkpoint to go on from, if any, as JSON; or ``error`` and what the user should change."""
    answering(answer, lambda: msgspec.json.encode(find(job, resume, checkpoints, facts, accept)).decode())


def run_digest(directory: str, answer: Connection) -> None:
    """Sends ``ok`` and the two hashes of the layers saved in ``directory``."""
    torch.set_num_threads(1)
    answering(answer, lambda: _hashes(Path(directory)))


def _hashes(directory: Path) -> str:
    digest = digest_run(directory)
    return f"{digest.weights_sha256} {digest.state_sha256}"


def run_model(job: Job, directory: str, answer: Connection) -> None:
    """Writes a model of transformers' as that reads it, beside the layers that are saved in ``directory``."""
    torch.set_num_threads(1)
    answering(answer, lambda: _write_model(job, Path(directory)))


def _write_model(job: Job, directory: Path) -> str:
    from holdfast.runtime.engine.slots.hugging_face import save

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("layer-*.safetensors")):
        state = load_layer(path)  # what the optimizer keeps of it goes at once
        weights |= {**state.parameters, **state.buffers}
    try:
        with tempfile.TemporaryDirectory(prefix=".model.tmp-", dir=directory) as folder:
            save(job, weights, Path(folder))
            settle(Path(folder))
            for path in sorted(Path(folder).iterdir(), key=lambda path: path.name == _SAYS_WHAT_IT_IS):
                if path.is_dir():
                    shutil.rmtree(directory / path.name, ignore_errors=True)
                path.replace(directory / path.name)
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}") from error
    return str(directory)


def answering(answer: Connection, work: Callable[[], str]) -> None:
    """Sends ``ok`` and what ``work`` returns, or ``error`` and what the user should change; ends the process."""
    try:
        text = "ok " + work()
    except (ConfigError, WorkFailed) as error:
        text = f"error {error}"
    except Exception as error:  # noqa: BLE001 - a process main: whatever it is, it is reported
        text = f"bug {type(error).__name__}: {error}\n{traceback.format_exc()}"
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone, and wants to hear nothing any more
        answer.send_bytes(text.encode())
    os._exit(0)
