"""What has to be known of a GPU before anything is trained on it, and whether what is promised holds there.

::

    PYTHONPATH=src python -m tools.gpu_check                 # all parts, each in a process of its own
    PYTHONPATH=src python -m tools.gpu_check bits train      # some

Prints a line of JSON for everything that was found. It needs what Holdfast needs, and a GPU.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["JOB", "LARGE", "PARTS", "RUNS", "TWO_BY_TWO", "main"]

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "identity": 40,
    "copies": 60,
    "bits": 120,
    "fold": 60,
    "sums": 90,
    "kill": 120,
    "step": 240,
    "profile": 150,
    "train": 100,
    "loops": 100,
}
"""Every part, with the most seconds that it may take."""


def tell(part: str, **found: Any) -> None:
    """Prints one thing that was found."""
    print(json.dumps({"part": part, **found}), flush=True)


def timed(work: Callable[[], Any], rounds: int = 10) -> float:
    """Returns the median of milliseconds on the device, after two rounds to get warm."""
    import torch

    times = []
    for turn in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 4)


# --- parts ------------------------------------------------------------------------------------------------------------


def identity() -> None:
    """What it is."""
    import torch

    from holdfast.devices.named import opened

    began = time.monotonic()
    device = opened("cuda", exact=True, alone=True)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    context_s = time.monotonic() - began
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,clocks.sm", "--format=csv,noheader"]
    tell(
        "identity",
        identity=device.identity,
        python=sys.version.split()[0],
        nccl=str(torch.cuda.nccl.version()),
        capability=f"{properties.major}.{properties.minor}",
        memory=total,
        used_with_one_context=total - free,
        context_s=round(context_s, 3),
        smi=subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        processors=os.cpu_count(),
        tf32=[torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    )


def copies() -> None:
    """How long tensors take between the memories, by what the host's memory is."""
    import torch

    for mebibytes in (1, 16, 256):
        _copies_of(mebibytes)
    small = torch.zeros(1, device="cuda")
    began = time.monotonic()
    for _ in range(200):
        small.item()
    tell("copies", item_us=round(1e6 * (time.monotonic() - began) / 200, 2))
    there = torch.zeros(1 << 28, device="cuda")
    other = torch.empty_like(there)
    tell("copies", device_to_device_gb_s=round(2 * there.nbytes / timed(lambda: other.copy_(there)) / 1e6, 1))


def _copies_of(mebibytes: int) -> None:
    import torch

    from holdfast.devices.fresh import fresh

    runtime, size = torch.cuda.cudart(), mebibytes << 20
    there = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    mapped, found = fresh(size, torch.uint8).fill_(1), {}
    began = time.monotonic()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found["pin_ms"] = 1e3 * (time.monotonic() - began)
    for name, here in (("pageable", torch.empty(size, dtype=torch.uint8)), ("mapped", mapped), ("pinned", pinned)):
        found[f"{name}_out_ms"] = timed(partial(here.copy_, there))
        found[f"{name}_in_ms"] = timed(partial(there.copy_, here))
    found["cpu_out_ms"] = timed(there.cpu)
    began = time.monotonic()
    runtime.cudaHostRegister(mapped.data_ptr(), size, 0)
    found["register_ms"] = 1e3 * (time.monotonic() - began)
    found["registered_out_ms"] = timed(partial(mapped.copy_, there))
    began = time.monotonic()
    runtime.cudaHostUnregister(mapped.data_ptr())
    found["unregister_ms"] = 1e3 * (time.monotonic() - began)
    tell("copies", mebibytes=mebibytes, **{name: round(each, 3) for name, each in found.items()})


