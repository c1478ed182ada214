"""Parses the command line and maps errors to exit codes.

0 done, 1 failed, 2 wrong usage, 3 no broker answers, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mlxpool.cli import alone, check, dial, keygen, ops, run, serve
from mlxpool.common.errors import BadRequest, BrokerLost, Internal, PoolError
from mlxpool.common.paths import default_run_dir

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3

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


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--run-dir",
        type=Path,
        default=argparse.SUPPRESS,
        help="the broker's run directory (default: $MLXPOOL_RUN_DIR, $XDG_RUNTIME_DIR/mlxpool,"
        " ~/.mlxpool/run)",
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
    dial.add_flags(dialling)
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve.add_commands(commands, common)
    alone.add_commands(commands, common, dialling)
    for room in (run, ops):
        room.add_commands(commands, dialling)
    for room in (check, keygen):
        room.add_commands(commands, common)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parsed(arguments)
    options.run_dir_flag = getattr(options, "run_dir", None)
    options.run_dir = options.run_dir_flag or default_run_dir()
    options.json = getattr(options, "json", False)
    options.place = dial.place_of(options, "admin")
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
        return _complain(options, BadRequest(str(error)), USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(options, Internal(_words(error)), FAILED)
    except KeyboardInterrupt:
        return 130


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    root = parser()
    options, rest = root.parse_known_args(arguments)
    if rest and not run.take_prompt(options, rest):
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


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
