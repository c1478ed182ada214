"""Frozen settings, each with its unit and reason; the only reader of TOML and of the environment.

Order: flag > environment > file > default. An unknown key is an error naming the nearest one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mlxpool.common import endpoints
from mlxpool.common.catalogue import fault_of_name, scan
from mlxpool.common.keys import NAME, PEERS, PUBLIC
from mlxpool.common.paths import default_run_dir


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of its bounds; the message names it."""


@dataclass(frozen=True, slots=True)
class Counting:
    """How the weightless `counting` model behaves; its token i is f(prompt, seed, i)."""

    load_ms: int = 0  # time the load takes, in ten shards
    prefill_us: int = 0  # time for each prompt token
    step_us: int = 1000  # time of one decode step
    vocab: int = 50_000  # token ids are below this
    load_bytes: int = 0  # memory it claims to need; takes none
    fault: str = ""  # what goes wrong, by name; "": nothing (docs/reliability.md lists them)
    fault_in: str = "decode"  # where: load, accept, prefill, decode, end, after_end, send
    fault_at: int = 0  # the position, prompt token, load step or frame at which it does
    fault_prompt: str = ""  # only for prompts that contain this text; "": for all
    fault_times: int = 0  # only in the first so many workers of a slot; 0: in all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[models.NAME]`."""

    path: str = ""  # a folder, a reference, or "builtin:demo", "builtin:counting"
    context: int = 0  # tokens; 0: the model's own
    replicas: int = 1  # workers of this model
    sequences: int = 8  # running at once in one worker
    keep_alive: float = 300.0  # seconds idle before the worker is ended; < 0: never
    pin: bool = False  # its workers start with the pool and stay: keep_alive = -1
    memory_limit: int = 0  # bytes of one worker, then it is ended; 0: no limit
    prefix_cache: str = "tree"  # tree | single | off
    prefix_bytes: int = 0  # bytes it may take; 0: a quarter of what the weights leave
    deterministic: bool = False  # no bit depends on what is computed beside it; slower
    counting: Counting = field(default_factory=Counting)
    within: str = ""  # no setting: the models folder it was found in, which no link may leave

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ModelConfig:
        """Undo `asdict`."""
        return cls(**{**table, "counting": Counting(**table["counting"])})


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """`[keys.NAME]`: who may come in over tcp, and as what."""

    role: str  # client | worker | admin
    public: str  # 40 characters, as `mlxpool keygen` prints it


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """`[pool]`."""

    run_dir: Path = field(default_factory=default_run_dir)
    front: tuple[str, ...] = ()  # further endpoints for clients; front.ipc is always there
    back: tuple[str, ...] = ()  # for workers that dial in
    admin: tuple[str, ...] = ()  # for operations; admin.ipc is always there
    secret_key: Path | None = None  # the broker's key file: every tcp endpoint speaks CURVE
    local_workers: bool = True  # false: workers dial in, none is started here
    quota_requests: int = 0  # live requests of one peer; 0: no limit, as for the next three
    quota_tokens: int = 0  # tokens of prompt that one peer may have waiting
    quota_bytes: int = 0  # bytes a second that one peer may send
    quota_cancels: int = 0  # cancels a second of one peer
    models_dir: Path | None = None  # each folder in it with a config.json is a model by its name
    queue_limit: int = 512  # requests waiting for one model
    queue_bytes: int = 256 * 1024 * 1024  # prompts waiting for one model
    deadline: float = 3600.0  # seconds, of a request that names none
    client_grace: float = 10.0  # seconds an unheard client's streams live on
    ack_grace: float = 30.0  # seconds without an ack while there is unread data
    unread_bytes: int = 1024 * 1024  # unread data of one stream
    restart_delay: float = 1.0  # seconds before the first restart of a worker; doubles
    restart_delay_max: float = 60.0
    restart_limit: int = 5  # failures in a row before the model is `broken`
    probe_interval: float = 300.0  # seconds until a broken model is tried again
    stop_grace: float = 5.0  # seconds between SIGTERM and SIGKILL
    drain_grace: float = 30.0  # seconds in which a drain lets streams end where they are
    memory_limit: int = 0  # bytes of all workers together; 0: 80 % of the machine's memory
    poison_life: float = 3600.0  # seconds for which a poisonous request is refused
    beat_limit: float = 10.0  # seconds without a beat before a worker is suspect; twice: ended
    load_limit: float = 60.0  # the same without progress in boot or load
    prefill_limit: float = 10.0  # in a prefill chunk, or 40 times the usual
    step_limit: float = 5.0  # in a decode step, or 40 times the usual
    fresh_limit: float = 120.0  # in the first use of a shape
    worker_log_bytes: int = 8 * 1024 * 1024  # a worker's log is cut to half at its next start
    log_format: str = "text"  # text | json
    metrics: str = ""  # HOST:PORT of /metrics, /healthz, /readyz and /stats; "": none
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    keys: Mapping[str, KeyConfig] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a broker tells the worker it starts, through the environment."""

    endpoint: str  # the broker's back socket
    slot: str
    token: str  # opens the back socket once
    name: str  # of the model
    model: ModelConfig
    log_format: str = "text"
    block_fd: int = -1  # of the progress block; -1: none
    dump_fd: int = -1  # of the file for stack dumps; -1: standard error
    incarnation: int = 0  # how many workers the slot had before
    dials: bool = False  # another supervisor's: it has no slot, and asks for one by the model
    server_key: str = ""  # the broker's public key; "": no CURVE
    key: str = ""  # the file of its own key
    orphan_grace: float = 60.0  # seconds without a broker, then it ends

    def to_environment(self) -> str:
        """The value of WORKER_VARIABLE."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, text: str) -> WorkerConfig:
        """Undo `to_environment`."""
        table = json.loads(text)
        return cls(model=ModelConfig.from_table(table.pop("model")), **table)


