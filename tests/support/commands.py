"""Runs programs in the test's own process, to save the 0.3 to 1 s of starting a process.

Tests of the process itself start a new process, see Pool.cli.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO
from unittest.mock import patch

from mlxpool.cli.main import FAILED, OK, main

# Commands that need a separate process.
SERVERS = frozenset({"broker", "gateway", "serve", "worker"})


def is_server(arguments: Sequence[str]) -> bool:
    """Returns whether a command line starts a server, which needs a separate process."""
    return not SERVERS.isdisjoint(arguments)


def run_here(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: str | None = None
) -> CompletedProcess[str]:
    """Runs the `mlxpool` command."""
    return _captured(lambda: main([*arguments]), arguments, environment, stdin)


def run_script_here(path: Path, *arguments: str) -> CompletedProcess[str]:
    """Runs a Python file as a program."""
    with patch.object(sys, "argv", [str(path), *arguments]):
        return _captured(lambda: _script(path), sys.argv, os.environ.copy())


def _script(path: Path) -> int:
    runpy.run_path(str(path), run_name="__main__")
    return OK  # the exit code of a program that returns none


def _captured(
    work: Callable[[], int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: str | None = None,
) -> CompletedProcess[str]:
    """Runs `work` with files as the standard streams; returns its exit code and output.

    Only one thread at a time may call this function.
    """
    with ExitStack() as stack:
        stdin_file, out, err = (_stream(stack) for _ in range(3))
        stdin_file.write(stdin or "")
        stdin_file.seek(0)
        for name, stream in (("stdin", stdin_file), ("stdout", out), ("stderr", err)):
            stack.enter_context(patch.object(sys, name, stream))
        stack.enter_context(patch.dict(os.environ, environment, clear=True))
        try:
            code = work()
        except SystemExit as end:
            code = _exit_code(end)
        return CompletedProcess([*arguments], code, _text(out), _text(err))


def _stream(stack: ExitStack) -> IO[str]:
    """Returns a temporary file that replaces a standard stream, as in a pipeline."""
    return stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))


def _text(stream: IO[str]) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def _exit_code(end: SystemExit) -> int:
    """Returns the exit code of a process that ends with SystemExit."""
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
        return FAILED
    return OK if end.code is None else end.code
