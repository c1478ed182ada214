"""Every setting, declared once: type, unit, bounds or choices, default and meaning.

To add a setting, add a field here and a line to deploy/mlxpool.toml, and run docs/make_pages.py.
These two files also make `mlxpool config`, the variables MLXPOOL_* and docs/configuration.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct, field

from mlxpool.common.config.bounds import (
    OneOf,
    Unit,
    Within,
    check_folder,
    check_gpu_ids,
    check_host_port,
)
from mlxpool.common.paths import default_prefix_dir, default_run_dir
from mlxpool.common.records import as_map
from mlxpool.common.transport.keys import PEERS

Bytes = Annotated[int, Unit.BYTES]
Seconds = Annotated[float, Unit.SECONDS]
Flag = Annotated[bool, Unit.FLAG]
GpuIds = Annotated[tuple[str, ...], Unit.IDS]

MAX_COUNT = 2**31 - 1
FAULTS = (  # faults that the `counting` model can inject
    "",
    "raise",  # an error inside the step
    "kill",  # SIGKILL to itself
    "stop",  # SIGSTOP to itself
    "exit",  # os._exit(0)
    "exit3",  # os._exit(3)
    "segfault",
    "abort",
    "lock",  # waits for a lock that is never released
    "native",  # hangs in native code, and releases the interpreter's lock
    "gil",  # hangs in native code, and holds the interpreter's lock
    "leak",  # allocates without end
    "device",  # the device is lost: every further step fails
    "slow",  # waits for 200 ms; not a failure
    "garbage",  # at stage send: sends a frame that is not a message
    "duplicate",  # at stage send: sends a frame twice
    "late",  # at stage send: sends a frame again after later frames
    "stale",  # at stage send: sends a frame again with the previous epoch
)
FAULT_STAGES = ("load", "accept", "prefill", "decode", "end", "after_end", "send")


class Counting(Struct, frozen=True):
    """Settings of the test model `counting`. It has no weights; token i is f(prompt, seed, i)."""

    # Milliseconds of a load, which has ten steps.
    load_ms: Annotated[int, Within(0, 10**7)] = 0
    # Microseconds for each prompt token.
    prefill_us: Annotated[int, Within(0, 10**9)] = 0
    # Microseconds of one decode step.
    step_us: Annotated[int, Within(0, 10**9)] = 1000
    # The most prompts of one prefill pass.
    joint: Annotated[int, Within(1, 1024)] = 1
    # The number of token ids; each id is below this number.
    vocab: Annotated[int, Within(256, MAX_COUNT)] = 50_000
    # Bytes of memory that the model claims to need; it does not allocate them.
    load_bytes: Annotated[Bytes, Within(0, 2**62)] = 0
    # The fault to inject; "": none. docs/reliability.md lists them.
    fault: Annotated[str, OneOf(FAULTS)] = ""
    # The stage in which the fault is injected.
    fault_in: Annotated[str, OneOf(FAULT_STAGES)] = "decode"
    # The number of the position, prompt token, load step or frame at which the fault is injected.
    fault_at: Annotated[int, Within(0, MAX_COUNT)] = 0
    # The fault is injected only for prompts that contain this text; "": for all prompts.
    fault_prompt: str = ""
    # The number of workers of a slot that have the fault, beginning with the first; 0: all workers.
    fault_times: Annotated[int, Within(0, MAX_COUNT)] = 0


class Scaling(Struct, frozen=True):
    """Autoscaling of a model's workers by load: `replicas = { min = 1, max = 4 }`."""

    # The fewest workers.
    min: Annotated[int, Within(0, 64)] = 1
    # The most workers; 0: the number is fixed.
    max: Annotated[int, Within(1, 1024)] = 0
    # Tokens of waiting requests (prompts and answers) per worker; above them workers are added.
    waiting_tokens: Annotated[int, Within(1, MAX_COUNT)] = 4096
    # Seconds for which fewer workers must have been enough before a worker is ended.
    cool_down: Annotated[Seconds, Within(0.0, 10**6)] = 300.0


