"""A script that starts processes in every way there is, light at its top: what it spawns runs that once more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def seen(_: int) -> str:
    """What a process that was forked has of its worker's."""
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    ours = [target for target in targets if target.endswith("events.jsonl")]
    handlers = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)]
    return (
        f"{internet_sockets()} sockets, {len(ours)} logs, handlers {handlers}, {sorted(signal.pthread_sigmask(0, ()))}"
    )


def internet_sockets() -> int:
    import psutil

    return len(psutil.Process().net_connections("inet"))


def lives(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(3600)


def look(folder: Path) -> None:
    """Tells what is seen here and in a pool's processes, and how often the script has begun."""
    import torch

    chosen = multiprocessing.get_start_method(allow_none=True)
    with multiprocessing.Pool(2) as pool:
        told = set(pool.map(seen, range(4), chunksize=1))
    loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=2, generator=torch.Generator())
    told.add(f"{sum(int(x) for x in loader)} loaded, {chosen} chosen, {internet_sockets() > 0} sockets here")
    (folder / "told").write_text("\n".join(sorted(told)))


def load(folder: Path) -> None:
    """Loads for as long as the job goes on, in processes that are told."""
    import torch

    (folder / "loads").touch()
    loader = torch.utils.data.DataLoader(range(1000), num_workers=1, collate_fn=slowly, generator=torch.Generator())
    next(iter(loader))


def slowly(batch: list[int]) -> int:
    time.sleep(0.01)
    return os.getpid()


def start(folder: Path) -> None:
    """Starts what would live for an hour: by fork, spawn, fork server and command, and one in a session of its own."""
    for method in ("fork", "spawn", "forkserver"):
        multiprocessing.get_context(method).Process(target=lives, args=(str(folder),)).start()
    command = [sys.executable, "-c", f"import {Path(__file__).stem} as me; me.lives({str(folder)!r})"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for apart in (False, True):
        subprocess.Popen(command, env=environment, start_new_session=apart)
    while len(list(folder.glob("*.pid"))) < 5:
        time.sleep(0.01)


def main() -> None:
    import torch

    import holdfast

    folder, what = Path(sys.argv[1]), sys.argv[2]
    hf = holdfast.session()
    model = torch.nn.Linear(4, 1)
    model, _ = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    for step in hf.steps(data, microbatches=4, size=2, steps=1000 if what == "load" else 4):
        for (x,) in step:
            step.backward(model(x).square().mean())
        if what == "load":
            load(folder)
        elif what == "say":
            print("a step is over", flush=True)
        elif step.number == 1 and hf.worker == "1.0":
            {"look": look, "start": start}[what](folder)
            if what == "start":
                os.kill(os.getpid(), signal.SIGKILL)
        while what == "start" and step.number == 3 and not (folder / "go").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
