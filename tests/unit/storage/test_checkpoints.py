"""Checkpoints as they should be, and as an attacker or a broken disk leaves them."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import tempfile
import threading
import urllib.request
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.evaluation import Best
from holdfast.errors import ConfigError, CorruptBlob, MissingBlob, StorageError
from holdfast.storage.blobs import ANY_SIZE, LocalStore, open_store
from holdfast.storage.checkpoints import Checkpoints, Facts, Shard

LAYERS = 3
FACTS = Facts(
    job="job",
    holdfast="0",
    seed=7,
    layers=LAYERS,
    microbatches=6,
    microbatch_size=2,
    optimizer="adamw",
    model="m",
    data="d",
)


def content(step: int, layer: int) -> bytes:
    return f"step {step} layer {layer}".encode() * 10


def make(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        shards = [checkpoints.write_shard(step, layer, content(step, layer)) for layer in range(LAYERS)]
        checkpoints.commit(step, shards, FACTS)
        checkpoints.tidy(step)


def shard_path(folder: Path, step: int, layer: int) -> Path:
    (path,) = (folder / f"step-{step:08d}").glob(f"layer-{layer:04d}-*")
    return path


def manifest_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}" / "manifest.json"


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of the steps 4, 8 and 12."""
    make(Checkpoints(LocalStore(tmp_path), keep=3), 4, 8, 12)
    return tmp_path


def test_what_is_committed_is_read(url):
    make(Checkpoints(open_store(url), keep=2), 4, 8)
    checkpoints = Checkpoints(open_store(url))
    assert checkpoints.steps() == (4, 8)
    sound = checkpoints.newest_sound()
    assert sound.rejected == ()
    assert sound.manifest.step == 8
    assert sound.manifest.facts == FACTS
    assert [checkpoints.read_shard(sound.manifest, layer) for layer in range(LAYERS)] == [
        content(8, 0),
        content(8, 1),
        content(8, 2),
    ]
    assert checkpoints.newest_sound(4).manifest.step == 4


def test_the_last_k_are_kept(url):
    checkpoints = Checkpoints(open_store(url), keep=2)
    make(checkpoints, 2, 4, 6, 8)
    assert checkpoints.steps() == (6, 8)
    assert len(open_store(url).list()) == 2 * (LAYERS + 1), "nothing of the others is left"


