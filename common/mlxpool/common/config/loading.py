"""Loads the settings of a pool. Only this module reads settings from TOML and the environment.

Precedence: flag > environment > file > default. An unknown key is an error that names the nearest
key. One ConfigError reports all errors.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

from msgspec.structs import fields, replace

from mlxpool.common.checks import nearest
from mlxpool.common.config.bounds import (
    LOOPBACK,
    ConfigError,
    Declaration,
    Problems,
    declarations,
    host_port,
    origin_faults,
    proxy_faults,
)
from mlxpool.common.config.model_names import fault_of_name, scan
from mlxpool.common.config.schema import (
    BUILTIN,
    NO_SETTINGS,
    Counting,
    KeyConfig,
    ModelConfig,
    PoolConfig,
    Scaling,
)
from mlxpool.common.paths import default_state_dir, expanded
from mlxpool.common.transport import endpoints
from mlxpool.common.transport.keys import NAME, PUBLIC
from mlxpool.common.web_targets import Allowed, Target

SECTIONS = ("pool", "models", "keys")
MIN_PREFIX_DISK = 16 * 1024 * 1024  # bytes
WITHOUT_PREFIXES = tuple(BUILTIN[name].path for name in ("counting", "demo-embed"))


def load(
    path: Path | None,
    flags: Mapping[str, Any] | None = None,
    folders: Mapping[str, str] | None = None,
) -> PoolConfig:
    """Returns the pool's settings from a TOML file, the environment (MLXPOOL_*) and flags.

    `folders` are the paths of further models from flags, by model name.

    Raises ConfigError naming the key, value and bound of every wrong setting.
    """
    table, problems = _read(path) if path else {}, Problems()
    problems.found += [_unknown(key, SECTIONS, str(path)) for key in table if key not in SECTIONS]
    config, models, keys = PoolConfig(), dict[str, ModelConfig](), dict[str, KeyConfig]()
    with problems.collected():
        config = _pool(_table(table, "pool"), flags or {})
    with problems.collected():
        models = _models(_table(table, "models"), folders or {})
    with problems.collected():
        keys = _keys(_table(table, "keys"))
    problems.check()
    for further in (BUILTIN, scanned(config.models_dir)):
        models = {**models, **{name: further[name] for name in further if name not in models}}
    return replace(config, models=models, keys=keys)


def _pool(table: Mapping[str, Any], flags: Mapping[str, Any]) -> PoolConfig:
    by_flag = {key: value for key, value in flags.items() if value is not None}
    values = {**table, **_environment(), **by_flag}
    config = _build(PoolConfig, values, "pool")
    if "state_dir" in values:
        return config
    return replace(config, state_dir=str(default_state_dir(config.run_dir)))


def _models(table: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, ModelConfig]:
    models, problems = dict[str, ModelConfig](), Problems()
    for name in table:
        with problems.collected():
            models[name] = _model(name, _table(table, name))
    for name, path in folders.items():
        with problems.collected():
            models[name] = _model(name, {"path": path})
    problems.check()
    return models


def _keys(table: Mapping[str, Any]) -> dict[str, KeyConfig]:
    """Returns the allow-list of public keys.

    Raises ConfigError if a key is wrong, or if two names have the same key.
    """
    names: dict[str, str] = {}
    keys, problems = dict[str, KeyConfig](), Problems()
    for name in table:
        with problems.collected():
            key = keys[name] = _key(name, table)
            if names.setdefault(key.public, name) != name:
                other = names[key.public]
                raise ConfigError(f"keys.{name} and keys.{other} have the same public key")
    problems.check()
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
    """Returns the environment variable of each setting of [pool], by name, except lists."""
    names = [
        name
        for name, setting in declarations(PoolConfig).items()
        if name not in NO_SETTINGS and get_origin(setting.type) is not tuple
    ]
    return {name: f"MLXPOOL_{name.upper()}" for name in sorted(names)}


def _environment() -> dict[str, str]:
    values = {name: os.environ.get(variable, "") for name, variable in variables().items()}
    return {name: value for name, value in values.items() if value}


def scanned(models_dir: Path | None) -> dict[str, ModelConfig]:
    """Returns the models in the models folder, each with default settings."""
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
    if isinstance(table.get("replicas"), Mapping):
        built = _scaled(table, where)
    else:
        built = _build(ModelConfig, table, where)
    built = replace(built, path=_expanded(built.path), draft=_expanded(built.draft))
    if 0 < built.batch <= built.sequences:
        raise ConfigError(
            f"{where}.batch is {built.batch} tokens, must be more than the {built.sequences} of"
            f" {where}.sequences, or no prompt is read while all run; 0 chooses it"
        )
    if fault := _prefix_fault(built):
        raise ConfigError(f"{where}.prefix_disk {fault}")
    if 0 < len(built.gpu_ids) < built.devices:
        raise ConfigError(
            f"{where}.gpu_ids names {len(built.gpu_ids)} GPUs ({', '.join(built.gpu_ids)}), but"
            f" devices is {built.devices}, and each of them is a GPU of its own: name at least"
            f" {built.devices}, or set devices to at most {len(built.gpu_ids)}"
        )
    if fault := _draft_fault(built):
        raise ConfigError(f"{where}.{fault}")
    if not built.pin:
        return built
    if "keep_alive" in table and built.keep_alive >= 0:
        raise ConfigError(
            f"{where}: pin = true keeps the workers for ever, keep_alive is {built.keep_alive:g};"
            " leave one of them out"
        )
    return replace(built, keep_alive=-1.0)


def _expanded(path: str) -> str:
    """Returns a path or reference with a leading ~ replaced by the home folder."""
    return str(expanded(path)) if path.startswith("~") else path


def _prefix_fault(model: ModelConfig) -> str:
    """Returns why the settings of a model forbid prefixes on disk; "" if they allow them."""
    if not model.prefix_disk:
        return ""
    if model.prefix_disk < MIN_PREFIX_DISK:
        return (
            f"is {model.prefix_disk} bytes, must be 0, which keeps nothing on disk, or at least"
            f" {MIN_PREFIX_DISK} (16 MiB)"
        )
    if model.prefix_cache != "tree":
        return (
            f'needs prefix_cache = "tree", which is {model.prefix_cache!r}: set that, or leave'
            " prefix_disk out"
        )
    if model.devices > 1:
        return (
            f"is not built for models on several devices, devices is {model.devices}: leave one of"
            " them out"
        )
    if model.task or model.path in WITHOUT_PREFIXES:
        what = f"a model with task = {model.task!r}" if model.task else model.path
        return f"is set, but {what} keeps no prefixes: leave prefix_disk out"
    return ""


def _draft_fault(model: ModelConfig) -> str:
    """Returns why `speculation` and `draft` contradict each other; "" if they do not."""
    if model.draft and model.speculation not in ("draft", "auto"):
        return (
            f"draft is {model.draft!r}, but speculation is {model.speculation!r}: set that to"
            " 'draft' or 'auto', or leave draft out"
        )
    if model.speculation == "draft" and not model.draft:
        return (
            "speculation is 'draft', but no draft model is set: name one that has the tokenizer"
            " of this model, draft = \"PATH\", or set speculation to 'ngram'"
        )
    return ""


def _scaled(table: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns a model whose setting `replicas` is a table. Raises ConfigError with all problems."""
    problems, scaling = Problems(), Scaling()
    with problems.collected():
        scaling = _build(Scaling, table["replicas"], f"{where}.replicas")
        if not scaling.max:
            raise ConfigError(f"{where}.replicas.max is missing")
        if scaling.min > scaling.max:
            raise ConfigError(
                f"{where}.replicas: min is {scaling.min}, must not be above max, which is"
                f" {scaling.max}"
            )
    rest = {key: value for key, value in table.items() if key != "replicas"}
    built = ModelConfig()
    with problems.collected():
        built = _build(ModelConfig, rest, where)
    problems.check()
    return replace(built, replicas=max(1, scaling.min), scaling=scaling)


