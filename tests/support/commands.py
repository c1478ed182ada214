"""Programs in the process of a test: a process of its own takes 0.3 to 1 s of a processor.

Tests of the process itself start one: see Pool.cli.
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

SERVERS = frozenset({"broker", "gateway", "serve", "worker"})  # they set up a process as theirs


def is_server(arguments: Sequence[str]) -> bool:
    """Whether a command line starts a server, which needs a process of its own."""
    return not SERVERS.isdisjoint(arguments)


def run_here(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: str | None = None
) -> CompletedProcess[str]:
    """Run the `mlxpool` command."""
    return _captured(lambda: main([*arguments]), arguments, environment, stdin)


def run_script_here(path: Path, *arguments: str) -> CompletedProcess[str]:
    """Run a Python file as a program."""
    with patch.object(sys, "argv", [str(path), *arguments]):
        return _captured(lambda: _script(path), sys.argv, os.environ.copy())


def _script(path: Path) -> int:
    runpy.run_path(str(path), run_name="__main__")
    return OK  # of a program that does not say how it ends


def _captured(
    work: Callable[[], int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: str | None = None,
) -> CompletedProcess[str]:
    """Run it with files in place of the standard streams; used by one thread at a time."""
    with ExitStack() as stack:
        given, out, err = (_stream(stack) for _ in range(3))
        given.write(stdin or "")
        given.seek(0)
        for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
            stack.enter_context(patch.object(sys, name, stream))
        stack.enter_context(patch.dict(os.environ, environment, clear=True))
        try:
            code = work()
        except SystemExit as end:
            code = _exit_code(end)
        return CompletedProcess([*arguments], code, _text(out), _text(err))


def _stream(stack: ExitStack) -> IO[str]:
    """A file, as the streams of a process in a pipeline are: no terminal, with a descriptor."""
    return stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))


def _text(stream: IO[str]) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def _exit_code(end: SystemExit) -> int:
    """The exit code of a process that is ended so."""
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
        return FAILED
    return OK if end.code is None else end.code
