"""The worker's heartbeat: when it is due, and its content."""

from __future__ import annotations

import psutil

from mlxpool.common.protocol.to_broker import Beat, ProgressSample
from mlxpool.worker.compute.progress import Progress

BEAT_INTERVAL = 1.0  # seconds


class Heartbeat:
    """Due every BEAT_INTERVAL, and whenever the compute thread changes its phase."""

    def __init__(self, progress: Progress, *, with_sample: bool) -> None:
        """`with_sample`: the broker cannot read the progress block, so beats carry its values."""
        self._progress = progress
        self._with_sample = with_sample
        self._process = psutil.Process()
        self._phase = ""
        self.next_at = BEAT_INTERVAL  # monotonic seconds

    def send_soon(self) -> None:
        """The next beat is due now: there is a new epoch."""
        self.next_at = BEAT_INTERVAL

    def is_due(self, now: float) -> bool:
        return now >= self.next_at or self._progress.phase != self._phase

    def beat(self, now: float, preparing: int, prepare_memory: int = 0) -> Beat:
        """The beat that is sent now; `preparing` runs wait for the compute thread.

        `prepare_memory`: resident bytes of the processes that prepare requests.
        """
        progress = self._progress
        self._phase, self.next_at = progress.phase, now + BEAT_INTERVAL
        return Beat(
            phase=progress.phase,
            phase_age_ms=round((now - progress.since) * 1000),
            progress=progress.count,
            prefill=progress.in_prefill,
            step_ms=progress.step_ms,
            running=progress.running,
            waiting=progress.waiting + preparing,
            layout=progress.layout,
            memory={
                **progress.memory,
                "rss": self._process.memory_info().rss,
                "prepare": prepare_memory,
            },
            prefix=progress.prefix,
            look=self._sample() if self._with_sample else None,
        )

    def _sample(self) -> ProgressSample:
        now = self._progress.block.read()
        return ProgressSample(now.tokens, now.fresh, now.usual_token_ns, now.usual_step_ns)
