"""Every setting, declared once: type, unit, bounds or choices, default and meaning.

To add one, add a field here and a line to deploy/mlxpool.toml, and run docs/make_pages.py: loading,
`mlxpool config`, the environment's variables and docs/configuration.md are made from these two.
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
FAULTS = (  # that the `counting` model can inject
    "",
    "raise",  # an error inside the step
    "kill",  # SIGKILL to itself
    "stop",  # SIGSTOP to itself
    "exit",  # os._exit(0)
    "exit3",  # os._exit(3)
    "segfault",
    "abort",
    "lock",  # waits for a lock that is never released
    "native",  # stuck in native code, the interpreter free
    "gil",  # stuck in native code, the interpreter held
    "leak",  # allocates without end
    "device",  # the device is lost: every further step fails
    "slow",  # takes 200 ms where it would take none; no failure
    "garbage",  # a frame that is no message (in send)
    "duplicate",  # a frame twice (in send)
    "late",  # a frame again after those that followed it (in send)
    "stale",  # a frame again with the epoch before (in send)
)
FAULT_STAGES = ("load", "accept", "prefill", "decode", "end", "after_end", "send")


class Counting(Struct, frozen=True):
    """How the weightless `counting` model behaves; its token i is f(prompt, seed, i)."""

    # Milliseconds that the load takes, in ten shards.
    load_ms: Annotated[int, Within(0, 10**7)] = 0
    # Microseconds for each prompt token.
    prefill_us: Annotated[int, Within(0, 10**9)] = 0
    # Microseconds of one decode step.
    step_us: Annotated[int, Within(0, 10**9)] = 1000
    # Prompts that one prefill pass reads at most.
    joint: Annotated[int, Within(1, 1024)] = 1
    # Token ids are below this.
    vocab: Annotated[int, Within(256, MAX_COUNT)] = 50_000
    # Memory that it claims to need; it allocates none.
    load_bytes: Annotated[Bytes, Within(0, 2**62)] = 0
    # The fault to inject; "": none. docs/reliability.md lists them.
    fault: Annotated[str, OneOf(FAULTS)] = ""
    # The stage in which it is injected.
    fault_in: Annotated[str, OneOf(FAULT_STAGES)] = "decode"
    # The position, prompt token, load step or frame at which it is injected.
    fault_at: Annotated[int, Within(0, MAX_COUNT)] = 0
    # Only for prompts that contain this text; "": for all.
    fault_prompt: str = ""
    # Only in the first so many workers of a slot; 0: in all.
    fault_times: Annotated[int, Within(0, MAX_COUNT)] = 0


class Scaling(Struct, frozen=True):
    """`replicas = { min = 1, max = 4 }` of a model: how its number of workers follows its load."""

    # Workers that there are at least.
    min: Annotated[int, Within(0, 64)] = 1
    # At most; 0: the number is fixed.
    max: Annotated[int, Within(1, 1024)] = 0
    # Waiting for each worker, above which workers are added: of prompts and of their answers.
    waiting_tokens: Annotated[int, Within(1, MAX_COUNT)] = 4096
    # For which fewer must have been enough before workers are ended.
    cool_down: Annotated[Seconds, Within(0.0, 10**6)] = 300.0


CACHE_AWARE = "cache_aware"
ROUTINGS = (CACHE_AWARE, "least_loaded")
FORCED, ALWAYS, OFF = "forced", "always", "off"  # of generic_tools


class ModelConfig(Struct, frozen=True):
    """`[models.NAME]`."""

    # A folder, a reference, or "builtin:" and demo, demo-chat, demo-embed or counting.
    path: str = ""
    # Tokens of prompt and completion; 0: the model's own bound.
    context: Annotated[int, Within(0, MAX_COUNT)] = 0
    # Of a request that names no max_tokens; 0: that of the pool.
    default_max_tokens: Annotated[int, Within(0, MAX_COUNT)] = 0
    # Workers of this model.
    replicas: Annotated[int, Within(1, 64)] = 1
    # Devices that hold one copy of it together, each a part; each worker is a group of so many
    # processes.
    devices: Annotated[int, Within(1, 64)] = 1
    # What adds up the parts of several GPUs. auto: kernels over the memory of each other, where
    # GPUs reach it, and NCCL where not; nccl: NCCL alone.
    device_sums: Annotated[str, OneOf(("auto", "nccl"))] = "auto"
    # Not a setting by this name: `replicas` as a table; max is 0 if it is a number.
    scaling: Scaling = field(default_factory=Scaling)
    # That a worker takes of its machine, for `mlxpool ray`; -1: one a device where the cluster has
    # any.
    gpus: Annotated[int, Within(-1, 64)] = -1
    # The GPUs of this machine that its workers may have, by number or name, as
    # CUDA_VISIBLE_DEVICES has them; (): all that the pool may use.
    gpu_ids: Annotated[GpuIds, check_gpu_ids] = ()
    # How a worker is chosen among them. cache_aware: by the time that a request costs there, what
    # its prefix cache saves included. least_loaded: the one with most free sequences.
    routing: Annotated[str, OneOf(ROUTINGS)] = CACHE_AWARE
    # Sequences that one worker runs at once.
    sequences: Annotated[int, Within(1, 4096)] = 8
    # Tokens of one step at most, more than sequences; 0: what suits the device.
    batch: Annotated[int, Within(0, 2**20)] = 0
    # Whose code computes it; "auto": ours where it has the model_type, else mlx-lm's.
    engine: Annotated[str, OneOf(("auto", "own", "mlx-lm"))] = "auto"
    # What a model of texts is for; "": what its files say.
    task: Annotated[str, OneOf(("", "embed", "rerank", "classify"))] = ""
    # Idle time before the worker is ended; below 0: never.
    keep_alive: Annotated[Seconds, Within(-1.0, 10**8)] = 300.0
    # Whether its workers start with the pool and stay; sets keep_alive to -1.
    pin: bool = False
    # Of one worker; above it the worker is ended; 0: no limit.
    memory_limit: Annotated[Bytes, Within(0, 2**62)] = 0
    prefix_cache: Annotated[str, OneOf(("tree", "single", "off"))] = "tree"
    # Of the prefix cache; 0: a quarter of what the weights leave.
    prefix_bytes: Annotated[Bytes, Within(0, 2**62)] = 0
    # What is stored of keys and values. auto: numbers as the model computes them; int8: 8-bit
    # integers with a scale for each token and head, about half of the bytes of 16-bit numbers; an
    # answer that is resumed goes on with the same tokens only if `deterministic` is set, too.
    kv: Annotated[str, OneOf(("auto", "int8"))] = "auto"
    # Of prefixes that are kept on disk in prefix_dir, where they outlive a worker, for all workers
    # of the model on a machine together; 0: none. At least 16 MiB.
    prefix_disk: Annotated[Bytes, Within(0, 2**62)] = 0
    # Who finds what a request left in the prefix cache. pool: everybody. owner: its owner alone,
    # so that nobody learns from `cached_tokens`, or from a quick first token, what others asked.
    prefix_scope: Annotated[str, OneOf(("pool", "owner"))] = "pool"
    # Seconds that prompts may add to a step of streams: with more, prompts are read sooner; with
    # less, a stream waits less for the prompts of others. 0: six decode steps of the model, 8 to
    # 40 ms, on a GPU and 200 ms elsewhere.
    step_target: Annotated[Seconds, Within(0.0, 60.0)] = 0.0
    # Whether steps check drafts of next tokens. ngram: what followed the same ones before; mtp:
    # what the model's own head predicts; draft: what the model of `draft` draws. Each is refused
    # where the model cannot check drafts or has none of these. auto: where it can, for each row the
    # best of these.
    speculation: Annotated[str, OneOf(("off", "ngram", "mtp", "draft", "auto"))] = "off"
    # A smaller model with the same tokenizer, as in `path`, that drafts for it; "": none.
    draft: str = ""
    # Whether control tokens that contents of messages have as text, such as <|im_end|>, are text:
    # no content ends a message or begins another then. Requests may say so, too.
    plain_contents: bool = False
    # When the gateway describes tools in the system's text, and reads JSON as calls, where the
    # chat template knows no tools. forced: for an answer that has to call one; always: whenever a
    # request has tools; off: never.
    generic_tools: Annotated[str, OneOf((FORCED, ALWAYS, OFF))] = FORCED
    # Whether no bit of an answer depends on the other rows of its batch; slower, CPU only.
    deterministic: bool = False
    counting: Counting = field(default_factory=Counting)
    # Not a setting: the models folder that it was found in; no link may lead out of it.
    within: str = ""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ModelConfig:
        """Undo `asdict`."""
        inner = {
            "counting": Counting(**table["counting"]),
            "scaling": Scaling(**table["scaling"]),
            "gpu_ids": tuple(table["gpu_ids"]),
        }
        return cls(**{**table, **inner})


class KeyConfig(Struct, frozen=True):
    """`[keys.NAME]`: a public key that may connect over tcp, and its role."""

    role: Annotated[str, OneOf(PEERS)]
    # 40 characters, as `mlxpool keygen` prints it.
    public: str
    # Of a client: a gateway, which asks on behalf of owners that it names.
    may_name_owners: bool = False


class PoolConfig(Struct, frozen=True):
    """`[pool]`."""

    # Holds sockets, lock and logs.
    run_dir: Path = field(default_factory=default_run_dir)
    # Further endpoints for clients; front.ipc in the run directory is always there.
    front: tuple[str, ...] = ()
    # Endpoints for workers that connect to the broker.
    back: tuple[str, ...] = ()
    # Further endpoints for operators; admin.ipc in the run directory is always there.
    admin: tuple[str, ...] = ()
    # The file of the broker's key; with it every tcp endpoint uses CURVE.
    secret_key: Path | None = None
    # Whether the broker starts workers; false: workers only connect to it.
    local_workers: Flag = True
    # Live requests of one peer; 0: no limit, as for the next three.
    quota_requests: Annotated[int, Within(0, 10**6)] = 0
    # Prompt tokens that one peer may have waiting in queues.
    quota_tokens: Annotated[int, Within(0, 2**40)] = 0
    # Bytes per second of one peer.
    quota_bytes: Annotated[Bytes, Within(0, 2**40)] = 0
    # Cancels per second of one peer.
    quota_cancels: Annotated[int, Within(0, 10**6)] = 0
    # Jobs that one peer may have in the store, ended ones included.
    quota_jobs: Annotated[int, Within(0, 10**9)] = 0
    # Bytes that the files of one peer may have in the store, 512 for each file and the lines of
    # batches included; 0: no limit. By default a quarter of `state_bytes`.
    quota_file_bytes: Annotated[Bytes, Within(0, 2**50)] = 2 * 1024 * 1024 * 1024
    # A folder, or the URL of a PostgreSQL database, in which jobs are kept; "": there are no jobs.
    # Where it is not set, `load` has paths.default_state_dir.
    state_dir: str = ""
    # That jobs may take there; above four fifths of it new ones are refused.
    state_bytes: Annotated[Bytes, Within(16 * 1024 * 1024, 2**50)] = 8 * 1024 * 1024 * 1024
    # How long the result of a job is kept after its end, if its client does not say.
    job_keep: Annotated[Seconds, Within(0.0, 10**8)] = 86400.0
    # The longest time that a client may ask for.
    job_keep_max: Annotated[Seconds, Within(0.0, 10**8)] = 2592000.0
    # How long the key of a job answers `gone` after its result was deleted.
    job_key_life: Annotated[Seconds, Within(0.0, 10**8)] = 86400.0
    # Whom jobs and batches may name to be told of their end: origins such as "https://hooks.example.org".
    job_notify_hosts: tuple[str, ...] = ()
    # Networks that are not public, at which those hosts may be all the same.
    job_notify_networks: tuple[str, ...] = ()
    # Whom the end of jobs and batches that name nobody is told, a URL of those hosts; "": nobody.
    job_notify_url: str = ""
    # The file of the secrets with which notices are signed, one a line.
    job_notify_secret: Path | None = None
    # How long a notice is tried again before it is given up.
    job_notify_for: Annotated[Seconds, Within(0.0, 10**7)] = 86400.0
    # Where workers keep prefixes on disk, see prefix_disk; a local disk, for this user alone.
    prefix_dir: Path = field(default_factory=default_prefix_dir)
    # Each NAME and OWNER/NAME in it with a config.json or a GGUF file is a model.
    models_dir: Annotated[Path | None, check_folder] = None
    # Requests that wait for one model.
    queue_limit: Annotated[int, Within(1, 10**6)] = 512
    # Prompts that wait for one model.
    queue_bytes: Annotated[Bytes, Within(1024, 2**50)] = 256 * 1024 * 1024
    # Of a request that names no deadline.
    deadline: Annotated[Seconds, Within(0.001, 10**7)] = 3600.0
    # Tokens of a completion whose request names no max_tokens; 0: up to the context.
    default_max_tokens: Annotated[int, Within(0, MAX_COUNT)] = 0
    # How long the streams and calls of a silent client are kept.
    client_grace: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # How long a stream with unread data may go without an ack.
    ack_grace: Annotated[Seconds, Within(0.1, 10**6)] = 30.0
    # Unread data of one stream.
    unread_bytes: Annotated[Bytes, Within(1024, 2**50)] = 1024 * 1024
    # Before the first restart of a worker; doubles with each, up to restart_delay_max.
    restart_delay: Annotated[Seconds, Within(0.0, 3600.0)] = 1.0
    restart_delay_max: Annotated[Seconds, Within(0.0, 86400.0)] = 60.0
    # Failures in a row before the model is `broken`.
    restart_limit: Annotated[int, Within(1, 1000)] = 5
    # Until a broken model is tried again.
    probe_interval: Annotated[Seconds, Within(0.1, 10**6)] = 300.0
    # Between SIGTERM and SIGKILL.
    stop_grace: Annotated[Seconds, Within(0.0, 600.0)] = 5.0
    # How long a drain lets streams finish on their worker.
    drain_grace: Annotated[Seconds, Within(0.0, 10**6)] = 30.0
    # For how long clients may keep an idle model beyond its keep_alive; -1: for any time.
    client_keep_alive: Annotated[Seconds, Within(-1.0, 10**8)] = -1.0
    # Of all workers together; 0: 80 % of the machine's memory.
    memory_limit: Annotated[Bytes, Within(0, 2**62)] = 0
    # How long a request that ended workers is refused.
    poison_life: Annotated[Seconds, Within(0.0, 10**7)] = 3600.0
    # Without a heartbeat before a worker is suspect; after twice as long it is ended.
    beat_limit: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # Without progress before a worker is suspect: in boot and load,
    load_limit: Annotated[Seconds, Within(0.1, 10**6)] = 60.0
    # in a prefill chunk (or 40 times the usual duration),
    prefill_limit: Annotated[Seconds, Within(0.1, 10**6)] = 10.0
    # in a decode step (or 40 times the usual duration),
    step_limit: Annotated[Seconds, Within(0.1, 10**6)] = 5.0
    # in the first step of a new shape.
    fresh_limit: Annotated[Seconds, Within(0.1, 10**6)] = 120.0
    # Processor time of the tokenizer for one request, plus 1 s for each 100,000 characters.
    prepare_limit: Annotated[Seconds, Within(0.1, 10**6)] = 5.0
    # A larger log of a worker is cut to half of this at its next start.
    worker_log_bytes: Annotated[Bytes, Within(1024, 2**50)] = 8 * 1024 * 1024
    # text: logfmt.
    log_format: Annotated[str, OneOf(("text", "json"))] = "text"
    # debug: also what the prefix cache had for each request, and the names of tensors.
    log_level: Annotated[str, OneOf(("info", "debug"))] = "info"
    # HOST:PORT of /metrics, /healthz, /readyz and /stats; "": none.
    metrics: Annotated[str, check_host_port] = ""
    # The file of the token with which operators cancel requests on the status page.
    metrics_admin_token: Path | None = None
    # HOST:PORT of the gateway that the broker runs: HTTP as OpenAI, Anthropic and Ollama have it;
    # "": none.
    http: Annotated[str, check_host_port] = ""
    # The file of bearer keys, one a line; needed on every address but loopback.
    http_keys: Path | None = None
    # Requests in flight of one bearer key; 0: no limit.
    http_per_key: Annotated[int, Within(0, 10**6)] = 0
    # Of one request's body.
    http_max_body: Annotated[Bytes, Within(1024, 2**40)] = 8 * 1024 * 1024
    # How long a connection may be open without a request: longer than proxies and clients keep one.
    http_idle_time: Annotated[Seconds, Within(1.0, 10**6)] = 120.0
    # How long an answer with an Idempotency-Key stays after its end, for clients that come again.
    http_stream_keep: Annotated[Seconds, Within(1.0, 10**8)] = 600.0
    # How long answers over HTTP may go on after SIGTERM, before the broker ends.
    http_drain_timeout: Annotated[Seconds, Within(0.0, 3600.0)] = 10.0
    # Origins whose pages in browsers may use it, as "https://app.example", or "*" for all.
    http_cors_origins: tuple[str, ...] = ()
    # Addresses or networks of proxies, whose X-Forwarded-For names the client; else the peer is it.
    http_trusted_proxies: tuple[str, ...] = ()
    # Whether the log has a line for each request over HTTP.
    http_access_log: Flag = True
    # Whether requests become spans of OpenTelemetry, whose variables say where these go.
    traces: Flag = False
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    keys: Mapping[str, KeyConfig] = field(default_factory=dict)


WAIT_LIMIT = 300.0  # seconds; more than twice each limit of a worker without progress, by default


class WorkerConfig(Struct, frozen=True):
    """What a worker gets at its start, in the environment of its process."""

    endpoint: str  # the broker's back socket
    slot: str
    token: str  # admits the worker to the back socket once
    name: str  # of the model
    model: ModelConfig
    log_format: str = "text"
    block_fd: int = -1  # of the progress block; -1: none
    dump_fd: int = -1  # of the file for stack dumps; -1: standard error
    incarnation: int = 0  # how many workers the slot had before
    dials: bool = False  # started by `mlxpool worker`: it has no slot, and asks for one by model
    server_key: str = ""  # the broker's public key; "": no CURVE
    key: str = ""  # the file of its own key
    orphan_grace: float = 60.0  # seconds without a broker until the worker ends
    prepare_limit: float = 5.0  # processor seconds, see PoolConfig
    log_level: str = "info"
    prefix_dir: str = ""  # of the disk tier of the prefix cache, see PoolConfig
    save_limit: float = 0.0  # seconds that the worker may write prefixes before it ends
    rank_block_fds: Sequence[int] = ()  # of a group: as block_fd, of the ranks behind the first
    rank: int = 0  # in a group; that of a process which rank 0 started is above 0, as what follows
    plan_fd: int = -1  # the pipe on which passes come
    hosts_fd: int = -1  # the file with the addresses of all ranks
    group_port: int = 0
    ready_fd: int = -1  # the pipe on which it says that it is about to join
    # Seconds after which a rank's GPU gives up a peer whose part of a sum does not come. Longer
    # than the broker lets any rank stand still: it ends a group sooner, and names the cause.
    wait_limit: float = WAIT_LIMIT

    def to_environment(self) -> str:
        """The value of WORKER_VARIABLE."""
        return json.dumps(as_map(self))

    @classmethod
    def from_environment(cls, text: str) -> WorkerConfig:
        """Undo `to_environment`."""
        table = json.loads(text)
        table["rank_block_fds"] = tuple(table["rank_block_fds"])
        return cls(model=ModelConfig.from_table(table.pop("model")), **table)


WORKER_VARIABLE = "MLXPOOL_WORKER"


class GatewayConfig(Struct, frozen=True):
    """What the gateway that a broker runs gets at its start, in the environment of its process.

    Its standard input ends with the broker. It writes a byte to `notify_fd` when it serves, and
    every `beat_interval` seconds from then on.
    """

    run_dir: str
    listen_fds: Sequence[int]  # sockets that listen
    notify_fd: int
    host: str  # that the first socket is bound to
    port: int
    keys: str = ""  # see http_keys and the settings that follow it; "": no keys
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
        """The value of GATEWAY_VARIABLE."""
        return json.dumps(as_map(self))

    @classmethod
    def from_environment(cls, text: str) -> GatewayConfig:
        """Undo `to_environment`."""
        return cls(**json.loads(text))


GATEWAY_VARIABLE = "MLXPOOL_GATEWAY"

BUILTIN_PREFIX = "builtin:"  # of a path

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
)  # fields that are not settings of their section
