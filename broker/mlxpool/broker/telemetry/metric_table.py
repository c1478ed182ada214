"""The broker's metrics: a table with the name, the labels and the values of each metric.

A new metric is recorded in metrics.py and listed here. docs/metrics.md is made from this table
(`make pages`).

Names and buckets are vLLM's, with `mlxpool_` for `vllm:` and `model` for `model_name`. A label has
few values, all known beforehand: models, slots, states, kinds, codes. A label is never an id, an
owner or a process.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.jobs.figures import REFUSING, UNUSABLE, JobFigures
from mlxpool.broker.metrics import OTHER
from mlxpool.broker.telemetry.snapshot import (
    GatewayInfo,
    ModelSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from mlxpool.common.errors import BY_CODE
from mlxpool.common.metrics import COUNTER, GAUGE, HISTOGRAM, PROCESS, Family, Rows, Value

REASONS = ("stop", "length", "cancelled")
BROKER_STATES = ("ready", "draining", "stopping")
MODEL_STATES = ("cold", "starting", "ready", "draining", "drained", "failed", "broken")
NOTICE_STATES = ("waiting", "given_up")  # state of notices of ended jobs and batches
JOB_STATES = ("waiting", "running", "done", "cancelled", "dead", "expired")
WORKER_STATES = ("starting", "loading", "ready", "suspect", "condemned", "draining")
CODES = tuple(BY_CODE)
FAILURES = (*CODES, OTHER)
MEMORY = (
    "weights", "kv", "prefix", "compute", "total",  # the sum of the kinds before `total`
    "kv_used", "images", "draft", "active", "cache", "peak", "rss", "prepare",
)  # fmt: skip


def _pool(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes one row, with a value of the whole pool."""
    return lambda snapshot: [((), float(value(snapshot)))]


def _model(value: Callable[[ModelSnapshot], Value]) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: (((model.name,), value(model)) for model in snapshot.models)


def _count(key: str) -> Callable[[Snapshot], Rows]:
    return _model(lambda model: model.counts[key])


def _histogram(key: str) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: (
        ((model.name,), model.histograms[key]) for model in snapshot.models if model.histograms
    )


def _worker(value: Callable[[WorkerSnapshot], int]) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: (((w.model, w.slot), value(w)) for w in snapshot.workers)


def _beat(value: Callable[[WorkerSnapshot], int | None]) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes a row for each worker whose value is not None."""

    def rows(snapshot: Snapshot) -> Rows:
        for worker in snapshot.workers:
            number = value(worker)
            if number is not None:
                yield (worker.model, worker.slot), number

    return rows


def _outcomes(names: tuple[str, ...]) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes a row for each model: its numbers of ended streams, by outcome.

    Numbers that are 0 are included, because a Prometheus rate needs them. Models without any
    request so far have no row.
    """
    return lambda snapshot: (
        ((model.name,), [model.outcomes.get(name, 0) for name in names])
        for model in snapshot.models
        if model.histograms
    )


def _rejected(snapshot: Snapshot) -> Rows:
    yield (), [snapshot.counters.rejected.get(code, 0) for code in CODES]


def _broker_states(snapshot: Snapshot) -> Rows:
    yield (), [int(snapshot.broker.state == state) for state in BROKER_STATES]


def _gateway(value: Callable[[GatewayInfo], float]) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes a row with a value of the gateway; no row without a gateway."""
    return lambda snapshot: (
        [] if snapshot.gateway is None else [((), float(value(snapshot.gateway)))]
    )


def _jobs(value: Callable[[JobFigures], Value]) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes a row with a figure of the jobs.

    It makes no row without a usable store of jobs.
    """

    def rows(snapshot: Snapshot) -> Rows:
        if snapshot.jobs is not None and snapshot.jobs.store != UNUSABLE:
            yield (), value(snapshot.jobs)

    return rows


def _job_store_up(snapshot: Snapshot) -> Rows:
    """Yields 1 if the store of jobs is usable, else 0; nothing without a configured store."""
    if snapshot.jobs is not None:
        yield (), int(snapshot.jobs.store in ("ok", REFUSING))


def _model_states(snapshot: Snapshot) -> Rows:
    return (
        ((model.name,), [int(model.state == state) for state in MODEL_STATES])
        for model in snapshot.models
    )


def _worker_states(snapshot: Snapshot) -> Rows:
    return (
        ((model.name,), [model.workers.get(state, 0) for state in WORKER_STATES])
        for model in snapshot.models
    )


def _load_phases(snapshot: Snapshot) -> Rows:
    for worker in snapshot.workers:
        for phase, seconds in worker.load_phases.items():
            yield (worker.model, worker.slot, phase), seconds