def bits() -> None:
    """Whether a layer has the same bits whatever is beside it; with no settings, and with ours."""
    digests = []
    for name in ("plain", "settled", "settled"):
        run = subprocess.run(
            [sys.executable, "-m", "tools.gpu_check", "--inner", f"bits-{name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
        )
        print(run.stdout, end="", flush=True)
        if run.returncode:
            tell("bits", setting=name, failed=run.stderr[-1500:])
        digests.append({d["layer"]: d.get("digest") for line in run.stdout.splitlines() if (d := json.loads(line))})
    tell("bits", same_in_two_processes={name: digests[1][name] == digests[2].get(name) for name in digests[1]})


def _layers() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Modules and their inputs."""
    import torch
    from profiles import gpt3
    from torch import nn

    from holdfast.models import resnet
    from holdfast.models.transformer import Block

    def uniform(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def block(dropout: float) -> Any:
        torch.manual_seed(0)
        return Block(1024, 16, dropout, causal=True)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0]

    def convolution() -> Any:
        torch.manual_seed(0)
        return resnet.build_50(channels=3, classes=10, seed=0)[3]

    def embedding() -> Any:
        return gpt3.layers(1, 1024)[0]

    tokens = torch.randint(50_257, (2, 2048), generator=torch.Generator().manual_seed(1))
    return {
        "block float32": lambda: (block(0.0), uniform(2, 1024, 1024)),
        "block float32 dropout": lambda: (block(0.1), uniform(2, 1024, 1024)),
        "block bf16": lambda: (gpt3.layers(1, 1024)[1], uniform(2, 2048, 1024, dtype=torch.bfloat16)),
        "block bf16 4096": lambda: (gpt3.layers(1, 4096)[1], uniform(1, 2048, 4096, dtype=torch.bfloat16)),
        "embedding": lambda: (embedding(), tokens),
        "head": lambda: (gpt3.layers(1, 1024)[2], uniform(2, 2048, 1024, dtype=torch.bfloat16)),
        "convolutions": lambda: (convolution(), None),
        "lstm": lambda: (Recurrent(), uniform(8, 128, 256)),
    }


def _bits(setting: str) -> None:
    import torch

    from holdfast.devices.named import opened

    device = opened("cuda", exact=setting == "settled", alone=True)
    for name, make in _layers().items():
        try:
            _bits_of(name, make, setting, device)
        except Exception as error:  # noqa: BLE001 - what cannot be made repeatable says so
            tell("bits", layer=name, setting=setting, error=f"{type(error).__name__}: {error}"[:300])
        gc.collect()
        torch.cuda.empty_cache()


def _bits_of(name: str, make: Callable[[], tuple[Any, Any]], setting: str, device: Any) -> None:
    import torch

    from holdfast.runtime.engine.split_backward import fused_gradient, input_gradient, weight_gradient

    module, given = make()
    if given is None:
        channels = next(p.shape[1] for p in module.parameters() if p.dim() == 4)
        given = torch.randn(8, channels, 56, 56, generator=torch.Generator().manual_seed(1))
    module, given = module.cuda(), given.cuda()
    parameters = list(module.parameters())
    gradient = None

    def run(split: bool = False) -> list[Any]:
        nonlocal gradient
        device.seed(5)
        source = given.clone()
        if source.is_floating_point():
            source.requires_grad_()
        output = module(source)
        if gradient is None:
            shape = torch.Generator(device="cuda").manual_seed(2)
            gradient = torch.randn(output.shape, generator=shape, device="cuda").to(output.dtype)
        if split:
            found, pending = input_gradient(output, source, parameters, gradient)
            weights = weight_gradient(pending)
        else:
            found, weights = fused_gradient(output, source, parameters, gradient)
        every = [output.detach(), found, *weights]
        return [each.contiguous().reshape(-1).view(torch.uint8) for each in every if each is not None]

    def same(others: list[Any]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(first, others, strict=True))

    first = run()
    digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in first)).hexdigest()[:16]
    found: dict[str, int] = {"again": sum(same(run()) for _ in range(6))}
    found["split"] = sum(same(run(split=True)) for _ in range(2))
    other, busy = torch.cuda.Stream(), torch.cuda.Stream()
    left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    torch.cuda.synchronize()

    def beside() -> list[Any]:
        with torch.cuda.stream(busy):
            for _ in range(40):
                left @ right
        return run()

    found["beside_products"] = sum(same(beside()) for _ in range(6))
    with torch.cuda.stream(other):
        found["other_stream"] = sum(same(run()) for _ in range(3))
    torch.cuda.synchronize()
    chance, kept, odd = random.Random(3), [], 0
    for _ in range(6):
        kept.append(torch.empty(chance.randrange(1, 1 << 20), dtype=torch.uint8, device="cuda"))
        odd += same(run())
    found["after_odd_allocations"] = odd

    tell("bits", layer=name, setting=setting, digest=digest, ms=timed(run), **found)


def fold() -> None:
    """Whether sums on the GPU have the bits of those on the host, of ordinary and of odd numbers."""
    import torch

    from holdfast.core.summing import add_up
    from holdfast.optim.accumulate import Accumulator, Layout

    size = 1 << 24
    layout = Layout(layers=(0,), shapes=((size,),), num_microbatches=4, record_width=0)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) * 10.0**power for power in (-3, 0, 2, -30)]
    given[3][: size // 2] = torch.randint(1, 1 << 22, (size // 2,), generator=generator, dtype=torch.int32).view(
        torch.float32
    )  # numbers below the smallest normal one
    parts, means, norms = [], [], []
    for name in ("cpu", "cuda"):
        where = torch.device(name)
        sums = Accumulator(layout, where)
        for number, each in enumerate(given):
            sums.add(0, number, [each.to(where)])
        message = sums.message()
        parts.append(message.parts[0].cpu())
        reduced = sums.decode(add_up([message]))
        means.append(reduced.gradients[0].cpu())
        norms.append(reduced.squared_norm)
    tell(
        "fold",
        sums=torch.equal(*[each.view(torch.int32) for each in parts]),
        means=torch.equal(*[each.view(torch.int32) for each in means]),
        norms=norms[0] == norms[1],
    )
    one, other = (torch.randn(size, generator=generator) * 10.0 ** torch.randint(-40, 30, (size,)) for _ in range(2))
    tell("fold", float32_sums=torch.equal(one + other, (one.cuda() + other.cuda()).cpu()))


def sums() -> None:
    """What sums, their ledger and updates cost for a block of the 6.7B model."""
    import torch
    from profiles import gpt3

    from holdfast.optim.accumulate import Layout
    from holdfast.optim.factory import make_optimizer
    from holdfast.optim.shadow import ShadowedLayer

    with torch.device("cuda"):
        module = gpt3.layers(1, 4096)[1]
    module = module.cuda()
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    layout = Layout(layers=(0,), shapes=tuple(tuple(p.shape) for p in parameters), num_microbatches=64, record_width=0)
    gradients = [torch.randn_like(p) * 1e-3 for p in parameters]
    found: dict[str, Any] = {"parameters": total, "floor_add_ms": round(total * 12 / 4.2e12 * 1e3, 3)}
    found |= _sums_of(layout, gradients)
    layer = ShadowedLayer(0, module, make_optimizer("adamw", lr=1e-4))
    found["update_ms"] = timed(partial(layer.update, dict(zip(layer.trainable, gradients, strict=True)), 1.0), rounds=5)
    for name in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **{name: True})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        found[f"{name}_adamw_ms"] = timed(optimizer.step, rounds=5)
    tell("sums", **found)


def _sums_of(layout: Any, gradients: Sequence[Any]) -> dict[str, float]:
    import torch

    from holdfast.core.summing import add_up
    from holdfast.optim.accumulate import Accumulator

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    accumulator = Accumulator(layout, torch.device("cuda"))
    numbers = iter(range(64))
    found = {"add_ms": timed(lambda: accumulator.add(0, next(numbers), gradients), rounds=8)}
    for each in numbers:
        accumulator.add(0, each, gradients)
    found["message_ms"] = timed(accumulator.message, rounds=3)
    found["decode_ms"] = timed(lambda: accumulator.decode(add_up([accumulator.message()])), rounds=5)
    found["peak_bytes_per_parameter"] = torch.cuda.max_memory_allocated() / layout.length
    return {name: round(each, 3) for name, each in found.items()}


_CHILD = """
import os, sys, time, torch
began = time.monotonic()
a = torch.randn(2048, 2048, device="cuda"); torch.cuda.synchronize()
print("ready", round(time.monotonic() - began, 3), flush=True)
kind = sys.argv[1]
if kind == "hold":
    x = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    print("holds", flush=True)
    torch.cuda._sleep(int(60 * 1.7e9)); torch.cuda.synchronize()
elif kind == "memory":
    try:
        y = torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("caught", type(error).__mro__[1].__name__, flush=True)
    print("goes on", float((a @ a).sum().isfinite()), flush=True)
elif kind == "sick":
    try:
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]; torch.cuda.synchronize()
    except Exception as error:
        print("raised", type(error).__name__, [c.__name__ for c in type(error).__mro__], flush=True)
    try:
        (a @ a).sum().item(); print("goes on", flush=True)
    except Exception as error:
        print("again", type(error).__name__, flush=True)
