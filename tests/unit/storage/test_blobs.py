"""One suite over folders and S3; then what only a disk can do wrong."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError, CorruptBlob, MissingBlob, StorageError
from holdfast.storage.blobs import LocalStore, open_store

DATA = bytes(range(256)) * 64


def test_what_is_put_is_got(url):
    store = open_store(url)
    store.put("a/b.bin", DATA)
    store.put("empty", b"")
    again = open_store(url)
    assert again.get("a/b.bin") == DATA
    assert again.get("empty") == b""
    assert again.list() == ("a/b.bin", "empty")
    assert again.exists("a/b.bin")
    assert again.url == url


def test_put_replaces(url):
    store = open_store(url)
    store.put("name", DATA)
    store.put("name", b"other")
    assert store.get("name") == b"other"
    assert store.list() == ("name",)


def test_what_is_put_new_is_put_once(url):
    store = open_store(url)
    assert store.put_new("a/b", b"first")
    assert not store.put_new("a/b", b"second")
    assert not store.put_new("a/b", b"first"), "whether it is the same, its caller looks up"
    assert store.get("a/b") == b"first"
    assert store.list() == ("a/b",)
    store.delete("a/b")
    assert store.put_new("a/b", b"third")


def test_what_is_not_there(url):
    store = open_store(url)
    assert store.list() == ()
    assert not store.exists("a")
    assert not store.exists("a/b")
    with pytest.raises(MissingBlob, match="a/b does not exist"):
        store.get("a/b")
    store.delete("a/b")
    store.put("a/b", DATA)
    assert not store.exists("a"), "a folder is no blob"
    store.delete("a/b")
    store.delete("a/b")
    assert store.list() == ()
    with pytest.raises(MissingBlob):
        store.get("a/b")


def test_what_is_put_survives_a_power_cut(tmp_path, power_cuts):
    store = open_store(tmp_path / "store")
    for data in (DATA, b"", DATA * 2):
        store.put("step-1/a", data)
        assert power_cuts.spare(tmp_path / "store" / "step-1" / "a")


def test_a_blob_of_another_size_is_not_read(url):
    store = open_store(url)
    store.put("a/b", DATA)
    assert store.get("a/b", range(len(DATA), len(DATA) + 1)) == DATA
    with pytest.raises(CorruptBlob, match=f"expected 0 to 99 bytes, found {len(DATA)} bytes"):
        store.get("a/b", range(100))
    with pytest.raises(CorruptBlob, match=f"expected 7 bytes, found {len(DATA)} bytes"):
        store.get("a/b", range(7, 8))


def test_a_huge_file_is_not_read_at_all(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # no machine has the memory for it
    with pytest.raises(CorruptBlob):
        LocalStore(tmp_path).get("huge", range(1 << 20))


def test_only_regular_files_are_read_and_no_link_is_followed(tmp_path):
    """Whoever may write in the folder could lead us elsewhere, or make us wait at a pipe for ever."""
    secret, store = tmp_path / "elsewhere", LocalStore(tmp_path / "store")
    secret.mkdir()
    (secret / "key").write_bytes(DATA)
    store.put("a/b", DATA)
    folder = tmp_path / "store"
    (folder / "link").symlink_to(secret / "key")
    (folder / "through").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    with pytest.raises(StorageError, match="link: cannot be read: it is a symbolic link"):
        store.get("link")
    with pytest.raises(MissingBlob, match="is in no folder of its own"):
        store.get("through/key")
    with pytest.raises(StorageError, match="pipe: cannot be read: it is no regular file"):
        store.get("pipe")
    with pytest.raises(StorageError, match="a: cannot be read: it is no regular file"):
        store.get("a")
    assert store.list() == ("a/b", "link"), "what is listed and cannot be read is told"
    assert not store.exists("link")
    assert not store.exists("pipe")


NO_NAMES = [
    "",
    ".",
    "..",
    "../a",
    "a/../../b",
    "/etc/passwd",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    "a/..",
    "a\\b",
    "a b",
    "a\0",
]


def test_names_that_lead_out_of_the_store_are_refused(url):
    store = open_store(url)
    for name in [*NO_NAMES, "a\n", "é"]:
        for attempt in (store.get, store.exists, store.delete, lambda name: store.put(name, DATA)):
            with pytest.raises(StorageError, match="is no name of a blob"):
                attempt(name)
    assert store.list() == ()


@given(st.text(alphabet="ab./-_\\ ", min_size=1, max_size=12))
def test_no_name_reaches_outside(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("outer")
    store = LocalStore(folder / "store", reserved_bytes=0)
    with contextlib.suppress(StorageError):
        store.put(name, b"x")
        assert store.get(name) == b"x"
    assert {path.name for path in folder.iterdir()} <= {"store"}


def test_a_file_url_is_a_folder(tmp_path):
    open_store(f"file://{tmp_path}/x").put("a", DATA)
    assert (tmp_path / "x" / "a").read_bytes() == DATA


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("s3//bucket/x", "s3//bucket/x: is no URL; expected s3://bucket/x, or ./s3//bucket/x for a folder"),
        ("s3:/bucket/x", "is no URL; expected s3://bucket/x"),
        ("S3:bucket/x", "is no URL; expected s3://bucket/x"),
        ("file:/tmp/x", "is no URL; expected file:///tmp/x, or ./file:/tmp/x for a folder"),
        (" s3://bucket/x", "is no URL; expected s3://bucket/x"),
        ("3s://bucket/x", "is no URL; expected a folder, file://PATH or s3://BUCKET/PREFIX"),
        ("gs://bucket/x", "unknown scheme gs; expected a folder, file://PATH or s3://BUCKET/PREFIX"),
        ("s3://", "names no bucket; expected s3://BUCKET/PREFIX"),
    ],
)
def test_urls_that_cannot_be_used(url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ConfigError, match=r"s3fs is not installed; pip install 'holdfast\[s3\]', in a clone pip install -e '.\[s3\]'"
    ):
        open_store("s3://bucket/x")


def test_nothing_new_can_be_put_into_a_bucket_that_does_not_exist(bucket):
    with pytest.raises(StorageError, match="cannot be written"):
        open_store("s3://no-such-bucket-of-ours/prefix").put_new("a", b"")


def test_a_bucket_that_does_not_exist(bucket):
    store = open_store("s3://no-such-bucket-here/x")
    with pytest.raises(StorageError, match="cannot be written"):
        store.put("a", DATA)
    assert store.list() == ()


def test_a_server_that_does_not_answer(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be written"):
        open_store(bucket).put("a", DATA)


def test_files_and_folders_are_private(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.put("a/b", DATA)
    assert (tmp_path / "store").stat().st_mode & 0o77 == 0
    assert (tmp_path / "store" / "a" / "b").stat().st_mode & 0o77 == 0


def test_sixteen_mebibytes_are_left_for_logs_and_decisions(make_disk):
    with pytest.raises(StorageError, match="free"):
        LocalStore(make_disk("15m")).put("name", b"x")


def test_no_descriptor_is_left_open(tmp_path):
    store = LocalStore(tmp_path, reserved_bytes=0)
    for number in range(5):
        store.put(f"folder/{number}", b"x")
    assert not [target for target in open_files() if target.startswith(str(tmp_path))]


def open_files():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread may have closed it meanwhile
            yield os.readlink(f"/proc/self/fd/{name}")


def test_what_the_system_has_no_words_for_is_told_all_the_same(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("no such device any more")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StorageError, match="cannot be read: no such device any more"):
        LocalStore(tmp_path, reserved_bytes=0).get("name")


def test_the_last_of_the_disk_is_left_alone(tmp_path):
    store = LocalStore(tmp_path, reserved_bytes=1 << 60)
    with pytest.raises(StorageError, match="KiB must stay free"):
        store.put("a", DATA)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, pathlib, signal, sys
from holdfast.storage import blobs
pathlib.Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
blobs.LocalStore(pathlib.Path(sys.argv[1])).put("step/a", b"new" * 1000)
"""