def _memory(snapshot: Snapshot) -> Rows:
    for worker in snapshot.workers:
        memory = worker.memory
        for kind in MEMORY:
            if kind in memory:
                yield (worker.model, worker.slot, kind), memory[kind]


def _gpus(snapshot: Snapshot) -> Rows:
    for worker in snapshot.workers:
        for gpu in worker.gpus:
            yield (worker.model, worker.slot, gpu), 1


def _kv_usage(snapshot: Snapshot) -> Rows:
    for worker in snapshot.workers:
        memory = worker.memory
        for_sequences = memory.get("limit", 0) - memory.get("weights", 0)
        if for_sequences > 0 and "kv" in memory:
            yield (worker.model, worker.slot), memory.get("kv_used", memory["kv"]) / for_sequences


def _kinds_of_kv(snapshot: Snapshot) -> Rows:
    return (((model.name, model.kv), 1) for model in snapshot.models)


def _queries(worker: WorkerSnapshot) -> int | None:
    prefix = worker.prefix
    return prefix.get("hits", 0) + prefix.get("misses", 0) if prefix else None


def _disk(name: str) -> Callable[[Snapshot], Rows]:
    """Returns a function that makes rows with a counter of the disk tier of the prefix cache.

    Workers without a disk tier have no row.
    """
    return _beat(lambda worker: worker.prefix.get(f"disk_{name}"))


_MODEL, _WORKER = ("model",), ("model", "worker")

BROKER = (
    Family("mlxpool_build_info", GAUGE, "Versions of the broker and its libraries; always 1",
           ("version", "python", "pyzmq", "libzmq"), lambda s: [(s.versions, 1.0)]),
    Family("mlxpool_broker_state", GAUGE, "1 for the current state, 0 for the others",
           ("state",), _broker_states, BROKER_STATES),
    Family("mlxpool_broker_uptime_seconds", GAUGE, "Time since the broker's start",
           (), _pool(lambda s: s.broker.uptime_s)),
    Family("mlxpool_broker_loop_lag_seconds", GAUGE,
           "Longest time without a read of the sockets in the last 15 to 30 s",
           (), _pool(lambda s: s.lag)),
    Family("mlxpool_links", GAUGE, "Connections of clients", (), _pool(lambda s: s.broker.links)),
    Family("mlxpool_full_links", GAUGE,
           "Connections that are full now because their client does not read",
           (), _pool(lambda s: s.broker.full_links)),
    Family("mlxpool_backlog_bytes", GAUGE, "Bytes that wait for full connections, at most 256 MiB",
           (), _pool(lambda s: s.broker.backlog_bytes)),
    Family("mlxpool_given_up_total", COUNTER,
           "Connections that were closed because their clients read too little",
           (), _pool(lambda s: s.broker.given_up)),
    Family("mlxpool_links_lost_total", COUNTER, "Lost connections that had live streams",
           (), _pool(lambda s: s.counters.links_lost)),
    Family("mlxpool_front_shut_total", COUNTER,
           "Times that the front socket was closed because descriptors or memory were short",
           (), _pool(lambda s: s.broker.front_shut)),
    Family("mlxpool_turned_out_total", COUNTER,
           "Connections that were closed because they filled the broker's memory",
           (), _pool(lambda s: s.broker.turned_out)),
    Family("mlxpool_bad_frames_total", COUNTER, "Frames that are not messages of the protocol",
           (), _pool(lambda s: s.counters.bad_frames)),
    Family("mlxpool_fenced_total", COUNTER,
           "Frames of workers that were dropped because their epoch or run was outdated",
           (), _pool(lambda s: s.counters.fenced)),
    Family("mlxpool_auth_failures_total", COUNTER,
           "Refused connections without a valid key, and refused workers",
           (), _pool(lambda s: s.counters.auth_failures)),
    Family("mlxpool_internal_errors_total", COUNTER,
           "Events that failed because of a bug in the broker",
           (), _pool(lambda s: s.counters.internal_errors)),
    Family("mlxpool_poisoned_requests", GAUGE,
           "Requests that are refused because they ended workers",
           (), _pool(lambda s: s.sizes["poisoned"])),
    Family("mlxpool_requests_rejected_total", COUNTER, "Requests that were not accepted",
           ("error",), _rejected, CODES),
    Family("mlxpool_gateway_up", GAUGE,
           "1 while the broker's gateway is ready; absent if the broker runs none",
           (), _gateway(lambda gateway: gateway.state == "ready")),
    Family("mlxpool_gateway_restarts_total", COUNTER,
           "Unrequested exits of the broker's gateway",
           (), _gateway(lambda gateway: gateway.restarts)),
    Family("mlxpool_jobs", GAUGE, "Jobs in the store", ("state",),
           _jobs(lambda j: [int(getattr(j, state)) for state in JOB_STATES]), JOB_STATES),
    Family("mlxpool_batches", GAUGE, "Batches that have not ended", (), _jobs(lambda j: j.batches)),
    Family("mlxpool_job_readers", GAUGE,
           "Open streams that read jobs",
           (), _jobs(lambda j: j.readers)),
    Family("mlxpool_job_store_up", GAUGE, "1 while the store of jobs takes writes",
           (), _job_store_up),
    Family("mlxpool_job_store_bytes", GAUGE, "Bytes of the store of jobs on the disk",
           (), _jobs(lambda j: j.bytes)),
    Family("mlxpool_job_store_max_bytes", GAUGE, "Greatest size of the store of jobs: state_bytes",
           (), _jobs(lambda j: j.max_bytes)),
    Family("mlxpool_job_store_room_bytes", GAUGE,
           "Bytes that state_bytes and the disk leave for new jobs; 0: new jobs are refused",
           (), _jobs(lambda j: j.room)),
    Family("mlxpool_job_notices", GAUGE, "Notices that wait for their next try or were given up",
           ("state",), _jobs(lambda j: [j.notices, j.notices_given_up]), NOTICE_STATES),
    Family("mlxpool_job_submissions_refused_total", COUNTER,
           "Refused jobs, batches and parts of files, not counting bad lines of batches",
           ("error",), _jobs(lambda j: [j.refused.get(code, 0) for code in CODES]), CODES),
    *PROCESS,
)  # fmt: skip

