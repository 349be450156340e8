"""What of a job decides the bits that it ends in, as one flat value; and how two jobs differ in that.

A key of the job file counts unless it is named here as one that does not, so a key that is added later counts at first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.config.job import Job, PipelineLayout
from holdfast.core.placement import split_evenly
from holdfast.core.sum_order import default_chunks

__all__ = ["GLOBAL_BATCH", "SUMS", "Difference", "compare", "compare_told", "covers", "deciding", "shown", "spelled"]

GLOBAL_BATCH = "grid.pipelines x grid.microbatches"
SUMS = "train.sums"
"""How gradients are added up where that decides bits: no key of the job file, but one that may differ by name."""
_SUMS_NOW = "float32, in the order of the micro-batches"
_SUMS_BEFORE = "whole numbers of 64 bits"
"""What no checkpoint said as long as exact ones were no others."""

_NEVER = (
    "train.epochs",  # steps do
    "name",
    "resume",
    "model.checkpoint_activations",  # what is run again has the same seeds
    "data.path",  # what is found there counts, see Facts.contents
    "data.tokenizer",  # so does what it makes of that
    "grid.workers_per_node",
    "train.audit_every",
    "train.compare_every",
    "train.time_limit",  # as where a loop is stopped
    "evaluate",
    "resilience",
    "checkpoint",
    "logging",
    "cluster",
    "control",
    "track",
)
_IN_FAST_NUMERICS = (
    "grid.gpus_per_stage",
    "grid.layout",
    "grid.pipelines",
    "grid.stages",
    "grid.microbatches",
    "train.technique",
    "train.profile",
    "train.in_flight",
)
"""Where and in which order sums are made: exact ones do not depend on it."""

_NOT_THERE = msgspec.UNSET
_BEYOND_JSON = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
_LONGEST = 160
_ARGUMENTS = "arguments."


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key in which two jobs differ; a value is UNSET where the key is not there."""

    path: str
    saved: Any
    wanted: Any

    def told(self, where: str) -> str:
        """For people, in one line; ``where`` the one that was saved is. Of long values it shows where they part."""
        saved, wanted = shown(self.saved), shown(self.wanted)
        alike = next((at for at, (one, other) in enumerate(zip(saved, wanted, strict=False)) if one != other), 0)
        return f"{self.path}: expected {_around(saved, alike)}, as in {where}, got {_around(wanted, alike)}"


def deciding(job: Job) -> dict[str, Any]:
    """Returns every key that decides bits, as ``section.key``, and its value in the form that JSON gives it back.

    What a person's own function is called with is one key per argument. Of devices their kind counts. The number of
    micro-batches in a step counts instead of the grid, unless numerics are fast. The number of steps counts if the
    learning rate falls towards it.
    """
    tree = msgspec.to_builtins(job, enc_hook=repr)
    for section in tree:
        for key in ("arguments", "schedule_arguments"):
            if (arguments := getattr(getattr(job, section), key, None)) is not None:
                tree[section][key] = arguments  # a set of them is none any more in the tree
    tree = spelled(tree)
    tree["train"]["device"] = job.train.device_kind  # which of them computes changes nothing
    tree["train"]["technique"] = job.train.technique_unprofiled  # with fast numerics, where it counts
    if job.train.sum_chunks == default_chunks(job.global_microbatches):
        tree["train"]["sum_chunks"] = None
    left_out = (*_NEVER, *(() if job.train.numerics == "fast" else _IN_FAST_NUMERICS))
    if job.optimizer.schedule not in ("cosine", "linear"):
        left_out += ("train.steps",)
    values = {path: value for path, value in _flat(tree) if not covers(left_out, path)}
    return {**values, SUMS: _SUMS_NOW, GLOBAL_BATCH: job.global_microbatches}


def compare(saved: Mapping[str, Any], job: Job) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """Returns where a job differs from what ``deciding`` once told of another, and the keys that cannot be compared.

    A key that was not there when ``saved`` was made had the meaning of its default. One that only ``saved`` has is of a
    version of Holdfast that knows more than we do. Keys that are there only because of another one, as those of some
    kind of model are, do not count beside that. A grid is the same however it is written.
    """
    saved, wanted = _in_short(saved), _in_short(deciding(job))
    kinds = {path for path, value in wanted.items() if path.endswith(".kind") and saved.get(path, value) != value}
    sections = tuple(path.removesuffix(".kind") for path in kinds)
    common = [path for path in wanted if path in saved]
    added = [path for path in wanted if path not in saved and not _follows(path, sections)]
    gone = [path for path in saved if path not in wanted and not _follows(path, sections)]
    found = [Difference(path=path, saved=saved[path], wanted=wanted[path]) for path in common]
    found += [Difference(path=path, saved=_default(path, job), wanted=wanted[path]) for path in added]
    found += [Difference(path=path, saved=saved[path], wanted=_NOT_THERE) for path in gone if _ARGUMENTS in path]
    unknown = tuple(path for path in gone if _ARGUMENTS not in path)
    return tuple(each for each in found if _text(each.saved) != _text(each.wanted)), unknown


