"""The core's counters: totals over all models, and figures of each model. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.common.errors import BY_CODE
from mlxpool.common.metrics import Histogram
from mlxpool.common.protocol.token_ids import ID_WIDTH


@dataclass(eq=False, slots=True)
class Counters:
    """The counters over all models. No value ever decreases.

    Invariant: accepted = done + failed + cancelled + live. Each request counts under its model's
    own name, whatever name the client used, so sums over `models` are the totals.
    """

    accepted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0  # received from workers
    prompt_tokens: int = 0  # prompt tokens of ended requests
    resumed: int = 0  # requeued requests after a worker was lost or drained
    preempted: int = 0  # requeued requests in favour of another owner
    fenced: int = 0  # frames of workers with an outdated epoch or run
    bad_frames: int = 0  # frames that are not messages
    links_lost: int = 0
    auth_failures: int = 0  # `hello` without a valid token, connections without a valid key
    internal_errors: int = 0  # events and actions that raised because of a bug
    rejected: Counter[str] = field(default_factory=Counter)  # refused requests, by code
    failures: Counter[str] = field(default_factory=Counter)  # failed requests, by code
    queue_s: float = 0.0  # seconds, summed over ended requests
    total_s: float = 0.0
    models: dict[str, Figures] = field(default_factory=dict)

    def of(self, model: str) -> Figures:
        """Returns the figures of a model by the model's own name.

        The figures are kept for ever, so the name must be that of an existing model.
        """
        figures = self.models.get(model)
        if figures is None:
            figures = self.models[model] = Figures()
        return figures

    def accept(self, request: Request) -> None:
        self.accepted += 1
        self.of(request.model).accepted += 1

    def resume(self, request: Request) -> None:
        """Counts a resume: a request that is queued again with its ids."""
        self.resumed += 1
        self.of(request.model).resumed += 1

    def preempt(self, request: Request) -> None:
        """Counts a preemption: a request is queued again in favour of another owner."""
        self.preempted += 1
        self.of(request.message.model).preempted += 1

    def end(self, request: Request, outcome: str, now: float) -> None:
        """Counts an ended request. `outcome`: the reason of its end, or the code of its error."""
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
        """Returns a copy of the totals, without the figures of models."""
        rejected, failures = Counter(self.rejected), Counter(self.failures)
        return replace(self, rejected=rejected, failures=failures, models={})


# ---- figures of one model ------------------------------------------------------------------------


# Upper bounds, seconds.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
# Upper bounds, tokens: 1, 2, 5, 10 … 500,000.
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

OTHER = "other"  # a reason or code of a worker that this version does not know
OUTCOMES = frozenset({"stop", "length", "cancelled", *BY_CODE})


class Figures:
    """Counts and histograms of a model since the broker's start. Times are seconds.

    No value decreases, and no data of single requests is kept. The bucket bounds are vLLM's, so
    that its dashboards and alerts fit. `INTER_TOKEN` has three additional low bounds, for small
    models.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.resumed = 0
        self.preempted = 0  # requeued requests in favour of another owner
        self.tokens = 0  # received from workers
        self.prompt_tokens = 0  # number of prompt tokens of ended requests
        self.outcomes: Counter[str] = Counter()  # ended streams by reason or error code
        self.queue = Histogram(REQUEST)  # seconds from acceptance to assignment to a worker
        self.first_token = Histogram(FIRST_TOKEN)  # seconds from acceptance to first token
        self.inter_token = Histogram(INTER_TOKEN)  # seconds between two tokens of a request
        self.prefill = Histogram(REQUEST)  # seconds from assignment to first token
        self.decode = Histogram(REQUEST)  # seconds from first token to end
        self.inference = Histogram(REQUEST)  # assignment to end
        self.whole = Histogram(REQUEST)  # acceptance to end
        self.prompts = Histogram(TOKENS)  # prompt tokens of requests that got a token
        self.completions = Histogram(TOKENS)  # tokens of requests that got a token

    def assigned(self, request: Request, now: float) -> None:
        """Records the waiting time of a request that was assigned to its first worker."""
        self.queue.observe(now - request.accepted_at)

    def tokens_came(self, request: Request, now: float) -> None:
        """Records the intervals between new token ids of a run.

        The ids of several decode steps may come together, at one time. The interval since the ids
        before them is then divided equally among them.
        """
        run = request.run
        count = len(run.ids) // ID_WIDTH - run.measured_ids
        if count <= 0:
            return
        if run.measured_at:
            self.inter_token.observe((now - run.measured_at) / count, count)
        else:
            self.first_token.observe(now - request.accepted_at)
            self.prefill.observe(now - run.assigned_at)
        run.measured_ids += count
        run.measured_at = now

    def ended(self, request: Request, outcome: str, now: float) -> None:
        """Records the figures of a request whose stream has its terminal message."""
        run = request.run
        self.outcomes[outcome if outcome in OUTCOMES else OTHER] += 1
        self.prompt_tokens += run.prompt_tokens
        self.whole.observe(now - request.accepted_at)
        if run.assigned_at:
            self.inference.observe(now - run.assigned_at)
        if run.first_token_at:
            self.decode.observe(now - run.first_token_at)
            self.prompts.observe(run.prompt_tokens)
            self.completions.observe(run.taken)