CACHE_AWARE = "cache_aware"
ROUTINGS = (CACHE_AWARE, "least_loaded")
FORCED, ALWAYS, OFF = "forced", "always", "off"  # values of generic_tools


class ModelConfig(Struct, frozen=True):
    """The settings of a model: the section `[models.NAME]`."""

    # The model: a folder, a reference, or builtin:NAME (demo, demo-chat, demo-embed or counting).
    path: str = ""
    # The most tokens of prompt and completion; 0: the model's own bound.
    context: Annotated[int, Within(0, MAX_COUNT)] = 0
    # The most tokens of a completion if the request has no max_tokens; 0: the setting of the pool.
    default_max_tokens: Annotated[int, Within(0, MAX_COUNT)] = 0
    # The number of workers of this model.
    replicas: Annotated[int, Within(1, 64)] = 1
    # The number of devices that share one copy of the model. Each worker has one process for each
    # device.
    devices: Annotated[int, Within(1, 64)] = 1
    # The library that adds up the partial sums of several GPUs. auto: our kernels if the GPUs can
    # read each other's memory, else NCCL; nccl: NCCL.
    device_sums: Annotated[str, OneOf(("auto", "nccl"))] = "auto"
    # Not a setting: the values of `replicas` if it is a table; max is 0 if `replicas` is a number.
    scaling: Scaling = field(default_factory=Scaling)
    # GPUs of a worker under `mlxpool ray`; -1: one for each device if the cluster has GPUs.
    gpus: Annotated[int, Within(-1, 64)] = -1
    # The GPUs of this machine that the model's workers may use, by number or name, as in
    # CUDA_VISIBLE_DEVICES; (): all GPUs of the pool.
    gpu_ids: Annotated[GpuIds, check_gpu_ids] = ()
    # The choice of a worker for a request. cache_aware: the worker on which the request costs the
    # least time, with its prefix cache; least_loaded: the worker with the most free sequences.
    routing: Annotated[str, OneOf(ROUTINGS)] = CACHE_AWARE
    # The most sequences that one worker runs at once.
    sequences: Annotated[int, Within(1, 4096)] = 8
    # The most tokens of one step; must be above `sequences`; 0: chosen for the device.
    batch: Annotated[int, Within(0, 2**20)] = 0
    # The implementation of the model. auto: own if it supports the model_type, else mlx-lm.
    engine: Annotated[str, OneOf(("auto", "own", "mlx-lm"))] = "auto"
    # The task of a text model; "": read from the model's files.
    task: Annotated[str, OneOf(("", "embed", "rerank", "classify"))] = ""
    # Idle time before the worker is ended; below 0: never.
    keep_alive: Annotated[Seconds, Within(-1.0, 10**8)] = 300.0
    # true: workers start with the pool and are never ended when idle; sets keep_alive to -1.
    pin: bool = False
    # The most bytes of memory of one worker; a worker that uses more is ended; 0: no limit.
    memory_limit: Annotated[Bytes, Within(0, 2**62)] = 0
    # The prefix cache. tree: keys and values of all prompts; single: of the last prompt only.
    prefix_cache: Annotated[str, OneOf(("tree", "single", "off"))] = "tree"
    # Bytes of the prefix cache; 0: a quarter of the memory that the weights leave.
    prefix_bytes: Annotated[Bytes, Within(0, 2**62)] = 0
    # The number format of the KV cache. auto: as the model computes; int8: 8-bit integers with a
    # scale for each token and head, about half of the bytes of 16-bit numbers. With int8 a resumed
    # answer has the same tokens only if `deterministic` is set, too.
    kv: Annotated[str, OneOf(("auto", "int8"))] = "auto"
    # The most bytes of prefixes on disk in prefix_dir, for all workers of the model on a machine
    # together; at least 16 MiB; 0: none. These prefixes remain after a worker ends.
    prefix_disk: Annotated[Bytes, Within(0, 2**62)] = 0
    # The requests that share cached prefixes. pool: all requests; owner: only requests of the same
    # owner, so that `cached_tokens` or a quick first token do not reveal the prompts of other
    # owners.
    prefix_scope: Annotated[str, OneOf(("pool", "owner"))] = "pool"
    # Seconds that prefill may add to a decode step. A higher value starts answers sooner; a lower
    # value makes running streams wait less for other prompts. 0: on a GPU six decode steps of the
    # model, 8 to 40 ms; elsewhere 200 ms.
    step_target: Annotated[Seconds, Within(0.0, 60.0)] = 0.0
    # The source of draft tokens. ngram: tokens that followed the same tokens earlier; mtp: the
    # model's own head; draft: the model of `draft`; auto: for each request the best source that the
    # model has, if any. A source that the model lacks, or cannot check, is refused.
    speculation: Annotated[str, OneOf(("off", "ngram", "mtp", "draft", "auto"))] = "off"
    # The path of a smaller draft model with the same tokenizer, in the form of `path`; "": none.
    draft: str = ""
    # true: a control token such as <|im_end|> in the content of a message is plain text, so that a
    # content cannot end its message or begin another message. Requests have this option, too.
    plain_contents: bool = False
    # Tools for a chat template that has none: the gateway describes them in the system's text, and
    # reads JSON as calls. forced: if the answer has to call a tool; always: whenever a request has
    # tools; off: never.
    generic_tools: Annotated[str, OneOf((FORCED, ALWAYS, OFF))] = FORCED
    # true: an answer does not depend on the other requests of its batch, not even in one bit;
    # slower, CPU only.
    deterministic: bool = False
    counting: Counting = field(default_factory=Counting)
    # Not a setting: the models folder of a scanned model; no link may lead out of it.
    within: str = ""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ModelConfig:
        """Returns the record of a map that `as_map` made."""
        inner = {
            "counting": Counting(**table["counting"]),
            "scaling": Scaling(**table["scaling"]),
            "gpu_ids": tuple(table["gpu_ids"]),
        }
        return cls(**{**table, **inner})


