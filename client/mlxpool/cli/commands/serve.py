"""`mlxpool serve`, `mlxpool broker` and `mlxpool worker`: a pool in the foreground."""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import replace

from mlxpool.cli.pool_flags import add_endpoints, add_settings, settings_of
from mlxpool.cli.target import add_flags, target_of

ORPHAN_GRACE = 60.0  # seconds


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the commands `serve`, `broker` and `worker`.

    `broker` is `serve` without local workers.
    """
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
        help="run a broker whose workers connect with `mlxpool worker`",
    )
    for parser in (serve, broker):
        add_settings(parser)
        add_endpoints(parser)
    serve.set_defaults(run=run)
    broker.set_defaults(run=run, local_workers=False)
    worker = commands.add_parser(
        "worker",
        parents=[common],
        help="run a worker that connects to a broker",
        description="Connects to a broker's back endpoint over tcp with a key of the role"
        " `worker`, or a `mlxpool broker` of this machine over ipc. A worker that crashes or hangs"
        " is restarted. Exit codes: 0 the broker stopped it, or SIGTERM; 1 its key is refused; 3"
        " no broker answered within --orphan-grace.",
    )
    add_flags(worker)
    worker.add_argument("name", metavar="MODEL", help="the model's name in requests")
    add_settings(worker)
    worker.add_argument(
        "--orphan-grace",
        type=float,
        default=ORPHAN_GRACE,
        metavar="SECONDS",
        help="time without a broker after which the worker ends (default 60)",
    )
    worker.add_argument("--log-format", choices=("text", "json"), help="format of the log")
    worker.set_defaults(run=run_worker)


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    # Imported here, because only this command needs the broker's code.
    from mlxpool.broker.edge.broker import Broker
    from mlxpool.common import logs
    from mlxpool.common.process import private_temp

    settings = settings_of(options)
    logs.set_up(json_lines=settings.log_format == "json", level=logs.LEVELS[settings.log_level])
    private_temp.use(settings.run_dir)  # for the processes that the broker starts
    Broker(settings, lambda: settings_of(options)).run()
    return 0


def run_worker(options: argparse.Namespace) -> int:
    """Supervises one worker until the broker stops it, or until SIGTERM."""
    # Imported here, because only this command needs the supervisor's code.
    from mlxpool.broker.processes.remote_supervisor import RemoteSupervisor
    from mlxpool.broker.processes.supervisor import DialSettings
    from mlxpool.common import logs
    from mlxpool.common.config.loading import check_run_dir
    from mlxpool.common.process import private_temp

    target = target_of(options, "back")
    target.credentials()  # a wrong key raises an error here, not in every worker
    config = settings_of(options)
    model = config.models.get(options.name)
    if model is None:
        raise ValueError(
            f"there is no model {options.name!r:.80} here; name it with --model NAME=PATH or in"
            f" the config; known: {', '.join(list(config.models)[:20])}"
        )
    if options.orphan_grace < 0:
        raise ValueError(f"--orphan-grace must be 0 or more, got {options.orphan_grace:g}")
    logs.set_up(json_lines=config.log_format == "json", level=logs.LEVELS[config.log_level])
    private_temp.use(config.run_dir)  # for the worker that the supervisor starts
    dial = DialSettings(target.server_key or "", target.key or "", options.orphan_grace)
    check_run_dir(config.run_dir)
    # A separate folder, because a broker in the run directory deletes unknown files.
    own = replace(config, run_dir=config.run_dir / "remote")
    return RemoteSupervisor(own, target.endpoint_of("back"), options.name, model, dial).run()
