"""``holdfast init``: writes a job file to begin with."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.parsing import parsing

__all__ = ["add_init_parser", "job_file"]

_CONTEXT = 128
_BUILT_IN = {
    "gpt": "stdlib",
    "bert": "stdlib",
    "vit": "digits",
    "convnet": "digits",
    "resnet": "digits",
    "nt3": "breast-cancer",
}
"""Models that are here, each with data that fit it."""
_DATASETS = ("digits", "breast-cancer")
_TASKS = {
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}
"""Tasks by how the names of transformers' classes end; others are causal language models."""


def add_init_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``init`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "init",
        help="write a job file to begin with",
        description="Writes a job file for a model and data, to be trained by holdfast train; a script with a loop of "
        "its own needs none: holdfast run --workers 4 SCRIPT.py.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of Hugging Face's transformers, with a config.json and perhaps safetensors; one's own, as "
        f"net.py:Net (a class) or net.py:build (a function); or one that is here: {', '.join(_BUILT_IN)}",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="a text file, a folder or a glob of such; one's own dataset, as net.py:dataset; or one that is here: "
        f"{', '.join(_DATASETS)}",
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="how many are to train (default: 4)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a new file (default: standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the file, tells what to do with it and returns 0."""
    text = job_file(args.model, args.data, args.workers, args.out or Path("job.yaml"))
    if args.out is None:
        sys.stdout.write(text)
        return 0
    try:
        with args.out.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"--out {args.out}: exists already, and nothing was overwritten; choose another name"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out {args.out}: cannot be written: {error.strerror or error}") from None
    print(f"written to {args.out}; holdfast train {args.out}")
    return 0


def job_file(model: str, data: str | None, workers: int, path: Path) -> str:
    """Returns a job file.

    Args:
        model: a folder of transformers', a target, or the kind of a model that is here.
        data: a path or glob of texts, a target, or the kind of data that are here; None: what fits the model.
        workers: how many there are to be, at least 1.
        path: of the file, for what is said in it.

    Raises:
        ConfigError: there is no such model or data, or they do not fit each other; says what would be right.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected at least 1")
    modelled = _model(model)
    read = _data(data or _BUILT_IN.get(model), modelled)
    stages = 2 if workers % 2 == 0 and workers >= 4 else 1
    grid = {"pipelines": workers // stages, "stages": stages, "microbatches": 4, "microbatch_size": 4}
    job: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)[:100],
        "model": modelled,
        "data": read,
        "grid": grid,
        "optimizer": {"kind": "adamw", "lr": 0.0003},
        "train": {"epochs": 1},
        "checkpoint": {"every": 100},
    }
    parse_job(job, source="init")
    return _written(job, path)


def _written(job: dict[str, Any], path: Path) -> str:
    grid, data = job["grid"], job["data"]
    samples = grid["pipelines"] * grid["microbatches"] * grid["microbatch_size"]
    evaluate = {"every": 100, "data": _held_out(data), "best": "loss"}
    copies = f"{grid['pipelines']} copies of the model, each cut in {grid['stages']}"
    remarks = {
        "grid": f"{copies}; {samples} samples a step" if grid["stages"] > 1 else f"{samples} samples a step",
        "train": "or steps: 1000",
        "checkpoint": "--resume auto goes on from the newest",
    }
    lines = [
        f"# holdfast train {path} --run-dir runs/{job['name']}",
        "# With --fault kill:0.0@20:backward a worker is killed in step 20. Every key: docs/job_file.md.",
        f"name: {job['name']}",
    ]
    for key, section in job.items():
        if key != "name":
            remark = f"  # {remarks[key]}" if key in remarks else ""
            lines.append(f"{key}: {_flow(section)}{remark}")
    if evaluate["data"]:
        lines.append(f"# evaluate: {_flow(evaluate)}  # on data that are held out")
    return "\n".join(lines) + "\n"


def _held_out(data: dict[str, Any]) -> dict[str, Any]:
    """Data of the same kind that one has yet to name; none of those that are here, of which nothing is held out."""
    match data["kind"]:
        case "text":
            return {**data, "path": "HELD_OUT.txt"}
        case "python":
            return {**data, "target": f"{data['target'].rpartition(':')[0]}:HELD_OUT"}
    return {}


def _flow(section: dict[str, Any]) -> str:
    return str(yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=1_000_000)).strip()


# --- the model --------------------------------------------------------------------------------------------------------


def _model(where: str) -> dict[str, Any]:
    if where in _BUILT_IN:
        return {"kind": where}
    if ":" in where:
        return {"kind": "python", "target": where, **({"split": "blocks"} if _is_class(where) else {})}
    folder = Path(where)
    if folder.suffix == ".py":
        raise ConfigError(
            f"{where}: a script is run as it is: holdfast run --workers 4 {where}; expected {where}:NAME for a job "
            "file, a class of a module, or a function that returns one or a list of layers"
        )
    if not (folder / "config.json").is_file():
        kinds = ", ".join(_BUILT_IN)
        raise ConfigError(f"{where}: is no folder with a config.json; expected one, FILE.py:NAME, or one of {kinds}")
    return _of_transformers(folder)


def _of_transformers(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    with parsing(lambda text: ConfigError(f"{path}: cannot be read: {text}"), OSError, ValueError):
        config = json.loads(path.read_text())
    architectures = config.get("architectures") if isinstance(config, dict) else None
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    task = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    return {
        "kind": "huggingface",
        **({} if task is None else {"task": task}),
        "config": str(folder),
        **({"weights": str(folder)} if any(folder.glob("*.safetensors")) else {}),
    }


def _is_class(target: str) -> bool:
    """Whether a target in a file is a class: one's own module, which is cut at its blocks.

    Raises:
        ConfigError: the file, or what it is to define, is not there.
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return False  # whoever loads the package sees what it is
    try:
        parsed = ast.parse(Path(place).read_text(), place)
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}; expected a file that defines {name}") from None
    if not any(_defines(each, name) for each in ast.walk(parsed)):
        raise ConfigError(f"{place}: defines no {name}; expected a file that does")
    return any(isinstance(each, ast.ClassDef) and each.name == name for each in parsed.body)


def _defines(node: ast.AST, name: str) -> bool:
    match node:
        case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.Name(id=found, ctx=ast.Store()):
            return found == name
        case ast.alias(name=imported, asname=found):
            return imported == "*" or (found or imported) == name
    return False


# --- the data ---------------------------------------------------------------------------------------------------------


def _data(where: str | None, model: dict[str, Any]) -> dict[str, Any]:
    if where is None:
        raise ConfigError("--data: is missing; expected a text file, a folder or a glob of such, or FILE.py:NAME")
    if where in _DATASETS:
        return {"kind": where}
    if ":" in where:
        _is_class(where)
        return {"kind": "python", "target": where}
    if where != "stdlib" and not Path(where).exists() and not any(character in where for character in "*?["):
        raise ConfigError(f"--data {where}: there is no such file or folder; expected one, a glob, or FILE.py:NAME")
    text: dict[str, Any] = {"kind": "text", "path": where}
    if model["kind"] not in _BUILT_IN:
        text["context"] = _CONTEXT
    if model["kind"] == "huggingface" and (Path(model["config"]) / "tokenizer.json").is_file():
        text["tokenizer"] = model["config"]
    return text
