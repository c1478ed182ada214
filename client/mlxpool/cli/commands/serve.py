"""`mlxpool serve`: the broker in the foreground."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpool.cli.pool_flags import add_endpoints, add_settings, settings_of


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `serve` and `broker`, which is `serve` without workers of its own."""
    serve = commands.add_parser(
        "serve",
        parents=[common],
        help="run a broker and its workers",
        description="Runs a broker in the foreground. Workers start with the first request for"
        " their model.",
    )
    broker = commands.add_parser(
        "broker",
        parents=[common],
        help="run a broker alone: workers connect with `mlxpool worker`",
    )
    for parser in (serve, broker):
        add_settings(parser)
        add_endpoints(parser)
    serve.set_defaults(run=run)
    broker.set_defaults(run=run, local_workers=False)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    # Here and not above: only this command needs the broker's code.
    from mlxpool.broker.edge.broker import Broker
    from mlxpool.common import logs
    from mlxpool.common.process import private_temp

    settings = settings_of(options)
    logs.set_up(json_lines=settings.log_format == "json", level=logs.LEVELS[settings.log_level])
    private_temp.use(settings.run_dir)  # for the processes that it starts
    Broker(settings, lambda: settings_of(options)).run()
    return 0
