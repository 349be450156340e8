"""Whatever is put before a parser, it takes it or says in one line what is wrong: 500 inputs each, 20,000 in the soak.

Inputs are valid ones in which something was changed: a value replaced by a nasty one, a key lost, doubled or renamed, a
part nested or repeated, bytes flipped, cut out or put in. A failing input is printed with its number: the seed of a
target is its name, so the same input comes again.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import hashlib
import json
import os
import random
import resource
import sqlite3
import struct
import time
import zlib

import msgspec
import pytest
import torch
import yaml
from tests.decisions import newest_in, put_in
from tests.processes import process_of

from holdfast.cli.commands import make_parser, run_command
from holdfast.cli.plan import _read
from holdfast.config.load import dump_job, load_job, parse_job
from holdfast.config.profiles import load_profile, save_profile
from holdfast.control.chain.entry import Entry
from holdfast.control.membership import GridState, Running, StoredDecision
from holdfast.control.messages import (
    Exited,
    Failure,
    Heartbeat,
    Hello,
    Here,
    Install,
    Meet,
    Peer,
    Status,
    decode_command,
    decode_message,
    encode,
    pack,
    unpack,
)
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import uniform_profile
from holdfast.core.summing import Told, Total
from holdfast.core.tensorspec import TensorSpec
from holdfast.errors import (
    ConfigError,
    CorruptBlob,
    InfeasiblePlan,
    InternalError,
    LogGap,
    MissingBlob,
    StateUnavailable,
    StorageError,
)
from holdfast.optim.accumulate import Accumulator, Layout
from holdfast.optim.digest import LayerState, decode_layer, encode_layer, load_layer
from holdfast.runtime.transport.links.allowance import Allowance
from holdfast.runtime.transport.links.handshake import dialing, listening
from holdfast.runtime.transport.links.inbox import Inbox
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.links.wire import CHUNK_BYTES, HEADER_BYTES, BadFrame, Chunk, Kind, Label
from holdfast.schedule.builders import regular_plan
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints, Facts
from holdfast.storage.tensorlog.reader import LogReader
from holdfast.storage.tensorlog.records import Key, LogOf, What, encode_record, scan
from holdfast.storage.tensorlog.writer import LogWriter
from holdfast.telemetry.events import (
    Chosen,
    Detected,
    EventLog,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Notice,
    StepOps,
    WorkerReady,
)

INPUTS = int(os.environ.get("HOLDFAST_FUZZ_INPUTS", "500"))
LONGEST_S, MOST_BYTES = 10.0, 400 << 20
"""Of processor time for one input, and of memory by which a target makes this process grow."""

NASTY_TEXTS = [
    *("", " ", "\n", "\t", "\0", "a\0b", "\ud800", "\u202e", "\x1b[2J", "x" * 5000, "../../etc/passwd", "/dev/zero"),
    *(
        "nan",
        "inf",
        "-inf",
        "1e400",
        "-1",
        "0",
        "0x10",
        "1_000",
        "9" * 30,
        "9" * 5000,
        "-" + "9" * 5000,
        "1:2:3",
        "0o9",
    ),
    *("0b2", "1e5", "+.inf", ".nan", "0." + "0" * 5000 + "1", "\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}"),
    *(
        "1.2.3",
        "1.",
        ".5",
        "true",
        "null",
        "~",
        "[",
        "]",
        "{",
        "}",
        "[" * 1000,
        "{a: " * 300,
        "*a",
        "&a [*a]",
        "=",
        "e:",
    ),
    *(
        "!!python/name:os.system x",
        "!!binary x",
        "!!timestamp 2001-99-99",
        "2001-99-99",
        "2001-01-01",
        "!!int x",
        "1:2:3",
    ),
    *("1:2:3", "!!float x", "!!set {a, a}", "? [a]\n: b", "<<: *x", "a: b: c", "- - - -", "%YAML 9.9", "---\n---"),
]
NASTY_VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.0, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), datetime.date(2001, 1, 1), b"\xff", (1, 2), list(range(50))),
    *([], {}, [[]], [None], {"": None}, {"kind": None}, {"kind": "x"}, [[[[[[]]]]]]),
    *NASTY_TEXTS,
]
NASTY_BYTES = [
    *(b"", b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"-", b'"', b'"\xed\xa0\x80"', b"\n" * 100, b"\r\n"),
    *(b"[" * 2000, b"{" * 2000, b'{"a":' * 2000, b"9" * 5000, b"null", b"[]", b"{}", b"0", b"1e999", b"\x93" * 5000),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1"),
    *(b"SQLite format 3\0", b"\xff" * 8, b"\x7f" * 8, b"\0" * 8, b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
]


class Mutator:
    """Changes valid inputs at random, the same way for the same seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(hashlib.sha256(seed.encode()).digest())

    def tree(self, value: object) -> object:
        """One to three changes at random places of a tree of lists, dicts and values."""
        value = copy.deepcopy(value)
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            value = self._once(value)
        return value

    def _once(self, value: object) -> object:
        places = list(_places(value))
        if not places or self.random.random() < 0.02:
            return self.nasty()
        holder, key = self.random.choice(places)
        change = self.random.choice(["nasty", "nasty", "nasty", "drop", "rename", "nest", "repeat", "swap"])
        if change == "drop":
            del holder[key]
        elif change == "rename" and isinstance(holder, dict):
            holder[self.text(str(key))] = holder.pop(key)
        elif change == "nest":
            holder[key] = self.random.choice(
                [[holder[key]], {"kind": holder[key]}, {str(holder[key])[:20]: holder[key]}]
            )
        elif change == "repeat" and isinstance(holder, list):
            holder.extend([copy.deepcopy(holder[key])] * self.random.choice([1, 2, 30]))
        elif change == "swap":
            other, place = self.random.choice(places)
            with contextlib.suppress(LookupError, TypeError):
                holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = self.nasty()
        return value

    def nasty(self) -> object:
        return copy.deepcopy(self.random.choice(NASTY_VALUES))

    def text(self, text: str) -> str:
        """A few changes of a text."""
        for _ in range(self.random.choice([1, 1, 2, 4])):
            start = self.random.randrange(len(text) + 1)
            stop = min(len(text), start + self.random.choice([0, 0, 1, 1, 3, 10]))
            some = self.random.choice(
                [self.random.choice(NASTY_TEXTS), chr(self.random.randrange(1, 256)), text[start:stop] * 2, ""]
            )
            text = text[:start] + some + text[stop:]
        return text if self.random.random() < 0.97 else self.random.choice(NASTY_TEXTS)

    def data(self, data: bytes) -> bytes:
        """A few changes of bytes."""
        if self.random.random() < 0.05:
            return self.random.choice(NASTY_BYTES)
        changed = bytearray(data)
        for _ in range(self.random.choice([1, 1, 2, 8])):
            start = self.random.randrange(len(changed) + 1)
            stop = min(len(changed), start + self.random.choice([0, 1, 1, 4, 64]))
            flipped = bytes(byte ^ 1 << self.random.randrange(8) for byte in changed[start:stop])
            some = self.random.choice(
                [flipped, flipped, self.random.choice(NASTY_BYTES), self.random.randbytes(3), b""]
            )
            changed[start:stop] = some
        return (
            bytes(changed) if self.random.random() < 0.9 else bytes(changed[: self.random.randrange(len(changed) + 1)])
        )


