"""Reads a job file: YAML and ``--set`` overrides in, a checked :class:`Job` out, or one line on what is wrong."""

from __future__ import annotations

import copy
import datetime
import difflib
import ipaddress
import math
import re
import reprlib
import typing
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import yaml

from holdfast.config.job import (
    BertModel,
    Checkpoint,
    Control,
    ConvnetModel,
    Data,
    GptModel,
    Grid,
    HuggingFaceModel,
    Job,
    Logging,
    ModelSettings,
    Nt3Model,
    Optimizer,
    PythonModel,
    Resilience,
    ResnetModel,
    ScriptData,
    ScriptModel,
    TextData,
    Train,
    VitModel,
)
from holdfast.config.laying_out import laid_out
from holdfast.core.placement import MOST_LAYERS
from holdfast.errors import ConfigError
from holdfast.parsing import parsing
from holdfast.strategies.registry import names, strategy_named
from holdfast.urls import refuse_mistyped

__all__ = ["check_cuts", "dump_job", "load_job", "logs_need", "num_layers", "parse_job"]

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]+)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_KEY = re.compile(r"Expected `str` - at `key` in `\$\.?(?P<path>[^`]*)`")
_OTHER = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?")


_SCIENTIFIC = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


_LONGEST, _MOST_VALUES = 1 << 18, 20_000
_MOST_WORKERS, _MOST_OPERATIONS = 100_000, 20_000_000
_UNFIT = re.compile("[\x00\ud800-\udfff]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


_ADAPTIVE = ("adam", "adamw", "lamb")
_KINDS_WITH = {
    "momentum": ("sgd",),
    "betas": _ADAPTIVE,
    "eps": _ADAPTIVE,
    "lr": ("sgd", *_ADAPTIVE),
    "weight_decay": ("sgd", *_ADAPTIVE),
}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 3e-4 as text; this reads it as the number that it is, and quoted text as text."""


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that ``_Loader`` would read as numbers."""


for _half in (_Loader, _Dumper):
    _half.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """Reads a job file.

    Args:
        path: a YAML file.
        overrides: ``key.path=value`` texts, values as in YAML, applied in order.

    Raises:
        ConfigError: the file or a value cannot be used; names the key and what would be right.
    """
    try:
        with Path(path).open() as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a job file in YAML") from None
    except ValueError:
        raise ConfigError(f"{path}: is not text; expected a job file in YAML") from None
    with parsing(lambda text: ConfigError(f"{path}: is not YAML: {text}")):
        tree = _read_yaml(text, str(path))
    return parse_job(tree, overrides, source=str(path))


def parse_job(tree: Any, overrides: Iterable[str] = (), *, source: str = "job") -> Job:
    """Checks a tree of plain values, such as a YAML file gives; see :func:`load_job`."""
    with parsing(lambda text: ConfigError(f"{source}: a value {text}; expected plain values")):
        return _parse(tree, overrides, source)


def _parse(tree: Any, overrides: Iterable[str], source: str) -> Job:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected keys such as model, data, grid, train; got {type(tree).__name__}")
    tree = copy.deepcopy(tree)
    for override in overrides:
        _override(tree, override)
    _spell_out(tree)
    _refuse_unfit(tree, source)
    try:
        job = msgspec.convert(tree, Job)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), tree)}") from None
    _check_size(job.grid, source)
    try:
        job = laid_out(job)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    _check(job, source)
    if complaint := _without_effect(job, tree):
        raise ConfigError(f"{source}: {complaint}")
    return job


def _spell_out(tree: dict[str, Any]) -> None:
    """YAML 1.1 reads ``on`` and ``off`` as true and false; where a key holds one of several words, they are words."""
    section = tree.get("logging")
    if isinstance(section, dict) and isinstance(use := section.get("use"), bool):
        section["use"] = "on" if use else "off"


