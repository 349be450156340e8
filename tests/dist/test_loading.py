"""Data that are loaded ahead, in whichever order: the same bits as in one process, and every sample once per epoch."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from tests.commands import holdfast
from tests.dist.test_loops import has_come, while_outside
from tests.plain import plain

from holdfast import Fault, parse_job, train
from holdfast.telemetry.events import FaultInjected, read_events

pytestmark = pytest.mark.dist

SCRIPT, WEBDATASET = (Path(__file__).with_name(f"{name}_script.py") for name in ("loading", "webdataset"))
SAMPLES, STEPS, EPOCH = 36, 36, 3
ORDERS = ["shuffled", "batches", "sampler", "grouped", "stream"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the weights are after a run in one process, without loader processes; each is made once."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def run(order):
        if order not in known:
            plain(SCRIPT, "--data", order, "--digest", folder / order)
            known[order] = (folder / order).read_text()
        return known[order]

    return run


def run(runs, folder, order, *faults, run_dir=None, more=(), settings=None, **options):
    """Runs three workers, each with two loader processes; returns the summary and what the weights are."""
    arguments = ["--data", order, "--loaders", "2", "--told", folder, "--digest", folder / "digest", *more]
    job = parse_job(
        {
            "name": "loading",
            "model": {"kind": "script", "path": str(SCRIPT), "arguments": list(map(str, arguments))},
            "data": {"kind": "script"},
            "grid": {"pipelines": 3, "stages": 1, "microbatches": 1},
            "train": {"steps": 1},
            "control": {"hang_s": 15},
            **(settings or {}),
        }
    )
    struck = [Fault.parse(text) for text in faults]
    summary = train(job, run_dir=run_dir or runs.folder(), faults=struck, **options)
    assert summary.unfired == ()
    return summary, (folder / "digest").read_text()


def samples(folder):
    """The samples of each item; whoever ran it again had the same."""
    found = {}
    for path in folder.glob("*.jsonl"):
        for step, item, indices, *_ in map(json.loads, path.read_text().splitlines()):
            assert found.setdefault((step, item), indices) == indices
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_losses_and_joins_change_no_bit_and_no_sample(runs, tmp_path, alone, order):
    go, run_dir = tmp_path / "go", runs.folder()

    with while_outside(run_dir, go, until=partial(has_come, workers=3)):
        faults, more = ("kill:1.0@2:backward", "join:1.0@3"), ("--outside", go)
        summary, digest = run(runs, tmp_path, order, *faults, run_dir=run_dir, more=more)
    assert [failure.worker for failure in summary.report.failures] == ["1.0"]
    assert len(list(tmp_path.glob("*.jsonl"))) == 5, "the probe, three workers, and the one that came"
    assert digest == alone(order)
    found = samples(tmp_path)
    assert set(found) == {(step, item) for step in range(STEPS) for item in range(6)}
    for first in range(0, STEPS, EPOCH):
        epoch = [each for (step, _), indices in found.items() if first <= step < first + EPOCH for each in indices]
        assert Counter(epoch) == Counter(range(SAMPLES))


def test_shards_of_webdataset_are_read_on_after_a_loss_and_from_a_checkpoint(tmp_path):
    """100 samples in four shards, so that the runs see some epochs; the checkpoint is in the midst of one."""
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset: pip install webdataset")
    shards, out = tmp_path / "shard-{0..3}.tar", tmp_path / "model.pt"
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"shard-{shard}.tar")) as file:
            for number in range(25 * shard, 25 * shard + 25):
                file.write({"__key__": f"{number:04}", "cls": str(number)})
    plain(WEBDATASET, shards, out)
    weights = out.read_bytes()

    def trained(name, *options):
        where = ("--workers", 2, "--quiet", "--run-dir", tmp_path / name, "--set", "checkpoint.every=7")
        ended = holdfast("run", *where, "--set", "checkpoint.keep=9", *options, WEBDATASET, shards, out)
        assert ended.returncode == 0, ended.stderr
        assert out.read_bytes() == weights
        events = [event for _, event in read_events(tmp_path / name / "events.jsonl")]
        return [str(event.spec) for event in events if isinstance(event, FaultInjected)]

    fault = "kill:1.0@6:backward"
    assert trained("struck", "--fault", fault) == [fault]
    assert trained("resumed", "--resume", f"{tmp_path / 'struck'}@35") == []


@pytest.mark.parametrize("order", ["shuffled", "stream"])
def test_a_killed_loader_process_loses_no_worker(runs, tmp_path, alone, order):
    summary, digest = run(runs, tmp_path, order, more=("--strike", "1.0"))
    assert len(list(tmp_path.glob("*.struck"))) >= 2
    assert summary.report.failures == ()
    assert digest == alone(order)


def reads(folder):
    """Samples that each process had read of the stream when it was given its first item, by the worker's name."""
    found = {}
    for path in folder.glob("*.jsonl"):
        step, item, _, read = json.loads(path.read_text().splitlines()[0])
        found.setdefault(path.name.split("-")[0], []).append((step, item, read))
    return found


CHECKED = 16
"""Samples that each process reads before the first step, to see whether the stream can be read again."""
LOST = 2 * (32 + 5 * 6) + 3
"""Samples of items from a mark to the next, of the steps in which a joiner is given the state, and behind a mark."""


@pytest.mark.parametrize("loaders", ["0", "2"])
def test_whoever_comes_or_resumes_reads_a_stream_on_from_a_mark(runs, tmp_path, alone, loaders):
    go, first = tmp_path / "go", runs.folder()
    settings = {"checkpoint": {"every": 20, "synchronous": True}}
    more = ("--outside", go, "--behind", "15", "--loaders", loaders)

    with while_outside(first, go, until=partial(has_come, workers=3)):
        faults = ("kill:1.0@10:backward", "join:1.0@11")
        _, digest = run(runs, tmp_path, "marked", *faults, run_dir=first, more=more, settings=settings)
    assert digest == alone("marked")
    step, _, read = max(reads(tmp_path)["1.0"])
    assert step > 12
    assert read <= CHECKED + LOST < 2 * 6 * step
    assert samples(tmp_path) == {
        (step, item): [12 * step + 2 * item, 12 * step + 2 * item + 1] for step in range(STEPS) for item in range(6)
    }

    again = tmp_path / "again"
    again.mkdir()
    options = {"resume": f"{first}@20", "accept": ["model.arguments"]}
    summary, digest = run(runs, again, "marked", more=("--loaders", loaders), settings=settings, **options)
    assert (summary.resumed_from, digest) == (20, alone("marked"))
    begun = [each for told in reads(again).values() for each in told if each[0] == 20]
    assert len(begun) == 3
    assert all(read <= CHECKED + LOST for _, _, read in begun)
