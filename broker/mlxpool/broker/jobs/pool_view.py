"""The job manager's view of the pool. It changes nothing there."""

from __future__ import annotations

from typing import Protocol

from mlxpool.common.protocol.kept.job_work import Work


class PoolView(Protocol):
    """A view of the core, made by the broker's edge; tests have their own."""

    @property
    def admits(self) -> bool:
        """Returns whether the pool takes new work."""
        ...

    @property
    def poison_life(self) -> float:
        """Seconds for which a request that ended workers is refused."""
        ...

    @property
    def ack_grace(self) -> float:
        """Seconds for which a reader may have a full window without an ack."""
        ...

    def check(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        """Raises PoolError if a request may not become a job."""
        ...

    def model_of(self, name: str) -> str | None:
        """Returns the name under which a model runs; None for an unknown model."""
        ...

    def available(self, model: str, now: float) -> bool:
        """Returns whether a request for the model would be accepted."""
        ...

    def places(self, model: str) -> int:
        """Returns how many requests its ready workers run at once."""
        ...

    def may_answer(self, model: str) -> bool:
        """Returns whether jobs of the model may be calls that have answers, such as `embed`."""
        ...

    def free(self, model: str) -> int:
        """Returns how many more requests they could run now, less the requests in its queue."""
        ...

    def is_outranked(self, id: bytes) -> bool:
        """Returns whether requests of a higher rank (`rank_of`) wait for a running job's model."""
        ...

    def loads_freely(self, model: str) -> bool:
        """Returns whether a worker of it can start without the end of another model's worker."""
        ...

    def link_known(self, link: int) -> bool:
        """Returns whether a client was heard from lately."""
        ...
