"""What the core counts over all models. Pure.

The conservation law: accepted = done + failed + cancelled + live. Each request counts under the
name under which its model runs, whatever name it asked for, so sums over `models` are the totals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from mlxpool.broker.metrics.histograms import Figures
from mlxpool.broker.requests.request import Request, RequestState


@dataclass(eq=False, slots=True)
class Counters:
    """No value ever goes down."""

    accepted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0  # taken from workers
    prompt_tokens: int = 0  # of ended requests
    resumed: int = 0  # times a request was queued again because its worker was lost or drained
    preempted: int = 0  # times a request gave up its place for another owner
    fenced: int = 0  # frames of workers about an epoch or a run that no longer counts
    bad_frames: int = 0  # what was no message
    links_lost: int = 0
    auth_failures: int = 0  # hellos without a valid token, peers without a valid key
    internal_errors: int = 0  # events and actions that met a bug of ours
    rejected: Counter[str] = field(default_factory=Counter)  # by error code, never accepted
    failures: Counter[str] = field(default_factory=Counter)  # by error code, accepted
    queue_s: float = 0.0  # sums over ended requests
    total_s: float = 0.0
    models: dict[str, Figures] = field(default_factory=dict)

    def of(self, model: str) -> Figures:
        """Those of one model, by the name under which it runs.

        They are kept for ever: only for models that exist.
        """
        figures = self.models.get(model)
        if figures is None:
            figures = self.models[model] = Figures()
        return figures

    def accept(self, request: Request) -> None:
        self.accepted += 1
        self.of(request.model).accepted += 1

    def resume(self, request: Request) -> None:
        """It is queued again with the ids it has."""
        self.resumed += 1
        self.of(request.model).resumed += 1

    def preempt(self, request: Request) -> None:
        """It gave up its place for another owner and is queued again with the ids it has."""
        self.preempted += 1
        self.of(request.message.model).preempted += 1

    def end(self, request: Request, outcome: str, now: float) -> None:
        """Count an ended request once; `outcome` is its reason or its error's code."""
        run = request.run
        self.of(request.model).ended(request, outcome, now)
        if request.state is RequestState.DONE:
            self.done += 1
        elif request.state is RequestState.FAILED:
            self.failed += 1
        else:
            self.cancelled += 1
        self.prompt_tokens += run.prompt_tokens
        self.queue_s += max(0.0, (run.assigned_at or now) - request.accepted_at)
        self.total_s += now - request.accepted_at

    def copy(self) -> Counters:
        """The values of now, without those of single models."""
        rejected, failures = Counter(self.rejected), Counter(self.failures)
        return replace(self, rejected=rejected, failures=failures, models={})