def _places(value: object):
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _json(tree: object) -> bytes:
    return json.dumps(tree, default=str).encode("utf-8", "surrogatepass")


def _yaml(tree: object) -> bytes:
    return yaml.dump(tree).encode("utf-8", "surrogatepass")


def strike(name: str, parse, *allowed: type[Exception], inputs: int = INPUTS) -> None:
    """Gives the parser so many inputs: it takes them, or raises one of these with one line, within bounds.

    Args:
        name: of the target, and its seed.
        parse: makes one input with a mutator and parses it.
        allowed: what it may raise.
        inputs: how many.
    """
    mutator, taken, refused = Mutator(name), 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for number in range(inputs):
        started = time.process_time()
        said = ""
        try:
            parse(mutator)
            taken += 1
        except allowed as error:
            said, refused = str(error), refused + 1
        except Exception as error:
            error.add_note(f"{name}, input {number}")
            raise
        assert "\n" not in said, f"{name}, input {number}: {said}"
        spent = time.process_time() - started
        assert spent < LONGEST_S, f"{name}, input {number} took {spent:.1f} s of processor time"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert grown < MOST_BYTES, f"{name} took {grown >> 20} MiB"
    assert refused > inputs // 10, "else nothing was tried"
    assert taken + refused == inputs


PAIR = Peer(worker=WorkerId(0, 0), here=Here(address="127.0.0.1:1", nonce=bytes(16)), key=bytes(32))
JOB = {
    "name": "small",
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 4, "dropout": 0.1},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 2},
    "optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.99]},
    "train": {"steps": 4, "seed": 1, "loss_scale": {"initial": 1024.0}},
    "resilience": {"strategy": "auto", "tolerate": 1},
    "checkpoint": {"every": 2, "url": "somewhere"},
    "control": {"host": "127.0.0.1", "tls": {"ca": "a", "cert": "b", "key": "c"}},
}
OWN = JOB | {
    "model": {"kind": "python", "target": "m.py:build", "arguments": {"a": [1, {"b": "c"}]}},
    "data": {"kind": "python", "target": "m.py:data", "arguments": {"n": 3}},
}


