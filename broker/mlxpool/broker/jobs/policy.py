"""The present settings of jobs."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.kept.job_messages import Notify
from mlxpool.common.web_targets import Allowed


class JobPolicy(Struct, frozen=True):
    """Settings of jobs, see PoolConfig. Times are seconds; a quota of 0 is unlimited."""

    keep: float
    keep_max: float
    quota_jobs: int = 0
    quota_file_bytes: int = 0
    notify_url: str = ""  # URL for notices of jobs and batches without their own URL
    notify_for: float = 86400.0  # seconds from a job's or batch's end until its notice is given up
    notify_allowed: Allowed = Allowed()  # frozen

    def told(self, notify: Notify | None) -> str:
        """Returns the URL that is notified when a job ends; "" if none is notified.

        Raises BadRequest if the URL is not allowed.
        """
        if notify is None:
            return self.notify_url
        if refused := self.notify_allowed.refusal(notify.target):
            raise BadRequest(f"notify.url: {refused}, the hosts that may get notices")
        return notify.url

    def kept(self, keep_ms: int | None) -> float:
        """Returns the seconds for which a result or file is kept.

        `keep_ms`: the client's request.
        """
        return min(self.keep if keep_ms is None else keep_ms / 1000, self.keep_max)

    def keep_warning(self, keep_ms: int | None) -> tuple[str, ...]:
        """Returns the warning for a client that asks for more than `keep_max` seconds."""
        if keep_ms is None or keep_ms / 1000 <= self.keep_max:
            return ()
        return (
            f"keep is {keep_ms / 1000:.0f} s; the result is kept for {self.keep_max:.0f} s"
            " (job_keep_max)",
        )
