import inspect

import msgspec
import pytest
from tests.processes import NODE, process_of

from holdfast.control import messages
from holdfast.control.messages import (
    MOST_IN_PARCEL,
    Attached,
    Audited,
    Audits,
    BeginAnew,
    Blob,
    CaughtUp,
    CommitVote,
    Computed,
    CoordinatorsAt,
    Dormant,
    Ended,
    Exited,
    Expel,
    Failure,
    Fence,
    Finished,
    Gathered,
    Heartbeat,
    Hello,
    Here,
    Install,
    Joined,
    Leave,
    Leaving,
    Left,
    Meet,
    NodeLeaving,
    NodeLost,
    Obsolete,
    Peer,
    Preempted,
    Progress,
    Pulse,
    Pulsed,
    Raised,
    Refused,
    Remark,
    ReplayOrder,
    Resume,
    Save,
    Saved,
    Scored,
    ScoresKept,
    ShardFailed,
    ShardWritten,
    Shutdown,
    StandBy,
    StandingBy,
    Started,
    StartWorker,
    StateAt,
    Status,
    StepDone,
    Strike,
    Suspect,
    Told,
    Unreadable,
    Unreplayed,
    Weighed,
    WorkerOffer,
    decode_command,
    decode_message,
    encode,
    pack,
    parcels,
    unpack,
)
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.replay import Replay
from holdfast.core.work import WorkPhase
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Detected, Evaluated, Notice, Parted, Synced

W = WorkerId(1, 2)
PLAN = adaptive_plan(regular_plan(2, split_evenly(5, 3), 3), [W])
REPLAY = Replay(
    layers=LayerRange(2, 4), workers=(WorkerId(0, 0), W), start=6, stop=9, microbatches=PLAN.routes.microbatches
)
BLOB = Blob(worker=W, generation=3, key="0.0+1.2/addr", value=bytes(range(256)), to=(WorkerId(0, 0), W))
VOTE = CommitVote(step=4, complete=True, value=bytes(range(48)))
SHARD = Shard(layer=3, name="layer-0003-0123456789abcdef.safetensors", sha256="0123456789abcdef" * 4, size=7)
RAISED = Raised(
    worker=W,
    process=process_of(W, 1),
    generation=1,
    step=4,
    phase=WorkPhase.LOADING,
    kind="OSError",
    error="OSError: gone",
    layer=1,
    item=2,
    microbatch=3,
    traceback="Traceback",
)
COMPUTED = Computed(worker=W, inputs="ab", output="cd", gradients="ef")
AUDITED = Audited(
    worker=WorkerId(0, 2), generation=1, step=4, layer=3, microbatch=5, runner=W, claims=(COMPUTED, COMPUTED)
)

SCORED = Scored(worker=W, generation=1, step=4, names=("loss", "accuracy"), rows=((0, (0.1, 1.0)), (3, (0.2, 0.0))))

