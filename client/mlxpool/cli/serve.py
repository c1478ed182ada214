"""`mlxpool serve`: the broker in the foreground."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.common.paths import config_file

if TYPE_CHECKING:
    from mlxpool.common.config.loading import PoolConfig


FLAGS = ("front", "back", "admin", "secret_key", "log_format", "local_workers")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """`serve`."""
    serve = commands.add_parser(
        "serve",
        parents=[common],
        help="run a broker; workers start with the first request for their model",
    )
    add_settings(serve)
    add_endpoints(serve)
    serve.set_defaults(run=run)


def add_endpoints(parser: argparse.ArgumentParser) -> None:
    """Where a broker listens beside its run directory, and the key that tcp needs."""
    for name, whom in (
        ("front", "clients"),
        ("back", "workers that dial in"),
        ("admin", "operators"),
    ):
        parser.add_argument(
            f"--{name}", action="append", metavar="ENDPOINT", help=f"further endpoint for {whom}"
        )
    parser.add_argument("--secret-key", metavar="FILE", help="the broker's own key: tcp is CURVE")
    parser.add_argument("--log-format", choices=("text", "json"))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags that say which models there are."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML (default: $MLXPOOL_CONFIG, $XDG_CONFIG_HOME/mlxpool/mlxpool.toml,"
        " /etc/mlxpool/mlxpool.toml; deploy/mlxpool.toml shows all settings)",
    )
    parser.add_argument("--models-dir", help="each folder in it with a config.json is a model")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the model at PATH, a folder or a reference, as NAME; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    # Here and not above: only this command needs the broker's code.
    from mlxpool.broker.edge.loop import Broker
    from mlxpool.common import logs

    settings = settings_of(options)
    logs.set_up(json_lines=settings.log_format == "json")

    Broker(settings, lambda: settings_of(options)).run()
    return 0


def settings_of(options: argparse.Namespace) -> PoolConfig:
    """The pool's settings; a flag beats the environment, which beats the file."""
    from mlxpool.common.config import loading

    return loading.load(config_file(options.config), flags_of(options), folders_of(options))


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of [pool] that flags give; None: not given."""
    return {
        "run_dir": options.run_dir_flag,
        "models_dir": options.models_dir,
        **{name: getattr(options, name, None) for name in FLAGS},
    }


def folders_of(options: argparse.Namespace) -> dict[str, str]:
    """The paths of the models that flags name."""
    return dict(map(_named_folder, options.model))


def _named_folder(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise ValueError(f"--model must be NAME=PATH, got {text!r}")
    return name, folder