@pytest.mark.parametrize("changed", ["tree", "tree again", "bytes", "bytes again"])
def test_job_files(tmp_path, changed):
    path = tmp_path / "job.yaml"

    def parse(mutator):
        tree = mutator.random.choice([JOB, OWN])
        path.write_bytes(mutator.data(_yaml(tree)) if "bytes" in changed else _yaml(mutator.tree(tree)))
        job = load_job(path)
        path.write_text(dump_job(job))
        if mutator.random.random() < 0.2:
            assert load_job(path) == job or "nan" in repr(job)

    strike(f"job, {changed}", parse, ConfigError, inputs=INPUTS // 4)


def test_overrides():
    keys = [
        "grid.stages",
        "name",
        "optimizer",
        "optimizer.betas",
        "model.arguments.x.y",
        "control.tls",
        "train.loss_scale.initial",
    ]

    def parse(mutator):
        key = mutator.random.choice(keys)
        override = mutator.text(f"{key}={mutator.random.choice(['2', '[1, 2]', '{a: b}', *NASTY_TEXTS])}")
        dump_job(parse_job(mutator.random.choice([JOB, OWN]), [override]))

    strike("set", parse, ConfigError)


def test_trees():
    strike("tree", lambda mutator: parse_job(mutator.tree(mutator.random.choice([JOB, OWN]))), ConfigError)


def test_faults():
    valid = [
        "kill:1.2@5:backward",
        "slow:0.1@3:2.5x",
        "kill-coordinator@7:persist",
        "kill-node:2@5",
        "join:new@30",
        "hang:0.0@0",
    ]

    def parse(mutator):
        fault = Fault.parse(mutator.text(mutator.random.choice(valid)))
        assert Fault.parse(str(fault)) == fault or fault.factor != 1.0

    strike("fault", parse, ConfigError)


PLAN_FLAGS = {
    "--grid": "3x4",
    "--microbatches": "6",
    "--costs": "1,2:3:4:5,2",
    "--comm": "1",
    "--optimizer-cost": "2",
    "--split-cost": "0.5",
    "--memory": "2,1,1,8",
    "--failed": "1.2,0.3",
    "--failures": "2",
    "--time-limit": "1",
    "--all-failures": "3",
    "--out": "plans",
}


def test_plan_arguments(tmp_path, capsys):
    parser = make_parser()
    save_profile(uniform_profile(6), tmp_path / "profile.json")

    def parse(mutator):
        chosen = {flag: text for flag, text in PLAN_FLAGS.items() if mutator.random.random() < 0.5}
        chosen |= {"--grid": "3x4", "--microbatches": "6"}
        chosen |= {"--profile": str(tmp_path / "profile.json")} if mutator.random.random() < 0.1 else {}
        for flag in mutator.random.sample(sorted(chosen), mutator.random.choice([1, 1, 2])):
            chosen[flag] = mutator.text(chosen[flag])
        try:
            args = parser.parse_args(["plan", *(f"{flag}={text}" for flag, text in chosen.items())])
        except SystemExit:
            told = capsys.readouterr().err
            assert told.count("\n") == 1
            raise ConfigError(told) from None
        _read(args, None)

    strike("plan", parse, ConfigError, InfeasiblePlan, StateUnavailable)


def test_profiles(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(uniform_profile(3), path)
    valid = json.loads(path.read_bytes())
    valid["layers"][0]["by_gpus"] = {"2": {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}}

    def parse(mutator):
        half = mutator.random.random() < 0.5
        path.write_bytes(_json(mutator.tree(valid)) if half else mutator.data(_json(valid)))
        profile = load_profile(path)
        save_profile(profile, path)
        assert load_profile(path) == profile

    strike("profile", parse, ConfigError)


def test_manifests_and_shards(tmp_path):
    checkpoints = Checkpoints(LocalStore(tmp_path, reserved_bytes=0))
    facts = Facts(
        **{field.name: _example(field.type) for field in msgspec.structs.fields(Facts) if field.required}
        | {"layers": 2}
    )
    shards = [checkpoints.write_shard(3, layer, b"x" * layer) for layer in range(2)]
    checkpoints.commit(3, shards, facts)
    path = tmp_path / "step-00000003" / "manifest.json"
    valid = json.loads(path.read_bytes())

    def parse(mutator):
        half = mutator.random.random() < 0.5
        path.write_bytes(_json(mutator.tree(valid)) if half else mutator.data(_json(valid)))
        manifest = checkpoints.read(3)
        for layer in range(2):
            checkpoints.read_shard(manifest, layer)

    strike("manifest", parse, CorruptBlob, MissingBlob, StorageError)


def test_chunks_of_a_log(tmp_path):
    writer = LogWriter(tmp_path, LogOf(job="j", job_id="1", worker="0.1"), reserved_bytes=0)
    keys = [Key(step=0, what=What.ACTIVATION, place=1, microbatch=2), Key(step=0, what=What.VOTE)]
    for key in keys:
        writer.append(key, TensorSpec(shape=(2,), dtype="float32"), b"x" * 8)
    writer.complete(0)
    writer.finish()
    (path,) = (tmp_path / "0.1").iterdir()
    valid = path.read_bytes()
    first = scan("chunk", valid).records[0][0]
    frame_bytes = len(encode_record(first)) - len(msgspec.msgpack.encode(first))
    at = valid.index(encode_record(first, 8))

    def parse(mutator):
        changed = mutator.data(valid)
        if mutator.random.random() < 0.5:  # a head that somebody else wrote, with the right checksum
            head = msgspec.msgpack.encode(_packable(mutator.tree(msgspec.to_builtins(first))))
            sizes = struct.pack("<IQ", len(head), 8)
            frame = struct.pack("<4sIQI", b"HFLR", len(head), 8, zlib.crc32(head, zlib.crc32(sizes)))
            changed = valid[:at] + frame + head + valid[at + frame_bytes + len(msgspec.msgpack.encode(first)) :]
        path.write_bytes(changed)
        reader = LogReader(LocalStore(tmp_path), writer.log)
        for key in keys:
            assert reader.read(key).data == b"x" * 8

    strike("chunk of a log", parse, CorruptBlob, LogGap, ConfigError)


def _example(kind: object) -> object:
    """A value of a type of a field, for the facts of a checkpoint, of which there are more and more."""
    text = str(kind)
    return 1 if "int" in text else {} if "dict" in text else "0" * 64


def test_layer_files(tmp_path):
    state = LayerState(
        layer=1,
        step=4,
        parameters={"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(3)},
        buffers={"count": torch.tensor(3)},
        optimizer={"weight": {"exp_avg": torch.ones(2, 3), "step": 4.0}},
        tied=(),
    )
    valid = encode_layer(state)
    size = int.from_bytes(valid[:8], "little")
    head, rest = json.loads(valid[8 : 8 + size]), valid[8 + size :]
    inner = next(iter(head["__metadata__"]))

    def parse(mutator):
        kind = mutator.random.random()
        if kind < 0.4:
            data = mutator.data(valid)
        elif kind < 0.7:
            changed = _json(mutator.tree(head))
            data = len(changed).to_bytes(8, "little") + changed + rest
        else:
            meta = {inner: json.dumps(mutator.tree(json.loads(head["__metadata__"][inner])), default=str)}
            changed = _json(head | {"__metadata__": meta})
            data = len(changed).to_bytes(8, "little") + changed + rest
        path = tmp_path / "layer-0001.safetensors"
        path.write_bytes(data)
        for read in (lambda: decode_layer(data), lambda: load_layer(path)):
            with contextlib.suppress(CorruptBlob):
                encode_layer(read())
        decode_layer(data)

    strike("layer", parse, CorruptBlob)


PLAN = regular_plan(2, split_evenly(2, 1), 1)
A, B = PLAN.workers
HERE = Here(address="127.0.0.1:4000", nonce=bytes(16))
MESSAGES = [
    Hello(
        worker=A,
        process=process_of(A, 1),
        exits=(Exited(worker=B, process=process_of(B, 2), status=-9),),
        offers=(None, A),
        strikes=("x",),
        here=HERE,
    ),
    Status(worker=A, generation=1, layer_steps=((0, 1),), executed=((0, 3),)),
    Heartbeat(worker=A, generation=1, step=2, op=3, busy_s=0.5),
    Failure(worker=A, process=process_of(A, 1), error="e", user_fault=False, traceback="t"),
    Install(generation=2, plan=PLAN, at_boundary=True),
    Meet(peers=(Peer(worker=A, here=HERE, key=bytes(32)),)),
]


def test_control_messages():
    def parse(mutator):
        message = mutator.random.choice(MESSAGES)
        decode = decode_command if isinstance(message, Install | Meet) else decode_message
        kind = mutator.random.random()
        if kind < 0.4:
            parcel = pack([encode(message), mutator.data(encode(message))])
        elif kind < 0.7:
            tree = mutator.tree(msgspec.msgpack.decode(encode(message)))
            parcel = pack([msgspec.msgpack.encode(_packable(tree))])
        else:
            parcel = mutator.data(pack([encode(message)]))
        for each in unpack(parcel):
            encode(decode(each))

    strike("message", parse, msgspec.ValidationError, msgspec.DecodeError)


def test_what_comes_on_a_link():
    labels = [Label(generation, 3, kind, 2, 1) for generation in (1, 2) for kind in Kind]

    def parse(mutator):
        if mutator.random.random() < 0.3:
            worker = WorkerId(0, 1)
            end = listening(worker, bytes(16), lambda source, nonce: None)
            turn = end.send(None)
            hello = mutator.data(dialing(worker, bytes(16), PAIR).send(None).send)[: turn.read]
            end.send(hello.ljust(turn.read, b"\0"))
            return
        inbox = Inbox()
        inbox.enter(1, Allowance())
        chunk = Chunk(mutator.random.choice(labels), 300_000, 0, CHUNK_BYTES)
        header = mutator.data(chunk.pack())[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        found = Chunk.unpack(header)
        incoming = inbox.begin(WorkerId(0, 0), found)
        if incoming is not None:
            inbox.add(incoming, found)

    strike("link", parse, BadFrame)


def test_what_a_worker_is_asked_for():
    def parse(mutator):
        said = []
        slices = Slices(lambda *message: said.append(message))
        slices.keep("key", {7: bytes(1000)})
        body = mutator.data(msgspec.msgpack.encode(("key", 7, 10, 900)))
        chunk = Chunk(Label(1, 0, Kind.ASK), len(body), 0, len(body))
        incoming = slices.begin(WorkerId(0, 0), chunk)
        incoming.place(chunk)[:] = body
        slices.add(incoming, chunk)
        ((_, _, given),) = said
        assert len(given) <= 1000

    strike("ask", parse, BadFrame)


def test_what_others_contribute_to_a_sum():
    """Whatever a header says, it is refused, or the sum is made."""
    layout = Layout(layers=(0, 3), shapes=((2,), (3,)), num_microbatches=6, record_width=2)
    sums = [Accumulator(layout) for _ in range(2)]
    for number in range(6):
        for layer in (0, 3):
            sums[number % 2].add(layer, number, [torch.ones(2), None])
        sums[number % 2].record(number, torch.zeros(2))
    ours, theirs = (each.message() for each in sums)

    def parse(mutator):
        header = mutator.data(theirs.header)
        told = (ours.told, Told(header, theirs.parts))
        sums[0].decode(Total(ours.fold(told, layout.length), (ours.header, header)))

    strike("header of a sum", parse, InternalError)


def _packable(value: object) -> object:
    """Without what msgpack cannot say: numbers beyond 64 bits and halves of characters."""
    if isinstance(value, dict):
        return {_packable(key): _packable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packable(each) for each in value]
    if isinstance(value, int):
        return max(-(2**63), min(2**64 - 1, value))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _write_events(folder):
    log = EventLog(folder / "events.jsonl")
    told = [
        JobStarted(name="j", workers=2, steps=2, samples_per_step=4, wall_time=0.0),
        Chosen(
            way="checkpoint",
            advised="log",
            why="logging.use: off",
            reasons=("none has a replica", "8 bytes cross nodes"),
            logging=False,
            alone=(0, 1),
            spares=0,
            crossing_bytes=8,
            state_bytes=9,
            copy_s=None,
            bubble_s=None,
            step_log=True,
            step_log_bytes=4,
        ),
        WorkerReady(worker="0.0", pid=1),
        Installed(generation=1, workers=("0.0", "1.0"), strategy=""),
        FaultInjected(worker="1.0", kind="kill", step=0, point="start", spec="kill:1.0@0:start"),
        Detected(worker="1.0", how="signal 9", generation=1),
        StepOps(
            worker="0.0",
            generation=1,
            step=0,
            loss=1.0,
            omitted=False,
            ops=(("F", 0, 0, 1.0, 2.0), ("B", 0, 0, 2.0, 3.0)),
        ),
        Notice(worker="0.0", text="look"),
        JobEnded(outcome="done", step=2),
    ]
    for second, event in enumerate(told):
        log.write(float(second), event)
    log.close()


def _inspect(capsys, *arguments) -> None:
    """Raises ConfigError if the command says that its input is wrong, in one line."""
    code = run_command(["inspect", *arguments])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    if code == 2:
        raise ConfigError(said.rstrip("\n"))


def _changed(mutator, log):
    """One or two lines of a log are changed, or have one more field, which may be nested deeply."""
    lines = log.splitlines()
    for _ in range(mutator.random.choice([1, 2])):
        at, kind = mutator.random.randrange(len(lines)), mutator.random.random()
        if kind < 0.6:
            lines[at] = _json(mutator.tree(json.loads(log.splitlines()[at])))
        elif kind < 0.9:
            lines[at] = mutator.data(lines[at])
        else:
            depth = mutator.random.choice([10, 900, 5000])
            lines[at] = lines[at][:-1] + b',"more":' + b"[" * depth + b"]" * depth + b"}"
    return b"\n".join([*lines, b""])


def test_events(tmp_path, capsys):
    _write_events(tmp_path)
    path = tmp_path / "events.jsonl"
    valid = path.read_bytes()

    def parse(mutator):
        path.write_bytes(_changed(mutator, valid))
        form = mutator.random.choice(
            [("--format", "text"), ("--format", "text", "--all"), ("--format", "svg"), ("--format", "json")]
        )
        _inspect(capsys, str(tmp_path), *form)

    strike("events", parse, ConfigError)


def test_events_of_two_attempts(tmp_path, capsys):
    """Whatever the earlier one's are, the newest is told."""
    logs = [tmp_path / "attempts" / "0001" / "events.jsonl", tmp_path / "events.jsonl"]
    for log in logs:
        log.parent.mkdir(parents=True, exist_ok=True)
        _write_events(log.parent)
    valid = logs[0].read_bytes()

    def parse(mutator):
        earlier_only = mutator.random.random() < 0.5
        logs[0].write_bytes(_changed(mutator, valid))
        logs[1].write_bytes(valid if earlier_only else _changed(mutator, valid))
        code = run_command(["inspect", str(tmp_path)])
        told = capsys.readouterr()
        assert code in ((0,) if earlier_only else (0, 2)), told.err
        if code == 2:
            raise ConfigError(told.err.rstrip("\n"))
        first, second, *_ = told.out.splitlines()
        assert first.startswith("attempt 1")
        assert second == "attempt 2:"

    strike("events of attempts", parse, ConfigError)


@pytest.mark.parametrize("changed", ["file", "file again", "body", "body again"])
def test_decisions(tmp_path, capsys, changed):
    _write_events(tmp_path)
    path = tmp_path / "control.db"
    decisions = [
        StoredDecision(revision=number, generation=number, grid=GridState(baseline=PLAN), running=Running(plan=PLAN))
        for number in (1, 2)
    ]
    for decision in decisions:
        put_in(path, decision)
    valid, body = path.read_bytes(), json.loads(Entry(by=16 * "a", decision=decisions[0]).encoded)

    def parse(mutator):
        for left in tmp_path.glob("control.db*"):
            left.unlink()
        if "file" in changed:
            path.write_bytes(mutator.data(valid))
        else:
            path.write_bytes(valid)
            with contextlib.closing(sqlite3.connect(path)) as db, db:
                half = mutator.random.random() < 0.8
                db.execute(
                    "UPDATE decisions SET body = ?", (_json(mutator.tree(body)) if half else mutator.data(_json(body)),)
                )
        newest_in(path)
        _inspect(capsys, str(tmp_path), "--perfetto")

    strike(f"control.db, {changed}", parse, StorageError, ConfigError, inputs=INPUTS // 4)