else:
    import statistics
    worst, times, until = 0.0, [], time.monotonic() + float(kind)
    while time.monotonic() < until:
        t = time.monotonic(); (a @ a).sum().item(); times.append(time.monotonic() - t)
    print("steps", len(times), round(1e3 * statistics.median(times), 3), round(1e3 * max(times), 1), flush=True)
os._exit(0)
"""


def kill() -> None:
    """What becomes of a GPU's other users when a process is killed, or stopped, in the middle of a kernel."""
    import torch

    def child(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _CHILD, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    for kind in ("memory", "sick"):
        process = child(kind)
        tell("kill", **{kind: [line.strip() for line in process.stdout or ()]}, status=process.wait())
    alone = child("3")
    tell("kill", alone=[line.strip() for line in alone.stdout or ()])
    torch.zeros(1, device="cuda")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        victim = child("hold")
        ready, holds = said(victim), said(victim)
        worker = child("6")
        said(worker)
        time.sleep(1.5)  # so that steps are made before it and behind it
        before, _ = torch.cuda.mem_get_info()
        began = time.monotonic()
        victim.send_signal(number)
        if number is signal.SIGSTOP:
            time.sleep(2)
            tell("kill", signal=number.name, other=said(worker), ready=ready, holds=holds)
            victim.kill()
        victim.wait()
        gone_s = time.monotonic() - began
        while torch.cuda.mem_get_info()[0] < before + (7 << 30):
            time.sleep(0.002)
            if time.monotonic() - began > 20:
                break
        back_s = time.monotonic() - began
        if number is signal.SIGKILL:
            tell("kill", signal=number.name, other=said(worker), gone_s=round(gone_s, 3), memory_s=round(back_s, 3))
        worker.kill()
        worker.wait()


def profile() -> None:
    """What the layers of the GPT-3 models cost; written to $OUT, whole, where that is set."""
    from profiles import estimate, measure

    from holdfast.config.profiles import save_profile

    for shape in estimate.SHAPES:
        name, began = shape.name, time.monotonic()
        found = measure.measured(shape, iterations=10)
        folder = os.environ.get("OUT")
        if folder:
            save_profile(found, Path(folder) / f"{name}.json")
        rows = {each.name: each for each in (found.layers[0], found.layers[1], found.layers[-1])}
        for layer, row in rows.items():
            numbers = {key: round(1e3 * getattr(row, key), 4) for key in _TIMES}
            spread = {key: round(1e3 * value, 4) for key, value in row.spread.items()}
            held = [row.held_after_forward_bytes, row.held_after_input_bytes, row.boundary_bytes]
            tell("profile", model=name, layer=layer, ms=numbers, spread_ms=spread, held=held)
        tell("profile", model=name, took_s=round(time.monotonic() - began, 1))


_TIMES = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s", "optimizer_s")
JOB: dict[str, Any] = {
    "name": "gpu",
    "model": {"kind": "gpt", "layers": 6, "width": 256, "heads": 4, "context": 128, "dropout": 0.1},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 4, "microbatch_size": 8},
    "optimizer": {"kind": "adamw", "lr": 1.0e-3},
    "train": {"steps": 8, "seed": 7, "device": os.environ.get("DEVICE", "cuda:0")},
    "control": {"hang_s": 15},
}