class KeyConfig(Struct, frozen=True):
    """A public key that may connect over tcp, and its role: the section `[keys.NAME]`."""

    role: Annotated[str, OneOf(PEERS)]
    # The public key: 40 characters, as `mlxpool keygen` prints them.
    public: str
    # true: the client is a gateway, which names the owner of each request.
    may_name_owners: bool = False


class PoolConfig(Struct, frozen=True):
    """The settings of a pool: the section `[pool]`."""

    # The folder of sockets, lock and logs.
    run_dir: Path = field(default_factory=default_run_dir)
    # Further endpoints for clients; front.ipc in the run directory is always an endpoint.
    front: tuple[str, ...] = ()
    # Endpoints for workers that connect to the broker.
    back: tuple[str, ...] = ()
    # Further endpoints for operators; admin.ipc in the run directory is always an endpoint.
    admin: tuple[str, ...] = ()
    # The file of the broker's secret key; with it every tcp endpoint uses CURVE.
    secret_key: Path | None = None
    # true: the broker starts workers; false: workers are started elsewhere and connect to it.
    local_workers: Flag = True
    # The most live requests of one peer; 0: no limit, as for the next four quotas.
    quota_requests: Annotated[int, Within(0, 10**6)] = 0
    # The most prompt tokens of one peer in queues.
    quota_tokens: Annotated[int, Within(0, 2**40)] = 0
    # The most bytes per second of one peer.
    quota_bytes: Annotated[Bytes, Within(0, 2**40)] = 0
    # The most cancels per second of one peer.
    quota_cancels: Annotated[int, Within(0, 10**6)] = 0
    # The most jobs of one peer in the store, including ended jobs.
    quota_jobs: Annotated[int, Within(0, 10**9)] = 0
    # The most bytes of the files of one peer in the store, including 512 for each file and the
    # lines of batches; 0: no limit. By default a quarter of `state_bytes`.
    quota_file_bytes: Annotated[Bytes, Within(0, 2**50)] = 2 * 1024 * 1024 * 1024
    # The folder of the jobs, or the URL of their PostgreSQL database; "": jobs are off. If it is
    # not set, `load` takes paths.default_state_dir.
    state_dir: str = ""
    # The most bytes of all jobs in state_dir; above four fifths new jobs are refused.
    state_bytes: Annotated[Bytes, Within(16 * 1024 * 1024, 2**50)] = 8 * 1024 * 1024 * 1024
    # Time for which a job's result is kept after the job's end, unless the client sets another.
    job_keep: Annotated[Seconds, Within(0.0, 10**8)] = 86400.0
    # The longest time for which a client may have a job's result kept.
    job_keep_max: Annotated[Seconds, Within(0.0, 10**8)] = 2592000.0
    # Time after the deletion of a job's result in which requests with the job's key get `gone`.
    job_key_life: Annotated[Seconds, Within(0.0, 10**8)] = 86400.0
    # Origins to which notices of ended jobs and batches may be posted: "https://hooks.example.org".
    job_notify_hosts: tuple[str, ...] = ()
    # Networks that are not public but may have hosts of `job_notify_hosts`.
    job_notify_networks: tuple[str, ...] = ()
    # The URL, at one of the allowed origins, for jobs and batches that name no URL; "": none.
    job_notify_url: str = ""
    # The file of the secrets that sign notices, one secret per line.
    job_notify_secret: Path | None = None
    # The time during which a notice is retried.
    job_notify_for: Annotated[Seconds, Within(0.0, 10**7)] = 86400.0
    # The folder of cached prefixes (see prefix_disk), on a local disk, for this user alone.
    prefix_dir: Path = field(default_factory=default_prefix_dir)
    # The models folder: each NAME and OWNER/NAME in it with a config.json or GGUF file is a model.
    models_dir: Annotated[Path | None, check_folder] = None
    # The most requests that wait for one model.
    queue_limit: Annotated[int, Within(1, 10**6)] = 512
    # The most bytes of prompts that wait for one model.
    queue_bytes: Annotated[Bytes, Within(1024, 2**50)] = 256 * 1024 * 1024
    # The deadline of a request that names no deadline.
    deadline: Annotated[Seconds, Within(0.001, 10**7)] = 3600.0
    # The most tokens of a completion if the request has no max_tokens; 0: up to the context.
    default_max_tokens: Annotated[int, Within(0, MAX_COUNT)] = 0
    # The time after which the streams and calls of a silent client are dropped.
    client_grace: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # The longest time that a stream with unread data may go without an ack.
    ack_grace: Annotated[Seconds, Within(0.1, 10**6)] = 30.0
    # The most bytes of one stream that its client has not read.
    unread_bytes: Annotated[Bytes, Within(1024, 2**50)] = 1024 * 1024
    # Delay of the first restart of a worker; doubles with each restart.
    restart_delay: Annotated[Seconds, Within(0.0, 3600.0)] = 1.0
    # The longest delay of a restart.
    restart_delay_max: Annotated[Seconds, Within(0.0, 86400.0)] = 60.0
    # Consecutive failures after which the model is `broken`.
    restart_limit: Annotated[int, Within(1, 1000)] = 5
    # Time until a broken model is tried again.
    probe_interval: Annotated[Seconds, Within(0.1, 10**6)] = 300.0
    # Time between SIGTERM and SIGKILL.
    stop_grace: Annotated[Seconds, Within(0.0, 600.0)] = 5.0
    # Time in which streams may finish on a draining worker.
    drain_grace: Annotated[Seconds, Within(0.0, 10**6)] = 30.0
    # The longest keep_alive that clients may set, unless the model's keep_alive is longer; -1: any.
    client_keep_alive: Annotated[Seconds, Within(-1.0, 10**8)] = -1.0
    # The most bytes of memory of all workers together; 0: 80 % of the machine's memory.
    memory_limit: Annotated[Bytes, Within(0, 2**62)] = 0
    # Time for which a request that ended workers is refused.
    poison_life: Annotated[Seconds, Within(0.0, 10**7)] = 3600.0
    # Time without a heartbeat before a worker is suspect; after twice this time it is ended.
    beat_limit: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # Time without progress before a worker that starts or loads is suspect.
    load_limit: Annotated[Seconds, Within(0.1, 10**6)] = 60.0
    # Time without progress before a worker is suspect in a prefill chunk; 40 times the usual
    # duration of the chunk if that is longer.
    prefill_limit: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # Time without progress before a worker is suspect in a decode step; 40 times the usual duration
    # of the step if that is longer.
    step_limit: Annotated[Seconds, Within(0.1, 10**6)] = 5.0
    # Time without progress before a worker is suspect in the first step of a new shape.
    fresh_limit: Annotated[Seconds, Within(0.1, 10**6)] = 120.0
    # The most processor time of the tokenizer for one request, plus 1 s for each 100,000
    # characters.
    prepare_limit: Annotated[Seconds, Within(0.1, 10**6)] = 5.0
    # The most bytes of a worker's log. At the start of the worker a larger log is cut to half of
    # this size.
    worker_log_bytes: Annotated[Bytes, Within(1024, 2**50)] = 8 * 1024 * 1024
    # The format of the log. text: logfmt; json: JSON lines.
    log_format: Annotated[str, OneOf(("text", "json"))] = "text"
    # The level of the log; debug also logs the cached prefix of each request and the names of
    # tensors.
    log_level: Annotated[str, OneOf(("info", "debug"))] = "info"
    # HOST:PORT of /metrics, /healthz, /readyz and /stats; "": none.
    metrics: Annotated[str, check_host_port] = ""
    # The file of the token with which operators cancel requests on the status page.
    metrics_admin_token: Path | None = None
    # HOST:PORT of the broker's gateway, with the HTTP APIs of OpenAI, Anthropic and Ollama; "":
    # none.
    http: Annotated[str, check_host_port] = ""
    # The file of bearer keys, one a line; needed on every address except the loopback.
    http_keys: Path | None = None
    # The most requests in flight of one bearer key; 0: no limit.
    http_per_key: Annotated[int, Within(0, 10**6)] = 0
    # The most bytes of a request's body.
    http_max_body: Annotated[Bytes, Within(1024, 2**40)] = 8 * 1024 * 1024
    # Time that an idle connection stays open; must be longer than the idle time of proxies and
    # clients.
    http_idle_time: Annotated[Seconds, Within(1.0, 10**6)] = 120.0
    # Time for which a finished answer with an Idempotency-Key is kept, for retries.
    http_stream_keep: Annotated[Seconds, Within(1.0, 10**8)] = 600.0
    # Time that answers over HTTP may take after SIGTERM, before the broker ends.
    http_drain_timeout: Annotated[Seconds, Within(0.0, 3600.0)] = 10.0
    # Origins of web pages that may use the gateway from a browser: "https://app.example"; "*": all.
    http_cors_origins: tuple[str, ...] = ()
    # Addresses or networks of trusted proxies, whose X-Forwarded-For is the client's address.
    http_trusted_proxies: tuple[str, ...] = ()
    # true: the log has a line for each request over HTTP.
    http_access_log: Flag = True
    # true: requests become OpenTelemetry spans; the variables of OpenTelemetry name their
    # destination.
    traces: Flag = False
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    keys: Mapping[str, KeyConfig] = field(default_factory=dict)