PATH_HINT = ": a folder, a reference, or builtin:demo"
Kind = TypeVar("Kind", PoolConfig, ModelConfig, Counting, Scaling, KeyConfig)


def _build(kind: type[Kind], table: Mapping[str, Any], where: str) -> Kind:
    """Returns the record of a section of the file. Raises ConfigError with all its problems."""
    known = {
        name: setting for name, setting in declarations(kind).items() if name not in NO_SETTINGS
    }
    values: dict[str, Any] = {}
    problems = Problems()
    for key, value in table.items():
        with problems.collected():
            values[key] = _setting(key, known, value, where)
    meant = {_nearest(key, known) for key in table}  # a misspelt key is not reported as missing
    for name in (f.name for f in fields(kind) if f.required and f.name not in meant):
        problems.found.append(f"{where}.{name} is missing")
    if (kind is ModelConfig and "path" not in meant) or table.get("path") == "":
        problems.found.append(f"{where}.path is missing{PATH_HINT}")
    if kind is PoolConfig:
        problems.found += [
            *_bad_endpoints(values, where),
            *(_bad_admin_token(values, where) if values.keys() >= table.keys() else ()),
            *_bad_http(values, where),
            *_bad_notify(values, where),
        ]
    problems.check()
    return kind(**values)


def _setting(key: str, known: Mapping[str, Declaration], value: Any, where: str) -> Any:
    if key not in known:
        raise ConfigError(_unknown(key, tuple(known), where))
    path = f"{where}.{key}"
    if known[key].type is not Counting:
        return known[key].read(value, path)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be a table, got {value!r}")
    return _build(Counting, value, path)


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like a key; the key itself if it is a known name."""
    if key in known:
        return key
    return nearest(key, known)


def _unknown(key: str, known: Iterable[str], where: str) -> str:
    near = _nearest(key, known)
    hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(known)}"
    return f"{where}: unknown key {key!r}{hint}"


def _bad_endpoints(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the problems of endpoints. Plain tcp is allowed only for clients, on the loopback."""
    secured = "secret_key" in values
    for name in ("front", "back", "admin"):
        for endpoint in values.get(name, ()):
            fault = endpoints.fault(endpoint, secured=secured, local=name == "front")
            if fault is not None:
                yield f"{where}.{name}: {endpoint!r} {fault}"