def compare_told(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Returns where what a script says of itself differs from what it, or another one, once said.

    Settings that are there only because of some kind of optimizer or scheduler do not count beside that.
    """
    kinds = {path for path in (*saved, *wanted) if path.endswith(".kind") and saved.get(path) != wanted.get(path)}
    sections = tuple(path.removesuffix(".kind") for path in kinds)
    found: list[Difference] = []
    for path in dict.fromkeys((*saved, *wanted)):
        one, other = saved.get(path, _NOT_THERE), wanted.get(path, _NOT_THERE)
        follows = path not in kinds and _NOT_THERE in (one, other) and covers(sections, path)
        if _text(one) != _text(other) and not follows:
            found.append(Difference(path=path, saved=one, wanted=other))
    return tuple(found)


def _in_short(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layout that says what pipelines, stages and microbatches can say, as these; where a profile cuts, it cannot."""
    try:
        layout = msgspec.convert(values.get("grid.layout"), tuple[PipelineLayout, ...])
    except msgspec.ValidationError:  # none is told, or one of a version of Holdfast that knows more
        return values
    if len(set(layout)) != 1 or values.get("train.profile") is not None:
        return values
    stages, widths = layout[0].stages, set(layout[0].widths)
    if len(widths) > 1:
        return values
    if stages != tuple(len(each.indices) for each in split_evenly(sum(stages), len(stages))):
        return values
    alike = {
        "pipelines": len(layout),
        "stages": len(stages),
        "microbatches": layout[0].microbatches,
        "gpus_per_stage": widths.pop(),
    }
    return {**values, "grid.layout": [], **{f"grid.{key}": value for key, value in alike.items()}}


def _follows(path: str, sections: Iterable[str]) -> bool:
    """Whether a key is there only because of another one, which tells of the difference."""
    return covers((*sections, *_IN_FAST_NUMERICS, "train.steps"), path)


def covers(names: Iterable[str], path: str) -> bool:
    """Whether a key is one of ``names``, or below one of them; the global batch is any of those that make it."""
    parts = (*path.split(" x "), "grid.layout") if path == GLOBAL_BATCH else (path,)
    return any(part == name or part.startswith(f"{name}.") for name in names for part in (path, *parts))


def shown(value: Any) -> str:
    """Returns a value for people."""
    if value is _NOT_THERE:
        return "nothing"
    return value if isinstance(value, str) else _text(value)


def _around(text: str, at: int) -> str:
    """What of a long text lies around a place in it."""
    if len(text) <= _LONGEST:
        return text
    start = max(0, min(at - _LONGEST // 4, len(text) - _LONGEST))
    stop = start + _LONGEST
    return f"{'...' if start else ''}{text[start:stop]}{'...' if stop < len(text) else ''}"


def spelled(value: Any) -> Any:
    """Returns a value such as JSON gives it back, without what that leaves open: numbers beyond it, sets' order."""
    if isinstance(value, float) and not math.isfinite(value):
        return _BEYOND_JSON[str(value)]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else f"({shown(key)})": spelled(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(spelled, value), key=_text)
    if isinstance(value, list | tuple):
        return [spelled(each) for each in value]
    return msgspec.to_builtins(value, enc_hook=repr)


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in tree.items():
        if not isinstance(value, dict):
            yield section, value
            continue
        for key, below in value.items():
            if key.endswith("arguments") and isinstance(below, dict):
                yield from _arguments(f"{section}.{key}", below)
            else:
                yield f"{section}.{key}", below


def _arguments(path: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _arguments(f"{path}.{name}", value)
        else:
            yield f"{path}.{name}", value


def _default(path: str, job: Job) -> Any:
    """What a key means where it is not there; UNSET if it must be there."""
    if path == SUMS:
        return _SUMS_BEFORE if job.train.numerics == "exact" else _SUMS_NOW
    section, _, key = path.partition(".")
    holder, name = (getattr(job, section), key) if key else (job, section)
    field = next((each for each in msgspec.structs.fields(holder) if each.name == name), None)
    if field is None or field.required:
        return _NOT_THERE
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.decode(msgspec.json.encode(value))


def _text(value: Any) -> str:
    """JSON tells 1 from 1.0 and from true, as a person's own function might."""
    return "nothing" if value is _NOT_THERE else msgspec.json.encode(value, order="deterministic").decode()
