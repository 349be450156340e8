"""The README's table of the job file has every key that there is, and no other."""

import re
import types
import typing
from pathlib import Path

import msgspec
import pytest

from holdfast.config.job import Job

README = Path(__file__).parents[3] / "README.md"


def rows():
    """Per key of the table, the text of its row."""
    table = README.read_text().partition("\n## The job file\n")[2].partition("\n## ")[0]
    found = {}
    for line in table.splitlines():
        first, *rest = line.strip("|").split(" | ")
        keys = re.findall(r"`([a-z_.]+)`", first) if line.startswith("| `") else []
        section = keys[0].rpartition(".")[0] if keys else ""
        for key in keys:
            name = key if "." in key or not section else f"{section}.{key}"
            found[name] = found.get(name, "") + " | ".join(rest)
    return found


def sections(hint):
    """The structs that a key can hold."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    return [each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def keys(struct=Job, prefix=""):
    """Every key of the job file with its type, those of the sections as section.key, and the kinds of sections."""
    for field in msgspec.structs.fields(struct):
        held = sections(field.type)
        if not held or prefix:
            yield prefix + field.name, field.type
        for each in held if not prefix else ():
            yield from keys(each, f"{field.name}.")
    if struct.__struct_config__.tag is not None:
        yield f"{prefix}kind", typing.Literal[struct.__struct_config__.tag]


KEYS = sorted(keys(), key=lambda pair: (pair[0], str(pair[1])))


def test_the_table_has_every_key():
    assert {name for name, _ in KEYS} - set(rows()) == set()


def test_the_table_has_no_key_that_there_is_not():
    assert set(rows()) - {name for name, _ in KEYS} == set()


@pytest.mark.parametrize(("name", "hint"), KEYS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(KEYS)])
def test_a_row_names_what_its_key_can_hold(name, hint):
    text = rows().get(name, "")
    options = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    inner = [field.name for struct in sections(hint) for field in msgspec.structs.fields(struct)]
    assert [each for each in options if f"`{each}`" not in text] == []
    assert [each for each in inner if not re.search(rf"\b{each}\b", text)] == []
