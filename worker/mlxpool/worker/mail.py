"""What the edge and the compute thread tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from mlxpool.common.wire import Delta
from mlxpool.worker.sequence import Sequence

Key = tuple[bytes, int]  # (id, attempt)


class TextModel(Protocol):
    """Tokenizer and template of a model; used by the edge's side only."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Seq[int]) -> str: ...

    def piece(self, token: int) -> bytes: ...

    def render(self, messages: Any, now: float) -> str: ...


# ---- to the compute thread ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """A prepared sequence; `facts` go out with its first ids. `received` is monotonic seconds."""

    sequence: Sequence
    facts: Mapping[str, Any]
    received: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop this run; it ends `cancelled`."""

    key: Key


Inbound = Admit | Drop

# ---- to the edge -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The model's folder is sound; its weights are not loaded yet."""

    digest: str
    context: int
    vocab_size: int
    text: TextModel


@dataclass(frozen=True, slots=True)
class Loaded:
    """Ready for work; `sequences` may run at once."""

    sequences: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """The model cannot be served; `error` is the body of an error frame."""

    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one step made, for every sequence that got something."""

    rows: Seq[Delta]


Outbound = Opened | Loaded | Unusable | Rows
