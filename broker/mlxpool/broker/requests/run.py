"""The work of a request: the ids made so far, and the lease of the worker that makes more."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import count_of


@dataclass(eq=False, slots=True)
class Run:
    """A completion in the making, over all workers that it is given to.

    `ids` are the packed ids received from workers, delivered or not: a resume is made of the
    message, the seed, the facts and these. The lease (`epoch`, `slot`, `number`) names the worker
    that runs it; `number` identifies the run there and is never used twice.
    """

    seed: int
    ids: bytearray = field(default_factory=bytearray)
    facts: Facts | None = None  # of its first worker
    prompt_tokens: int = 0
    epoch: int = 0  # 0: no worker has it
    slot: str = ""
    number: int = 0
    tries: int = 0  # times it was given to a worker
    resumes_without_progress: int = 0  # in a row
    charge: float = 0.0  # how far the ends of workers speak against it; see `blame`
    batch_bound: int = 0  # runs that a worker may hold together with it, itself included; 0: any
    assigned_at: float = 0.0  # first given to a worker; 0: not yet
    first_token_at: float = 0.0  # 0: no token yet
    measured_ids: int = 0  # ids that the histograms have counted
    measured_at: float = 0.0  # when the newest of these came; 0: none came

    @property
    def taken(self) -> int:
        """How many ids were received from workers."""
        return count_of(self.ids)

    def lease(self, epoch: int, slot: str, number: int) -> None:
        """A worker has it now."""
        self.epoch, self.slot, self.number = epoch, slot, number
        self.tries += 1

    def release(self) -> None:
        """No worker has it any more."""
        self.epoch, self.slot, self.number = 0, "", 0

    def leased_by(self, epoch: int, number: int) -> bool:
        return self.epoch == epoch and self.number == number
