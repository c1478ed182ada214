"""`mlxpool keygen`: a key pair for a client, a worker, an operator or a broker."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlxpool.cli.formatting import json_text
from mlxpool.common.transport import keys


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `keygen`."""
    sub = commands.add_parser(
        "keygen",
        parents=[common],
        help="make a CURVE key for tcp",
        description="Writes NAME.key, which only you can read, and never overwrites a file. The"
        " broker admits clients, workers and operators whose public key is in its config; its own"
        " key (--role server) is named there by pool.secret_key.",
    )
    sub.add_argument("name", metavar="NAME", help="name of the key, as in logs")
    sub.add_argument("--role", choices=keys.ROLES, required=True, help="role of the key")
    sub.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="folder of the key (default: ~/.mlxpool/keys)"
    )
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes a key pair, writes its file, and prints the public key."""
    pair = keys.make(options.name, options.role)
    path = keys.write(pair, options.folder or keys.default_folder())
    answer = {"name": pair.name, "role": pair.role, "public": pair.public, "path": str(path)}
    section = keys.section(pair.name)
    print(
        json_text(answer) if options.json else _config_text(section, pair.role, pair.public, path)
    )
    return 0


def _config_text(section: str, role: str, public: str, path: Path) -> str:
    if role == "server":
        return (
            f"# {path} is the secret key; for the broker's config:\n[pool]\n"
            f'secret_key = "{path.absolute()}"\n'
            f"# for those who dial it:\n# --server-key '{public}'"
        )
    return (
        f"# {path} is the secret key; for the broker's config:\n"
        f'{section}\nrole = "{role}"\npublic = "{public}"'
    )
