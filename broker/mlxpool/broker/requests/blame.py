"""Which requests are charged for the end of a worker, and what follows from a charge. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.broker.requests.request import IDLE_RANK

ALONE_CHARGE = 1.0  # from this charge on a request runs alone
POISON_CHARGE = 2.0  # at this charge a request is refused
MAX_RESUMES = 2  # in a row without a new token
MAX_RESUMES_ALONE = 4  # the same of a request that runs alone: its worker's next end decides
MAX_WAIT = (
    30.0  # seconds for which the run of a charged job lets requests of a higher rank go first
)
MAX_WAIT_IDLE = 300.0  # the same of an idle job: each turn of it empties a worker


def shares(ids: Sequence[bytes], in_prefill: bytes | None) -> dict[bytes, float]:
    """The charge of each request or call that a worker ran when it ended by itself.

    The one in prefill is charged 1 and the others nothing; without one, each of n is charged 1/n.
    """
    if in_prefill in ids:
        return {id: float(id == in_prefill) for id in ids}
    return {id: 1 / len(ids) for id in ids}


def batch_bound(charge: float) -> int:
    """How many may run together with a request of this charge; 0: any.

    That is a quarter of those among which its charge was divided, and one for a second charge. It
    follows from the charge alone, which is what a job keeps of the brokers before this one.
    """
    if charge <= 0:
        return 0
    return 1 if charge >= ALONE_CHARGE else max(1, round(1 / charge) // 4)


def max_wait(rank: int) -> float:
    """Seconds for which a charged job of this rank (see `rank_of`) lets others go first."""
    return MAX_WAIT_IDLE if rank == IDLE_RANK else MAX_WAIT


def max_resumes(charge: float) -> int:
    """How many resumes in a row without a new token a request of this charge may have."""
    return MAX_RESUMES if charge < ALONE_CHARGE else MAX_RESUMES_ALONE
