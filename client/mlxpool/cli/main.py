"""Parses the command line and maps errors to exit codes.

0 done, 1 failed, 2 wrong usage, 3 no broker answers, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from mlxpool.cli import target
from mlxpool.common.errors import BadRequest, BrokerLost, Internal, PoolError
from mlxpool.common.paths import run_dir_of

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3

# Which module has a command. Only that one is imported, so that `ps` is quick.
ROOMS = {
    "serve": "mlxpool.cli.serve",
    "broker": "mlxpool.cli.broker_worker",
    "worker": "mlxpool.cli.broker_worker",
    "run": "mlxpool.cli.run",
    "chat": "mlxpool.cli.chat",
    "check": "mlxpool.cli.check",
    "ps": "mlxpool.cli.operations",
    "top": "mlxpool.cli.top",
    "stats": "mlxpool.cli.operations",
    "models": "mlxpool.cli.operations",
    "requests": "mlxpool.cli.operations",
    "load": "mlxpool.cli.operations",
    "unload": "mlxpool.cli.operations",
    "drain": "mlxpool.cli.operations",
    "restart": "mlxpool.cli.operations",
    "cancel": "mlxpool.cli.operations",
    "reload": "mlxpool.cli.operations",
    "stop": "mlxpool.cli.operations",
    "keygen": "mlxpool.cli.keygen",
    "revoke": "mlxpool.cli.revoke",
    "gateway": "mlxpool.cli.gateway",
    "bench": "mlxpool.bench.cli",
    "config": "mlxpool.cli.settings",
    "completion": "mlxpool.cli.completion",
}

# Those that take keys and an endpoint.
DIALLING = frozenset(
    f"mlxpool.cli.{name}" for name in ("run", "chat", "ops", "top", "gateway", "revoke")
)

DESCRIPTION = "A pool of processes that serves MLX language models over ZeroMQ."
EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 3 no broker answers, 130 interrupted

  mlxpool serve &                     start a broker
  mlxpool run demo "def main():"      complete a text
  mlxpool ps                          workers and what they are doing
  mlxpool check /path/to/model        what a model is, needs, and what is wrong with it
"""


class Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"mlxpool {version('mlxpool')}")
        parser.exit()


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The whole command line, or as much of it as these arguments need."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--run-dir",
        type=Path,
        default=argparse.SUPPRESS,
        help="the broker's run directory (default: $MLXPOOL_RUN_DIR, run_dir of the settings,"
        " $XDG_RUNTIME_DIR/mlxpool, ~/.mlxpool/run)",
    )
    common.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="machine-readable output"
    )
    root = argparse.ArgumentParser(
        "mlxpool",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    root.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    dialling = argparse.ArgumentParser(add_help=False, parents=[common])
    target.add_flags(dialling)
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    room = ROOMS.get(_command(arguments))
    for name in [room] if room else dict.fromkeys(ROOMS.values()):
        import_module(name).add_commands(commands, dialling if name in DIALLING else common)
    return root


def _command(arguments: Sequence[str]) -> str:
    """The command that is asked for; "" when only argparse can tell."""
    rest = list(arguments)
    while rest and (rest[0] in ("--json", "--run-dir") or rest[0].startswith("--run-dir=")):
        rest = rest[2:] if rest[0] == "--run-dir" else rest[1:]
    return rest[0] if rest else ""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parsed(arguments)
    options.run_dir_flag = getattr(options, "run_dir", None)
    options.run_dir = run_dir_of(options.run_dir_flag)
    options.json = getattr(options, "json", False)
    options.place = target.place_of(options, "admin")
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except BrokerLost as error:
        return _complain(options, error, UNREACHABLE)
    except BadRequest as error:
        return _complain(options, error, USAGE)
    except PoolError as error:
        return _complain(options, error, FAILED)
    except ValueError as error:  # ConfigError among them
        problems = list(getattr(error, "problems", ()))
        details = {"problems": problems} if problems else None
        return _complain(options, BadRequest(str(error), details=details), USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(options, Internal(_words(error)), FAILED)
    except KeyboardInterrupt:
        return 130


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    given = sys.argv[1:] if arguments is None else arguments
    root = parser(given)
    options, rest = root.parse_known_args(given)
    if rest and not _takes(options, rest):
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _takes(options: argparse.Namespace, rest: list[str]) -> bool:
    """Whether `run` can do with what argparse has left over."""
    from mlxpool.cli.run import take_prompt

    return take_prompt(options, rest)


def _words(error: OSError) -> str:
    named = f"{error.filename}: " if error.filename else ""
    return f"{named}{error.strerror}" if error.strerror else str(error)


def _complain(options: argparse.Namespace, error: PoolError, code: int) -> int:
    if options.json:
        print(json.dumps({"error": error.body()}))
    what = "" if error.code in ("internal", "bad_request") else f"{error.code}: "
    print(f"mlxpool: {what}{error.message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
