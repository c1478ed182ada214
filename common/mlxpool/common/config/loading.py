"""Frozen settings, each with its unit and reason; the only reader of TOML and of the environment.

Order: flag > environment > file > default. An unknown key is an error naming the nearest one, and
all errors are told at once.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mlxpool.common.config.bounds import ConfigError, Faults, check, convert
from mlxpool.common.config.model_names import fault_of_name, scan
from mlxpool.common.paths import default_run_dir
from mlxpool.common.transport import endpoints
from mlxpool.common.transport.keys import NAME, PUBLIC


@dataclass(frozen=True, slots=True)
class Counting:
    """How the weightless `counting` model behaves; its token i is f(prompt, seed, i)."""

    load_ms: int = 0  # time the load takes, in ten shards
    prefill_us: int = 0  # time for each prompt token
    step_us: int = 1000  # time of one decode step
    joint: int = 1  # prompts that are read in one pass
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
    deterministic: bool = False  # no bit depends on what is computed beside it; slower, CPU only
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

    Raises ConfigError naming the key, its value and the bound, for all that is wrong.
    """
    table, faults = _read(path) if path else {}, Faults()
    faults.problems += [_unknown(key, SECTIONS, str(path)) for key in table if key not in SECTIONS]
    config, models, keys = PoolConfig(), dict[str, ModelConfig](), dict[str, KeyConfig]()
    with faults.caught():
        config = _pool(_table(table, "pool"), flags or {})
    with faults.caught():
        models = _models(_table(table, "models"), folders or {})
    with faults.caught():
        keys = _keys(_table(table, "keys"))
    faults.tell()
    for more in (BUILTIN, scanned(config.models_dir)):
        models = {**models, **{name: more[name] for name in more if name not in models}}
    return replace(config, models=models, keys=keys)


def _pool(table: Mapping[str, Any], flags: Mapping[str, Any]) -> PoolConfig:
    given = {key: value for key, value in flags.items() if value is not None}
    return _build(PoolConfig, {**table, **_environment(), **given}, "pool")


def _models(table: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, ModelConfig]:
    models, faults = dict[str, ModelConfig](), Faults()
    for name in table:
        with faults.caught():
            models[name] = _model(name, _table(table, name))
    for name, path in folders.items():
        with faults.caught():
            models[name] = _model(name, {"path": path})
    faults.tell()
    return models


def _keys(table: Mapping[str, Any]) -> dict[str, KeyConfig]:
    """The allow-list. Raises ConfigError, also for a key that stands there under two names."""
    names: dict[str, str] = {}
    keys, faults = dict[str, KeyConfig](), Faults()
    for name in table:
        with faults.caught():
            key = keys[name] = _key(name, table)
            if names.setdefault(key.public, name) != name:
                other = names[key.public]
                raise ConfigError(f"keys.{name} and keys.{other} have the same public key")
    faults.tell()
    return keys


def _key(name: str, table: Mapping[str, Any]) -> KeyConfig:
    if not NAME.fullmatch(name):
        raise ConfigError(f"[keys.{name!r:.80}]: a name that `mlxpool keygen` would not give")
    key = _build(KeyConfig, _table(table, name), f"keys.{name}")
    if not PUBLIC.fullmatch(key.public):
        raise ConfigError(
            f"keys.{name}.public is {key.public!r:.80}, must be the 40 characters that"
            " `mlxpool keygen` prints"
        )
    return key


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
    built = _build(ModelConfig, table, where)
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


NO_SETTINGS = ("models", "keys", "within")
PATH_WORDS = ": a folder, a reference, or builtin:demo"
Kind = TypeVar("Kind", PoolConfig, ModelConfig, Counting, KeyConfig)


def _build(kind: type[Kind], table: Mapping[str, Any], where: str) -> Kind:
    """A dataclass of a section. Raises ConfigError with all that is wrong with it."""
    known = {f.name: str(f.type) for f in fields(kind) if f.name not in NO_SETTINGS}
    values, faults = dict[str, Any](), Faults()
    for key, value in table.items():
        with faults.caught():
            values[key] = _setting(key, known, value, where)
    meant = {_nearest(key, known) for key in table}  # the like of an unknown key is not missed
    for name in (f.name for f in fields(kind) if _needed(f) and f.name not in meant):
        faults.problems.append(f"{where}.{name} is missing")
    if (kind is ModelConfig and "path" not in meant) or table.get("path") == "":
        faults.problems.append(f"{where}.path is missing{PATH_WORDS}")
    if kind is PoolConfig:
        faults.problems += _bad_endpoints(values, where)
    faults.tell()
    return kind(**values)


def _setting(key: str, known: Mapping[str, str], value: Any, where: str) -> Any:
    if key not in known:
        raise ConfigError(_unknown(key, tuple(known), where))
    place = f"{where}.{key}"
    if key == "counting":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place} must be a table, got {value!r}")
        return _build(Counting, value, place)
    read = convert(key, known[key], value, place)
    check(key, read, place)
    if key == "models_dir" and not read.is_dir():
        raise ConfigError(f"{place}: there is no folder {read}")
    return read


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The name itself, if it is known."""
    if key in known:
        return key
    return next(iter(difflib.get_close_matches(key, list(known), n=1)), None)


def _unknown(key: str, known: Iterable[str], where: str) -> str:
    near = _nearest(key, known)
    hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(known)}"
    return f"{where}: unknown key {key!r}{hint}"


def _needed(setting: Field[Any]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _bad_endpoints(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Plain tcp is for clients of this machine alone."""
    secured = "secret_key" in values
    for name in ("front", "back", "admin"):
        for endpoint in values.get(name, ()):
            fault = endpoints.fault(endpoint, secured=secured, local=name == "front")
            if fault is not None:
                yield f"{where}.{name}: {endpoint!r} {fault}"


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
