"""Reads and writes profiles: the JSON that ``holdfast profile`` makes and that planning and emulation take."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.profile import GpuProfile, LayerProfile, Link, Profile
from holdfast.errors import ConfigError
from holdfast.parsing import parsing

__all__ = ["dump_profile", "load_profile", "save_profile"]

_LONGEST = 64 << 20
_EXPECTED = "expected a profile, as `holdfast profile JOB.yaml --out FILE` writes it"
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?")
_REPEATED: Mapping[tuple[type, str], type] = {(Profile, "layers"): LayerProfile, (LayerProfile, "by_gpus"): GpuProfile}
_NESTED: Mapping[tuple[type, str], type] = {(Profile, "link"): Link}


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Args:
        path: a JSON file.

    Raises:
        ConfigError: there is no such file, it is no JSON, or a key or value in it cannot be used; names its place.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}; {_EXPECTED}") from None
    if len(data) > _LONGEST:
        raise ConfigError(f"{path}: has more than {_LONGEST} bytes; {_EXPECTED}")
    with parsing(lambda text: ConfigError(f"{path}: is not JSON: {text}; {_EXPECTED}")):
        tree = msgspec.json.decode(data)
    with parsing(lambda text: ConfigError(f"{path}: {text}; {_EXPECTED}")):
        return _profile_of(tree, path)


def _profile_of(tree: Any, path: str | Path) -> Profile:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: is no JSON object; {_EXPECTED}")
    try:
        _refuse_unknown(tree, Profile, "")
        return msgspec.convert(tree, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error))}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def dump_profile(profile: Profile) -> bytes:
    """Returns a profile as the JSON that :func:`load_profile` reads."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile, whole or not at all; what was there before is replaced.

    Raises:
        ConfigError: it cannot be written there.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_bytes(dump_profile(profile))
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _refuse_unknown(tree: object, kind: type, path: str) -> None:
    """Refuses keys that a profile does not have; values of a wrong type are left to msgspec."""
    if not isinstance(tree, dict):
        return
    known = [field.name for field in fields(kind)]
    for key, value in tree.items():
        place = f"{path}.{key}" if path else key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{place}: unknown key; {hint}")
        if (kind, key) in _NESTED:
            _refuse_unknown(value, _NESTED[kind, key], place)
        if (kind, key) in _REPEATED:
            for name, each in _entries(value):
                _refuse_unknown(each, _REPEATED[kind, key], f"{place}[{name}]")


def _entries(value: object) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _explain(message: str) -> str:
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    what = match["what"].replace("Object missing", "missing")
    return f"{match['path'] or 'the profile'}: {what[:1].lower()}{what[1:]}"
