"""The messages between the main thread and the compute thread."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.interface import Opened
from mlxpool.worker.scheduling.sequence import Sequence

RunKey = tuple[bytes, int]  # (request id, attempt): one attempt of a request in one worker


# ---- to the compute thread ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Run a prepared sequence; `facts` are sent with its first row.

    `detokenizer` has replayed the ids of a resume: the client has their text already.
    `received` and `deadline` are monotonic seconds.
    """

    sequence: Sequence
    facts: Facts
    detokenizer: Detokenizer
    received: float
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop one run; it ends `cancelled`."""

    key: RunKey


@dataclass(frozen=True, slots=True)
class DropAll:
    """Drop every run without a row; results carry the new `fence` from now on."""

    fence: int


@dataclass(frozen=True, slots=True)
class HandBack:
    """Stop every run without an end row; answered by `HandedBack`."""


Inbound = Admit | Drop | DropAll | HandBack

# ---- to the edge -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """Ready for work; `sequences` may run at once."""

    sequences: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """The model cannot be served, or no longer."""

    error: PoolError


@dataclass(frozen=True, slots=True)
class Rows:
    """The results of one step: at most one row a sequence.

    `fence` counts the connections to the broker: results for an older connection must not be sent
    over a newer one.
    """

    rows: Seq[Delta]
    fence: int = 0


@dataclass(frozen=True, slots=True)
class HandedBack:
    """No run is left, and no row will follow."""

    fence: int = 0


Outbound = Opened | Loaded | Unusable | Rows | HandedBack
