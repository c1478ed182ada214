"""`mlxpool gateway`: serves HTTP APIs for a pool, in the foreground."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlxpool.cli.formatting import json_text
from mlxpool.cli.target import add_flags, targets_of


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `gateway`."""
    gateway = commands.add_parser(
        "gateway",
        parents=[common],
        help="serve the HTTP APIs of OpenAI, Anthropic and Ollama",
    )
    add_flags(gateway, several=True)
    gateway.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    gateway.add_argument(
        "--port", type=int, default=11434, help="port to listen on, 0: any free port (11434)"
    )
    gateway.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="file of bearer keys, one a line (default: none, requests need no key)",
    )
    gateway.add_argument(
        "--max-body", type=int, default=8 * 2**20, metavar="BYTES",
        help="greatest number of bytes of a request's body (8388608)",
    )  # fmt: skip
    gateway.add_argument(
        "--idle-time", type=float, default=120.0, metavar="SECONDS",
        help="time that a connection without a request stays open (120)",
    )  # fmt: skip
    gateway.add_argument(
        "--stream-keep", type=float, default=600.0, metavar="SECONDS",
        help="time for which an answer with an Idempotency-Key is kept after its end (600)",
    )  # fmt: skip
    gateway.add_argument(
        "--keep-alive", type=float, default=10.0, metavar="SECONDS",
        help="time without output after which a stream sends a sign of life (10)",
    )  # fmt: skip
    gateway.add_argument(
        "--deadline", type=float, metavar="SECONDS",
        help="deadline of a request (default: the pool's own)",
    )  # fmt: skip
    gateway.add_argument(
        "--per-key", type=int, metavar="N",
        help="greatest number of requests of one key at once (default: no limit)",
    )  # fmt: skip
    gateway.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS",
        help="time in which running requests may end after SIGTERM (30)",
    )  # fmt: skip
    gateway.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="origin whose pages may use the gateway in browsers, such as https://app.example, or"
        " '*' for all; may be repeated (none)",
    )  # fmt: skip
    gateway.add_argument(
        "--name-owners", action="store_true",
        help="name the owner of each bearer key to a broker over tcp, whose settings must allow it",
    )  # fmt: skip
    gateway.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="ADDRESS",
        help="proxy whose X-Forwarded-For names the client, or network of proxies such as"
        " 10.0.0.0/8; may be repeated (none)",
    )  # fmt: skip
    gateway.add_argument(
        "--access-log", action=argparse.BooleanOptionalAction, default=True,
        help="log a line for each request (yes)",
    )  # fmt: skip
    gateway.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of the log (text)"
    )
    gateway.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    # Imported here, because only this command needs the gateway and its packages.
    from mlxpool.common import logs
    from mlxpool.common.process import private_temp
    from mlxpool.gateway import server
    from mlxpool.gateway.settings import Broker, Settings

    logs.set_up(json_lines=options.log_format == "json")
    private_temp.use()
    targets = targets_of(options, "front")
    settings = Settings(
        run_dir=targets[0].run_dir,
        remote=tuple(
            Broker(target.endpoint, target.server_key) for target in targets if target.endpoint
        ),
        key=next((target.key for target in targets if target.key), None),
        host=options.host,
        port=options.port,
        keys=options.keys,
        max_body=options.max_body,
        idle_time=options.idle_time,
        stream_keep=options.stream_keep,
        keep_alive=options.keep_alive,
        per_key=options.per_key,
        deadline=options.deadline,
        drain_timeout=options.drain_timeout,
        cors_origins=tuple(options.cors_origin),
        trusted_proxies=tuple(options.trusted_proxy),
        name_owners=options.name_owners or None,
        access_log=options.access_log,
    )

    def print_url(url: str) -> None:
        print(json_text({"url": url}) if options.json else f"listening on {url}", flush=True)

    server.run(settings, print_url)
    return 0
