"""The settings of jobs, as they are in force."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.common.web_targets import Allowed


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """Settings of jobs, see PoolConfig. Times are seconds; a quota of 0 is none."""

    keep: float
    keep_max: float
    quota_jobs: int = 0
    quota_file_bytes: int = 0
    notify_url: str = ""  # of jobs that name none
    notify_for: float = 86400.0  # seconds after the end, until a notice is given up
    notify_allowed: Allowed = Allowed()  # noqa: RUF009  # frozen

    def kept(self, keep_ms: int | None) -> float:
        """Seconds for which something is kept of which a client says so, or nothing."""
        return min(self.keep if keep_ms is None else keep_ms / 1000, self.keep_max)