MODELS = (
    Family("mlxpool_model_state", GAUGE, "1 for the current state, 0 for the others",
           ("model", "state"), _model_states, MODEL_STATES),
    Family("mlxpool_replicas_wanted", GAUGE,
           "Number of workers that the model should have; 0 if all connect from outside and"
           " replicas is a number",
           ("model",), _model(lambda model: model.replicas_wanted)),
    Family("mlxpool_workers", GAUGE, "Number of workers in each state",
           ("model", "state"), _worker_states, WORKER_STATES),
    Family("mlxpool_kv_cache_info", GAUGE, "The model's setting kv, auto or int8; always 1",
           ("model", "kv"), _kinds_of_kv),
    Family("mlxpool_requests_running", GAUGE, "Requests assigned to workers",
           _MODEL, _model(lambda model: model.running)),
    Family("mlxpool_requests_waiting", GAUGE, "Requests in the model's queue",
           _MODEL, _model(lambda model: model.waiting)),
    Family("mlxpool_requests_waiting_bytes", GAUGE, "Bytes of the prompts in the model's queue",
           _MODEL, _model(lambda model: model.waiting_bytes)),
    Family("mlxpool_requests_accepted_total", COUNTER, "Accepted streams",
           _MODEL, _count("accepted")),
    Family("mlxpool_requests_resumed_total", COUNTER,
           "Requests that returned to the queue because their worker was lost or drained",
           _MODEL, _count("resumed")),
    Family("mlxpool_requests_preempted_total", COUNTER,
           "Requests that returned to the queue to make room for another owner",
           _MODEL, _count("preempted")),
    Family("mlxpool_request_success_total", COUNTER, "Streams that ended with `done`",
           ("model", "reason"), _outcomes(REASONS), REASONS),
    Family("mlxpool_request_failures_total", COUNTER, "Streams that ended with `error`",
           ("model", "error"), _outcomes(FAILURES), FAILURES),
    Family("mlxpool_prompt_tokens_total", COUNTER, "Prompt tokens of ended requests",
           _MODEL, _count("prompt_tokens")),
    Family("mlxpool_generation_tokens_total", COUNTER, "Tokens received from workers",
           _MODEL, _count("tokens")),
    Family("mlxpool_request_queue_time_seconds", HISTOGRAM,
           "Time from a request's acceptance to its assignment to a worker",
           _MODEL, _histogram("queue")),
    Family("mlxpool_time_to_first_token_seconds", HISTOGRAM,
           "Time from a request's acceptance to its first token",
           _MODEL, _histogram("first_token")),
    Family("mlxpool_inter_token_latency_seconds", HISTOGRAM, "Time between two tokens of a stream",
           _MODEL, _histogram("inter_token")),
    Family("mlxpool_e2e_request_latency_seconds", HISTOGRAM,
           "Time from a request's acceptance to its end",
           _MODEL, _histogram("whole")),
    Family("mlxpool_request_prefill_time_seconds", HISTOGRAM,
           "Time from a request's assignment to its first token", _MODEL, _histogram("prefill")),
    Family("mlxpool_request_decode_time_seconds", HISTOGRAM,
           "Time from a request's first token to its end",
           _MODEL, _histogram("decode")),
    Family("mlxpool_request_inference_time_seconds", HISTOGRAM,
           "Time from a request's assignment to its end",
           _MODEL, _histogram("inference")),
    Family("mlxpool_request_prompt_tokens", HISTOGRAM, "Prompt tokens of requests that got a token",
           _MODEL, _histogram("prompts")),
    Family("mlxpool_request_generation_tokens", HISTOGRAM,
           "Completion tokens of requests that got a token",
           _MODEL, _histogram("completions")),
)  # fmt: skip