WAIT_LIMIT = 300.0  # seconds; more than twice the default of each limit on time without progress


class WorkerConfig(Struct, frozen=True):
    """The settings of a worker process, which reads them from an environment variable."""

    endpoint: str  # the endpoint of the broker's socket for workers (back socket)
    slot: str
    token: str  # a token for one hello on the back socket
    name: str  # the model's name
    model: ModelConfig
    log_format: str = "text"
    block_fd: int = -1  # descriptor of the progress block; -1: none
    dump_fd: int = -1  # descriptor of the file for stack dumps; -1: standard error
    incarnation: int = 0  # number of earlier workers of the slot
    dials: bool = False  # started by `mlxpool worker`: asks the broker for a slot of its model
    server_key: str = ""  # the broker's public key; "": no CURVE
    key: str = ""  # the file of the worker's own key
    orphan_grace: float = 60.0  # seconds without a broker after which the worker ends
    prepare_limit: float = 5.0  # processor seconds of the tokenizer for one request, see PoolConfig
    log_level: str = "info"
    prefix_dir: str = ""  # the folder of prefixes on disk, see PoolConfig
    save_limit: float = 0.0  # seconds that the worker may write prefixes before it ends
    rank_block_fds: Sequence[int] = ()  # in a group: block_fd of each rank from rank 1 on
    # In a group: the rank. Rank 0 starts the processes of the ranks above 0, which use the next
    # four fields.
    rank: int = 0
    plan_fd: int = -1  # the pipe from which the rank reads its steps
    hosts_fd: int = -1  # the file with the addresses of all ranks
    group_port: int = 0
    ready_fd: int = -1  # the pipe to which the rank writes when it is about to join
    # Seconds after which a rank's GPU stops waiting for another rank's part of a sum. Longer than
    # the broker's limits, so that the broker ends the group first, with the cause.
    wait_limit: float = WAIT_LIMIT

    def to_environment(self) -> str:
        """Returns the record as the text of the environment variable WORKER_VARIABLE."""
        return json.dumps(as_map(self))

    @classmethod
    def from_environment(cls, text: str) -> WorkerConfig:
        """Returns the record of a text that `to_environment` made."""
        table = json.loads(text)
        table["rank_block_fds"] = tuple(table["rank_block_fds"])
        return cls(model=ModelConfig.from_table(table.pop("model")), **table)


