"""``holdfast templates``: pipelines for any number of nodes, and what becomes of them when nodes are lost."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from holdfast.cli.arguments import above_0, whole_number
from holdfast.cli.templates_shown import FORMATS, RECONFIGURED, ShownTemplates
from holdfast.config.profiles import load_profile
from holdfast.errors import ConfigError
from holdfast.planning.templates.batches import count_microbatches, even_shares
from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.prediction import predicted_seconds
from holdfast.planning.templates.reconfigure import Pipelines, reconfigured
from holdfast.planning.templates.sizes import make_templates
from holdfast.planning.templates.stages import stage_table, with_recomputation

__all__ = ["add_templates_parser", "run"]

_OF_TEMPLATES = ("profile", "nodes", "global_batch", "microbatch_size")
"""Flags without which there are no templates."""
_OF_THESE_ONLY = (
    *_OF_TEMPLATES,
    "gpus_per_node",
    "tolerate",
    "memory",
    "copies",
    "sums",
    "activation_checkpointing",
    "planning_microbatches",
    "alive",
    "shares",
)
"""Flags that say nothing of a reconfiguration."""


def add_templates_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``templates`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser(
        "templates", help="pipelines for any number of nodes, and their reconfiguration", description=__doc__
    )
    parser.add_argument("--profile", metavar="FILE", help="times and sizes from `holdfast profile`")
    parser.add_argument("--nodes", type=whole_number(1), metavar="N", help="nodes of the job")
    parser.add_argument("--gpus-per-node", type=whole_number(1), metavar="M", help="GPUs of each node; default: 1")
    parser.add_argument(
        "--tolerate", type=whole_number(0), metavar="F", help="failures at once that leave a copy of all; default: 1"
    )
    parser.add_argument("--global-batch", type=whole_number(1), metavar="B", help="samples of a step")
    parser.add_argument("--microbatch-size", type=whole_number(1), metavar="b", help="samples of a micro-batch")
    parser.add_argument(
        "--memory",
        type=above_0("bytes, such as 16e9"),
        metavar="BYTES",
        help="memory of a GPU, for parameters, gradients, optimizer state and micro-batches; default: no limit",
    )
    parser.add_argument(
        "--copies",
        type=whole_number(1),
        metavar="N",
        help="copies of the state: 2 with a shadow; default: 1",
    )
    parser.add_argument(
        "--sums", type=whole_number(1), metavar="N", help="sums of gradients, in sizes of the parameters; default: 1"
    )
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="layers keep their input only and run forward again, where the profile was measured without that",
    )
    parser.add_argument(
        "--minimum", type=whole_number(1), metavar="n0", help="the fewest nodes of a pipeline; default: by memory"
    )
    parser.add_argument(
        "--planning-microbatches",
        type=whole_number(1),
        metavar="N_b",
        help="micro-batches for which templates are the best; default: of one of F + 1 pipelines",
    )
    parser.add_argument(
        "--shares",
        choices=["fastest", "even"],
        help="micro-batches of pipelines: so that the slowest is done as soon as possible (fastest, the default), or "
        "so that times vary least, as Oobleck's equation 6 has it (even)",
    )
    parser.add_argument("--alive", type=whole_number(1), metavar="N'", help="nodes that are left; default: all")
    parser.add_argument(
        "--reconfigure",
        metavar="JSON",
        help="nodes of pipelines that run, such as [[0,1],[2,3,4]]: what becomes of them",
    )
    parser.add_argument("--lost", metavar="2,4", help="nodes that are lost, with --reconfigure")
    parser.add_argument("--format", choices=sorted(FORMATS), default="table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints templates and the best pipelines made of them, or pipelines after a loss, and returns the exit code 0.

    Raises:
        ConfigError: a flag cannot be used; the message names it and what would be right.
        InfeasiblePlan: there are too few nodes, or too little memory.
    """
    sys.stdout.write(_templates(args) if args.reconfigure is None else _reconfigured(args))
    return 0


def _templates(args: argparse.Namespace) -> str:
    for flag in _OF_TEMPLATES:
        if getattr(args, flag) is None:
            raise ConfigError(f"{_name(flag)} is missing: expected it, or --reconfigure with the pipelines that run")
    if args.lost is not None:
        raise ConfigError(f"--lost {args.lost}: expected --reconfigure with it")
    tolerate, gpus = 1 if args.tolerate is None else args.tolerate, args.gpus_per_node or 1
    alive = args.nodes if args.alive is None else args.alive
    if alive > args.nodes:
        raise ConfigError(f"--alive {alive}: expected at most the {args.nodes} of --nodes")
    count = count_microbatches(args.global_batch, args.microbatch_size, tolerate + 1)
    profile = load_profile(args.profile)
    if args.activation_checkpointing:
        profile = with_recomputation(profile)
    table = stage_table(profile, gpus, memory_bytes=args.memory, copies=args.copies or 1, sums=args.sums or 1)
    largest = min(args.nodes, table.num_layers)
    planning = args.planning_microbatches or max(largest, -(-count // (tolerate + 1)))
    templates = make_templates(table, args.nodes, tolerate, planning, minimum=args.minimum)
    paces = {size: template.pace for size, template in templates.templates.items()}
    instance = best_instance(paces, alive, tolerate + 1, count)
    if args.shares == "even":
        steady_s = [templates.templates[size].steady_s for size in instance.sizes]
        instance = replace(instance, microbatches=even_shares(steady_s, count))
    pipelines = set(zip(instance.sizes, instance.microbatches, strict=True))
    step_s = max(predicted_seconds(profile, templates.templates[size], share) for size, share in pipelines)
    shown = ShownTemplates(templates=templates, instance=instance, global_batch=args.global_batch, step_s=step_s)
    return FORMATS[args.format](shown)


def _reconfigured(args: argparse.Namespace) -> str:
    for flag in _OF_THESE_ONLY:
        if getattr(args, flag) is not None:
            raise ConfigError(f"{_name(flag)} says nothing of --reconfigure: expected --lost and --minimum alone")
    if args.minimum is None:
        raise ConfigError("--minimum is missing: expected the fewest nodes of a pipeline")
    if args.format not in RECONFIGURED:
        raise ConfigError(f"--format {args.format}: expected {' or '.join(RECONFIGURED)} with --reconfigure")
    before = Pipelines(pipelines=_read_pipelines(args.reconfigure))
    return RECONFIGURED[args.format](reconfigured(before, _read_nodes(args.lost or ""), args.minimum))


def _name(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _read_pipelines(text: str) -> tuple[tuple[int, ...], ...]:
    expected = f"--reconfigure {text}: expected the nodes of each pipeline, such as [[0,1],[2,3,4]]"
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(expected) from None
    if not isinstance(tree, list) or not all(isinstance(row, list) and row for row in tree):
        raise ConfigError(expected)
    if not all(type(node) is int for row in tree for node in row):
        raise ConfigError(expected)
    return tuple(tuple(row) for row in tree)


def _read_nodes(text: str) -> frozenset[int]:
    numbers = [number for number in text.split(",") if number]
    if not all(number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers):
        raise ConfigError(f"--lost {text}: expected numbers of nodes, such as 2,4")
    return frozenset(map(int, numbers))