def train() -> None:
    """Whether runs on one GPU that all workers share end in the same bits, with losses and without."""
    hashes = [_ran(JOB, overrides, faults, "train") for overrides, faults in RUNS]
    tell("train", equal=[each == hashes[0] for each in hashes])


RUNS: Sequence[tuple[list[str], list[str]]] = (
    ([], []),
    ([], []),
    ([], ["kill:1.1@3:backward"]),
    ([], ["kill:0.0@4:update"]),
    (["train.technique=decoupled"], ["kill:1.0@3:gradients:50"]),
    (["resilience.commit=undo"], []),
    (["checkpoint.every=2"], ["kill:0.1@3:backward", "join:0.1@6"]),
)


def loops() -> None:
    """Whether loops of a script, on one GPU that all workers share, end in the same bits, with a loss and without."""
    for variant in ("norm", "scaled", "own"):
        tree = {
            "name": f"loop-{variant}",
            "model": {"kind": "script", "path": str(SCRIPT), "arguments": ["--variant", variant]},
            "data": {"kind": "script"},
            "grid": {"pipelines": 4, "stages": 1, "microbatches": 1},
            "train": {"steps": 1, "device": os.environ.get("DEVICE", "cuda:0")},
            "control": {"hang_s": 15},
        }
        hashes = [_ran(tree, [], faults, "loops") for faults in ([], ["kill:1.0@3:backward"])]
        tell("loops", variant=variant, equal=hashes[0] is not None and hashes[0] == hashes[1])


SCRIPT = ROOT / "tests" / "dist" / "loop_script.py"

