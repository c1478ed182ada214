"""The flags of commands with pool settings, such as `serve`, `check` and `config`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.common.paths import config_file

if TYPE_CHECKING:
    from mlxpool.common.config.schema import PoolConfig

POOL_FLAGS = (
    "front", "back", "admin", "secret_key", "metrics", "http", "http_keys", "state_dir",
    "log_format",
    "local_workers",
)  # fmt: skip


def add_endpoints(parser: argparse.ArgumentParser) -> None:
    """Adds flags of the broker: endpoints, secret key, metrics, HTTP APIs and log format."""
    for name, peers in (
        ("front", "clients"),
        ("back", "workers that connect"),
        ("admin", "operators"),
    ):
        parser.add_argument(
            f"--{name}", action="append", metavar="ENDPOINT", help=f"further endpoint for {peers}"
        )
    parser.add_argument(
        "--secret-key",
        metavar="FILE",
        help="file of the broker's secret key; with it tcp uses CURVE",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="address of the status page and Prometheus's /metrics, such as 127.0.0.1:9464"
        " (default: `metrics` of the settings, else none)",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="address of the HTTP APIs of OpenAI, Anthropic and Ollama, such as 127.0.0.1:11434"
        " (default: `http` of the settings, else none)",
    )
    parser.add_argument(
        "--http-keys",
        metavar="FILE",
        help="file of bearer keys, one a line; needed if others can reach the address of --http",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="folder of the jobs, which outlive the broker; '': no jobs (default: `state_dir` of"
        " the settings, else a folder of yours)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), help="format of the log")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name the settings file and the models."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings in TOML (default: $MLXPOOL_CONFIG, $XDG_CONFIG_HOME/mlxpool/mlxpool.toml,"
        " /etc/mlxpool/mlxpool.toml; deploy/mlxpool.toml shows all settings)",
    )
    parser.add_argument(
        "--models-dir",
        help="folder of models: each folder in it with a config.json or a GGUF file is a model",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="add the model at PATH, a folder or a reference, as NAME; may be repeated",
    )


def settings_of(options: argparse.Namespace) -> PoolConfig:
    """Returns the pool's settings. Precedence: flags, then the environment, then the file.

    Raises ConfigError, and ValueError if a --model is not NAME=PATH.
    """
    from mlxpool.common.config import loading

    return loading.load(config_file(options.config), flags_of(options), model_paths_of(options))


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of [pool] that have flags; None for an absent flag."""
    return {
        "run_dir": options.run_dir_flag,
        "models_dir": options.models_dir,
        **{name: getattr(options, name, None) for name in POOL_FLAGS},
    }


def model_paths_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the paths in the flags --model, by model name."""
    return dict(map(_name_and_path, options.model))


def _name_and_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise ValueError(f"--model must be NAME=PATH, got {text!r}")
    return name, path
