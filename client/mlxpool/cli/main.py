"""Parses the command line and maps errors to exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no broker answers, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from mlxpool.cli import target
from mlxpool.cli.admin import explained
from mlxpool.cli.formatting import error_text, json_text
from mlxpool.cli.parser import COMMAND_MODULES, GROUPS, REMOTE_MODULES, Parser, RootParser
from mlxpool.cli.style import ERROR, paint_of
from mlxpool.common.errors import BadRequest, BrokerLost, Internal, PoolError
from mlxpool.common.escapes import escape_line
from mlxpool.common.paths import home, run_dir_of
from mlxpool.common.process import core_dumps
from mlxpool.common.version import VERSION

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
UNWRITABLE = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

DESCRIPTION = "A pool of processes that serves MLX language models over ZeroMQ."
NOTES = (
    "`mlxpool help COMMAND` shows the options of a command.",
    "exit codes: 0 done, 1 failed, 2 wrong usage, 3 no broker answers, 130 Ctrl-C",
)
EXAMPLES = {
    "mlxpool serve &": "start a broker",
    'mlxpool run demo "def main():"': "complete a text",
    "mlxpool ps": "show workers and their work",
    "mlxpool pull ORG/NAME": "download a model",
    "mlxpool check /path/to/model": "show a model's properties and needs",
}


def parser(arguments: Sequence[str] = ()) -> RootParser:
    """Returns the parser of the whole command line, or of the one command in the arguments."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="the broker's run directory (default: $MLXPOOL_RUN_DIR, run_dir of the settings,"
        " $XDG_RUNTIME_DIR/mlxpool, ~/.mlxpool/run)",
    )
    common.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, for programs"
    )
    root = RootParser(
        "mlxpool",
        description=DESCRIPTION,
        parents=[common],
        groups=GROUPS,
        notes=NOTES,
        examples=EXAMPLES,
    )
    version = f"mlxpool {VERSION}"
    root.add_argument("-V", "--version", action="version", version=version)
    remote = argparse.ArgumentParser(add_help=False, parents=[common])
    target.add_flags(remote)
    commands = root.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    module = COMMAND_MODULES.get(_command(arguments))
    for name in [module] if module else dict.fromkeys(COMMAND_MODULES.values()):
        import_module(name).add_commands(commands, remote if name in REMOTE_MODULES else common)
    return root


def _command(arguments: Sequence[str]) -> str:
    """Returns the name of the command: the first argument after the common flags; "" if none."""
    rest = list(arguments)
    while rest and (rest[0] in ("--json", "--run-dir") or rest[0].startswith("--run-dir=")):
        rest = rest[2:] if rest[0] == "--run-dir" else rest[1:]
    return rest[0] if rest else ""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code."""
    _open_missing_streams()
    core_dumps.turn_off()
    try:
        options = _parsed(arguments)
    except OSError as error:  # the help could not be written, for example to a full disk
        return _unwritten(error)
    options.run_dir_flag = getattr(options, "run_dir", None)
    options.json = getattr(options, "json", False)
    options.whole_parser = parser  # used by `completion` and `help`
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        options.run_dir = run_dir_of(options.run_dir_flag)
        options.admin_target = target.target_of(options, "admin")
        code = command(options)
        sys.stdout.flush()
        return code
    except BrokerLost as error:
        return _print_error(options, explained(options.run_dir, error), UNREACHABLE)
    except BadRequest as error:
        return _print_error(options, error, USAGE)
    except PoolError as error:
        return _print_error(options, error, FAILED)
    except ValueError as error:  # also ConfigError
        problems = list(getattr(error, "problems", ()))
        details = {"problems": problems} if problems else None
        lines = getattr(error, "lines", [str(error)])
        return _print_error(options, BadRequest(str(error), details=details), USAGE, lines)
    except OSError as error:
        if error.errno in UNWRITABLE and not error.filename:
            return _unwritten(error)
        return _print_error(options, Internal(_message_of(error)), FAILED)
    except KeyboardInterrupt:
        return 130


def _open_missing_streams() -> None:
    """Opens the null device for standard streams that the shell closed (`>&-`).

    The null device takes their descriptors, so that no file or socket gets them later.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            if stream.fileno() == descriptor:
                os.set_inheritable(descriptor, True)
            setattr(sys, name, stream)


def _unwritten(error: OSError) -> int:
    """Prints why standard output is incomplete; prints nothing if its reader has closed it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # At the exit Python writes the remaining text: into `nowhere`, where it causes no error.
    os.dup2(nowhere, sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        words = f"mlxpool: the output cannot be written: {_message_of(error)}"
        try:
            print(words, file=sys.stderr, flush=True)
        except OSError:
            os.dup2(nowhere, sys.stderr.fileno())
    return FAILED


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    root = parser(words)
    if not words:
        root.print_help(sys.stderr)
        sys.exit(USAGE)
    options, rest = root.parse_known_args(words)
    take_rest: Callable[[argparse.Namespace, list[str]], bool] | None
    take_rest = getattr(options, "take_rest", None)  # set by the commands `run` and `submit`
    if rest and not (take_rest and take_rest(options, rest)):
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _message_of(error: OSError) -> str:
    named = f"{error.filename}: " if error.filename else ""
    words = f"{named}{error.strerror}" if error.strerror else str(error)
    closed = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    if closed and str(error.filename).startswith(str(home())) and not os.access(home(), os.W_OK):
        words += f"; the home folder is {home()}: set HOME to one that this user can write to"
    return words


def _print_error(
    options: argparse.Namespace, error: PoolError, code: int, lines: Sequence[str] = ()
) -> int:
    """Prints the message of an error, or `lines` in its place. Returns the exit code."""
    if options.json:
        print(json_text({"error": error.body()}))
    message = error_text(error, "\n  ".join(map(escape_line, lines)))
    print(f"{paint_of(sys.stderr)('mlxpool:', ERROR)} {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