LARGE: dict[str, Any] = {
    "name": "gpt-125m",
    "model": {
        "kind": "python",
        "target": f"{ROOT / 'profiles' / 'gpt3.py'}:layers",
        "loss": f"{ROOT / 'profiles' / 'gpt3.py'}:loss",
        "arguments": {"blocks": 12, "width": 768, "context": 1024},
    },
    "data": {"kind": "python", "target": f"{ROOT / 'profiles' / 'gpt3.py'}:Tokens", "arguments": {"context": 1024}},
    "grid": {"pipelines": 1, "stages": 1, "microbatches": 8, "microbatch_size": 4},
    "optimizer": {"kind": "adamw", "lr": 3.0e-4},
    "train": {"steps": 12, "seed": 7, "device": os.environ.get("DEVICE", "cuda:0")},
    "control": {"hang_s": 30},
}
TWO_BY_TWO = ["grid.pipelines=2", "grid.stages=2", "grid.microbatches=4", "train.steps=6"]


def step() -> None:
    """How long a step of a GPT of 125 million parameters takes: a plain loop, one worker, four on the same GPU."""
    for name in ("plain", "settled"):
        subprocess.run(
            [sys.executable, "-m", "tools.gpu_check", "--inner", f"step-{name}"],
            cwd=ROOT,
            check=False,
            env=_environment(),
        )
    for overrides in ([], ["train.numerics=fast"]):
        _ran(LARGE, overrides, [], "step")
    healthy = _ran(LARGE, TWO_BY_TWO, [], "step")
    killed = _ran(LARGE, TWO_BY_TWO, ["kill:1.1@3:backward"], "step")
    tell("step", equal=healthy == killed and healthy is not None)


def _step(setting: str) -> None:
    import torch
    from profiles import gpt3

    from holdfast.devices.named import opened

    opened("cuda", exact=setting == "settled", alone=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(*gpt3.layers(12, 768, context=1024)).cuda()
    data = gpt3.Tokens(context=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times = []
    for turn in range(15):
        torch.cuda.synchronize()
        began = time.monotonic()
        for number in range(8):
            pairs = [data[(turn * 32 + number * 4 + each) % 64] for each in range(4)]
            inputs, targets = (torch.stack(each).cuda() for each in zip(*pairs, strict=True))
            (gpt3.loss(model(inputs), targets) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if turn >= 5:
            times.append(time.monotonic() - began)
    peak = torch.cuda.max_memory_allocated()
    tell("step", plain=setting, median_ms=round(1e3 * statistics.median(times), 2), peak_bytes=peak)


def _ran(tree: dict[str, Any], overrides: Sequence[str], faults: Sequence[str], part: str) -> str | None:
    """Trains, tells of it, and returns the hash of the weights; None if it failed."""
    from holdfast import Fault, parse_job
    from holdfast import train as run

    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            job, struck = parse_job(tree, overrides), [Fault.parse(each) for each in faults]
            summary = run(job, run_dir=Path(folder) / "run", faults=struck)
        except Exception as error:  # noqa: BLE001 - told, and the next is tried
            text = f"{type(error).__name__}: {error}"[:1500]
            tell(part, overrides=overrides, faults=faults, error=text)
            return None
    commits = [at for _, at in summary.report.commits]
    steps = [after - before for before, after in pairwise(commits)]
    tell(
        part,
        overrides=overrides,
        faults=faults,
        sha=(summary.weights_sha256 or "")[:12],
        loss=summary.final_loss,
        generations=summary.generations,
        unfired=summary.unfired,
        steps_ms=[round(1e3 * each, 1) for each in steps],
        median_ms=round(1e3 * statistics.median(steps), 2),
        recovered_ms=[
            [round(1e3 * (getattr(each, key) or 0), 1) for key in ("detected_s", "agreed_s", "rebuilt_s", "resumed_s")]
            for each in summary.report.failures
        ],
        took_s=round(time.monotonic() - began, 1),
    )
    return summary.weights_sha256


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs parts; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inner is not None:
        part, _, setting = chosen.inner.partition("-")
        if setting:
            {"bits": _bits, "step": _step}[part](setting)
        else:
            globals()[part]()
        return 0
    failed = False
    for part in chosen.parts or PARTS:
        began = time.monotonic()
        command = [sys.executable, "-m", "tools.gpu_check", "--inner", part]
        try:
            status = subprocess.run(command, cwd=ROOT, env=_environment(), check=False, timeout=PARTS[part]).returncode
        except subprocess.TimeoutExpired:
            status = -1
        failed |= status != 0
        tell(part, status=status, took_s=round(time.monotonic() - began, 1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