WORKER_VARIABLE = "MLXPOOL_WORKER"

BUILTIN = {
    "demo": ModelConfig(path="builtin:demo"),
    "counting": ModelConfig(path="builtin:counting"),
}


SECTIONS = ("pool", "models", "keys")


def load(
    path: Path | None,
    flags: Mapping[str, Any] | None = None,
    folders: Mapping[str, str] | None = None,
) -> PoolConfig:
    """The pool's settings from a TOML file, the environment (MLXPOOL_*) and flags.

    `folders` names further models by flag.

    Raises ConfigError naming the key, its value and the bound.
    """
    table = _read(path) if path else {}
    unknown = set(table) - set(SECTIONS)
    if unknown:
        raise ConfigError(_unknown(sorted(unknown)[0], SECTIONS, str(path)))
    pool = dict(_table(table, "pool"))
    pool.update(_environment())
    pool.update({key: value for key, value in (flags or {}).items() if value is not None})
    models = {
        name: _model(name, _table(_table(table, "models"), name))
        for name in _table(table, "models")
    }
    models.update({name: _model(name, {"path": path}) for name, path in (folders or {}).items()})
    config: PoolConfig = _build(PoolConfig, pool, "pool")
    if config.models_dir is not None and not config.models_dir.is_dir():
        raise ConfigError(f"pool.models_dir: there is no folder {config.models_dir}")
    for more in (BUILTIN, scanned(config.models_dir)):
        models = {**models, **{name: more[name] for name in more if name not in models}}
    return replace(config, models=models, keys=_keys(_table(table, "keys")))


def _keys(table: Mapping[str, Any]) -> dict[str, KeyConfig]:
    """The allow-list. Raises ConfigError, also for a key that stands there under two names."""
    names: dict[str, str] = {}
    keys: dict[str, KeyConfig] = {}
    for name in table:
        if not NAME.fullmatch(name):
            raise ConfigError(f"[keys.{name!r:.80}]: a name that `mlxpool keygen` would not give")
        key: KeyConfig = _build(KeyConfig, _table(table, name), f"keys.{name}")
        if not PUBLIC.fullmatch(key.public):
            raise ConfigError(
                f"keys.{name}.public is {key.public!r:.80}, must be the 40 characters that"
                " `mlxpool keygen` prints"
            )
        if names.setdefault(key.public, name) != name:
            raise ConfigError(f"keys.{name} and keys.{names[key.public]} have the same public key")
        keys[name] = key
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not TOML: {error}") from None


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"[{key}] must be a table, got {value!r}")
    return value


