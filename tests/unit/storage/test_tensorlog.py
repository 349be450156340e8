"""Logs of what crosses nodes: written, killed over, damaged in every place, sent away and deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError, CorruptBlob, LogGap, StorageError
from holdfast.storage.blobs import LocalStore, open_store
from holdfast.storage.tensorlog.chunks import check_log, chunks_of, collect, upload
from holdfast.storage.tensorlog.reader import LogReader
from holdfast.storage.tensorlog.records import ChunkEnd, Key, LogOf, What, encode_record
from holdfast.storage.tensorlog.writer import LogWriter

LOG = LogOf(job="gpt", job_id="a1", worker="0.1")
SPEC = TensorSpec(shape=(2, 3), dtype="float32")
SCALAR = TensorSpec(shape=(), dtype="float64")


def writer_of(folder: Path, log: LogOf = LOG, **options) -> LogWriter:
    return LogWriter(folder, log, **{"reserved_bytes": 0, **options})


def reader_of(folder: Path, log: LogOf = LOG) -> LogReader:
    return LogReader(LocalStore(folder), log)


def keys_of(step: int, microbatches: int = 2) -> list[Key]:
    both = [
        Key(step=step, what=what, place=3, microbatch=microbatch)
        for microbatch in range(microbatches)
        for what in (What.ACTIVATION, What.GRADIENT)
    ]
    return [*both, Key(step=step, what=What.TIED_SUM, place=0), Key(step=step, what=What.VOTE)]


def body_of(key: Key, attempt: int = 0) -> bytes:
    """Bytes that no other key has."""
    return (f"{key}#{attempt}".encode() * 2).ljust(24, b".")[:24]


def write_step(writer: LogWriter, step: int, attempt: int = 0, complete: bool = True) -> None:
    for key in keys_of(step):
        writer.append(key, SPEC, body_of(key, attempt))
    if complete:
        writer.complete(step)


def check_step(reader: LogReader, step: int, attempt: int = 0) -> None:
    assert reader.keys(step) == tuple(keys_of(step))
    for key in reader.keys(step):
        found = reader.read(key)
        assert (found.key, found.spec, found.data, found.bitwise) == (key, SPEC, body_of(key, attempt), True)


def write_many(writer: LogWriter, key: Key) -> None:
    for _ in range(200):
        writer.append(key, SPEC, body_of(key))


def chunk_paths(folder: Path) -> list[Path]:
    return sorted((folder / "0.1").iterdir())


def test_what_is_appended_is_read_back(tmp_path):
    writer = writer_of(tmp_path)
    for step in range(3):
        write_step(writer, step)
    vote = Key(step=3, what=What.VOTE)
    writer.append(vote, SCALAR, b"\0" * 8)
    writer.complete(3)
    writer.complete(4)
    writer.finish()
    reader = reader_of(tmp_path)
    for step in range(3):
        check_step(reader, step)
    assert reader.read(vote).spec == SCALAR
    assert reader.keys(4) == (), "nothing crossed in it, and that is known"
    assert reader.bitwise
    assert [path.name for path in chunk_paths(tmp_path)] == ["chunk-00000000-00000000-00000004.log"]


def test_what_is_not_finished_yet_can_be_read_on_the_node(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0)
    check_step(reader_of(tmp_path), 0)


def test_small_chunks(tmp_path):
    writer = writer_of(tmp_path, chunk_bytes=300)
    for step in range(6):
        write_step(writer, step)
    chunks = chunks_of(writer.store.list(), "0.1")
    assert len(chunks) > 6
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    reader = reader_of(tmp_path)
    for step in (5, 0, 3):
        check_step(reader, step)


def test_of_two_entries_of_one_key_the_later_one_counts(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0, complete=False)
    write_step(writer, 0, attempt=1)
    check_step(reader_of(tmp_path), 0, attempt=1)


def test_a_step_that_is_made_again_begins_anew(tmp_path):
    """Also one that was complete, when its updates are rolled back; what went elsewhere the first time is forgotten."""
    writer = writer_of(tmp_path)
    other = Key(step=0, what=What.ACTIVATION, place=5, microbatch=9)
    for end in (writer.complete, lambda step: writer.drop(step, "its generation is over")):
        writer.append(other, SPEC, body_of(other))
        end(0)
    write_step(writer, 0, attempt=1)
    reader = reader_of(tmp_path)
    check_step(reader, 0, attempt=1)
    with pytest.raises(LogGap, match="has nothing under step 0: activation at boundary 5, micro-batch 9"):
        reader.read(other)


def test_a_step_that_is_made_again_and_of_which_nothing_crosses_then_is_empty(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0)
    writer.drop(0, "it is run again")
    writer.complete(0)
    assert reader_of(tmp_path).keys(0) == ()


def test_a_step_that_is_gone_on_with_keeps_what_it_had(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0)
    before = set(reader_of(tmp_path).keys(0))
    vote = Key(step=0, what=What.VOTE)
    writer.append(vote, SCALAR, b"\0" * 8)
    with pytest.raises(LogGap, match="it was not finished"):
        reader_of(tmp_path).keys(0)
    writer.complete(0)
    assert set(reader_of(tmp_path).keys(0)) == before | {vote}
    writer.complete(0)
    assert set(reader_of(tmp_path).keys(0)) == before | {vote}


def test_a_mark_may_be_written_twice(tmp_path, monkeypatch):
    """As when it is there, and its chunk could not be finished."""
    writer = writer_of(tmp_path, chunk_bytes=1000)
    write_step(writer, 0, complete=False)

    def refuse(file):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(writer, "_chunk_bytes", 1)
    with pytest.raises(StorageError, match="Input/output error"):
        writer.complete(0)
    writer.complete(0)
    check_step(reader_of(tmp_path), 0)


def test_steps_that_are_left_out_or_not_finished_say_so(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0, complete=False)
    writer.drop(0, "the disk is behind")
    write_step(writer, 1, complete=False)
    reader = reader_of(tmp_path)
    named = r"log of worker 0\.1 of job gpt \(a1\) lacks step"
    with pytest.raises(LogGap, match=rf"{named} 0: it was left out: the disk is behind"):
        reader.read(keys_of(0)[0])
    with pytest.raises(LogGap, match=rf"{named} 1: it was not finished"):
        reader.keys(1)
    with pytest.raises(LogGap, match=rf"{named} 2: it was not finished"):
        reader.keys(2)
    with pytest.raises(LogGap, match=rf"{named} 0: it was deleted, or never written"):
        LogReader(LocalStore(tmp_path / "nothing"), LOG).keys(0)


def test_a_missing_chunk(tmp_path):
    writer = writer_of(tmp_path, chunk_bytes=1)
    for step in range(3):
        write_step(writer, step)
    per_step = len(keys_of(0)) + 1
    chunk_paths(tmp_path)[per_step].unlink()
    with pytest.raises(LogGap, match=f"lacks step 0: chunk {per_step} is missing"):
        reader_of(tmp_path).keys(0)
    with pytest.raises(LogGap, match=f"lacks step 1: {per_step - 1} entries were written, {per_step - 2} are there"):
        reader_of(tmp_path).keys(1)
    check_step(reader_of(tmp_path), 2)


def test_the_last_chunk_is_missing(tmp_path):
    writer = writer_of(tmp_path, chunk_bytes=1)
    write_step(writer, 0)
    chunk_paths(tmp_path)[-1].unlink()
    with pytest.raises(LogGap, match="lacks step 0: it was not finished"):
        reader_of(tmp_path).keys(0)


def finished_log(folder: Path, steps: int = 2) -> Path:
    writer = writer_of(folder)
    for step in range(steps):
        write_step(writer, step)
    writer.finish()
    (path,) = chunk_paths(folder)
    return path


END_BYTES = len(encode_record(ChunkEnd()))


def test_every_truncation_of_a_finished_chunk_is_told(tmp_path):
    path = finished_log(tmp_path, steps=1)
    whole = path.read_bytes()
    for size in range(len(whole) - END_BYTES):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptBlob):
            check_step(reader_of(tmp_path), 0)


def test_every_flipped_bit_is_told(tmp_path):
    """Nothing is ever read that was not written."""
    path = finished_log(tmp_path, steps=1)
    whole = path.read_bytes()
    for at in range(len(whole) - END_BYTES):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises((CorruptBlob, ConfigError)):
            check_step(reader_of(tmp_path), 0)


def test_a_flipped_bit_of_a_tensor_is_named_and_costs_that_alone(tmp_path):
    path = finished_log(tmp_path)
    hurt = keys_of(1)[1]
    path.write_bytes(path.read_bytes().replace(body_of(hurt), b"\xff" + body_of(hurt)[1:]))
    reader = reader_of(tmp_path)
    with pytest.raises(CorruptBlob, match=f"0000-00000001.log: {hurt} is corrupt: expected CRC-32 "):
        reader.read(hurt)
    check_step(reader, 0)


def test_a_log_of_another_job_is_refused_by_name(tmp_path):
    finished_log(tmp_path)
    other = LogOf(job="gpt", job_id="b2", worker="0.1")
    complaint = r"is of the log of worker 0\.1 of job gpt \(a1\); expected that of worker 0\.1 of job gpt \(b2\)"
    with pytest.raises(ConfigError, match=complaint):
        reader_of(tmp_path, other).keys(0)
    with pytest.raises(ConfigError, match=complaint):
        writer_of(tmp_path, other)
    with pytest.raises(ConfigError, match=complaint):
        check_log(LocalStore(tmp_path), other)
    check_log(LocalStore(tmp_path), LOG)
    write_step(writer_of(tmp_path, LogOf(job="gpt", job_id="b2", worker="0.2")), 0)  # of another worker


def test_a_chunk_under_another_number_is_refused(tmp_path):
    path = finished_log(tmp_path)
    path.rename(path.with_name("chunk-00000007-00000000-00000001.log"))
    with pytest.raises(CorruptBlob, match="expected chunk 7, found chunk 0"):
        reader_of(tmp_path).keys(0)


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_process_goes_on_from_where_another_was_killed(tmp_path, cut):
    """What was torn is cut off; the step that it was writing begins anew."""
    first = writer_of(tmp_path)
    write_step(first, 0)
    write_step(first, 1, complete=False)
    (path,) = chunk_paths(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    second = writer_of(tmp_path)
    for key in keys_of(1)[1:]:
        second.append(key, SPEC, body_of(key, 1))
    second.complete(1)
    reader = reader_of(tmp_path)
    check_step(reader, 0)
    assert reader.keys(1) == tuple(keys_of(1)[1:])
    assert [each.number for each in chunks_of(second.store.list(), "0.1")] == [0, 1]


def test_a_process_killed_over_the_beginning_of_a_chunk_leaves_nothing(tmp_path):
    writer = writer_of(tmp_path)
    write_step(writer, 0)
    writer.finish()
    (tmp_path / "0.1" / "open-00000001.log").write_bytes(b"HF")
    again = writer_of(tmp_path)
    write_step(again, 1)
    again.finish()
    for step in range(2):
        check_step(reader_of(tmp_path), step)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tensorlog import write_step, writer_of
writer = writer_of(Path(sys.argv[1]), chunk_bytes=500)
for step in range(5):
    write_step(writer, step)
write_step(writer, 5, complete=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_written_can_be_read(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "log"), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False).returncode == -9
    reader = reader_of(tmp_path / "log")
    for step in range(5):
        check_step(reader, step)
    with pytest.raises(LogGap, match="lacks step 5: it was not finished"):
        reader.keys(5)


def test_chunks_before_a_checkpoint_are_deleted(tmp_path):
    writer = writer_of(tmp_path, chunk_bytes=300)
    for step in range(6):
        write_step(writer, step)
    deleted = collect(writer.store, "0.1", 4)
    assert deleted
    assert collect(writer.store, "0.1", 4) == ()
    reader = reader_of(tmp_path)
    for step in (4, 5):
        check_step(reader, step)
    with pytest.raises(LogGap, match="lacks step 0: it was deleted, or never written"):
        reader.keys(0)
    write_step(writer, 6)
    check_step(reader_of(tmp_path), 6)


def test_finished_chunks_are_sent_and_read_from_another_node(tmp_path, url):
    writer = writer_of(tmp_path / "node", chunk_bytes=300)
    for step in range(3):
        write_step(writer, step)
    target = open_store(url)
    sent = list(upload(writer.store, target, LOG))
    write_step(writer, 3)
    writer.finish()
    more = list(upload(writer.store, target, LOG, sent))
    assert more
    assert not set(more) & set(sent)
    shutil.rmtree(tmp_path / "node")
    reader = LogReader(open_store(url), LOG)
    for step in range(4):
        check_step(reader, step)
    assert collect(target, "0.1", 2)
    check_step(LogReader(target, LOG), 3)


def test_lower_precision_is_told_by_the_log_and_by_each_entry(tmp_path):
    writer = writer_of(tmp_path, precision="bfloat16")
    half, whole = keys_of(0)[0], keys_of(0)[-1]
    writer.append(half, SPEC, b"\0" * 12, "bfloat16")
    writer.append(whole, SCALAR, b"\0" * 8)
    writer.complete(0)
    reader = reader_of(tmp_path)
    found = reader.read(half)
    assert (found.spec.dtype, found.stored, found.bitwise) == ("float32", "bfloat16", False)
    assert reader.read(whole).bitwise
    assert not reader.bitwise


def test_folders_and_files_are_private(tmp_path):
    write_step(writer_of(tmp_path / "log"), 0)
    for path in (tmp_path / "log", tmp_path / "log" / "0.1", *chunk_paths(tmp_path / "log")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_what_is_finished_survives_a_power_cut(tmp_path, power_cuts):
    assert power_cuts.spare(finished_log(tmp_path))


def test_a_full_disk_is_told_and_costs_no_record_that_was_there(make_disk):
    disk = make_disk("64k")
    writer = writer_of(disk / "log")
    write_step(writer, 0)
    (key,) = keys_of(1)[:1]
    with pytest.raises(StorageError, match=r"0\.1: the log cannot be written: No space left on device|KiB are free"):
        writer.append(key, SPEC, b"x" * 70_000)
    filler = disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(b"x" * 70_000)
    with pytest.raises(StorageError):
        write_many(writer, key)
    check_step(reader_of(disk / "log"), 0)
    filler.unlink()
    write_step(writer, 1)
    check_step(reader_of(disk / "log"), 1)


def test_a_write_that_ends_half_way_is_cut_off_by_the_next(tmp_path, monkeypatch):
    writer = writer_of(tmp_path)
    write_step(writer, 0)
    written, key = os.write, keys_of(1)[0]

    def half(file, data):
        monkeypatch.setattr(os, "write", refuse)
        return written(file, bytes(data[: len(data) // 2]))

    def refuse(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StorageError, match="the log cannot be written: No space left on device"):
        writer.append(key, SPEC, body_of(key))
    monkeypatch.setattr(os, "write", written)
    write_step(writer, 1)
    for step in range(2):
        check_step(reader_of(tmp_path), step)


def test_room_is_left_on_the_disk(make_disk):
    with pytest.raises(StorageError, match="must stay free"):
        write_step(writer_of(make_disk("15m"), reserved_bytes=16 << 20), 0)


def test_a_folder_that_cannot_be_written(tmp_path):
    writer = writer_of(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"no folder")
    with pytest.raises(StorageError, match="the log cannot be written: File exists"):
        write_step(writer, 0)
    with pytest.raises(StorageError, match="log: cannot be read: Not a directory"):
        writer_of(tmp_path / "log")


@pytest.mark.parametrize(
    ("what", "place", "microbatch", "complaint"),
    [
        (What.ACTIVATION, None, 1, "expected a place and a micro-batch"),
        (What.GRADIENT, 1, None, "expected a place and a micro-batch"),
        (What.TIED_SUM, 1, 1, "expected a place and no micro-batch"),
        (What.VOTE, 1, None, "expected no place and no micro-batch"),
        (What.ACTIVATION, -1, 0, "expected numbers from 0"),
    ],
)
def test_keys_that_name_nothing(what, place, microbatch, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Key(step=0, what=what, place=place, microbatch=microbatch)


STEPS = st.integers(0, 4)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), STEPS, st.integers(0, 5)),
        st.tuples(st.sampled_from(["complete", "drop", "finish", "restart"]), STEPS, st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(acts=ACTS, chunk_bytes=st.sampled_from([1, 400, 1 << 20]))
def test_whatever_is_written_in_whatever_order_is_read_as_a_dictionary_would_have_it(
    tmp_path_factory, acts, chunk_bytes
):
    folder = tmp_path_factory.mktemp("log")
    writer = writer_of(folder, chunk_bytes=chunk_bytes)
    entries: dict[int, dict[Key, bytes]] = {}
    complete: dict[int, dict[Key, bytes]] = {}
    for number, (act, step, which) in enumerate(acts):
        if act == "append":
            key = keys_of(step)[which]
            complete.pop(step, None)
            entries.setdefault(step, {})[key] = body_of(key, number)
            writer.append(key, SPEC, body_of(key, number))
        elif act == "complete":
            complete[step] = dict(entries.get(step, {}))
            writer.complete(step)
        elif act == "drop":
            entries.pop(step, None)
            complete.pop(step, None)
            writer.drop(step, "so")
        elif act == "finish":
            writer.finish()
        else:
            writer.close()
            writer = writer_of(folder, chunk_bytes=chunk_bytes)
            entries = {each: dict(found) for each, found in complete.items()}
    writer.close()
    reader = reader_of(folder)
    for step in range(5):
        if step in complete:
            assert {key: reader.read(key).data for key in reader.keys(step)} == complete[step]
        else:
            with pytest.raises(LogGap):
                reader.keys(step)


def test_what_is_left_when_old_chunks_go_has_no_hole(tmp_path):
    """All went back: the second chunk has older steps than the first."""
    writer = writer_of(tmp_path)
    for steps in ((8, 9, 10), (5, 6, 7), (10, 11)):
        for step in steps:
            writer.drop(step, "it is run again")
            write_step(writer, step)
        writer.finish()
    assert collect(writer.store, LOG.worker, 10) == (), "the oldest is needed, and those behind it with it"
    for step in (10, 11):
        check_step(reader_of(tmp_path), step)
