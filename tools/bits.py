"""Records the hashes that 30 small jobs end in, and compares them later: a redesign of the house may change no bit.

::

    python -m tools.bits record before.json          # with the code as it was
    python -m tools.bits compare before.json         # with the code as it is, on the same machine

Hashes depend on the processor and on torch, so a record is for one machine. Only what users call is used here: job
keys, faults and ``holdfast.train``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import Fault, Summary, parse_job, train

__all__ = ["CASES", "Case", "differences", "main"]

_EXAMPLES = Path(__file__).resolve().parents[1] / "tests" / "dist"
_GPT: dict[str, Any] = {
    "name": "gpt",
    "model": {"kind": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 3, "stages": 3, "microbatches": 3, "microbatch_size": 2},
    "optimizer": {"kind": "adamw", "lr": 1.0e-3, "weight_decay": 0.01},
    "train": {"steps": 6, "seed": 7},
    "control": {"hang_s": 15},
}
_CONVNET = _GPT | {
    "name": "convnet",
    "model": {"kind": "convnet", "width": 4},
    "data": {"kind": "digits"},
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
}
_OWN = _GPT | {
    "name": "own",
    "model": {
        "kind": "python",
        "target": f"{_EXAMPLES / 'foreign_models.py'}:build",
        "loss": "torch.nn:CrossEntropyLoss",
    },
    "data": {"kind": "python", "target": f"{_EXAMPLES / 'foreign_models.py'}:dataset"},
}
_POISONED = _GPT | {
    "name": "poisoned",
    "model": {
        "kind": "python",
        "target": f"{_EXAMPLES / 'poisoned_model.py'}:build",
        "loss": f"{_EXAMPLES / 'poisoned_model.py'}:loss",
        "arguments": {"layer": 0, "one_in": 15},
    },
    "data": {"kind": "digits"},
}
_JOBS = {job["name"]: job for job in (_GPT, _CONVNET, _OWN, _POISONED)}
_WAIT = ("checkpoint.every=2", "resilience.wait_for_replacement=120")
_UNDO = ("resilience.commit=undo", "optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job whose bits are recorded.

    Attributes:
        name: of the case.
        job: which job it is a variant of.
        overrides: ``key=value`` texts.
        faults: what strikes it.
        goes_on: overrides with which the same job goes on from its last checkpoint; None: it does not.
    """

    name: str
    job: str = "gpt"
    overrides: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    goes_on: tuple[str, ...] | None = None


