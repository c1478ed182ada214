"""The broker to which a command connects: the flags, environment variables and endpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from msgspec import Struct

from mlxpool.common.errors import BadRequest
from mlxpool.common.transport import endpoints, sockets
from mlxpool.common.transport.keys import Credentials

SERVER_KEY_VARIABLE, KEY_VARIABLE = "MLXPOOL_SERVER_KEY", "MLXPOOL_KEY"
ENDPOINT_VARIABLES = {  # names by the broker's socket to which a command connects
    "front": "MLXPOOL_ENDPOINT",
    "admin": "MLXPOOL_ADMIN_ENDPOINT",
    "back": "MLXPOOL_BACK_ENDPOINT",
}


def add_flags(
    parser: argparse.ArgumentParser, *, with_key: bool = True, several: bool = False
) -> None:
    """Adds `--endpoint`, `--server-key` and, if `with_key`, `--key`.

    With `several` the first two may be repeated, for several brokers (`targets_of`).
    """
    action, ending = ("append", "s") if several else ("store", "")
    repeated = "; may be repeated: one gateway for several pools" if several else ""
    front, admin, back = (ENDPOINT_VARIABLES[name] for name in ("front", "admin", "back"))
    parser.add_argument(
        "--endpoint",
        action=action,
        dest=f"endpoint{ending}",
        default=argparse.SUPPRESS,
        help="the broker's endpoint for this command, such as tcp://pool:7200 (default: the local"
        f" broker's; ${front}, ${admin} for commands of operators,"
        f" ${back} for `worker`){repeated}",
    )
    parser.add_argument(
        "--server-key",
        action=action,
        dest=f"server_key{ending}",
        default=argparse.SUPPRESS,
        metavar="PUBLIC",
        help=f"the broker's public key, or a file that has it (default: ${SERVER_KEY_VARIABLE})"
        f"{'; repeated: one for each --endpoint' if several else ''}",
    )
    if not with_key:
        return
    parser.add_argument(
        "--key",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=f"the file of your own key, which `mlxpool keygen` made (default: ${KEY_VARIABLE})",
    )


class Target(Struct, frozen=True):
    """A broker's address and the keys for it.

    Without an `endpoint` this is the local broker of `run_dir`.
    """

    run_dir: Path
    endpoint: str | None = None
    server_key: str | None = None
    key: str | None = None

    def credentials(self) -> Credentials | None:
        """Returns the CURVE keys; None without keys. Raises BadKey if a key cannot be used."""
        return Credentials.of(self.server_key, self.key)

    def endpoint_of(self, socket: str) -> str:
        """Returns the given endpoint, or the local broker's ipc endpoint for a socket.

        Raises BadRequest if the endpoint is malformed, and ValueError if the path of the run
        directory is too long for a socket.
        """
        if not self.endpoint:
            return sockets.ipc(self.run_dir, socket)
        if (fault := endpoints.dial_fault(self.endpoint)) is not None:
            raise BadRequest(fault)
        return self.endpoint


def targets_of(options: argparse.Namespace, socket: str) -> list[Target]:
    """Returns a target for each repeated flag; without flags the target of `target_of`.

    One server key is used for all endpoints. Raises BadRequest if there are several server keys,
    and their number differs from the number of endpoints.
    """
    endpoints: list[str | None] = [*getattr(options, "endpoints", ())] or [None]
    server_keys: list[str | None] = [*getattr(options, "server_keys", ())] or [None]
    if len(server_keys) not in (1, len(endpoints)):
        raise BadRequest(
            f"--server-key is given {len(server_keys)} times and --endpoint {len(endpoints)} times:"
            " give one key for all, or one for each, in their order"
        )
    if len(server_keys) == 1:
        server_keys *= len(endpoints)
    flags = vars(options)
    return [
        target_of(argparse.Namespace(**{**flags, "endpoint": endpoint, "server_key": key}), socket)
        for endpoint, key in zip(endpoints, server_keys, strict=True)
    ]


def target_of(options: argparse.Namespace, socket: str) -> Target:
    """Returns the target in flags or the environment, for one of the broker's sockets.

    A local broker (with --run-dir, or without an endpoint) needs no keys.
    """
    run_dir: Path = options.run_dir
    endpoint = getattr(options, "endpoint", None)
    if endpoint is None and options.run_dir_flag is None:
        endpoint = os.environ.get(ENDPOINT_VARIABLES[socket])
    if not endpoint or not endpoint.startswith("tcp:"):
        return Target(run_dir, endpoint or None)
    return Target(
        run_dir,
        endpoint,
        getattr(options, "server_key", None) or os.environ.get(SERVER_KEY_VARIABLE),
        getattr(options, "key", None) or os.environ.get(KEY_VARIABLE),
    )