def dump_job(job: Job) -> str:
    """Returns the job with every default filled in, as YAML."""
    tree = msgspec.to_builtins(job, builtin_types=(bytes, datetime.date, datetime.datetime))  # of YAML, too
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False))


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {override}: expected KEY=VALUE, such as grid.stages=2")
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {name} is a value, it has no keys below it")
    with parsing(lambda _: ConfigError(f"--set {override}: {text!r} is not a YAML value")):
        value = _read_yaml(text, f"--set {path}")
    if path == "grid.layout":
        value = _layout_of(node, value)
    elif path == "grid.workers":
        _keep_microbatches(node)
    node[last] = value


def _keep_microbatches(grid: dict[str, Any]) -> None:
    """A number of workers takes the place of pipelines, and the micro-batches of a step stay as many as they were."""
    layout, alike = grid.pop("layout", None), [grid.pop(key, None) for key in ("pipelines", "microbatches", "stages")]
    counts = [each.get("microbatches") if isinstance(each, dict) else None for each in layout or ()] or alike[:2]
    if "global_microbatches" not in grid and all(isinstance(each, int) for each in counts):
        grid["global_microbatches"] = sum(counts) if layout else math.prod(counts)


def _layout_of(grid: dict[str, Any], value: Any) -> Any:
    """A layout takes the place of what it stands for; an empty one is none, and leaves all else as it is."""
    if value:
        for key in ("pipelines", "stages", "microbatches"):
            grid.pop(key, None)
    return [] if value is None else value