WORKERS = (
    Family("mlxpool_worker_restarts_total", COUNTER, "Unrequested exits of workers",
           _WORKER, _worker(lambda worker: worker.restarts)),
    Family("mlxpool_worker_load_seconds", GAUGE,
           "Duration of each phase of the load; of the current phase so far",
           ("model", "worker", "phase"), _load_phases),
    Family("mlxpool_worker_gpu_info", GAUGE,
           "A GPU that the broker assigned to a worker, one series for each rank; always 1",
           ("model", "worker", "gpu"), _gpus),
    Family("mlxpool_worker_memory_bytes", GAUGE, "Bytes of memory that a worker reports",
           ("model", "worker", "kind"), _memory),
    Family("mlxpool_worker_memory_limit_bytes", GAUGE, "Bound of the worker's memory in bytes",
           _WORKER, _beat(lambda worker: worker.memory.get("limit") or None)),
    Family("mlxpool_kv_cache_usage_ratio", GAUGE,
           "Share that running requests take of the memory that the weights leave, 0 to 1",
           _WORKER, _kv_usage),
    Family("mlxpool_preemptions_total", COUNTER,
           "Sequences that were preempted for others",
           _WORKER, _beat(lambda worker: worker.memory.get("preemptions"))),
    Family("mlxpool_prefix_cache_queries_total", COUNTER, "Prompts looked up in the prefix cache",
           _WORKER, _beat(_queries)),
    Family("mlxpool_prefix_cache_hits_total", COUNTER,
           "Prompts whose beginning was found in the prefix cache",
           _WORKER, _beat(lambda worker: worker.prefix.get("hits"))),
    Family("mlxpool_prefix_cache_tokens_total", COUNTER,
           "Prompt tokens that were found in the prefix cache",
           _WORKER, _beat(lambda worker: worker.prefix.get("tokens"))),
    Family("mlxpool_prefix_disk_bytes", GAUGE,
           "Bytes of the model's prefixes on disk, equal for all workers of one machine",
           _WORKER, _disk("bytes")),
    Family("mlxpool_prefix_disk_hits_total", COUNTER,
           "Prompts of which tokens were read from the disk",
           _WORKER, _disk("hits")),
    Family("mlxpool_prefix_disk_tokens_total", COUNTER,
           "Prompt tokens that were read from the disk",
           _WORKER, _disk("tokens")),
    Family("mlxpool_prefix_disk_read_bytes_total", COUNTER, "Bytes of prefixes that were read",
           _WORKER, _disk("read_bytes")),
    Family("mlxpool_prefix_disk_written_bytes_total", COUNTER,
           "Bytes of prefixes that were written",
           _WORKER, _disk("written_bytes")),
    Family("mlxpool_prefix_disk_bad_total", COUNTER,
           "Damaged or unreadable records of prefixes; each counts as a miss",
           _WORKER, _disk("bad")),
    Family("mlxpool_prefix_disk_dropped_total", COUNTER,
           "Records of prefixes that could not be written",
           _WORKER, _disk("dropped")),
    Family("mlxpool_spec_decode_drafts_total", COUNTER,
           "Times that a decode step checked a sequence's draft",
           _WORKER, _beat(lambda worker: worker.speculation.get("checks"))),
    Family("mlxpool_spec_decode_draft_tokens_total", COUNTER, "Draft tokens that were checked",
           _WORKER, _beat(lambda worker: worker.speculation.get("drafted"))),
    Family("mlxpool_spec_decode_accepted_tokens_total", COUNTER, "Draft tokens that were accepted",
           _WORKER, _beat(lambda worker: worker.speculation.get("accepted"))),
)  # fmt: skip

FAMILIES = (*BROKER, *MODELS, *WORKERS)