def test_keep_must_be_one_at_least(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: expected at least 1, got 0"):
        Checkpoints(LocalStore(tmp_path), keep=0)


def test_an_unfinished_checkpoint_is_ignored_and_goes_when_superseded(url):
    store = open_store(url)
    checkpoints = Checkpoints(store, keep=3)
    make(checkpoints, 2)
    checkpoints.write_shard(4, 0, content(4, 0))
    store.put("step-00000004/layer-0001.tmp-abc", b"torn")
    assert checkpoints.steps() == (2,)
    assert checkpoints.newest_sound().manifest.step == 2
    with pytest.raises(MissingBlob):
        checkpoints.newest_sound(4)
    make(checkpoints, 6)
    assert checkpoints.steps() == (2, 6)
    assert not [name for name in store.list() if name.startswith("step-00000004")]


def test_what_is_being_written_for_a_later_step_is_left_alone(tmp_path):
    checkpoints = Checkpoints(LocalStore(tmp_path), keep=1)
    checkpoints.write_shard(8, 0, content(8, 0))
    make(checkpoints, 4)
    assert shard_path(tmp_path, 8, 0).exists()


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    store = LocalStore(tmp_path)
    store.put("notes.txt", b"mine")
    store.put("step-x/manifest.json", b"{}")
    checkpoints = Checkpoints(store, keep=1)
    make(checkpoints, 4, 8)
    assert checkpoints.steps() == (8,)
    assert store.exists("notes.txt")
    assert store.exists("step-x/manifest.json")


def test_writing_again_changes_nothing(folder):
    def files():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = files()
    make(Checkpoints(LocalStore(folder), keep=3), 12)
    assert files() == before


def test_other_bits_of_the_same_step_never_take_the_place_of_the_first(folder):
    checkpoints = Checkpoints(LocalStore(folder), keep=3)
    checkpoints.write_shard(12, 1, b"other bits")
    assert checkpoints.read_shard(checkpoints.read(12), 1) == content(12, 1)


def test_a_commit_without_all_layers_is_refused(tmp_path):
    checkpoints = Checkpoints(LocalStore(tmp_path))
    shards = [checkpoints.write_shard(4, layer, b"x") for layer in (0, 2)]
    with pytest.raises(StorageError, match=r"layers \[0, 2\], expected 0 to 2"):
        checkpoints.commit(4, shards, FACTS)
    assert checkpoints.steps() == ()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def foreign(path: Path) -> None:
    """The right shard of the wrong step."""
    path.write_bytes(content(4, 1))


@pytest.mark.parametrize("damage", [flip, truncate, empty, lengthen, foreign, Path.unlink])
def test_a_damaged_shard_is_noticed_and_the_one_before_is_used(folder, damage):
    damage(shard_path(folder, 12, 1))
    checkpoints = Checkpoints(LocalStore(folder))
    sound = checkpoints.newest_sound()
    assert sound.manifest.step == 8
    (rejected,) = sound.rejected
    assert rejected.step == 12
    assert "layer-0001" in rejected.reason
    with pytest.raises((CorruptBlob, MissingBlob), match="layer-0001"):
        checkpoints.newest_sound(12)
    with pytest.raises((CorruptBlob, MissingBlob), match="layer-0001"):
        checkpoints.read_shard(checkpoints.read(12), 1)


@pytest.mark.parametrize("damage", [truncate, empty, lengthen, foreign])
def test_a_damaged_manifest_is_noticed_and_the_one_before_is_used(folder, damage):
    damage(manifest_path(folder, 12))
    sound = Checkpoints(LocalStore(folder)).newest_sound()
    assert sound.manifest.step == 8
    assert [each.step for each in sound.rejected] == [12]
    with pytest.raises(CorruptBlob, match=r"manifest\.json is corrupt"):
        Checkpoints(LocalStore(folder)).newest_sound(12)


class Fails(LocalStore):
    """An endpoint that cannot give some blobs."""

    def __init__(self, folder: Path, part: str) -> None:
        super().__init__(folder)
        self._part = part

    def get(self, name: str, sizes: range = ANY_SIZE) -> bytes:
        if self._part in name:
            raise StorageError(f"{name}: cannot be read: input/output error")
        return super().get(name, sizes)


@pytest.mark.parametrize("part", ["step-00000012/manifest.json", "step-00000012/layer-0001"])
def test_whatever_is_wrong_with_one_blob_the_checkpoint_before_is_used(folder, part):
    sound = Checkpoints(Fails(folder, part)).newest_sound()
    assert sound.manifest.step == 8
    (rejected,) = sound.rejected
    assert rejected.step == 12
    assert rejected.reason.endswith("cannot be read: input/output error")
    with pytest.raises(StorageError, match="input/output error"):
        Checkpoints(Fails(folder, part)).newest_sound(12)


def becomes(path: Path, make) -> None:
    """Something else stands where a file was."""
    path.unlink()
    make(path)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path)])
@pytest.mark.parametrize("place", [manifest_path, lambda folder, step: shard_path(folder, step, 1)])
def test_what_is_no_file_at_all_is_rejected(folder, place, make):
    becomes(place(folder, 12), make)
    assert Checkpoints(LocalStore(folder)).newest_sound().manifest.step == 8


