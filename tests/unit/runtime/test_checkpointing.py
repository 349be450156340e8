"""The worker's writer and reader of checkpoints, over a real folder."""

import hashlib
import os
import pickle
import queue
import threading
from pathlib import Path

import numpy
import pytest
import torch
from tests.waiting import LIMIT_S

from holdfast.config.load import parse_job
from holdfast.control.messages import ShardFailed, ShardWritten
from holdfast.core.faults import Point
from holdfast.core.ids import WorkerId
from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.data import digits
from holdfast.errors import ConfigError, CorruptBlob, InternalError, MissingBlob
from holdfast.optim.digest import layer_sha256
from holdfast.runtime.checkpointing import MAX_PENDING, CheckpointWriter, load_states
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.probing import fingerprint_data, fingerprint_model, probe
from holdfast.settings.planning import healthy_plan
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints, Facts

W = WorkerId(0, 1)
JOB = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 1, "stages": 1, "microbatches": 2},
    "train": {"steps": 3, "seed": 1},
}


class Writer:
    """A writer into a folder, and what it tells the coordinator."""

    def __init__(self, folder, reserved_bytes=0, reach=lambda point, step: None):
        self.told = queue.SimpleQueue()
        self.checkpoints = Checkpoints(LocalStore(folder, reserved_bytes=reserved_bytes))
        self.writer = CheckpointWriter(W, self.checkpoints, self.told.put, reach)

    def next(self):
        return self.told.get(timeout=LIMIT_S)

    def drain(self):
        """Everything told until all that was pinned before is written."""
        self.writer.then(lambda: self.told.put(None))
        return list(iter(self.next, None))


def constant(layer):
    return lambda: b"layer %d" % layer


def test_what_is_pinned_is_written_in_order_and_told(tmp_path):
    points = []
    writer = Writer(tmp_path, reach=lambda point, step: points.append((point, step)))
    writer.writer.pin(3, 4, (2, 1), constant)
    told = writer.drain()
    assert [(type(m), m.worker, m.generation, m.step, m.shard.layer) for m in told] == [
        (ShardWritten, W, 3, 4, 1),
        (ShardWritten, W, 3, 4, 2),
    ]
    assert [LocalStore(tmp_path).get(f"step-00000004/{m.shard.name}") for m in told] == [b"layer 1", b"layer 2"]
    assert points == [(Point.CHECKPOINT, 4)]


def test_the_copy_is_of_the_moment_of_pinning(tmp_path):
    value, held = [1], threading.Event()

    def snapshot(layer):
        pinned = list(value)
        return lambda: held.wait(LIMIT_S) and bytes(pinned)

    writer = Writer(tmp_path)
    writer.writer.pin(1, 4, (0,), snapshot)
    value[0] = 2
    held.set()
    (message,) = writer.drain()
    assert message.shard.sha256 == hashlib.sha256(b"\1").hexdigest()


def test_a_backlog_is_skipped_and_told_and_training_never_waits(tmp_path):
    release = threading.Event()
    taken = []

    def slow(layer):
        taken.append(layer)
        return lambda: release.wait(LIMIT_S) and b"x"

    writer = Writer(tmp_path)
    for step in range(1, MAX_PENDING + 2):
        writer.writer.pin(1, step, (0,), slow)
    told = writer.next()
    assert isinstance(told, ShardFailed)
    assert told.step == MAX_PENDING + 1
    assert "not written yet" in told.detail
    assert len(taken) == MAX_PENDING, "what is skipped is not even copied"
    release.set()
    assert [message.step for message in writer.drain()] == list(range(1, MAX_PENDING + 1))
    release.clear()
    for step in range(11, MAX_PENDING + 12):
        writer.writer.pin(1, step, (0,), slow)
    assert writer.next().step == MAX_PENDING + 11, "no more are kept than before, nor fewer"
    release.set()
    assert [message.step for message in writer.drain()] == list(range(11, MAX_PENDING + 11))


def test_a_full_disk_is_told_and_the_next_checkpoint_is_tried(tmp_path):
    writer = Writer(tmp_path, reserved_bytes=1 << 60)
    writer.writer.pin(1, 4, (0, 1), constant)
    writer.writer.pin(1, 8, (0, 1), constant)
    told = writer.drain()
    assert [(type(message), message.step) for message in told] == [(ShardFailed, 4), (ShardFailed, 8)]
    assert "must stay free" in told[0].detail


def test_a_state_that_cannot_be_encoded_is_told_too(tmp_path):
    def broken(layer):
        def encode():
            raise ValueError("no such type")

        return encode

    writer = Writer(tmp_path)
    writer.writer.pin(1, 4, (0,), broken)
    writer.writer.pin(1, 8, (0,), constant)
    first, second = writer.drain()
    assert first.detail == "ValueError: no such type"
    assert isinstance(second, ShardWritten)


def stage_of(job):
    torch.set_num_threads(1)
    plan = healthy_plan(job, 4)
    return build_stage(job, plan, WorkerId(0, 0), probe(job).boundaries).stage


def run_step(stage, step):
    for microbatch in range(2):
        stage.forward(step, microbatch, None)
    for microbatch in range(2):
        stage.backward(OpKind.B, step, microbatch, None)
    for reduction in stage.reductions:
        stage.accept(reduction, add_up([stage.message(reduction)]))
    stage.conclude(stage.vote())
    for layer in stage.layers:
        stage.update(layer)
        stage.swap(layer)


FACTS = Facts(
    job="j", holdfast="0", seed=1, layers=4, microbatches=2, microbatch_size=1, optimizer="adamw", model="", data=""
)