WORKER_VARIABLE = "MLXPOOL_WORKER"


class GatewayConfig(Struct, frozen=True):
    """The settings of a broker's gateway process, which reads them from an environment variable.

    The gateway's standard input ends when the broker ends. The gateway writes a byte to `notify_fd`
    when it starts to serve, and then every `beat_interval` seconds.
    """

    run_dir: str
    listen_fds: Sequence[int]  # descriptors of the listening sockets
    notify_fd: int
    host: str  # the host of the first socket of `listen_fds`
    port: int
    keys: str = ""  # the file of bearer keys; "": none. The next fields are as in PoolConfig.
    per_key: int = 0
    max_body: int = 8 * 1024 * 1024
    idle_time: float = 120.0
    stream_keep: float = 600.0
    drain_timeout: float = 10.0
    cors_origins: Sequence[str] = ()
    trusted_proxies: Sequence[str] = ()
    access_log: bool = True
    beat_interval: float = 1.0
    log_format: str = "text"
    log_level: str = "info"

    def to_environment(self) -> str:
        """Returns the record as the text of the environment variable GATEWAY_VARIABLE."""
        return json.dumps(as_map(self))

    @classmethod
    def from_environment(cls, text: str) -> GatewayConfig:
        """Returns the record of a text that `to_environment` made."""
        return cls(**json.loads(text))


GATEWAY_VARIABLE = "MLXPOOL_GATEWAY"

BUILTIN_PREFIX = "builtin:"  # beginning of the path of a built-in model

BUILTIN = {
    "demo": ModelConfig(path=f"{BUILTIN_PREFIX}demo"),
    "demo-chat": ModelConfig(path=f"{BUILTIN_PREFIX}demo-chat"),
    "demo-embed": ModelConfig(path=f"{BUILTIN_PREFIX}demo-embed"),
    "counting": ModelConfig(path=f"{BUILTIN_PREFIX}counting"),
}

NO_SETTINGS = (
    "models",
    "keys",
    "within",
    "scaling",
)  # fields of the records that are not settings of their sections
