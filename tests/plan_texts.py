"""Reads what plans and programs print as, for tests that say in text what is to be run."""

import re

from holdfast.core.ids import WorkerId, beside
from holdfast.core.instructions import Compute, Payload, Receive, Reduce, Send, Sum, UpdateLayer
from holdfast.core.schedule import Op, OpKind, Orders

_OP = re.compile(r"([FBIW])(\d+)\.(\d+)")
_MESSAGE = re.compile(r"(SEND|RECV)_([A-Z]+)(\d+)\.(\d+)[<>](\d+\.\d+)")


def op_of(text, batch):
    """The operation of a text such as ``F1.5``."""
    kind, pipeline, index = _OP.fullmatch(text).groups()
    return Op(OpKind(kind), batch.named(int(pipeline), int(index)))


def orders_of(text, batch):
    """What ``format_orders`` printed; rows may come in any order, and ``#`` starts a comment."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    rows = [line.split(":") for line in lines if line]
    read = {WorkerId.parse(name): tuple(op_of(op, batch) for op in ops.split()) for name, ops in rows}
    return Orders(tuple(sorted(read.items())))


def printed(instructions):
    """One worker's instructions, separated by blanks."""
    return " ".join(map(str, instructions))


def instructions_of(text, batch, reductions=()):
    """What :func:`printed` printed; it does not say who takes part in a reduction."""
    known = {reduction.name: reduction for reduction in reductions}
    return tuple(_instruction(word, batch, known) for word in text.split())


def _instruction(word, batch, known):
    if word.startswith(("SEND_", "RECV_")):
        return _message(word, batch)
    kind, _, rest = word.partition("_")
    if kind in ("REDUCE", "SUM"):
        return {"REDUCE": Reduce, "SUM": Sum}[kind](known[rest])
    return UpdateLayer(int(rest.removeprefix("L"))) if kind == "STEP" else Compute(op_of(word, batch))


def _message(word, batch):
    kind, payload, pipeline, index, peer = _MESSAGE.fullmatch(word).groups()
    place = int(pipeline), int(index)
    name = batch.named(*place) if batch.has(*place) else beside(*place)
    return {"SEND": Send, "RECV": Receive}[kind](Payload(payload), name, WorkerId.parse(peer))