def _read_yaml(text: str, source: str) -> Any:
    """Reads YAML of a size that a job may have, counted with every alias written out.

    Raises:
        ConfigError: it has more.
        Whatever a parser raises: it is no YAML.
    """
    if len(text) > _LONGEST:
        raise ConfigError(f"{source}: expected at most {_LONGEST} characters, as a job file has; got more")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        size = _weigh(node, {})
        if size == math.inf:
            raise ConfigError(f"{source}: a value holds itself; expected plain values")
        if size > _MOST_VALUES:
            raise ConfigError(f"{source}: with its aliases written out, it has more than {_MOST_VALUES} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _weigh(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node has, with every alias written out: a few lines can stand for any number."""
    if id(node) not in known:
        known[id(node)] = math.inf  # met again within itself, it has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = (child for part in parts for child in (part if isinstance(part, tuple) else (part,)))
        known[id(node)] = 1 + sum(_weigh(child, known) for child in children)
    return known[id(node)]


def _refuse_unfit(value: Any, source: str) -> None:
    """Refuses texts that no file name and no log can have."""
    if isinstance(value, str) and (found := _UNFIT.search(value)):
        raise ConfigError(f"{source}: {_SHORT.repr(value)}: no text may have the character {found[0]!r}")
    if isinstance(value, dict):
        for pair in value.items():
            _refuse_unfit(pair, source)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _refuse_unfit(each, source)


def _explain(message: str, tree: dict[str, Any]) -> str:
    """Turns msgspec's message into one that names the key and what would be right."""
    if match := _UNKNOWN.fullmatch(message):
        return _unknown(match["path"] or "", match["key"], tree)
    if match := _MISSING.fullmatch(message):
        return f"{_join(match['path'], match['key'])}: is missing and has no default"
    if match := _KEY.fullmatch(message):
        return f"{match['path'] or 'the job'}: every key must be text, quote those that are numbers"
    match = _OTHER.fullmatch(message)
    assert match is not None
    path = match["path"] or "the job"
    if match["what"].startswith("Invalid"):
        return f"{path}: expected one of {', '.join(_choices(path))}{_found(path, tree)}"
    found = _found(path, tree)
    what = re.sub(r", got `\w+`$", "", match["what"]) if found else match["what"]
    return f"{path}: {_lower(what)}{found}"


def _choices(path: str) -> list[str]:
    """The texts that a key with a fixed set of values takes; every such key lies in a section of the job.

    One that takes numbers, too, has these as a type beside the texts.
    """
    section, _, key = path.rpartition(".")
    kinds = _kinds(section)
    if key == "kind":
        return [str(kind.__struct_config__.tag) for kind in kinds]
    found: list[str] = []
    for choice in typing.get_args(typing.get_type_hints(kinds[0])[key]):
        found += ["a whole number"] if choice is int else map(str, typing.get_args(choice) or (choice,))
    return found


def _kinds(path: str) -> tuple[Any, ...]:
    """The structs that a section can be, by its path; one, unless it has a kind."""
    kinds: tuple[Any, ...] = (Job,)
    for name in path.split("."):
        key = name.partition("[")[0]  # of a list, one section
        found = next(field.type for kind in kinds for field in msgspec.structs.fields(kind) if field.name == key)
        kinds = tuple(kind for kind in typing.get_args(found) or (found,) if kind not in (type(None), ...))
    return kinds


def _unknown(path: str, key: str, tree: dict[str, Any]) -> str:
    known = sorted(_known_keys(path, tree))
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{_join(path, key)}: unknown key; {hint}"


def _known_keys(path: str, tree: dict[str, Any]) -> set[str]:
    if not path:
        return {field.name for field in msgspec.structs.fields(Job)}
    kinds = _kinds(path)
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    kind = node.get("kind") if isinstance(node, dict) else None
    chosen = [k for k in kinds if getattr(k.__struct_config__, "tag", None) in (kind, None)] or list(kinds)
    keys = {name for k in chosen for name in k.__struct_fields__}
    return keys | ({"kind"} if len(kinds) > 1 else set())


def _join(path: str | None, key: str) -> str:
    return f"{path}.{key}" if path else key


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _found(path: str, tree: dict[str, Any]) -> str:
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return ""
        node = node[name]
    return f", got {_SHORT.repr(node)}" if not isinstance(node, dict) else ""


def _check(job: Job, source: str) -> None:
    """What no single key can tell."""
    try:
        strategy_named(job.resilience.strategy)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    _check_size(job.grid, source)
    layers = num_layers(job)
    if layers is not None:
        check_cuts(job.grid, layers, f"{source}: ", "model")
    if isinstance(job.model, GptModel) and job.model.width % job.model.heads:
        raise ConfigError(f"{source}: model.heads: must divide model.width ({job.model.width})")
    if complaint := _wrong_text(job.model, job.data):
        raise ConfigError(f"{source}: {complaint}")
    if complaint := _wrong_optimizer(job.optimizer):
        raise ConfigError(f"{source}: optimizer.{complaint}")
    if job.control.hang_s < 3 * job.control.heartbeat_s:
        raise ConfigError(
            f"{source}: control.hang_s: {job.control.hang_s:g} s without a sign of life say nothing where workers give "
            f"one every {job.control.heartbeat_s:g} s (control.heartbeat_s): expected at least three times as much"
        )
    if not (job.control.tls or job.control.insecure or is_loopback(job.control.host)):
        raise ConfigError(
            f"{source}: control.host: {job.control.host} can be reached from outside, and the job's token would travel "
            "in the clear: expected control.tls (holdfast certs makes it), or control.insecure: true if that is meant"
        )
    if job.control.carrier != "links" and job.control.tls:
        raise ConfigError(
            f"{source}: control.carrier: {job.control.carrier} carries bodies in the clear, and whoever reaches its "
            "ports may speak there: expected links with control.tls, which are sealed"
        )
    for key, place in (
        ("checkpoint.url", job.checkpoint.url),
        ("logging.url", job.logging.url),
        ("resume", job.resume),
    ):
        refuse_mistyped(place or "", f"{source}: {key}: ")
    if job.train.audit_every and job.resilience.commit == "undo":
        raise ConfigError(
            f"{source}: train.audit_every: {job.train.audit_every}, and steps that resilience.commit undo has inverted "
            "leave owners of a layer with other bits: expected commit shadow, or audit_every 0"
        )
    if complaint := _wrong_evaluation(job):
        raise ConfigError(f"{source}: evaluate{complaint}")
    if complaint := _wrong_loop(job) or _wrong_strategy(job) or _wrong_logging(job):
        raise ConfigError(f"{source}: {complaint}")
    if complaint := _wrong_lanes(job) or _wrong_shards(job) or _wrong_chunks(job):
        raise ConfigError(f"{source}: {complaint}")
    pipelines, owners = len(job.grid.depths), _fewest_owners(job)
    if job.resilience.tolerate > owners - 1:
        raise ConfigError(
            f"{source}: resilience.tolerate: {pipelines} pipelines survive any {owners - 1} failures, not any "
            f"{job.resilience.tolerate}; use more pipelines or tolerate less"
        )


def _fewest_owners(job: Job) -> int:
    """How many workers hold a layer, one of those that the fewest hold."""
    if not job.grid.layout:
        return sum(lanes[0] for lanes in job.lanes)
    rows = [
        [lanes for layers, lanes in zip(each.stages, widths, strict=True) for _ in range(layers)]
        for each, widths in zip(job.grid.layout, job.lanes, strict=True)
    ]
    return min(map(sum, zip(*rows, strict=False)))


def _wrong_lanes(job: Job) -> str:
    """What does not go with stages of several workers; empty if nothing."""
    if job.most_lanes == 1:
        return ""
    for pipeline, (lanes, count) in enumerate(zip(job.lanes, job.grid.batch.counts, strict=True)):
        if count < max(lanes):
            return (
                f"grid: pipeline {pipeline} has {count} micro-batches for a stage of {max(lanes)} GPUs, which take "
                f"them by turns; expected at least {max(lanes)}"
            )
    return _torn_stage(job)


def _wrong_chunks(job: Job) -> str:
    """Why micro-batches cannot be cut into chunks as the job says; empty if they can."""
    chunks, total = job.train.sum_chunks, job.grid.global_microbatches or sum(job.grid.batch.counts)
    if chunks is None or total % chunks == 0:
        return ""
    return f"train.sum_chunks: {chunks} chunks, and a step has {total} micro-batches; expected a number that divides it"


def _wrong_shards(job: Job) -> str:
    """What does not go with stages that are sharded over several GPUs; empty if nothing."""
    gpus = job.most_shards
    if gpus == 1:
        return ""
    if job.train.device != "cpu":
        return (
            "train.device: with numerics fast a stage of several GPUs is sharded over processes that compute on CPUs "
            f"so far; expected cpu, or numerics exact, got {job.train.device}"
        )
    wide = "with numerics fast a stage of several GPUs is sharded over them"
    if uneven := [each for row in job.shards for each in row if job.grid.microbatch_size % each]:
        return (
            f"grid.microbatch_size: {wide}, which share the samples of each micro-batch; expected a multiple of "
            f"{uneven[0]}, got {job.grid.microbatch_size}"
        )
    unlike, alike = job.fewest_shards < gpus, "equally many GPUs for each stage"
    unfit = {
        "resilience.spares": (unlike and job.resilience.spares > 0, f"0, or {alike}"),
        "resilience.commit": (job.resilience.commit == "undo", "shadow"),
        "train.precision": (job.train.precision != "fp32", "fp32"),
        "optimizer.kind": (
            job.optimizer.kind not in ("sgd", "adam", "adamw"),
            "sgd, adam or adamw, which update each element by itself",
        ),
    }
    return next((f"{key}: {wide}; expected {right}" for key, (wrong, right) in unfit.items() if wrong), "")


def _torn_stage(job: Job) -> str:
    """Which stage would lie on two nodes; empty if none."""
    first, per_node = 0, job.grid.workers_per_node
    for pipeline, lanes in enumerate(job.lanes):
        for stage, width in enumerate(lanes):
            last = first + width - 1
            if first // per_node != last // per_node:
                return (
                    f"grid.workers_per_node: with {per_node} workers per node, stage {stage} of pipeline {pipeline}, "
                    f"which has {width} GPUs, would lie on nodes {first // per_node} to {last // per_node}; expected a "
                    f"number such that every stage is on one node, such as {_fitting(job)}"
                )
            first += width
    return ""


def _fitting(job: Job) -> int:
    """The fewest workers per node that tear no stage apart; all of them never do."""
    widths = [width for lanes in job.lanes for width in lanes]
    ends = list(accumulate(widths))

    def fits(per_node: int) -> bool:
        return all((end - width) // per_node == (end - 1) // per_node for end, width in zip(ends, widths, strict=True))

    return next((each for each in range(max(widths), ends[-1]) if fits(each)), ends[-1])


def _check_size(grid: Grid, source: str) -> None:
    """Refuses what is more than can be planned, before anything of that size is made."""
    if grid.layout:
        operations = sum(3 * len(each.stages) * each.microbatches for each in grid.layout)
        workers = sum(sum(each.widths) for each in grid.layout)
        told = f"{workers} workers with {operations} operations in a step"
    elif grid.workers:
        workers, operations = grid.workers, 3 * (grid.global_microbatches or 0)  # at least: each on one stage
        told = f"{workers} workers with {grid.global_microbatches} micro-batches"
    else:
        stages = (grid.pipelines or 0) * (grid.stages or 0)
        workers, operations = stages * grid.gpus_per_stage, 3 * stages * (grid.microbatches or 0)
        told = f"{grid.pipelines} x {grid.stages} workers with {grid.microbatches} micro-batches per pipeline"
    if workers > _MOST_WORKERS or operations > _MOST_OPERATIONS:
        raise ConfigError(
            f"{source}: grid: {told} are more than can be planned: expected at most {_MOST_WORKERS} workers and "
            f"{_MOST_OPERATIONS} operations"
        )
    if (layers := max((sum(each.stages) for each in grid.layout), default=0)) > MOST_LAYERS:
        raise ConfigError(f"{source}: grid.layout: no model has {layers} layers; expected at most {MOST_LAYERS}")


def check_cuts(grid: Grid, layers: int, where: str = "", what: str = "model") -> None:
    """Checks that a grid fits a number of layers.

    Args:
        grid: of the job.
        layers: how many there are.
        where: what the message begins with.
        what: what has these layers, for people.

    Raises:
        ConfigError: more stages than layers, or a pipeline whose stages have more or fewer layers together.
    """
    if (grid.stages or 0) > layers:
        raise ConfigError(f"{where}grid.stages: {grid.stages} stages for a {what} of {layers} layers; at most {layers}")
    for number, each in enumerate(grid.layout):
        if sum(each.stages) != layers:
            raise ConfigError(
                f"{where}grid.layout: the stages of pipeline {number} have {sum(each.stages)} layers together, "
                f"{' + '.join(map(str, each.stages))}; expected the {layers} of the {what}"
            )


def is_loopback(host: str) -> bool:
    """Returns whether an address is this machine's own, which no other one reaches."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _wrong_strategy(job: Job) -> str:
    """What the strategy lacks, or is told for nothing; empty if nothing."""
    name, given, strategy = job.resilience.strategy, job.resilience, job.strategy
    if not strategy.takes_snapshots and given.snapshot_every:
        return f"resilience.snapshot_every: strategy {name} takes no snapshots; expected 0, got {given.snapshot_every}"
    if complaint := strategy.needs(job):
        return complaint
    plain = Resilience()
    for key in ("smallest_pipeline", "worker_memory", "degraded"):
        value, default = getattr(given, key), getattr(plain, key)
        if not strategy.makes_pipelines and value != default:
            return f"resilience.{key}: strategy {name} makes no pipelines; expected {default}, got {value}"
    return ""


def _wrong_loop(job: Job) -> str:
    """What does not go with a script that has its own loop; empty if nothing."""
    if job.loops != isinstance(job.data, ScriptData):
        return "model.kind and data.kind: script has both; expected it for both or for neither"
    if not job.loops:
        if job.train.compare_every is not None:
            return "train.compare_every: only workers of a script compare by it; expected train.audit_every"
        if job.train.time_limit is None:
            return ""
        return (
            "train.time_limit: only the loop of a script ends by it: expected none; `timeout SECONDS holdfast train "
            "...` ends any job with a checkpoint"
        )
    train, plain = job.train, Train(steps=1)
    wanted = (
        ("grid.stages", max(job.grid.depths), 1),
        ("grid.gpus_per_stage", job.most_lanes * job.most_shards, 1),
        ("optimizer", job.optimizer, Optimizer()),
        ("train.sum_chunks", train.sum_chunks, plain.sum_chunks),
        ("train.clip_norm", train.clip_norm, plain.clip_norm),
        ("train.precision", train.precision, plain.precision),
        ("train.loss_scale", train.loss_scale, plain.loss_scale),
        ("train.epochs", train.epochs, plain.epochs),
        ("train.technique", train.technique_unprofiled, "1f1b"),
        ("train.profile", train.profile, plain.profile),
        ("train.audit_every", train.audit_every, 0),
        *((("train.compare_every", train.compare_every or 0, 0),) if train.numerics == "fast" else ()),
        ("resilience.commit", job.resilience.commit, "shadow"),
        ("resilience.step_log", job.resilience.step_log, True),
    )
    for key, value, expected in wanted:
        if value != expected:
            return f"{key}: a script has its own model and loop: expected nothing else than the default, got {value}"
    if not job.strategy.loops:
        return (
            "resilience.strategy: a script's loop never goes back; expected one of "
            f"{', '.join(names(lambda each: each.loops))}, got {job.resilience.strategy}"
        )
    return ""


def _wrong_evaluation(job: Job) -> str:
    """Why a job cannot be evaluated as it says; empty if it can."""
    if job.evaluate is None:
        return ""
    data, model = job.evaluate.data, job.model
    if job.loops or isinstance(data, ScriptData):
        return ": a script evaluates in its own loop: expected none"
    if job.most_shards > 1:
        return ": stages of several GPUs are not evaluated with train.numerics fast: expected none, or one GPU a stage"
    made = job.checkpoint.every
    if job.evaluate.patience and not job.evaluate.best:
        return ".patience: is for evaluations that are not the best: expected best, such as loss, or patience 0"
    if job.evaluate.best and (not isinstance(made, int) or not made or job.evaluate.every % made):
        return (
            f".best: each evaluated state needs a checkpoint: expected checkpoint.every to divide {job.evaluate.every}"
        )
    return _wrong_text(model, data, ".data")


def _wrong_text(model: ModelSettings, data: Data, key: str = "data") -> str:
    """What data say that a model says itself; empty if nothing."""
    if not isinstance(data, TextData):
        return ""
    if isinstance(model, HuggingFaceModel) and model.task != "causal-lm":
        return f"{key}.kind: text asks for the tokens that follow; expected kind python for model.task {model.task}"
    if not isinstance(model, GptModel | BertModel):
        return ""
    if data.context is not None:
        return f"{key}.context: this model says it itself; expected model.context"
    if data.tokenizer != "bytes":
        return f"{key}.tokenizer: this model is one of bytes; expected bytes, or another model"
    return ""


def _wrong_logging(job: Job) -> str:
    """Why what a job says of logs cannot be; empty if it can."""
    needed = logs_need(job) if job.logging.use == "on" else ""
    return f"logging.use: on needs {needed}" if needed else _wrong_groups(job)


def _wrong_groups(job: Job) -> str:
    """Why nodes cannot be replayed together as a job says; empty if they can."""
    told = [node for group in job.logging.groups for node in group]
    nodes = -(-job.num_workers // job.grid.workers_per_node)
    if not told or (len(set(told)) == len(told) and max(told) < nodes):
        return ""
    return (
        f"logging.groups: {[list(group) for group in job.logging.groups]} has a node twice, or one that there is not; "
        f"expected numbers from 0 to {nodes - 1}, each in one group at most"
    )


def logs_need(job: Job) -> str:
    """Returns what logs of what crosses nodes need that a job does not have; empty if it may log."""
    if job.may_log:
        return ""
    missing = (
        (not job.checkpoint_every, "checkpoint.every", "more than 0: layers are replayed from a checkpoint"),
        (job.most_shards > 1 or job.most_lanes > 1, "grid", "stages of one GPU"),
        (not job.strategy.logs, "resilience.strategy", " or ".join(names(lambda each: each.logs))),
    )
    return next(f"{key}: {right}" for wrong, key, right in missing if wrong)


def _wrong_optimizer(optimizer: Optimizer) -> str:
    """What does not fit together, or would count for nothing; empty if nothing."""
    momentum = optimizer.kind == "sgd" and optimizer.momentum > 0
    if optimizer.nesterov and not (momentum and optimizer.dampening == 0):
        return "nesterov: needs kind sgd, momentum above 0 and dampening 0"
    if optimizer.dampening and not momentum:
        return "dampening: needs kind sgd and momentum above 0"
    if optimizer.amsgrad and optimizer.kind not in ("adam", "adamw"):
        return "amsgrad: needs kind adam or adamw"
    if optimizer.schedule not in ("constant", "cosine", "linear") and ":" not in optimizer.schedule:
        return (
            "schedule: expected one of constant, cosine, linear, or package.module:name of a scheduler, got "
            f"{optimizer.schedule!r}"
        )
    if optimizer.schedule_arguments and ":" not in optimizer.schedule:
        return f"schedule_arguments: schedule {optimizer.schedule} takes none; expected none, or a scheduler of torch's"
    own, plain = ":" in optimizer.kind, Optimizer()
    if own and ":" in optimizer.schedule:
        return (
            f"schedule: {optimizer.schedule} goes by a learning rate, and kind {optimizer.kind} has its own; expected "
            "constant, cosine or linear, which are factors on that"
        )
    if not own and optimizer.kind not in _KINDS_WITH["lr"]:
        return ""  # whoever makes it says that there is no such kind
    for key, kinds in _KINDS_WITH.items():
        if getattr(optimizer, key) != getattr(plain, key) and (own or optimizer.kind not in kinds):
            which = "a function of yours, which is given parameters only" if own else f"kind {optimizer.kind}"
            instead = "no such key" if own else f"kind {' or '.join(kinds)}"
            return f"{key}: counts for nothing with {which}; expected {instead}"
    return ""


def _without_effect(job: Job, tree: dict[str, Any]) -> str:
    """Which key was given a value that counts for nothing, and what it needs; empty if none.

    The default is what a job file that a run leaves says of such a key, and is always taken.
    """
    given = tree.get("checkpoint") or {}
    if not job.checkpoint_every and "every" not in given:  # 0 says that none are wanted
        for key in _changed(job.checkpoint, Checkpoint()):
            if not (key == "url" and job.resume):
                return f"checkpoint.{key}: no checkpoints are made; expected checkpoint.every with it (0: none)"
        for key in _changed(job.logging, Logging(use=job.logging.use)):
            if job.logging.use == "auto":
                return (
                    f"logging.{key}: nothing is logged without checkpoints; expected checkpoint.every with it (0: none)"
                )
    if job.resilience.step_log_bytes and not job.resilience.step_log:
        return "resilience.step_log_bytes: nothing is kept of a step; expected resilience.step_log true with it"
    if job.control.outside_s != Control().outside_s and not job.loops:
        return "control.outside_s: no script with a loop of its own is run; expected no such key"
    if job.logging.upload == "always" and job.logging.url is None:
        return "logging.upload: there is no place to send logs to; expected logging.url with it"
    return ""


def _changed(section: msgspec.Struct, plain: msgspec.Struct) -> list[str]:
    """The keys of a section that have another value than the plain one."""
    return [key for key in section.__struct_fields__ if getattr(section, key) != getattr(plain, key)]


def num_layers(job: Job) -> int | None:
    """How many layers the model has, where the job file alone tells; None for one's own model."""
    match job.model:
        case GptModel(layers=blocks) | BertModel(layers=blocks) | VitModel(layers=blocks):
            return blocks + 2
        case ConvnetModel():
            return 7
        case ResnetModel(depth=depth):
            return 19 if depth == 50 else 6
        case Nt3Model():
            return 5
        case PythonModel(split="none"):
            return 1
        case HuggingFaceModel() | PythonModel() | ScriptModel():
            return None
