"""Events of jobs: frozen records without behaviour. Store results go to `JobManager.stored`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.kept.kept_questions import Question
from mlxpool.common.protocol.to_client import Done, Failed


class QuestionAsked(Struct, frozen=True):
    """A client asks about jobs, files or batches.

    `message` is the question, or the error of a body that cannot be parsed. `new_id` and `seed` are
    random values for a job that the question may make. `operator`: the sender is an operator, who
    may read and change the jobs of all owners; `owner` is then the owner that the question names.
    `submits`: the message was sent to submit a job, a batch or a part of a file, even if its body
    is bad. Refusals of such messages are counted.
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
    """A client has read output of jobs.

    `have` has pairs: the id of the client's request that reads a job, and the total number of token
    ids read.
    """

    link: int
    have: Sequence[tuple[bytes, int]]


class ReaderLeft(Struct, frozen=True):
    """A client stops reading a job. The job continues to run."""

    link: int
    owner: str
    id: bytes


class Output(Struct, frozen=True):
    """Deltas of running jobs, from the core."""

    rows: Sequence[Delta]


class RunEnded(Struct, frozen=True):
    """The core has ended the run of a job, or refused it."""

    id: bytes
    attempt: int
    terminal: Done | Failed


class SetBack(Struct, frozen=True):
    """A worker that ran a job was lost. Another worker continues the run, or `RunEnded` follows.

    `stacks` are the stacks of the worker's threads if it hung or crashed on this machine, else "".
    """

    id: bytes
    attempt: int
    charge: float
    cause: str
    stacks: str = ""


class Posted(Struct, frozen=True):
    """An attempt to post a notice has ended. `why`: the cause of its failure, else "".

    `final`: a retry cannot help. `unreachable`: no notice can reach its origin now.
    """

    end_seq: int
    delivered: bool
    why: str = ""
    final: bool = False
    retry_after: float = 0.0
    unreachable: bool = False


class StoreOpened(Struct, frozen=True):
    """The store accepts operations, for the first time or again after a disk failure."""


class StoreLost(Struct, frozen=True):
    """The store refuses operations. Operations under way were refused, and no job was changed."""


class Closing(Struct, frozen=True):
    """The broker ends. `final`: no other broker follows."""

    final: bool


class Wake(Struct, frozen=True):
    """The time of `JobManager.next_wake` has come, or the pool may have places for more jobs."""


Event = (
    QuestionAsked
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