def _bad_admin_token(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields a problem if there is an operator token without a status page on the loopback."""
    if values.get("metrics_admin_token") is None:
        return
    address = values.get("metrics", "")
    if not address or host_port(address)[0] not in LOOPBACK:
        yield (
            f"{where}.metrics_admin_token needs {where}.metrics on the loopback interface, such as"
            f' "127.0.0.1:9464", got {address!r}: HTTP is not encrypted; reach it from elsewhere'
            " through ssh -L"
        )


def _bad_http(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the problems of origins, of proxies, and of a public address without bearer keys."""
    for fault in origin_faults(values.get("http_cors_origins", ())):
        yield f"{where}.http_cors_origins: {fault}"
    for fault in proxy_faults(values.get("http_trusted_proxies", ())):
        yield f"{where}.http_trusted_proxies: {fault}"
    address = values.get("http", "")
    if address and not values.get("http_keys") and host_port(address)[0] not in LOOPBACK:
        yield (
            f"{where}.http: others can reach {address!r}: name the keys that may ask with"
            f" {where}.http_keys (--http-keys FILE), or listen on 127.0.0.1"
        )


def _bad_notify(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the problems of the settings of notices, the POSTs about ended jobs."""
    allowed = Allowed()
    for name in ("job_notify_hosts", "job_notify_networks"):
        is_host = name == "job_notify_hosts"
        for text in values.get(name, ()):
            try:
                parsed = Allowed.of([text], []) if is_host else Allowed.of([], [text])
            except ValueError as error:
                yield f"{where}.{name}: {error}"
            else:
                allowed = Allowed(allowed.origins | parsed.origins)
    if url := values.get("job_notify_url", ""):
        try:
            refused = allowed.refusal(Target.parse(url))
        except ValueError as error:
            refused = str(error)
        if refused:
            yield f"{where}.job_notify_url: {refused}"


def check_run_dir(run_dir: Path) -> None:
    """Makes the run directory with mode 0700. Raises ConfigError if it cannot be used.

    An existing directory that other users may read but not write gets mode 0700.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.stat()
        if fault := access_fault(run_dir, status):
            raise ConfigError(fault)
        if status.st_mode & 0o077:
            run_dir.chmod(0o700)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir / "logs"):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot use the run directory {run_dir}: {error.strerror}; give another with --run-dir"
            " or $MLXPOOL_RUN_DIR"
        ) from None


def access_fault(run_dir: Path, status: os.stat_result) -> str:
    """Returns why a broker refuses a directory that another user owns or may write to; else ""."""
    if status.st_uid != os.getuid():
        return (
            f"the run directory {run_dir} belongs to the user {_user(status.st_uid)}, and this"
            f" process runs as {_user(os.getuid())}; give another with --run-dir"
        )
    if status.st_mode & 0o022:
        return (
            f"the run directory {run_dir} has the mode {status.st_mode & 0o7777:04o}, with which"
            f" other users may put files there; it must be 0700: chmod 700"
            f" {shlex.quote(str(run_dir))}"
        )
    return ""


def _user(uid: int) -> str:
    """Returns a user's name and id; the id alone if it has no name."""
    import pwd  # imported here, because only errors need it

    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
