"""Charges of requests for ends of workers, and the effects of a charge. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.broker.requests.request import IDLE_RANK

ALONE_CHARGE = 1.0  # a request with at least this charge runs alone
POISON_CHARGE = 2.0  # at this charge a request is refused
MAX_RESUMES = 2  # most resumes in a row without a new token
MAX_RESUMES_ALONE = 4  # the same of a request that runs alone: its worker's next end decides
MAX_WAIT = (
    30.0  # seconds for which the run of a charged job lets requests of a higher rank go first
)
MAX_WAIT_IDLE = 300.0  # the same of an idle job: each turn of it empties a worker


def shares(ids: Sequence[bytes], in_prefill: bytes | None) -> dict[bytes, float]:
    """Returns the charge of each request or call that a worker ran when it ended by itself.

    The request in prefill is charged 1, the others 0. Without one, each of n is charged 1/n.
    """
    if in_prefill in ids:
        return {id: float(id == in_prefill) for id in ids}
    return {id: 1 / len(ids) for id in ids}


def batch_bound(charge: float) -> int:
    """Returns how many may run in a batch with a request of this charge, itself included; 0: any.

    This is a quarter of the batch that shared its charge, and 1 after a second charge. It follows
    from the charge alone, as a job keeps nothing else from earlier brokers.
    """
    if charge <= 0:
        return 0
    return 1 if charge >= ALONE_CHARGE else max(1, round(1 / charge) // 4)


def max_wait(rank: int) -> float:
    """Returns the most seconds that a charged job of `rank` waits for requests of higher ranks."""
    return MAX_WAIT_IDLE if rank == IDLE_RANK else MAX_WAIT


def max_resumes(charge: float) -> int:
    """Returns the most resumes in a row without a new token for this charge."""
    return MAX_RESUMES if charge < ALONE_CHARGE else MAX_RESUMES_ALONE