MESSAGES = [
    Hello(worker=W, process=process_of(W, 7), raised=RAISED),
    Hello(worker=W, process=process_of(W, 7), here=Here(address="127.0.0.1:4000", nonce=bytes(16))),
    Hello(worker=None, process=process_of(None, 0)),
    Status(worker=W, generation=1, layer_steps=((3, 5), (4, 6)), executed=((5, 12),)),
    BLOB,
    Joined(worker=W, generation=1),
    Suspect(worker=W, generation=1, peer=WorkerId(0, 0), detail="reset by peer"),
    Suspect(worker=W, generation=1, peer=None, detail=""),
    Status(worker=W, generation=1, layer_steps=(), executed=(), votes=(VOTE,), unsettled=4),
    Status(worker=WorkerId(0, 2), generation=2, layer_steps=(), executed=(), disputed=AUDITED),
    AUDITED,
    Weighed(worker=W, generation=1, step=4, digests=((3, "ab"), (4, "cd"))),
    SCORED,
    Hello(worker=W, process=process_of(W, 7), scored=(SCORED, SCORED)),
    Refused(worker=W, generation=1, step=4, omitted=True),
    Joined(worker=W, generation=1, step=4),
    Leaving(worker=W),
    Dormant(worker=W, dormant=True),
    Left(worker=W, process=process_of(W, 7), generation=2, step=4),
    CaughtUp(worker=W, generation=2, step=4, entered=2, bytes=1000),
    WorkerOffer(worker=W, node=NODE),
    WorkerOffer(worker=None, node=NODE),
    Started(worker=W, process=process_of(W, 7)),
    Hello(worker=None, process=process_of(None, 1), started=(Started(worker=W, process=process_of(W, 7)),)),
    Preempted(),
    Started(worker=W, process=process_of(W, 1)),
    Hello(worker=None, process=process_of(None, 0), preempted=True),
    Strike(worker=W, spec="kill-node:2@5:start"),
    Remark(worker=None, kind="k", text="t"),
    Started(worker=W, process=process_of(W, 5)),
    Unreadable(worker=W, generation=3, step=6, detail="layer 2 is corrupt"),
    Unreplayed(worker=W, generation=3, detail="no log has step 4"),
    NodeLost(node=2, workers=(W, WorkerId(0, 0))),
    StandingBy(process=process_of(None, 7), address="10.0.0.2:7000"),
    NodeLeaving(process=process_of(None, 7)),
    Pulsed(process=process_of(None, 7), clock="0123456789ab", sent_s=1.5, now_s=3600.25),
    Heartbeat(worker=W, generation=1, step=2, op=3),
    Heartbeat(worker=W, generation=1, step=2, op=3, moves=9, busy_s=0.5, slowest_s=0.25),
    StepDone(worker=W, generation=1, step=2, loss=0.1, omitted=False),
    StepDone(worker=W, generation=1, step=2, loss=None, omitted=False),
    Finished(worker=W, generation=1, step=3),
    Saved(worker=W, generation=1, digests=((3, "ab"), (4, "cd"))),
    ShardWritten(worker=W, generation=1, step=4, shard=SHARD),
    ShardFailed(worker=W, generation=1, step=4, detail="no space"),
    RAISED,
    Raised(
        worker=W,
        process=process_of(W, 1),
        generation=1,
        step=4,
        phase=WorkPhase.OTHER,
        kind="KeyError",
        error="k",
        sound=False,
    ),
    Failure(worker=W, process=process_of(W, 1), error="größer\nals", user_fault=True),
    Exited(worker=W, process=process_of(W, 1), status=-9),
]
COMMANDS = [
    Attached(),
    Install(generation=4, plan=PLAN),
    Install(generation=4, plan=None),
    Install(generation=4, plan=PLAN, at_boundary=True),
    Install(generation=4, plan=PLAN, at_boundary=True, pins=True),
    Install(generation=4, plan=PLAN, audits=Audits(disputed=4, unsteady=(1, 3), weigh=True)),
    Install(generation=4, plan=PLAN, load=StateAt(url="s3://bucket/run", step=6)),
    Install(generation=4, plan=PLAN, load=StateAt(url=None, step=0)),
    Expel(reason="held for lost"),
    Meet(peers=(Peer(worker=W, here=Here(address="127.0.0.1:4000", nonce=bytes(16)), key=bytes(32)),)),
    StartWorker(worker=W),
    StartWorker(worker=W, first=True),
    Gathered(missing=(W,), of=2),
    Told(news=Detected(worker="1.2", how="process ended: signal 9", generation=3)),
    Told(news=Parted(worker="1.2", step=5)),
    Told(news=Synced(worker="1.2", entered=3, step=5, bytes=10)),
    Told(news=Notice(worker="1.2", text="was lost while starting")),
    Strike(worker=W, spec="kill-node:2@5:start"),
    Remark(worker=None, kind="k", text="t"),
    Resume(generation=4, step=9),
    Resume(generation=4, step=9, evaluates=((0, 2), (4, 5))),
    ScoresKept(step=9),
    ScoresKept(step=9, ends=12),
    Resume(generation=4, step=9, scored=8),
    Told(news=Evaluated(step=9, scores=(("loss", 0.5),), microbatches=4, of=4)),
    Obsolete(step=20),
    ReplayOrder(generation=4, state=StateAt(url="s3://bucket/run", step=6), num_layers=8, parts=(REPLAY,), vote=b"\0"),
    Resume(generation=4, step=9, votes=(b"\x00\xff",)),
    BLOB,
    Save(generation=4, step=9, votes=(b"\x00",), layers=(1,), directory="final"),
    Save(generation=4, step=9, layers=(0, 2), directory="runs/x/final"),
    Shutdown(reason="done"),
    Pulse(),
    BeginAnew(reason="node n was held to be gone"),
    StandBy(),
    Leave(),
    CoordinatorsAt(addresses=("10.0.0.1:7000", "10.0.0.2:7000")),
    Progress(step=3, loss=0.5, omitted=False, alive=11, generation=2),
    Fence(worker=W, process=process_of(W, 1)),
    Ended(outcome="lost", detail="", step=3, directory="", generations=2, lost_layers=(1,), members=(W,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_messages_round_trip(message):
    found = decode_message(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_round_trip(command):
    found = decode_command(encode(command))
    assert found == command
    assert type(found) is type(command)


def test_a_plan_that_travelled_is_the_same_plan():
    found = decode_command(encode(Install(generation=1, plan=PLAN))).plan
    assert found == PLAN
    assert found.digest() == PLAN.digest()


@pytest.mark.parametrize("count", [0, 1, len(MESSAGES)])
def test_parcels_keep_their_order(count):
    parcel = pack([encode(message) for message in MESSAGES[:count]])
    assert [decode_message(each) for each in unpack(parcel)] == MESSAGES[:count]


def test_parcels_are_bounded_by_what_they_become(monkeypatch):
    """Each of a million messages of one byte would take 64."""
    monkeypatch.setattr(messages, "_USUAL_PARCEL", 1 << 30)
    small = [encode(message) for message in MESSAGES[:1]] * (MOST_IN_PARCEL + 1)
    found = [unpack(parcel) for parcel in parcels(small)]
    assert [len(each) for each in found] == [MOST_IN_PARCEL, 1]
    with pytest.raises(msgspec.ValidationError):
        unpack(pack(small))


def test_what_is_no_parcel_is_refused():
    for data in (b"", b"\xc1", encode(MESSAGES[0]), pack([encode(MESSAGES[0])])[:-1]):
        with pytest.raises(msgspec.DecodeError):
            unpack(data)


def test_every_type_is_tested():
    known = {value for _, value in inspect.getmembers(messages, inspect.isclass) if issubclass(value, messages._Wire)}
    assert {type(value) for value in [*MESSAGES, *COMMANDS]} == known - {
        messages._Wire,
        StateAt,
        Audits,
        CommitVote,
        Computed,
        Here,
        Peer,
    }


@pytest.mark.parametrize(
    "here",
    [
        {"address": "nowhere", "nonce": bytes(16)},
        {"address": "host:port", "nonce": bytes(16)},
        {"address": "127.0.0.1:4000", "nonce": bytes(15)},
        {"address": f"{'h' * 300}:1", "nonce": bytes(16)},
    ],
)
def test_an_address_that_is_none_is_refused(here):
    said = msgspec.to_builtins(Hello(worker=W, process=process_of(W, 1)), builtin_types=(bytes,)) | {"here": here}
    refused(decode_message, said)


def refused(decode, value):
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(value))


def test_unknown_fields_are_refused():
    refused(decode_message, {"type": "Joined", "worker": {"pipeline": 1, "stage": 2}, "generation": 1, "more": 0})
    refused(decode_command, {"type": "Shutdown", "reason": "done", "more": 0})


def test_a_shard_that_leads_elsewhere_is_refused():
    worker, shard = {"pipeline": 1, "stage": 2}, msgspec.to_builtins(SHARD)
    good = {"type": "ShardWritten", "worker": worker, "generation": 1, "step": 4, "shard": shard}
    assert decode_message(msgspec.msgpack.encode(good)).shard == SHARD
    refused(decode_message, {**good, "shard": {**shard, "name": "../x"}})
    refused(decode_message, {**good, "shard": {**shard, "sha256": "x"}})


def test_missing_fields_and_wrong_types_are_refused():
    refused(decode_message, {"type": "Joined", "generation": 1})
    refused(decode_message, {"type": "Joined", "worker": {"pipeline": 1, "stage": 2}, "generation": "1"})


def test_foreign_types_are_refused():
    refused(decode_message, {"type": "Eval", "code": "1"})
    refused(decode_message, [1, 2])
    for command in (Shutdown(reason=""), Install(generation=1, plan=PLAN)):
        with pytest.raises(msgspec.ValidationError):
            decode_message(encode(command))
    for message in (MESSAGES[0], MESSAGES[-1]):
        with pytest.raises(msgspec.ValidationError):
            decode_command(encode(message))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(COMMANDS[1])[:-1]], ids=["empty", "never used", "cut"])
def test_what_is_no_msgpack_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_command(data)


def test_impossible_ids_are_refused():
    refused(decode_message, {"type": "Joined", "worker": {"pipeline": -1, "stage": 2}, "generation": 1})