CASES = (
    Case(name="1f1b"),
    Case(name="gpipe, kill in forward", overrides=("train.technique=gpipe",), faults=("kill:1.1@2:forward",)),
    Case(name="decoupled, kill in backward", overrides=("train.technique=decoupled",), faults=("kill:0.2@3:backward",)),
    Case(name="staggered", overrides=("train.technique=staggered",)),
    Case(
        name="staggered, three kills",
        overrides=("train.technique=staggered",),
        faults=("kill:0.1@1:update", "kill:2.0@3:verdict", "kill:1.2@4:reduce"),
    ),
    Case(name="kill at the start", faults=("kill:0.0@1:start",)),
    Case(name="kill in reduce", faults=("kill:2.2@2:reduce",)),
    Case(name="kill with the verdict", faults=("kill:1.0@2:verdict",)),
    Case(name="kill in commit", faults=("kill:1.1@3:commit",)),
    Case(name="one pipeline left", faults=("kill:0.0@1:forward", "kill:1.1@2:update", "kill:0.2@3:backward")),
    Case(name="a hang", overrides=("control.hang_s=2",), faults=("hang:1.1@2:backward",)),
    Case(name="a node", overrides=("grid.workers_per_node=2",), faults=("kill-node:0@2",)),
    Case(name="leaves and comes back", overrides=("train.steps=12",), faults=("leave:1.1@2", "join:1.1@5")),
    Case(name="dies and comes back", overrides=("train.steps=12",), faults=("kill:2.1@2:update", "join:2.1@5")),
    Case(name="the coordinator dies", faults=("kill-coordinator@2",)),
    Case(
        name="the coordinator and a worker die",
        overrides=("train.technique=staggered",),
        faults=("kill-coordinator@2", "kill:0.1@3:reduce"),
    ),
    Case(name="undo", overrides=_UNDO),
    Case(name="undo, kill in forward", overrides=_UNDO, faults=("kill:1.1@2:forward",)),
    Case(name="fast numerics", overrides=("train.numerics=fast",)),
    Case(name="clipped, staggered", overrides=("train.technique=staggered", "train.clip_norm=0.5")),
    Case(
        name="lamb, checkpointed activations",
        overrides=("optimizer.kind=lamb", "model.checkpoint_activations=[1,2]", "optimizer.schedule=cosine"),
    ),
    Case(name="convnet, kill", job="convnet", faults=("kill:0.1@2:backward",)),
    Case(name="convnet, staggered", job="convnet", overrides=("train.technique=staggered",)),
    Case(name="own model, two kills", job="own", faults=("kill:0.1@1:forward", "kill:1.0@3:update")),
    Case(
        name="steps are omitted, the loss is scaled",
        job="poisoned",
        overrides=("train.loss_scale={}", "train.technique=staggered", "train.steps=10"),
        faults=("kill:1.1@4:commit",),
    ),
    Case(
        name="a smaller grid from a checkpoint",
        overrides=("checkpoint.every=2",),
        faults=("kill:0.1@3:forward", "kill:1.1@3:forward", "kill:2.1@3:forward"),
    ),
    Case(
        name="snapshots",
        overrides=("resilience.strategy=snapshots", "resilience.snapshot_every=2"),
        faults=("kill:1.1@3:backward",),
    ),
    Case(
        name="checkpoint-restart",
        overrides=("resilience.strategy=checkpoint-restart", "checkpoint.synchronous=true", *_WAIT),
        faults=("kill:1.1@3:backward",),
    ),
    Case(name="checkfreq", overrides=("resilience.strategy=checkfreq", *_WAIT), faults=("kill:0.2@5:reduce",)),
    Case(
        name="goes on in another shape",
        overrides=("checkpoint.every=2",),
        goes_on=("train.steps=10", "grid.pipelines=1", "grid.stages=2", "grid.microbatches=9"),
    ),
)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Returns what a case ended in."""
    summary = _train(case, case.overrides, folder / "run", [Fault.parse(text) for text in case.faults])
    if case.goes_on is not None:
        summary = _train(case, (*case.overrides, *case.goes_on), folder / "on", (), resume=str(folder / "run"))
    if summary.unfired:
        raise SystemExit(f"{case.name}: {', '.join(summary.unfired)} never fired, so its bits say nothing")
    return {
        "weights_sha256": summary.weights_sha256,
        "state_sha256": summary.state_sha256,
        "final_loss": summary.final_loss,
        "omitted_steps": summary.omitted_steps,
    }


def _train(
    case: Case, overrides: Sequence[str], run_dir: Path, faults: Sequence[Fault], resume: str | None = None
) -> Summary:
    job = parse_job(copy.deepcopy(_JOBS[case.job]), overrides)
    return train(job, run_dir=run_dir, faults=faults, resume=resume)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line for every case that does not end as before, or is not in both."""
    lines = [f"{name}: was recorded, and is none any more" for name in before if name not in after]
    lines += [f"{name}: was not recorded" for name in after if name not in before]
    for name in before:
        for key in before[name] if name in after else ():
            if before[name][key] != after[name].get(key):
                lines.append(f"{name}: {key} was {before[name][key]}, is {after[name].get(key)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Records or compares; returns 1 if a bit is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="where the hashes are kept, as JSON")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args(arguments)
    found = {}
    for number, case in enumerate(cases := [case for case in CASES if options.only in case.name], start=1):
        with tempfile.TemporaryDirectory(prefix="holdfast-bits-") as folder:
            found[case.name] = run(case, Path(folder))
        print(f"{number:2} of {len(cases)}  {found[case.name]['state_sha256'][:16]}  {case.name}", file=sys.stderr)
    if options.what == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(options.file.read_text())
    lines = differences({name: each for name, each in before.items() if options.only in name}, found)
    print("\n".join(lines) or f"all {len(found)} end in the bits that were recorded")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