def variables() -> dict[str, str]:
    """The settings of [pool] that the environment may give, and their variables."""
    names = {f.name for f in fields(PoolConfig)} - {"models", "keys", "front", "back", "admin"}
    return {name: f"MLXPOOL_{name.upper()}" for name in sorted(names)}


def _environment() -> dict[str, str]:
    given = {name: os.environ.get(variable, "") for name, variable in variables().items()}
    return {name: value for name, value in given.items() if value}


def scanned(models_dir: Path | None) -> dict[str, ModelConfig]:
    """The models of the models folder, with the settings that nobody has named."""
    if models_dir is None:
        return {}
    border = str(models_dir)
    return {
        name: ModelConfig(path=str(folder), within=border)
        for name, folder in scan(models_dir).items()
    }


def _model(name: str, table: Mapping[str, Any]) -> ModelConfig:
    where = f"models.{name}"
    fault = fault_of_name(name)
    if fault is not None:
        raise ConfigError(f"[models.{name!r:.80}]: the name {fault}")
    built: ModelConfig = _build(ModelConfig, table, where)
    if built.path.startswith("~"):
        built = replace(built, path=str(Path(built.path).expanduser()))
    if not built.pin:
        return built
    if "keep_alive" in table and built.keep_alive >= 0:
        raise ConfigError(
            f"{where}: pin = true keeps the workers for ever, keep_alive is {built.keep_alive:g};"
            " leave one of them out"
        )
    return replace(built, keep_alive=-1.0)


