"""Writes docs/job_file.md of what config/job.py says of each key: ``python -m tools.job_file``."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from holdfast.config import job
from holdfast.config.job import Job

TARGET = Path(__file__).parents[1] / "docs" / "job_file.md"
_NAMES: dict[type[types.Type], str] = {
    types.BoolType: "`true`, `false`",
    types.StrType: "text",
    types.DictType: "names and values",
    types.StructType: "see below",
}
"""Of kinds of values that have no more to tell."""


def page() -> str:
    """Returns the page."""
    parts = [
        "# The job file",
        "Unknown keys, wrong types and impossible values are refused with the path of the key and what would be right. "
        "`--set KEY=VALUE` overrides a key. This page is made of `src/holdfast/config/job.py` by "
        "`python -m tools.job_file`.",
        *_section("Keys of the file", Job),
    ]
    told: set[type] = set()
    for field in msgspec.structs.fields(Job):
        for kind in _kinds(types.type_info(field.type)):
            parts += _section(f"{field.name}, kind: {kind.tag}" if kind.tag else field.name, kind.cls)
            told.add(kind.cls)
            for within in msgspec.structs.fields(kind.cls):
                for inner in _kinds(types.type_info(within.type)):
                    parts += [] if inner.cls in told else _section(f"{field.name}.{within.name}", inner.cls)
    return "\n\n".join(parts) + "\n"


def attributes(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Returns what a struct's docstring says of each key, its own and its bases'."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        told = inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", told, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def _section(title: str, struct: type[msgspec.Struct]) -> list[str]:
    about = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[0].strip()
    texts, fields = attributes(struct), msgspec.structs.fields(struct)
    rows = [
        f"| `{each.name}` | {_default(each)} | {_values(types.type_info(each.type))} | {_marked(texts[each.name])} |"
        for each in fields
    ]
    table = ["\n".join(["| key | default | values | meaning |", "|---|---|---|---|", *rows])] if rows else []
    return [f"## {title}", _marked(about), *table]


def _kinds(told: types.Type) -> Iterator[types.StructType]:
    """The structs among the values of a key."""
    if isinstance(told, types.StructType):
        yield told
    elif isinstance(told, types.UnionType):
        for each in told.types:
            yield from _kinds(each)
    elif isinstance(told, types.VarTupleType):
        yield from _kinds(told.item_type)


def _default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.UNSET:
        return "none"
    if isinstance(value, msgspec.Struct):
        return "as below"
    return f"`{json.dumps(msgspec.to_builtins(value))}`".replace('"', "")


def _values(value: types.Type) -> str:
    match value:
        case types.IntType():
            return f"whole number{_range(value)}"
        case types.FloatType():
            return f"number{_range(value)}"
        case types.Metadata(extra={"one_of": names}):
            return ", ".join(f"`{each}`" for each in names)
        case types.Metadata():
            return _values(value.type)
        case types.LiteralType():
            return ", ".join(f"`{each}`" for each in value.values)
        case types.VarTupleType():
            return f"list of: {_values(value.item_type)}"
        case types.TupleType():
            return f"{len(value.item_types)} of: {_values(value.item_types[0])}"
        case types.UnionType():
            kinds = [each for each in value.types if not isinstance(each, types.NoneType | types.CustomType)]
            return " or ".join(dict.fromkeys(map(_values, kinds)))
    return _NAMES.get(type(value), "anything")


def _range(value: Any) -> str:
    low = f" from {value.ge}" if value.ge is not None else f" above {value.gt}" if value.gt is not None else ""
    high = f" below {value.lt}" if value.lt is not None else ""
    if value.le is not None and value.le < sys.float_info.max:
        high = f" to {value.le}"
    return low + high


def _marked(text: str) -> str:
    """A docstring's text as Markdown: code between single ticks, and links to documents."""
    text = re.sub(r"``(.+?)``", r"`\1`", text.replace("|", "\\|"))
    return re.sub(r"\bdocs/(\w+)\.md(#[\w-]+)?", r"[\1](\1.md\2)", text)


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"written: {TARGET}; from {job.__file__}")
