"""The trackers that have names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from holdfast.errors import ConfigError
from holdfast.trackers.csv import CsvTracker
from holdfast.trackers.mlflow import MlflowTracker
from holdfast.trackers.port import Tracker
from holdfast.trackers.tensorboard import TensorBoardTracker
from holdfast.trackers.wandb import WandbTracker

__all__ = ["BUILT_IN", "check_names", "folder_of"]

BUILT_IN: dict[str, type[Tracker]] = {
    "csv": CsvTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def check_names(names: Sequence[str], key: str) -> None:
    """Looks whether there are such trackers, as far as that shows without running anybody's code.

    Args:
        names: of trackers, or targets (``file.py:Class``, ``module:Class``) of one's own.
        key: where they were given, for people.

    Raises:
        ConfigError: there is none of a name, or what it needs is not installed; or two would have one folder.
    """
    folders: set[str] = set()
    for name in names:
        if folder_of(name) in folders:
            raise ConfigError(f"{key} {name}: there is a tracker of this name already; expected each once")
        folders.add(folder_of(name))
        if name not in BUILT_IN and ":" not in name:
            known = ", ".join(BUILT_IN)
            raise ConfigError(f"{key} {name}: is no tracker; expected {known}, or file.py:Class of your own")
        if name in BUILT_IN and (needs := BUILT_IN[name].needs) and find_spec(needs) is None:
            raise ConfigError(f"{key} {name}: {needs} is not installed; expected pip install 'holdfast[{name}]'")


def folder_of(name: str) -> str:
    """Returns the name of the folder that a tracker has."""
    return name.rpartition(":")[2]
