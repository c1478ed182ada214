"""`mlxpool broker` and `mlxpool worker`: the two halves of a pool, on machines of their own."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from mlxpool.cli import serve
from mlxpool.cli.target import add_flags, place_of

ORPHAN_GRACE = 60.0  # seconds


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """`broker` and `worker`."""
    broker = commands.add_parser(
        "broker",
        parents=[common],
        help="run a broker that starts no worker: workers dial in with `mlxpool worker`",
    )
    serve.add_settings(broker)
    serve.add_endpoints(broker)
    broker.set_defaults(run=serve.run, local_workers=False)
    worker = commands.add_parser(
        "worker",
        parents=[common],
        help="run a worker of a broker elsewhere",
        description="Dials a broker's back endpoint over tcp with a key of the role `worker`, or a"
        " `mlxpool broker` of this machine over ipc. A worker that crashes or hangs is started"
        " again. Exit codes: 0 the broker sent it away, or SIGTERM; 1 its key is refused; 3 no"
        " broker answered for --orphan-grace.",
    )
    add_flags(worker)
    worker.add_argument("name", metavar="MODEL", help="the name under which requests ask for it")
    serve.add_settings(worker)
    worker.add_argument(
        "--orphan-grace",
        type=float,
        default=ORPHAN_GRACE,
        metavar="SECONDS",
        help="how long the broker may be gone before the worker ends (default 60)",
    )
    worker.add_argument("--log-format", choices=("text", "json"))
    worker.set_defaults(run=run_worker)


def run_worker(options: argparse.Namespace) -> int:
    """Serve until the broker says stop, or SIGTERM."""
    # Here and not above: only this command needs that code.
    from mlxpool.broker.processes.remote_supervisor import Outpost
    from mlxpool.broker.processes.supervisor import Dial
    from mlxpool.common import logs
    from mlxpool.common.config.loading import check_run_dir

    place = place_of(options, "back")
    place.credentials()  # a key that cannot be used is told here and not by every worker
    config = serve.settings_of(options)
    model = config.models.get(options.name)
    if model is None:
        raise ValueError(
            f"there is no model {options.name!r:.80} here; name it with --model NAME=PATH or in"
            f" the config; known: {', '.join(list(config.models)[:20])}"
        )
    if options.orphan_grace < 0:
        raise ValueError(f"--orphan-grace must be 0 or more, got {options.orphan_grace:g}")
    logs.set_up(json_lines=config.log_format == "json")
    dial = Dial(place.server_key or "", place.key or "", options.orphan_grace)
    check_run_dir(config.run_dir)
    own = replace(config, run_dir=config.run_dir / "remote")  # no broker may sweep it away
    return Outpost(own, place.of_socket("back"), options.name, model, dial).run()
