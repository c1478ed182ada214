"""The flags with which a command reaches a broker on another machine."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import Credentials

SERVER_KEY, KEY = "MLXPOOL_SERVER_KEY", "MLXPOOL_KEY"
ENDPOINTS = {  # by the socket that a command talks to
    "front": "MLXPOOL_ENDPOINT",
    "admin": "MLXPOOL_ADMIN_ENDPOINT",
    "back": "MLXPOOL_BACK_ENDPOINT",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--endpoint`, `--server-key` and `--key`."""
    parser.add_argument(
        "--endpoint",
        default=argparse.SUPPRESS,
        help="the broker's endpoint for this command, such as tcp://pool:7200 (default: the local"
        f" broker's; ${ENDPOINTS['front']}, ${ENDPOINTS['admin']} for what operators ask,"
        f" ${ENDPOINTS['back']} for `worker`)",
    )
    parser.add_argument(
        "--server-key",
        default=argparse.SUPPRESS,
        metavar="PUBLIC",
        help=f"the broker's public key, or a file with it (default: ${SERVER_KEY})",
    )
    parser.add_argument(
        "--key",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=f"the file of your own key, as `mlxpool keygen` made it (default: ${KEY})",
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a broker is and what opens it. `endpoint` None: the local broker's of `run_dir`."""

    run_dir: Path
    endpoint: str | None = None
    server_key: str | None = None
    key: str | None = None

    def credentials(self) -> Credentials | None:
        """Raises BadKey."""
        return Credentials.of(self.server_key, self.key)

    def of_socket(self, name: str) -> str:
        """The endpoint, or the local one of this name."""
        return self.endpoint or sockets.ipc(self.run_dir, name)


def place_of(options: argparse.Namespace, name: str) -> Place:
    """Where a command finds the socket `name`: by its flags, or by the environment.

    A local broker, with --run-dir or without any endpoint, is asked without keys.
    """
    run_dir: Path = options.run_dir
    endpoint = getattr(options, "endpoint", None)
    if endpoint is None and options.run_dir_flag is None:
        endpoint = os.environ.get(ENDPOINTS[name])
    if not endpoint or not endpoint.startswith("tcp:"):
        return Place(run_dir, endpoint or None)
    return Place(
        run_dir,
        endpoint,
        getattr(options, "server_key", None) or os.environ.get(SERVER_KEY),
        getattr(options, "key", None) or os.environ.get(KEY),
    )
