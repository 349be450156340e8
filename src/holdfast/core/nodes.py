"""Nodes, and the processes on them: each by a name that nobody else ever has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.errors import ConfigError

__all__ = ["NodeId", "Process"]

_NAME = re.compile(r"[!-~]{1,255}")
_NONCE = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, order=True)
class NodeId:
    """A node, as long as one agent is there for it: a machine, or a part of one.

    Attributes:
        name: for people; whoever takes a node's place may have its name, too.
        nonce: 16 hexadecimal digits that its agent has drawn, which tell it from all others; parts of one machine, for
            all of which one agent is there, have that in common.
    """

    name: str
    nonce: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name[:80]!r} is no node's name: expected 1 to 255 printable characters, no space")
        _check_nonce(self.nonce)

    def __str__(self) -> str:
        return self.name

    def shares_agent(self, other: NodeId) -> bool:
        """Whether the same agent is there for both."""
        return self.nonce == other.nonce


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process of a worker, or of an agent, on one node.

    Its number alone would not do: other nodes give the same numbers, in containers mostly the same ones, and a node
    gives one again once its process has ended.

    Attributes:
        node: on which it runs.
        pid: its number there.
        nonce: 16 hexadecimal digits that were drawn for it.
    """

    node: NodeId
    pid: int
    nonce: str

    def __post_init__(self) -> None:
        _check_nonce(self.nonce)

    def __str__(self) -> str:
        return str(self.pid)


def _check_nonce(nonce: str) -> None:
    if not _NONCE.fullmatch(nonce):
        raise ConfigError(f"{nonce[:80]!r} is no nonce: expected 16 hexadecimal digits")
