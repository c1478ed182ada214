"""Events: what can happen to jobs. Frozen, without behaviour. Results of the store come apart."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.kept.kept_questions import Question
from mlxpool.common.protocol.to_client import Done, Failed


class Asked(Struct, frozen=True):
    """A client asks about jobs, files or batches.

    `message` is the error that parsing raised if the body is bad. `new_id` and `seed` are drawn; a
    job that is new gets them. `operator`: an operator asks, who may look at and change the jobs of
    all; then `owner` is the one that the question names. `submits`: it submits a job, a batch or a
    part of a file, also one whose body is bad; such questions are counted when they are refused.
    """

    link: int
    owner: str
    id: bytes
    attempt: int
    message: Question | job_operations.Question | PoolError
    new_id: bytes = b""
    seed: int = 0
    operator: bool = False
    submits: bool = False


class Acknowledged(Struct, frozen=True):
    """A client has read so many ids in all, of each of these readings."""

    link: int
    have: Sequence[tuple[bytes, int]]


class ReaderLeft(Struct, frozen=True):
    """A client ends its reading; the job goes on."""

    link: int
    owner: str
    id: bytes


class Output(Struct, frozen=True):
    """Rows of jobs that run, from the core."""

    rows: Sequence[Delta]


class RunEnded(Struct, frozen=True):
    """The core has ended the run of a job, or refused it."""

    id: bytes
    attempt: int
    terminal: Done | Failed


class SetBack(Struct, frozen=True):
    """A worker that ran a job was lost; its run goes on, or `RunEnded` follows.

    `stacks` are those of its threads if it hung or crashed on this machine, "" else.
    """

    id: bytes
    attempt: int
    charge: float
    cause: str
    stacks: str = ""


class Posted(Struct, frozen=True):
    """A try to post a notice is over. `why` it failed; `final`: no other try can help.

    `unreachable`: no notice to its origin can be delivered now.
    """

    end_seq: int
    delivered: bool
    why: str = ""
    final: bool = False
    retry_after: float = 0.0
    unreachable: bool = False


class StoreOpened(Struct, frozen=True):
    """The store takes operations: for the first time, or again after a failure of the disk."""


class StoreLost(Struct, frozen=True):
    """The store takes no operation: what is under way was refused, and stands as it was."""


class Closing(Struct, frozen=True):
    """The broker ends. `final`: no other broker follows."""

    final: bool


class Wake(Struct, frozen=True):
    """The time that `JobManager.next_wake` named has come, or the pool may have room."""


Event = (
    Asked
    | Acknowledged
    | ReaderLeft
    | Output
    | RunEnded
    | SetBack
    | Posted
    | StoreOpened
    | StoreLost
    | Closing
    | Wake
)
