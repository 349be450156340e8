"""Whatever a user's job loads is of the version that everything is tested with."""

from __future__ import annotations

import importlib.util
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DEVELOPERS = "dev"
APART = {"hf": "transformers"}
"""Extras that developers need not have, and by what they are known to be there."""


def direct():
    """What the project asks for at run time, with every extra that a user may choose."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    away = {name for name, package in APART.items() if importlib.util.find_spec(package) is None}
    named = [text for name in extras if name not in {DEVELOPERS, *away} for text in extras[name]]
    return [*project["dependencies"], *named]


def needed(texts, extras=frozenset({""}), found=None):
    """The installed version of all that these requirements need, by name, transitively."""
    found = {} if found is None else found
    for requirement in map(Requirement, texts):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key not in found:
            found[key] = Version(metadata.version(requirement.name)).public
            needed(metadata.requires(requirement.name) or (), key[1] | {""}, found)
    return found


def pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_run_time_dependency_is_pinned_to_the_version_that_is_tested():
    installed = {name: version for (name, _), version in needed(direct()).items()}
    assert {"torch", "grpcio", "numpy", "sympy", "jmespath"} <= installed.keys()
    pins = pinned()
    assert {name: (version, pins.get(name)) for name, version in installed.items() if pins.get(name) != version} == {}
