"""What the edge and the compute thread tell each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.engine.sequence import Sequence
from mlxpool.worker.prompt.detokenizer import Completion

Key = tuple[bytes, int]  # (id, attempt)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt; `restore_at` of them lie before the generation prompt, 0: unknown.

    `thinks`: its end leaves the model within its thoughts.
    """

    ids: list[int]
    restore_at: int = 0
    thinks: bool = False


Fits = Callable[[int], None]  # told how many ids a prompt has; raises if these are too many


def any_size(size: int) -> None:
    """Every prompt fits."""


class TextModel(Protocol):
    """Tokenizer and templates of a model; used by the edge's side only.

    A list of many ids holds the interpreter for milliseconds: `fits` is asked before one is made.
    """

    def warm_up(self) -> None:
        """Called once by the thread that will ask for prompts, so that the first one is quick."""

    def encode(self, text: str, fits: Fits = any_size) -> list[int]: ...

    def decode(self, ids: Seq[int]) -> str: ...

    def piece(self, token: int) -> bytes: ...

    def chat(
        self, messages: Any, tools: Any, now: float, fits: Fits = any_size, think: Any = None
    ) -> Prompt: ...


# ---- to the compute thread ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """A prepared sequence; `facts` go out with its first ids.

    `text` has replayed the ids that the sequence begins with: the client has their text already.
    `received` and `deadline` are monotonic seconds.
    """

    sequence: Sequence
    facts: Mapping[str, Any]
    text: Completion
    received: float
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop this run; it ends `cancelled`."""

    key: Key


@dataclass(frozen=True, slots=True)
class DropAll:
    """Forget every run without a word; what is made from now on is of `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class HandBack:
    """Stop every run where it stands, without an end; answered by `HandedBack`."""


Inbound = Admit | Drop | DropAll | HandBack

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
    """What one step made, for every sequence that got something.

    `generation` counts the links to the broker: what was made for an old one must not go out
    under a new one.
    """

    rows: Seq[Delta]
    generation: int = 0


@dataclass(frozen=True, slots=True)
class HandedBack:
    """No run is left, and no row of one will follow."""

    generation: int = 0


Outbound = Opened | Loaded | Unusable | Rows | HandedBack