def test_a_kill_before_the_rename_leaves_the_old_blob_and_a_file_that_can_be_deleted(tmp_path):
    store = LocalStore(tmp_path)
    store.put("step/a", b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.get("step/a") == b"old"
    blob, left = store.list()
    assert blob == "step/a"
    assert left.startswith("step/a.tmp-")
    store.delete(left)
    assert store.list() == ("step/a",)


def test_a_file_that_may_not_grow_leaves_the_old_blob(tmp_path):
    """The kernel itself refuses in the middle of the write."""
    store = LocalStore(tmp_path, reserved_bytes=0)
    store.put("a", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            store.put("a", DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get("a") == b"old"
    assert store.list() == ("a",), "the part that was written is gone"


def test_a_full_disk_leaves_the_old_blob(make_disk):
    store = LocalStore(make_disk("64k"), reserved_bytes=-(1 << 30))  # so that the disk itself refuses
    store.put("a", DATA)
    with pytest.raises(StorageError, match="No space left on device"):
        store.put("a", DATA * 4)
    assert store.get("a") == DATA
    assert store.list() == ("a",)
    store.put("b", DATA)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("x")
    store = LocalStore(tmp_path / "store")
    with pytest.raises(StorageError, match="cannot be written"):
        store.put("a/b", DATA)
    with pytest.raises(MissingBlob):
        store.get("a/b")


def test_readers_see_whole_blobs_while_others_write(tmp_path):
    store = LocalStore(tmp_path)
    versions = [bytes([number]) * 40_000 for number in range(8)]
    store.put("a", versions[0])
    writers = [threading.Thread(target=lambda v=v: [store.put("a", v) for _ in range(5)]) for v in versions]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(store.get("a"))
    for writer in writers:
        writer.join()
    assert seen
    assert seen <= set(versions)
    assert store.list() == ("a",)