def _unknown(key: str, known: tuple[str, ...], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    return f"{where}: unknown key {key!r}{hint}"


NO_SETTINGS = ("models", "keys", "within")


def _build(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    known = {f.name: str(f.type) for f in fields(kind) if f.name not in NO_SETTINGS}
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(_unknown(key, tuple(known), where))
        if key == "counting":
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}.counting must be a table, got {value!r}")
            values[key] = _build(Counting, value, f"{where}.counting")
        else:
            values[key] = _convert(key, known[key], value, f"{where}.{key}")
    missing = [f.name for f in fields(kind) if _needed(f) and f.name not in values]
    if missing:
        raise ConfigError(f"{where}.{missing[0]} is missing")
    built = kind(**values)
    _validate(built, where)
    return built


def _needed(setting: Field[Any]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _convert(key: str, annotation: str, value: Any, where: str) -> Any:
    if key in ("keep_alive",) or annotation == "float":
        return seconds(value, where)
    if annotation == "int":
        return (
            size(value, where)
            if key.endswith("bytes") or key == "memory_limit"
            else _int(value, where)
        )
    if annotation == "bool":
        value = {"true": True, "false": False}.get(value, value) if key in _IN_THE_AIR else value
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    if annotation.startswith("tuple"):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise ConfigError(f"{where} must be a list of strings, got {value!r}")
        return tuple(items)
    if not isinstance(value, str | Path):
        raise ConfigError(f"{where} must be a string, got {value!r}")
    return Path(value).expanduser().absolute() if annotation.startswith("Path") else str(value)


def _int(value: Any, where: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be an integer, got {value!r}")
    return value


_IN_THE_AIR = ("local_workers",)  # true or false as text: so it comes from the environment
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def seconds(value: Any, where: str) -> float:
    """A time as a number of seconds or as text: "250ms", "5m", "-1"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?", str(value).strip())
    if not match or not isinstance(value, str):
        raise ConfigError(f'{where} must be a time such as "5m" or "250ms", got {value!r}')
    return float(match[1]) * _UNITS[match[2] or "s"]


def size(value: Any, where: str) -> int:
    """A size as a number of bytes or as text: "4GB", "512MiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if not match or not isinstance(value, str) or match[2].upper() not in _BYTES:
        raise ConfigError(f'{where} must be a size such as "4GB", got {value!r}')
    return int(float(match[1]) * _BYTES[match[2].upper()])


_BOUNDS: dict[str, tuple[float, float]] = {
    "context": (0, 2**31 - 1),
    "replicas": (1, 64),
    "sequences": (1, 4096),
    "queue_limit": (1, 10**6),
    "queue_bytes": (1024, 2**50),
    "unread_bytes": (1024, 2**50),
    "restart_limit": (1, 1000),
    "deadline": (0.001, 10**7),
    "client_grace": (0.1, 10**6),
    "ack_grace": (0.1, 10**6),
    "restart_delay": (0.0, 3600.0),
    "restart_delay_max": (0.0, 86400.0),
    "probe_interval": (0.1, 10**6),
    "stop_grace": (0.0, 600.0),
    "worker_log_bytes": (1024, 2**50),
    "vocab": (256, 2**31 - 1),
    "keep_alive": (-1.0, 10**8),
    "load_ms": (0, 10**7),
    "prefill_us": (0, 10**9),
    "step_us": (0, 10**9),
    "fault_at": (0, 2**31 - 1),
    "fault_times": (0, 2**31 - 1),
    "load_bytes": (0, 2**62),
    "memory_limit": (0, 2**62),
    "prefix_bytes": (0, 2**62),
    "drain_grace": (0.0, 10**6),
    "poison_life": (0.0, 10**7),
    "beat_limit": (0.1, 10**6),
    "quota_requests": (0, 10**6),
    "quota_tokens": (0, 2**40),
    "quota_bytes": (0, 2**40),
    "quota_cancels": (0, 10**6),
    "load_limit": (0.1, 10**6),
    "prefill_limit": (0.1, 10**6),
    "step_limit": (0.1, 10**6),
    "fresh_limit": (0.1, 10**6),
}
FAULTS = (
    "",
    "raise",  # an error inside the step
    "kill",  # SIGKILL to itself
    "stop",  # SIGSTOP to itself
    "exit",  # os._exit(0)
    "exit3",  # os._exit(3)
    "segfault",
    "abort",
    "lock",  # waits for a lock that nobody opens
    "native",  # stuck in native code, the interpreter free
    "gil",  # stuck in native code, the interpreter held
    "leak",  # allocates until somebody ends it
    "slow",  # takes 200 ms where it would take none; healthy
    "garbage",  # a frame that is no message (in send)
    "duplicate",  # a frame twice (in send)
    "late",  # a frame again after those that followed it (in send)
    "stale",  # a frame again with the epoch before (in send)
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "prefix_cache": ("tree", "single", "off"),
    "log_format": ("text", "json"),
    "role": PEERS,
    "fault": FAULTS,
    "fault_in": ("load", "accept", "prefill", "decode", "end", "after_end", "send"),
}


def host_port(text: str, where: str = "pool.metrics") -> tuple[str, int]:
    """The parts of "127.0.0.1:9464" or "[::1]:9464"; port 0 takes a free one."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if not match or int(match[3]) > 65535:
        raise ConfigError(f'{where} must be HOST:PORT such as "127.0.0.1:9464", got {text!r}')
    return match[1] or match[2], int(match[3])


def _validate(built: Any, where: str) -> None:
    check: Callable[[str], Any] = lambda name: getattr(built, name)  # noqa: E731
    for name in (f.name for f in fields(built)):
        if name in _BOUNDS and not _BOUNDS[name][0] <= check(name) <= _BOUNDS[name][1]:
            low, high = _BOUNDS[name]
            raise ConfigError(f"{where}.{name} is {check(name)}, must be from {low:g} to {high:g}")
        if name in _CHOICES and check(name) not in _CHOICES[name]:
            raise ConfigError(f"{where}.{name} is {check(name)!r}, must be of {_CHOICES[name]}")
    if isinstance(built, PoolConfig):
        _check_endpoints(built, where)
    if getattr(built, "metrics", ""):
        host_port(built.metrics, f"{where}.metrics")
    if isinstance(built, ModelConfig) and not built.path:
        raise ConfigError(f"{where}.path is missing: a folder, a reference, or builtin:demo")


def _check_endpoints(pool: PoolConfig, where: str) -> None:
    """Plain tcp is for clients of this machine alone."""
    for name in ("front", "back", "admin"):
        for endpoint in getattr(pool, name):
            fault = endpoints.fault(
                endpoint, secured=pool.secret_key is not None, local=name == "front"
            )
            if fault is not None:
                raise ConfigError(f"{where}.{name}: {endpoint!r} {fault}")


def check_run_dir(run_dir: Path) -> None:
    """Make the run directory, 0700. Raises ConfigError when it cannot be used."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir / "logs"):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot use the run directory {run_dir}: {error.strerror}; give another with --run-dir"
        ) from None
    status = run_dir.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"the run directory {run_dir} must be ours and closed to others (chmod 700)"
        )
