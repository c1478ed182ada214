"""What the job manager sees of the pool. It changes nothing there."""

from __future__ import annotations

from typing import Protocol

from mlxpool.common.protocol.kept.job_work import Work


class PoolView(Protocol):
    """Made by the broker's edge around the core; tests have one of their own."""

    @property
    def admits(self) -> bool:
        """Whether the pool takes new work."""
        ...

    @property
    def poison_life(self) -> float:
        """Seconds for which a request that ended workers is refused."""
        ...

    @property
    def ack_grace(self) -> float:
        """Seconds that a reader may be behind its window without an ack."""
        ...

    def check(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        """Raises PoolError for a request that may not become a job."""
        ...

    def model_of(self, name: str) -> str | None:
        """The name under which a model runs; None if there is no such model."""
        ...

    def available(self, model: str, now: float) -> bool:
        """Whether a request for the model would be accepted."""
        ...

    def places(self, model: str) -> int:
        """How many requests its ready workers run at once."""
        ...

    def may_answer(self, model: str) -> bool:
        """Whether jobs of the model may be calls that have answers, such as `embed`."""
        ...

    def free(self, model: str) -> int:
        """How many more they could be given now, without what waits in its queue already."""
        ...

    def is_outranked(self, id: bytes) -> bool:
        """Whether requests of a higher rank (`rank_of`) wait for the model of a job that runs."""
        ...

    def loads_freely(self, model: str) -> bool:
        """Whether a worker of it can be started without the end of another model's."""
        ...

    def link_known(self, link: int) -> bool:
        """Whether a client was heard from lately."""
        ...
