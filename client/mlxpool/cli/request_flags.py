"""The flags of a request, for `run` and `chat`, and the client that sends the request."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.cli.admin import check_socket
from mlxpool.cli.target import Target, target_of
from mlxpool.common.answer_format import KEYS, check_format
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_text
from mlxpool.common.options import CHECKS, FLAGS, MAX_DEADLINE_MS

if TYPE_CHECKING:
    from mlxpool.client import Client

BROKER_GRACE = 10.0  # in seconds; shorter than the client's default, because a person waits
# Seconds until a broker that completes no handshake counts as gone, so that a command fails within
# one second. The broker's thread answers a handshake between two iterations of its loop; over tcp
# a handshake has four round trips.
IPC_GRACE, TCP_GRACE = 0.5, 0.75
TICK = 0.05  # seconds between two checks of the handshake


def add_connect_timeout(parser: argparse.ArgumentParser) -> None:
    """Adds `--connect-timeout`."""
    parser.add_argument(
        "--connect-timeout",
        type=seconds,
        metavar="SECONDS",
        help="time to wait for a broker that does not answer yet (default: none)",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--deadline`, `--raw`, and a flag for each option of `FLAGS`, numbers first."""
    for name, (kind, text) in sorted(
        FLAGS.items(), key=lambda flag: flag[1][0] not in (int, float)
    ):
        flag = f"--{name.replace('_', '-')}"
        if kind in (int, float):
            parser.add_argument(flag, type=kind, help=text)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", default=None, help=text)
        else:
            parser.add_argument(flag, action="append", metavar="TEXT", help=text)
    parser.add_argument(
        "--format",
        type=format_of,
        metavar="json|FILE",
        help="answer with a JSON object, or by the JSON schema or the format in a file",
    )
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="give up after this time"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="print control characters as they are, even on a terminal",
    )


def take_prompt(options: argparse.Namespace, rest: list[str]) -> bool:
    """Takes the prompt from the arguments that argparse left over. Returns whether it was there.

    argparse of Python 3.11 leaves over PROMPT in `run MODEL --chat PROMPT`, and in `submit`: after
    MODEL it assumes that there is no prompt.
    """
    missing = options.prompt is None and len(rest) == 1
    if not missing or (rest[0].startswith("-") and rest[0] != "-"):
        return False
    options.prompt = rest[0]
    return True


def seconds(text: str) -> float:
    """Returns the seconds in a flag. Raises ArgumentTypeError if the value is out of bounds."""
    value = float(text)
    if not 0 < value <= MAX_DEADLINE_MS / 1000:
        most = MAX_DEADLINE_MS // 1000
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {most}, got {text}")
    return value


def format_of(text: str) -> dict[str, Any]:
    """Returns the option `format`: any JSON if the text is "json".

    Any other text is the path of a file with a format or a JSON schema. Raises ArgumentTypeError if
    the file cannot be read or has no format.
    """
    if text == "json":
        return {"type": "json"}
    try:
        value = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    kind = value.get("type") if isinstance(value, dict) else None
    whole = isinstance(kind, str) and kind in KEYS  # no type in a JSON schema is in KEYS
    try:
        return check_format("format", value if whole else {"type": "json_schema", "schema": value})
    except BadRequest as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.message}") from None


def options_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `generate` that have flags; None for an absent flag.

    Raises BadRequest naming the flag, its value and its bound.
    """
    options = {name: getattr(flags, name) for name in CHECKS if hasattr(flags, name)}
    for name, value in options.items():
        if value is not None:
            CHECKS[name](f"--{name.replace('_', '-')}", value)
    if flags.deadline is not None:
        options["deadline_ms"] = max(1, round(flags.deadline * 1000))
    if flags.top_logprobs:
        options["logprobs"] = True
    return options


def shown_form(options: argparse.Namespace) -> Callable[[str], str]:
    """Returns the function that makes a model's text printable.

    For a terminal, without --raw, it escapes control characters. Otherwise it returns the text
    unchanged.
    """
    return escape_text if sys.stdout.isatty() and not options.raw else str


def check_broker(options: argparse.Namespace) -> None:
    """Raises BrokerLost immediately if no broker can answer, except with --connect-timeout.

    Raises BadRequest if the endpoint is malformed.
    """
    target = target_of(options, "front")
    endpoint = target.endpoint_of("front")
    if options.connect_timeout is None:
        check_socket(target.run_dir, endpoint)


def client_of(options: argparse.Namespace) -> Client:
    """Returns a client of the broker that the flags name. Raises the errors of `check_broker`."""
    # Imported here, so that commands that only show help start faster.
    from mlxpool.client import Client, Pace

    check_broker(options)
    target, wait = target_of(options, "front"), options.connect_timeout
    grace = TCP_GRACE if (target.endpoint or "").startswith("tcp:") else IPC_GRACE
    return Client(
        target.run_dir,
        target.endpoint,
        server_key=target.server_key,
        key=target.key,
        broker_grace=max(BROKER_GRACE, wait or 0.0),
        **({} if wait is None else {"connect_timeout": wait}),
        pace=Pace(tick=TICK, handshake_grace=grace if wait is None else wait),
    )


def admin_target_of(options: argparse.Namespace) -> Target | None:
    """Returns the target of the admin endpoint, from which the progress of a load is read.

    Returns None if --endpoint names an endpoint for clients: then the admin endpoint is unknown.
    """
    return None if getattr(options, "endpoint", None) else options.admin_target


def decode_utf8(read: bytes) -> str:
    """Returns standard input as text. Raises ValueError if the bytes are not UTF-8."""
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None