def test_a_folder_that_may_not_be_read_is_told():
    """Only somebody who is not root can be kept out; another user looks."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        make(Checkpoints(LocalStore(top / "a"), keep=3), 4, 8)
        for path in (top, *top.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (top / "a" / "step-00000008").chmod(0)
        os.seteuid(65534)
        try:
            checkpoints = Checkpoints(LocalStore(top / "a"))
            assert checkpoints.steps() == (4, 8)
            sound = checkpoints.newest_sound()
        finally:
            os.seteuid(0)
        assert sound.manifest.step == 4
        assert [each.step for each in sound.rejected] == [8]
        assert "Permission denied" in sound.rejected[0].reason


def test_an_endpoint_that_fails_for_one_object(bucket, s3_endpoint, monkeypatch):
    make(Checkpoints(open_store(bucket), keep=2), 4, 8)
    with failing_endpoint(s3_endpoint, "step-00000008/layer-0002") as (address, failed):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        sound = Checkpoints(open_store(bucket)).newest_sound()
    assert failed, "it was asked for"
    assert sound.manifest.step == 4
    (rejected,) = sound.rejected
    assert rejected.step == 8
    assert "cannot be read" in rejected.reason


@contextlib.contextmanager
def failing_endpoint(behind: str, part: str):
    """An S3 server that fails for whatever has ``part`` in its name; the paths that it failed for."""
    failed = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if part in self.path:
                failed.append(self.path)
                self.send_response(500)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            request = urllib.request.Request(behind + self.path, headers=dict(self.headers), method=self.command)
            with urllib.request.urlopen(request, timeout=30) as answer:
                body = answer.read()
                self.send_response(answer.status)
                for name in ("Content-Length", "Content-Type", "ETag", "Last-Modified"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", failed
    finally:
        server.shutdown()
        server.server_close()


def rewrite(folder: Path, change) -> None:
    path = manifest_path(folder, 12)
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(format="holdfast-checkpoint-2"),
        lambda tree: tree.update(step=8),
        lambda tree: tree.update(step=-1),
        lambda tree: tree.update(extra=1),
        lambda tree: tree.pop("facts"),
        lambda tree: tree["facts"].update(layers=4),
        lambda tree: tree["facts"].update(layers=10**12),
        lambda tree: tree["facts"].update(extra=1),
        lambda tree: tree["shards"].pop(),
        lambda tree: tree["shards"].append(tree["shards"][0]),
        lambda tree: tree["shards"].reverse(),
        lambda tree: tree["shards"][1].update(layer=0),
        lambda tree: tree["shards"][1].update(size=-1),
        lambda tree: tree["shards"][1].update(sha256="0" * 63),
        lambda tree: tree["shards"][1].update(sha256="0" * 64),
        lambda tree: tree["shards"][1].update(size=1),
        lambda tree: tree["shards"][1].update(extra=1),
        lambda tree: tree.update(shards=None),
    ],
)
def test_a_manifest_that_was_tampered_with_is_rejected(folder, change):
    rewrite(folder, change)
    sound = Checkpoints(LocalStore(folder)).newest_sound()
    assert sound.manifest.step == 8
    assert [each.step for each in sound.rejected] == [12]


@pytest.mark.parametrize(
    "name",
    [
        "../step-00000008/layer-0001-0123456789abcdef.safetensors",
        "/etc/passwd",
        "layer-0001-0123456789abcdef.safetensors/../../secret",
        "..",
        "",
        "layer-0001-0123456789abcdef.safetensors\n",
        "layer-0001-0123456789abcdef.pt",
    ],
)
def test_names_that_lead_elsewhere_are_rejected(folder, name):
    """Even where the digest is that of the file it leads to."""
    (folder.parent / "secret").write_bytes(b"secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    rewrite(folder, lambda tree: tree["shards"][1].update(name=name, sha256=digest, size=6))
    sound = Checkpoints(LocalStore(folder)).newest_sound()
    assert [each.step for each in sound.rejected] == [12]
    assert sound.manifest.step == 8


def test_deep_nesting_is_rejected(folder):
    manifest_path(folder, 12).write_bytes(b'{"facts":' * 100_000)
    assert Checkpoints(LocalStore(folder)).newest_sound().manifest.step == 8


def test_no_sound_checkpoint_at_all(folder):
    for step in (4, 8, 12):
        flip(shard_path(folder, step, 0))
    with pytest.raises(StorageError, match="holds no sound checkpoint") as caught:
        Checkpoints(LocalStore(folder)).newest_sound()
    assert all(f"step {step}: " in str(caught.value) for step in (4, 8, 12))


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(MissingBlob, match="holds no checkpoint"):
        Checkpoints(LocalStore(tmp_path)).newest_sound()
    with pytest.raises(MissingBlob):
        Checkpoints(LocalStore(tmp_path)).newest_sound(4)


def test_a_failed_manifest_deletes_nothing(tmp_path):
    checkpoints = Checkpoints(LocalStore(tmp_path), keep=1)
    make(checkpoints, 4)
    shards = [checkpoints.write_shard(8, layer, content(8, layer)) for layer in range(LAYERS)]
    full = Checkpoints(LocalStore(tmp_path, reserved_bytes=1 << 60), keep=1)
    with pytest.raises(StorageError):
        full.commit(8, shards, FACTS)
    assert checkpoints.newest_sound().manifest.step == 4


def test_a_deletion_that_is_cut_short_leaves_only_whole_checkpoints(folder):
    """After each single deletion, everything that still looks like a checkpoint is one."""

    class Dying(LocalStore):
        left = 0

        def delete(self, name):
            if self.left == 0:
                raise StorageError("cut short")
            self.left -= 1
            super().delete(name)

    for deletions in range(2 * (LAYERS + 1) - 1):
        store = Dying(folder, reserved_bytes=0)
        store.left = 1
        with pytest.raises(StorageError, match="cut short"):
            Checkpoints(store, keep=1).tidy(12)
        checkpoints = Checkpoints(LocalStore(folder))
        assert [checkpoints.newest_sound(step).manifest.step for step in checkpoints.steps()], deletions
    Checkpoints(LocalStore(folder), keep=1).tidy(12)
    assert len(LocalStore(folder).list()) == LAYERS + 1


def test_checkpoints_that_are_spared_stay_and_the_others_go(tmp_path):
    store = LocalStore(tmp_path, reserved_bytes=0)
    for step in (3, 6, 9, 12):
        checkpoints = Checkpoints(store, keep=1)
        shards = [checkpoints.write_shard(step, layer, bytes([step, layer])) for layer in range(LAYERS)]
        checkpoints.commit(step, shards, FACTS, Best(step=6, score=0.5) if step > 6 else None)
        checkpoints.tidy(step, {6, 300})
    assert checkpoints.steps() == (6, 12)
    assert checkpoints.read(12).best == Best(step=6, score=0.5)
    assert checkpoints.read(6).best is None
    checkpoints.tidy(12)
    assert checkpoints.steps() == (12,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_flipped_byte_of_the_newest_checkpoint_is_survived(tmp_path_factory, data):
    """What comes back is what was written: of this step, or of the one before."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make(Checkpoints(LocalStore(folder), keep=2), 4, 8)
    path = data.draw(st.sampled_from(sorted((folder / "step-00000008").iterdir())))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    checkpoints = Checkpoints(LocalStore(folder))
    sound = checkpoints.newest_sound()
    step = sound.manifest.step
    assert step in (4, 8)
    assert [each.step for each in sound.rejected] == ([8] if step == 4 else [])
    for layer in range(LAYERS):
        assert checkpoints.read_shard(sound.manifest, layer) == content(step, layer)
    if path.name != "manifest.json":
        assert step == 4


@given(st.binary(max_size=200))
def test_any_bytes_as_manifest_are_rejected(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("checkpoints")
    LocalStore(folder).put("step-00000004/manifest.json", data)
    with pytest.raises(CorruptBlob):
        Checkpoints(LocalStore(folder)).read(4)


def test_a_shard_says_what_it_is(tmp_path):
    shard = Checkpoints(LocalStore(tmp_path)).write_shard(4, 11, b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    assert shard == Shard(layer=11, name=f"layer-0011-{digest[:16]}.safetensors", sha256=digest, size=3)
    assert msgspec.convert(msgspec.to_builtins(shard), Shard) == shard
