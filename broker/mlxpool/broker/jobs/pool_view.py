"""The job manager's read-only view of the pool."""

from __future__ import annotations

from typing import Protocol

from mlxpool.common.protocol.kept.job_work import Work


class PoolView(Protocol):
    """A view of the core, implemented by the broker's edge, and by tests."""

    @property
    def admits(self) -> bool:
        """Returns whether the pool takes new work."""
        ...

    @property
    def poison_life(self) -> float:
        """Seconds for which a request that has ended workers stays refused."""
        ...

    @property
    def ack_grace(self) -> float:
        """Seconds for which a reader with a full flow-control window may go without an ack."""
        ...

    def check(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        """Raises PoolError if a request may not become a job."""
        ...

    def model_of(self, name: str) -> str | None:
        """Returns the name under which the pool runs a model; None for an unknown model."""
        ...

    def available(self, model: str, now: float) -> bool:
        """Returns whether the core would accept a request for the model."""
        ...

    def places(self, model: str) -> int:
        """Returns the number of batch slots of the model's ready workers."""
        ...

    def may_answer(self, model: str) -> bool:
        """Returns whether the model's jobs may be calls whose answers are blobs, as for `embed`."""
        ...

    def free(self, model: str) -> int:
        """Returns the free batch slots of the model's ready workers, less its queued requests."""
        ...

    def is_outranked(self, id: bytes) -> bool:
        """Returns whether requests of a higher rank (`rank_of`) wait for the job's model."""
        ...

    def loads_freely(self, model: str) -> bool:
        """Returns whether a worker of the model can start without unloading another model."""
        ...

    def link_known(self, link: int) -> bool:
        """Returns whether the core knows this client's link: it has sent a frame recently."""
        ...
