"""Other people's code, found by name; whatever it raises is told in one line, and is theirs to change."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from holdfast.errors import ConfigError, HoldfastError, WorkFailed

__all__ = ["call_target", "load_target", "one_line", "theirs"]

_LONGEST = 400
_NOT_THEIRS = tuple(
    str(Path(folder).resolve()) + "/"
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    )
)


@contextmanager
def theirs(what: str) -> Iterator[None]:
    """Turns whatever their code raises within into a ConfigError of one line that begins with ``what``.

    Raises:
        ConfigError: their code raised; what is ours (any other HoldfastError) passes as it is.
    """
    try:
        yield
    except WorkFailed as error:
        raise ConfigError(f"{what}: {one_line(error.__cause__ or error)}") from error
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the class and the text of an error, and which line of their code raised it, in one line."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " ..."
    return type(error).__name__ + (f": {text}" if text else "") + _place(error)


def _place(error: BaseException) -> str:
    """The last line of their own code, as `` (model.py, line 3)``; empty if none of it was running."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_theirs(file: str) -> bool:
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(_NOT_THEIRS)


def _find_beside(*folders: Path) -> None:
    """Lets their modules import what lies in these folders, the first of them first, as a script's own folder does."""
    new = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path[:0] = dict.fromkeys(new)


def load_target(target: str, key: str) -> Callable[..., Any]:
    """Returns the function that ``package.module:name`` or ``path/to/file.py:name`` names.

    Modules beside the file, and in the current directory, can be imported by it and by name.

    Raises:
        ConfigError: there is no such module, file or name; ``key`` says which key named it.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{key}: {target!r} is no target; expected package.module:name or path/to/file.py:name")
    module = _module_of(place, target, key)
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [each for each, value in vars(module).items() if callable(value)], n=1)
        raise ConfigError(f"{key}: {place} has no function {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return cast(Callable[..., Any], found)


def _module_of(place: str, target: str, key: str) -> ModuleType:
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{key}: {place}: No such file; expected one that holds a function to call")
    _find_beside(*([] if file is None else [file.resolve().parent]), Path.cwd())
    try:
        return importlib.import_module(place) if file is None else _module_of_file(file)
    except ImportError as error:
        hint = "; a file in a package is named package.module:name" if "relative import" in str(error) else ""
        raise ConfigError(f"{key}: {target!r} cannot be imported: {one_line(error)}{hint}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {place} cannot be loaded: {one_line(error)}") from error


def call_target(target: str, key: str, arguments: dict[str, Any]) -> Any:
    """Calls the function that a target names with these arguments.

    Raises:
        ConfigError: there is no such function, it takes other arguments, or it raised.
    """
    function = load_target(target, key)
    _check_arguments(function, target, key, arguments)
    with theirs(f"{key}: {target} failed"):
        return function(**arguments)


def _check_arguments(function: Callable[..., Any], target: str, key: str, arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: it will say itself
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        section = key.partition(".")[0]
        raise ConfigError(f"{section}.arguments: {error}; {target} takes {signature}") from None


def _module_of_file(path: Path) -> ModuleType:
    """Imports a file once, under a name of its own."""
    resolved = path.resolve(strict=True)
    name = f"holdfast_target_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
