"""`mlxpool ray`: a pool on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.cli.columns import Column
from mlxpool.cli.formatting import json_text
from mlxpool.cli.style import print_table
from mlxpool.common.errors import BadRequest

PATIENCE = 60.0  # seconds
MODELS = (Column("MODEL", 0, "text"), Column("REPLICAS"), Column("READY"), Column("STARTED"))
WORKERS = (Column("WORKER"), Column("MODEL", 0, "text"), Column("STATE"), Column("NODE", 1))


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `ray` with `up`, `down` and `status`."""
    group = commands.add_parser(
        "ray",
        parents=[common],
        help="run a pool on a Ray cluster",
        description="Runs the broker on the node with the resource mlxpool_broker, and workers"
        " wherever the cluster has room for them: docs/scale.md. Needs `pip install"
        " 'mlxpool[ray]'` on every node.",
    )
    verbs = group.add_subparsers(dest="verb", metavar="up | down | status", required=True)
    up = verbs.add_parser(
        "up", parents=[common], help="start a pool, or give a running pool new settings"
    )
    down = verbs.add_parser("down", parents=[common], help="end a pool; its files stay")
    status = verbs.add_parser("status", parents=[common], help="show the broker and its workers")
    up.add_argument("file", type=Path, metavar="FILE", help="file of the pool's settings, in TOML")
    for parser in (down, status):
        parser.add_argument(
            "file",
            type=Path,
            nargs="?",
            metavar="FILE",
            help="file of the settings, of which the name is used",
        )
    for parser in (up, down, status):
        parser.add_argument("--name", help="name of the pool (default: FILE without .toml)")
        parser.add_argument(
            "--address",
            default="auto",
            help="address of the Ray cluster (default: $RAY_ADDRESS, or this machine's cluster)",
        )
    up.add_argument(
        "--folder",
        default="",
        help="folder of the broker's key, sockets and log on its machine (~/.mlxpool/ray/NAME)",
    )
    up.add_argument(
        "--front-port", type=int, default=7200, help="the broker's port for clients (7200)"
    )
    up.add_argument(
        "--back-port", type=int, default=7201, help="the broker's port for workers (7201)"
    )
    up.set_defaults(run=run_up)
    down.set_defaults(run=run_down)
    status.set_defaults(run=run_status)


def run_up(options: argparse.Namespace) -> int:
    """Starts a pool, or changes its settings."""
    from mlxpool.cluster import pool_spec

    spec = pool_spec.read(
        options.file, name_of(options), options.folder, options.front_port, options.back_port
    )
    ray = _ray_cluster()
    with ray.connected(options.address):
        pool = ray.up(spec, PATIENCE)
    print_status(options, pool)
    return 0


def run_down(options: argparse.Namespace) -> int:
    """Ends a pool."""
    name = name_of(options)
    ray = _ray_cluster()
    with ray.connected(options.address):
        actors = ray.down(name)
    text = f"{name}: ended" if actors else f"{name}: there is no such pool"
    print(json_text({"name": name, "actors": actors}) if options.json else text)
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Prints a pool's status; exit code 1 if its broker does not answer."""
    ray = _ray_cluster()
    with ray.connected(options.address):
        pool = ray.status(name_of(options))
    print_status(options, pool)
    return 0 if pool.get("broker") else 1


def name_of(options: argparse.Namespace) -> str:
    """Returns the pool's name: the value of --name, or the name of the file without its suffix.

    Raises BadRequest if neither --name nor the file is given.
    """
    from mlxpool.cluster.pool_spec import check_name

    if options.name is None and options.file is None:
        raise BadRequest("name the pool: its file of settings, or --name")
    return check_name(options.name or options.file.stem)


def print_status(options: argparse.Namespace, pool: Mapping[str, Any]) -> None:
    """Prints the status of a pool, as text or as JSON."""
    if options.json:
        print(json_text(pool))
        return
    if pool["fault"]:
        print(f"{pool['name']}: no broker: {pool['fault']}")
        return
    answers = "does not answer" if pool["broker"] is None else "answers"
    print_table(
        MODELS,
        [(row["name"], _bounds(row), str(row["ready"]), str(row["started"]))
         for row in pool["models"]],
        above=[
            f"pool {pool['name']}: the broker {answers}",
            f"--endpoint {pool['endpoint']} --server-key '{pool['server_key']}'",
        ],
    )  # fmt: skip
    print_table(
        WORKERS,
        [(row["id"], row["model"], row["state"], row["address"] or "-")
         for row in pool["workers"]],
        above=[""],
    )  # fmt: skip


def _bounds(row: Mapping[str, Any]) -> str:
    """Returns the number of workers that a model should have, or the bounds of this number."""
    return str(row["min"]) if row["min"] == row["max"] else f"{row['min']} to {row['max']}"


def _ray_cluster() -> Any:
    """Returns the module that uses Ray. Raises BadRequest if Ray is not installed."""
    try:
        from mlxpool.cluster import ray_cluster
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("ray"):
            raise
        raise BadRequest(
            "`mlxpool ray` needs Ray, which is not installed here: pip install 'mlxpool[ray]'"
        ) from None
    return ray_cluster