@pytest.fixture
def trained(tmp_path):
    """A stage after two steps; its checkpoint at step 1, pinned before the second was run."""
    stage = stage_of(parse_job(JOB))
    run_step(stage, 0)
    writer = Writer(tmp_path)
    writer.writer.pin(1, 1, range(4), stage.snapshot)
    digests = [stage.layer_digest(layer) for layer in range(4)]
    run_step(stage, 1)
    writer.checkpoints.commit(1, [message.shard for message in writer.drain()], FACTS)
    return stage, digests, tmp_path


def test_a_new_stage_goes_on_bitwise_from_what_was_pinned(trained):
    _, digests, folder = trained
    other = stage_of(parse_job(JOB, ["train.seed=2"]))  # other weights to begin with
    assert [other.layer_digest(layer) for layer in range(4)] != digests
    for layer, data in load_states(str(folder), 1, range(4)).items():
        other.restore(layer, data)
    assert other.layer_steps() == dict.fromkeys(range(4), 1)
    assert [other.layer_digest(layer) for layer in range(4)] == digests


def test_the_step_after_is_the_same_step(trained):
    stage, _, folder = trained
    other = stage_of(parse_job(JOB))
    for layer, data in load_states(str(folder), 1, range(4)).items():
        other.restore(layer, data)
    run_step(other, 1)
    assert [layer_sha256(other.export(i)) for i in range(4)] == [layer_sha256(stage.export(i)) for i in range(4)]


def test_only_the_layers_asked_for_are_read(trained):
    *_, folder = trained
    next(folder.rglob("layer-0003-*")).unlink()
    assert set(load_states(str(folder), 1, (0, 2))) == {0, 2}
    with pytest.raises(MissingBlob):
        load_states(str(folder), 1, (0, 3))
    with pytest.raises(MissingBlob):
        load_states(str(folder), 2, (0,))


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [pickle.dumps, lambda bomb: b"\x08" + b"\0" * 7 + pickle.dumps(bomb)])
def test_a_pickle_is_refused_and_never_loaded(tmp_path, wrap):
    """With the right digest in the manifest, as an attacker who can write there would do."""
    mark = tmp_path / "exploded"
    data = wrap(Bomb(mark))
    checkpoints = Checkpoints(LocalStore(tmp_path / "store"))
    shards = [checkpoints.write_shard(1, layer, data) for layer in range(4)]
    checkpoints.commit(1, shards, FACTS)
    assert checkpoints.newest_sound().manifest.step == 1, "the bytes are those that were written"
    stage = stage_of(parse_job(JOB))
    with pytest.raises(CorruptBlob):
        stage.restore(0, load_states(str(tmp_path / "store"), 1, (0,))[0])
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works"


def test_the_state_of_another_layer_is_refused(trained):
    stage, _, folder = trained
    states = load_states(str(folder), 1, (1, 2))
    with pytest.raises(InternalError, match="does not fit"):
        stage.restore(1, states[2])


def facts_of(*overrides):
    return probe(parse_job(JOB, overrides)).facts


def test_the_fingerprints_tell_models_and_data_apart(tmp_path):
    facts = facts_of()
    assert facts == facts_of()
    assert facts.layers == 4
    assert facts_of("model.dropout=0.2").model == facts.model
    assert facts_of("model.dropout=0.2").values == {**facts.values, "model.dropout": 0.2}
    assert facts.sources == {}
    assert facts_of("model.width=16").model != facts.model
    assert facts_of("model.layers=3").model != facts.model
    other = tmp_path / "text"
    other.write_bytes(bytes(range(256)) * 8)
    assert facts_of(f"data.path={other}").data != facts.data
    assert facts_of(f"data.path={other}").contents != facts.contents
    assert facts_of(f"data.path={other}").model == facts.model


OWN = """
from torch import nn

def build():
    return [nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 10)]

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def test_the_files_of_ones_own_functions_are_told(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    tree = {
        **JOB,
        "model": {"kind": "python", "target": f"{file}:build", "loss": f"{file}:loss"},
        "data": {"kind": "python", "target": "holdfast.data.digits:Digits"},
    }
    sources = probe(parse_job(tree)).facts.sources
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    assert sources["model.target"] == sources["model.loss"] == digest
    assert sources["data.target"] == hashlib.sha256(Path(digits.__file__).read_bytes()).hexdigest()


def test_the_model_fingerprint_knows_types_and_ties():
    job = parse_job(JOB)
    model = build_model(job)
    before = fingerprint_model(model)
    assert fingerprint_model(build_model(job)) == before
    model.layers[1].half()
    assert fingerprint_model(model) != before


def test_the_data_fingerprint_looks_at_samples():
    samples = [(torch.tensor([float(i)]), torch.tensor(i)) for i in range(9)]
    before = fingerprint_data(samples)
    assert fingerprint_data(list(samples)) == before
    assert fingerprint_data(samples[:-1]) != before
    assert fingerprint_data([*samples[:-1], samples[0]]) != before


class Augmented:
    """Samples that another generator than torch's has a part in."""

    def __init__(self, width):
        self.source, self.width = numpy.random.default_rng(), width

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.from_numpy(self.source.random(self.width)), torch.tensor(index)


def test_the_data_fingerprint_leaves_out_what_is_never_the_same():
    assert fingerprint_data(Augmented(3)) == fingerprint_data(Augmented(3))
    assert fingerprint_data(Augmented(3)) != fingerprint_data(Augmented(4))


def test_a_job_without_checkpoints_needs_no_store():
    with pytest.raises(ConfigError, match="unknown scheme"):
        load_states("ftp://x", 1, (0,))
