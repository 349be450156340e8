"""Data sets that come with scikit-learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from holdfast.errors import ConfigError, installing

__all__ = ["packaged_file"]


def packaged_file(name: str, kind: str) -> Path:
    """Returns a file of scikit-learn's data, found without importing it: that takes a second of CPU time, per worker.

    Args:
        name: of the file.
        kind: of the data, for messages.

    Raises:
        ConfigError: scikit-learn is not installed, or has no such file.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ConfigError(f"data.kind: {kind} needs scikit-learn; {installing('digits')}")
    folders = [Path(folder) for folder in package.submodule_search_locations or ()]
    files = [folder / "datasets" / "data" / name for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ConfigError(f"data.kind: {kind}: this scikit-learn has no {' or '.join(map(str, files))}")
    return found
