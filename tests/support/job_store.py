"""Jobs, chunks and stores for the tests of the store of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpool.broker.store.operations import Finish, Operation, Progress, Submit
from mlxpool.broker.store.records import Chunk, JobState, JobView, Result, Scope, Submitted
from mlxpool.broker.store.sql.sql_store import Opener, SqlStore
from mlxpool.common.protocol.token_ids import pack_ids

BOOT = 7
BEGIN = 1_000_000.0  # the time at which the tests open stores, in seconds
MAX_BYTES = 256 * 1024 * 1024
RESERVE = 1024 * 1024
FOREVER = 10_000.0


def job_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def submit(number: int, owner: str = "a", **fields: Any) -> Submit:
    """Returns the operation that submits job `number`; id and key of the job have this number."""
    of: dict[str, Any] = {
        "scope": Scope(owner, "", f"key-{number}"),
        "digest": b"digest",
        "kind": "generate",
        "model": "m",
        "request": b"request %d" % number,
        "seed": number,
        "keep": FOREVER,
    }
    return Submit(job_id(number), **{**of, **fields})


def token(number: int, pos: int) -> int:
    """Returns the token id of job `number` at a position."""
    return (number * 1_000_003 + pos * 7) % 2**32


def chunk(number: int, pos: int, count: int = 4, step: int = 2) -> Chunk:
    """Returns `count` ids of the output of job `number` from `pos` on, in steps of `step` ids.

    The text of an id is its position, as `<7>`.
    """
    texts = [f"<{pos + i}>" for i in range(count)]
    ends = [min(i + step, count) for i in range(0, count, step)]
    borders = tuple((end, len("".join(texts[:end]))) for end in ends)
    ids = pack_ids(token(number, pos + i) for i in range(count))
    return Chunk(pos, ids, "".join(texts), borders)


def progress(number: int, pos: int, count: int = 4, gen: int = 0, **fields: Any) -> Progress:
    return Progress(job_id(number), gen, chunk(number, pos, count), **fields)


def finish(number: int, state: JobState = JobState.DONE, **fields: Any) -> Finish:
    return Finish(job_id(number), fields.pop("gen", 0), state, b"end", **fields)


class OpenedStore:
    """A store without its thread; it performs operations immediately, at the time `now`."""

    def __init__(self, make_opener: Callable[..., Opener]) -> None:
        self._make_opener = make_opener
        self.now = BEGIN
        self.opener: Opener | None = None
        self.open()

    def open(self, boot: int = BOOT, **settings: Any) -> None:
        """Closes the store and opens it again, as a broker that starts at `now` does."""
        self.close()
        self.opener = self._make_opener(**settings)
        self.store: SqlStore = self.opener.open()
        self.store.begin(boot, self.now)

    def do(self, *operations: Operation) -> list[Result]:
        """Performs operations in one transaction."""
        return self.store.transaction(operations, self.now)

    def one(self, operation: Operation) -> Any:
        """Performs an operation; returns its result."""
        return self.do(operation)[0]

    def submitted(self, number: int, **fields: Any) -> JobView:
        """Submits a job, which must be accepted."""
        result = self.one(submit(number, **fields))
        assert isinstance(result, Submitted), result
        return result.job

    def close(self) -> None:
        if self.opener is not None:
            self.store.close()
            self.opener.close()
            self.opener = None
