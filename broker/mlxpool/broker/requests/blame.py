"""Charges: how much requests are to blame for lost workers, and the effects of that. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.broker.requests.request import IDLE_RANK

ALONE_CHARGE = 1.0  # least charge of a request that runs alone
POISON_CHARGE = 2.0  # least charge at which a request is refused
MAX_RESUMES = 2  # most consecutive resumes without a new token
MAX_RESUMES_ALONE = 4  # MAX_RESUMES of a request that runs alone: the next lost worker decides
MAX_WAIT = 30.0  # seconds for which a charged job yields to requests of a higher rank
MAX_WAIT_IDLE = 300.0  # MAX_WAIT of an idle job: each of its runs needs an empty worker


def shares(ids: Sequence[bytes], in_prefill: bytes | None) -> dict[bytes, float]:
    """Returns the charge (blame) of each request or call in a worker that ended by itself.

    A request in prefill is charged 1, all others 0. Without a request in prefill, each of n
    requests is charged 1/n.
    """
    if in_prefill in ids:
        return {id: float(id == in_prefill) for id in ids}
    return {id: 1 / len(ids) for id in ids}


def batch_bound(charge: float) -> int:
    """Returns the largest batch that may contain a request of this charge; 0 if there is no bound.

    When a worker ends, the requests of its batch share the charge. After a first such end the bound
    is a quarter of that batch, after a second it is 1. The bound is computed from the charge alone,
    because a job keeps only its charge when the broker restarts.
    """
    if charge <= 0:
        return 0
    return 1 if charge >= ALONE_CHARGE else max(1, round(1 / charge) // 4)


def max_wait(rank: int) -> float:
    """Returns the most seconds that a charged job of `rank` waits for requests of higher ranks."""
    return MAX_WAIT_IDLE if rank == IDLE_RANK else MAX_WAIT


def max_resumes(charge: float) -> int:
    """Returns how often in a row a request may be resumed without a new token.

    `charge`: the sum of the request's shares in the deaths of workers."""
    return MAX_RESUMES if charge < ALONE_CHARGE else MAX_RESUMES_ALONE
