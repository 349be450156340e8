"""What is handed over while a worker trains: written by a thread, bounded, never a silent gap, never in the way."""

from __future__ import annotations

import queue
import random
import resource
import threading

import pytest
import torch
from tests.waiting import LIMIT_S

from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import ConfigError, CorruptBlob, LogGap, StorageError
from holdfast.runtime.background_log import BackgroundLog, LogCondition, When, tensor_of
from holdfast.storage.blobs import LocalStore, open_store
from holdfast.storage.tensorlog.chunks import chunks_of
from holdfast.storage.tensorlog.reader import LogReader
from holdfast.storage.tensorlog.records import Key, LoggedTensor, LogOf, What
from holdfast.storage.tensorlog.writer import LogWriter

LOG = LogOf(job="gpt", job_id="a1", worker="1.0")
FLOATS = 256
SIZE = 4 * FLOATS


def key(step: int, microbatch: int) -> Key:
    return Key(step=step, what=What.ACTIVATION, place=2, microbatch=microbatch)


def tensor(step: int, microbatch: int) -> torch.Tensor:
    return torch.arange(FLOATS, dtype=torch.float32).add(step * 1000 + microbatch).view(2, -1)


class SlowWriter(LogWriter):
    """A log on a disk that takes nothing while ``held`` is set."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, reserved_bytes=0, **options)
        self.free, self.asked = threading.Event(), threading.Event()
        self.free.set()

    def append(self, *arguments):
        self.asked.set()
        assert self.free.wait(LIMIT_S)
        super().append(*arguments)


class Logging:
    """A background log into a folder, what it tells, and its reader."""

    def __init__(self, folder, *, most_bytes=100 * SIZE, precision="exact", chunk_bytes=1 << 20, **options):
        self.folder, self.told = folder, queue.SimpleQueue()
        self.writer = SlowWriter(folder, LOG, precision=precision, chunk_bytes=chunk_bytes)
        self.log = BackgroundLog(self.writer, most_bytes=most_bytes, tell=self.told.put, **options)

    def step(self, step, microbatches=4, end=True):
        for microbatch in range(microbatches):
            self.log.hand_over(key(step, microbatch), tensor(step, microbatch))
        if end:
            self.log.end_step(step)

    def reader(self):
        return LogReader(LocalStore(self.folder), LOG)

    def next(self):
        return self.told.get(timeout=LIMIT_S)


def check_step(reader, step, microbatches=4):
    assert reader.keys(step) == tuple(key(step, microbatch) for microbatch in range(microbatches))
    for microbatch in range(microbatches):
        assert torch.equal(tensor_of(reader.read(key(step, microbatch))), tensor(step, microbatch))


@pytest.fixture
def make(tmp_path):
    made = []

    def one(folder=tmp_path / "log", **options):
        made.append(Logging(folder, **options))
        return made[-1]

    yield one
    for each in made:
        each.writer.free.set()
        each.log.close(LIMIT_S)


@pytest.mark.parametrize("when", list(When))
def test_what_is_handed_over_is_in_the_log(make, when):
    logging = make(when=when)
    for step in range(3):
        logging.step(step)
    assert logging.log.flush(LIMIT_S)
    for step in range(3):
        check_step(logging.reader(), step)
    report = logging.log.report()
    assert (report.condition, report.logged_steps, report.left_out_steps) == (LogCondition.LOGGING, 3, 0)
    assert (report.queued_bytes, report.written_bytes) == (0, 12 * SIZE)
    assert report.bytes_per_s > 0
    assert logging.told.empty()
    assert "log logging; 0 of 102400 bytes wait; 3 step(s) logged, 0 left out; 12288 bytes written at" in str(report)


def test_nobody_waits_for_the_disk(make):
    logging = make()
    logging.writer.free.clear()
    logging.step(0)
    assert logging.writer.asked.wait(LIMIT_S)
    assert logging.log.report().queued_bytes == 4 * SIZE
    assert not logging.log.flush(0)
    logging.writer.free.set()
    assert logging.log.flush(LIMIT_S)
    check_step(logging.reader(), 0)


def test_who_writes_before_sending_has_written_when_it_comes_back(make):
    logging = make(when=When.BEFORE_SENDING)
    logging.step(0)
    check_step(logging.reader(), 0)


def test_a_disk_that_is_too_slow_costs_whole_steps_and_is_told(make):
    logging = make(most_bytes=6 * SIZE)
    logging.step(0)
    assert logging.log.flush(LIMIT_S)
    logging.writer.free.clear()
    logging.step(1)
    logging.step(2)
    report = logging.next()
    assert report.condition is LogCondition.BEHIND
    assert report.why == f"{6 * SIZE} of {6 * SIZE} bytes wait to be written, and {SIZE} more come"
    assert logging.log.report().queued_bytes == 4 * SIZE, "what waited of step 2 is forgotten"
    logging.step(3, microbatches=3)
    assert logging.log.report().left_out_steps == 2
    assert logging.told.empty(), "it is told once"
    logging.writer.free.set()
    assert logging.log.flush(LIMIT_S)
    logging.step(4)
    assert logging.log.flush(LIMIT_S)
    assert logging.next().condition is LogCondition.LOGGING
    reader = logging.reader()
    for step in (0, 1, 4):
        check_step(reader, step)
    for step in (2, 3):
        with pytest.raises(LogGap, match=rf"lacks step {step}: it was left out: \d+ of 6144 bytes wait to be written"):
            reader.keys(step)
    assert logging.log.report().left_out_steps == 2


def test_the_bound_holds_however_much_is_handed_over(make):
    logging = make(most_bytes=4 << 20)
    logging.writer.free.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(80):
        logging.log.hand_over(key(step, 0), torch.ones(1 << 18))
        logging.log.end_step(step)
        assert logging.log.report().queued_bytes <= 4 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10, "KiB"
    assert logging.log.report().left_out_steps == 76


def test_a_part_of_a_large_tensor_does_not_keep_all_of_it(make):
    logging = make()
    logging.writer.free.clear()
    whole = torch.zeros(1 << 16)
    logging.log.hand_over(key(0, 0), whole[:FLOATS])
    whole[:FLOATS] = 7.0
    logging.log.end_step(0)
    logging.writer.free.set()
    assert logging.log.flush(LIMIT_S)
    assert torch.equal(tensor_of(logging.reader().read(key(0, 0))), torch.zeros(FLOATS))


def test_a_step_that_is_made_again(make):
    logging = make()
    logging.log.hand_over(key(0, 9), tensor(0, 9))
    logging.step(0, microbatches=2, end=False)
    logging.log.abort_step(0, "its generation is over")
    logging.step(0)
    assert logging.log.flush(LIMIT_S)
    check_step(logging.reader(), 0)


def test_a_step_that_was_left_out_and_is_made_again_is_logged(make):
    logging = make(most_bytes=6 * SIZE)
    logging.writer.free.clear()
    logging.step(0)
    logging.step(1, end=False)
    assert logging.next().condition is LogCondition.BEHIND
    logging.log.abort_step(1, "its generation is over")
    logging.writer.free.set()
    assert logging.log.flush(LIMIT_S)
    logging.step(1)
    assert logging.log.flush(LIMIT_S)
    for step in range(2):
        check_step(logging.reader(), step)


def test_a_step_of_which_nothing_crosses_is_complete(make):
    logging = make()
    logging.log.end_step(0)
    assert logging.log.flush(LIMIT_S)
    assert logging.reader().keys(0) == ()


def test_while_there_is_no_time_nothing_is_written_until_half_of_the_memory_is_taken(make):
    logging = make(when=When.IDLE, most_bytes=10 * SIZE)
    logging.step(0)
    assert not logging.log.collect(0), "nor is anything else done"
    assert logging.log.report().queued_bytes == 4 * SIZE
    assert not logging.writer.asked.is_set()
    with logging.log.idle():
        assert logging.writer.asked.wait(LIMIT_S)
    assert logging.log.flush(LIMIT_S), "whoever is busy"
    logging.writer.asked.clear()
    logging.step(1, microbatches=5, end=False)
    assert not logging.writer.asked.is_set()
    logging.log.hand_over(key(1, 5), tensor(1, 5))
    assert logging.writer.asked.wait(LIMIT_S)


def test_a_full_disk_is_told_and_logging_goes_on_once_there_is_room(make, make_disk):
    disk = make_disk("256k")
    logging = make(disk / "log")
    logging.step(0)
    assert logging.log.flush(LIMIT_S)
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * (256 << 10))
    for step in range(1, 5):
        logging.step(step)
    report = logging.next()
    assert report.condition is LogCondition.FAILED
    assert "KiB must stay free" in report.why or "No space left on device" in report.why
    logging.log.flush(LIMIT_S)
    filler.unlink()
    logging.step(9)
    assert logging.log.flush(LIMIT_S)
    assert logging.next().condition is LogCondition.LOGGING
    reader = logging.reader()
    check_step(reader, 0)
    check_step(reader, 9)
    left_out = 0
    for step in range(1, 5):
        try:
            check_step(reader, step)  # what was left of a block may have sufficed for the first
        except LogGap:
            left_out += 1
    assert left_out == logging.log.report().left_out_steps > 0


def test_a_folder_that_cannot_be_written_is_told(make, tmp_path):
    logging = make(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"no folder")
    logging.step(0)
    report = logging.next()
    assert report.condition is LogCondition.FAILED
    assert "log/1.0: the log cannot be written: File exists" in report.why
    logging.log.flush(LIMIT_S)
    (tmp_path / "log").unlink()
    logging.step(1)
    assert logging.log.flush(LIMIT_S)
    check_step(logging.reader(), 1)
    with pytest.raises(LogGap):
        logging.reader().keys(0)


@pytest.mark.parametrize("send_all", [False, True])
def test_finished_chunks_go_where_other_nodes_read_them(make, url, send_all):
    logging = make(chunk_bytes=4 * SIZE, store=open_store(url), send_all=send_all)
    for step in range(4):
        logging.step(step)
    assert logging.log.flush(LIMIT_S)
    reader = LogReader(open_store(url), LOG)
    for step in range(4):
        check_step(reader, step)
    assert logging.log.collect(3, LIMIT_S)
    assert logging.log.flush(LIMIT_S)
    for store in (LocalStore(logging.folder), open_store(url)):
        with pytest.raises(LogGap, match="lacks step 0: it was deleted, or never written"):
            LogReader(store, LOG).keys(0)
        check_step(LogReader(store, LOG), 3)


def test_chunks_are_sent_only_once_a_failure_is_detected_unless_told_otherwise(make, tmp_path):
    store = open_store(tmp_path / "store")
    logging = make(chunk_bytes=SIZE, store=store)
    logging.step(0)
    assert logging.log.collect(0, LIMIT_S), "all that was before it is written, nothing is deleted"
    assert logging.log._sender.sent(LIMIT_S), "what was asked of the store is done"
    assert chunks_of(store.list(), "1.0") == ()
    assert logging.log.flush(LIMIT_S)
    check_step(LogReader(store, LOG), 0)


def test_a_store_that_is_away_is_told_and_tried_again(make, tmp_path):
    place = tmp_path / "store"
    place.write_bytes(b"no folder")
    logging = make(store=open_store(place))
    logging.step(0)
    assert not logging.log.flush(LIMIT_S)
    report = logging.next()
    assert report.condition is LogCondition.LOGGING
    assert report.sending.startswith(f"{place}: chunks of the log cannot be sent: ")
    check_step(logging.reader(), 0)
    place.unlink()
    assert logging.log.flush(LIMIT_S)
    assert logging.next().sending == ""
    check_step(LogReader(open_store(place), LOG), 0)


def test_a_bucket_that_does_not_answer_is_told(make, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    logging = make(store=open_store(bucket))
    logging.step(0)
    assert not logging.log.flush(LIMIT_S)
    assert logging.next().sending.startswith(f"{bucket}: chunks of the log cannot be sent: ")
    check_step(logging.reader(), 0)


def test_a_store_that_holds_another_jobs_log_is_left_alone(make, tmp_path):
    other = LogOf(job="gpt", job_id="b2", worker="1.0")
    writer = LogWriter(tmp_path / "store", other, reserved_bytes=0)
    writer.complete(0)
    writer.finish()
    logging = make(store=open_store(tmp_path / "store"))
    logging.step(0)
    assert not logging.log.flush(LIMIT_S)
    assert "expected that of worker 1.0 of job gpt (a1)" in logging.next().sending
    assert len(chunks_of(writer.store.list(), "1.0")) == 1


def test_a_process_that_comes_back_sends_only_what_is_not_there(make, tmp_path):
    store = open_store(tmp_path / "store")
    first = make(store=store)
    first.step(0)
    assert first.log.close(LIMIT_S)
    (sent,) = chunks_of(store.list(), "1.0")
    before = (tmp_path / "store" / sent.name).stat().st_ino
    second = make(store=store)
    second.step(1)
    assert second.log.flush(LIMIT_S)
    assert (tmp_path / "store" / sent.name).stat().st_ino == before
    for step in range(2):
        check_step(LogReader(store, LOG), step)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_keeps_half_of_the_bytes_of_what_crosses_boundaries_alone(make, precision):
    logging = make(precision=precision)
    sent, vote = torch.linspace(-3, 3, FLOATS), torch.linspace(-3, 3, 6, dtype=torch.float64)
    numbers = Key(step=0, what=What.VOTE)
    whole = torch.arange(FLOATS)
    logging.log.hand_over(key(0, 0), sent)
    logging.log.hand_over(key(0, 1), whole)
    logging.log.hand_over(numbers, vote)
    logging.log.end_step(0)
    assert logging.log.flush(LIMIT_S)
    reader = logging.reader()
    found = reader.read(key(0, 0))
    assert (found.stored, len(found.data), found.bitwise) == (precision, SIZE // 2, False)
    assert torch.equal(tensor_of(found), sent.to(getattr(torch, precision)).float())
    assert torch.equal(tensor_of(reader.read(key(0, 1))), whole)
    assert torch.equal(tensor_of(reader.read(numbers)), vote)
    assert not reader.bitwise


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 5).t(),
        torch.randn(2, requires_grad=True),
        torch.randn(3).bfloat16(),
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.arange(3),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_tensors_of_all_kinds(make, value):
    logging = make()
    logging.log.hand_over(key(0, 0), value)
    logging.log.end_step(0)
    assert logging.log.flush(LIMIT_S)
    found = tensor_of(logging.reader().read(key(0, 0)))
    assert found.dtype == value.dtype
    assert torch.equal(found, value.detach())


@pytest.mark.parametrize(
    ("shape", "stored", "complaint"),
    [((3,), "float32", "12 bytes of float32"), ((2,), "float31", "expected a tensor")],
)
def test_bytes_that_are_no_such_tensor(shape, stored, complaint):
    spec = TensorSpec(shape=shape, dtype="float32")
    with pytest.raises(CorruptBlob, match=complaint):
        tensor_of(LoggedTensor(key=key(0, 0), spec=spec, stored=stored, data=b"x" * 8))


def test_no_memory_is_impossible(tmp_path):
    with pytest.raises(ConfigError, match="0 bytes for what is to be logged are impossible"):
        Logging(tmp_path, most_bytes=0)


def test_what_cannot_be_written_at_all_costs_its_step_and_stops_nobody(make):
    logging = make()
    logging.log.hand_over(key(0, 0), torch.empty(3, device="meta"))
    logging.log.end_step(0)
    assert logging.next().condition is LogCondition.FAILED
    logging.step(1)
    assert logging.log.flush(LIMIT_S)
    check_step(logging.reader(), 1)
    with pytest.raises(LogGap, match="lacks step 0: it was left out: "):
        logging.reader().keys(0)


def test_after_the_end_nothing_is_waited_for(make):
    logging = make()
    logging.step(0)
    assert logging.log.close(LIMIT_S)
    assert not logging.log.flush(10 * LIMIT_S)
    check_step(logging.reader(), 0)


class UnsteadyWriter(LogWriter):
    """A log on a disk that refuses now and then; half of what is refused was written all the same."""

    def __init__(self, folder, source, **options):
        super().__init__(folder, LOG, reserved_bytes=0, **options)
        self._source = source

    def _unsteady(self, write, *arguments):
        refused = self._source.random() < 0.08
        if not refused or self._source.random() < 0.5:
            write(*arguments)
        if refused:
            raise StorageError("not now")

    def append(self, *arguments):
        self._unsteady(super().append, *arguments)

    def complete(self, *arguments):
        self._unsteady(super().complete, *arguments)

    def drop(self, *arguments):
        self._unsteady(super().drop, *arguments)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_step_is_whole_or_known_not_to_be(tmp_path, seed):
    """Steps are made again, memory is short, the disk refuses, chunks are small, all at random."""
    source = random.Random(seed)
    writer = UnsteadyWriter(tmp_path, random.Random(seed + 100), chunk_bytes=source.choice([1, 3 * SIZE, 1 << 20]))
    log = BackgroundLog(writer, most_bytes=source.choice([3, 6, 40]) * SIZE, when=source.choice([*When]))
    last = {}
    for step in range(60):
        for attempt in range(source.choice([1, 1, 1, 2])):
            if attempt:
                log.abort_step(step, "it is run again")
            last[step] = [(microbatch, 100 * attempt) for microbatch in range(source.randrange(1, 5))]
            for microbatch, more in last[step]:
                log.hand_over(key(step, microbatch), tensor(step, microbatch + more))
            if attempt == 0 and source.random() < 0.2:
                log.flush(LIMIT_S)
            if source.random() < 0.5:
                log.end_step(step)
            else:
                log.abort_step(step, "its generation is over")
                last.pop(step)
    while not log.flush(LIMIT_S):
        assert log.report().condition is LogCondition.FAILED
    report = log.report()
    log.close(LIMIT_S)
    reader = LogReader(LocalStore(tmp_path), LOG)
    whole = []
    for step in range(60):
        try:
            keys = reader.keys(step)
        except LogGap:
            continue
        whole.append(step)
        assert [each.microbatch for each in keys] == [microbatch for microbatch, _ in last[step]]
        for found, (microbatch, more) in zip(keys, last[step], strict=True):
            assert torch.equal(tensor_of(reader.read(found)), tensor(step, microbatch + more))
    assert whole
    assert report.left_out_steps > 0


def test_whoever_writes_himself_is_not_disturbed_by_what_another_thread_wants(make):
    """What is obsolete is told by the thread that listens to the coordinator."""
    logging = make(when=When.BEFORE_SENDING, most_bytes=1 << 30)
    over = threading.Event()

    def collect():
        while not over.is_set():
            logging.log.collect(0)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for step in range(150):
            logging.step(step)
    finally:
        over.set()
        thread.join()
    assert logging.log.flush(LIMIT_S)
    assert logging.log.report().condition is LogCondition.LOGGING
    for step in range(150):
        check_step(logging.reader(), step)
