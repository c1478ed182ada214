"""The counts of jobs for the status page, `ps`, `top` and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from mlxpool.broker.store.records import JobState, StoreFigures

UNUSABLE = "unusable"  # the pool has no jobs until the broker restarts; see JobFigures.why
REFUSING = "refusing"  # the store refuses new jobs for lack of room; running jobs go on


class JobFigures(Struct, frozen=True):
    """Counts of jobs by state, including the jobs of batches, and the bytes of the store.

    The fields are the keys of `jobs` in `ps` and `stats`.
    """

    waiting: int
    running: int
    done: int
    cancelled: int
    dead: int
    expired: int
    readers: int
    bytes: int  # bytes of the store on the disk
    max_bytes: int  # bound of the store in bytes
    notices: int = 0  # notices not delivered yet
    notices_given_up: int = 0
    store: str = "ok"  # opening | ok | refusing | full | failed | fenced | closed | unusable
    batches: int = 0  # batches that have not ended
    room: int = 0  # bytes that new jobs may still use; 0: new jobs are refused
    refused: Mapping[str, int] = field(default_factory=dict)  # refused submissions by error code

    why: str = ""  # the cause of an unusable store

    @classmethod
    def none(cls, why: str) -> JobFigures:
        """Returns the figures of a pool that cannot use its configured store, because of `why`."""
        return cls(0, 0, 0, 0, 0, 0, 0, 0, 0, store=UNUSABLE, why=why)

    @classmethod
    def of(
        cls,
        stored: StoreFigures,
        running: int,
        readers: int,
        batches: int,
        refused: Mapping[str, int],
    ) -> JobFigures:
        counts = dict(stored.states)
        waiting = counts.get(JobState.WAITING, 0)
        ended = (JobState.DONE, JobState.CANCELLED, JobState.DEAD, JobState.EXPIRED)
        done, cancelled, dead, expired = (counts.get(state, 0) for state in ended)
        return cls(
            max(0, waiting - running),
            running,
            done,
            cancelled,
            dead,
            expired,
            readers,
            stored.used,
            stored.bound,
            stored.notices,
            stored.given_up,
            "ok" if stored.room or not stored.bound else REFUSING,
            batches,
            stored.room,
            dict(refused),
        )
