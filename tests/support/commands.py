"""The `mlxpool` command in the process of a test: a process of its own takes 0.3 s of a processor.

Tests of the command's process itself start one: see Pool.cli.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
    """Run a command with files in place of its standard streams; used by one thread at a time."""
    with ExitStack() as stack:
        given, out, err = (_stream(stack) for _ in range(3))
        given.write(stdin or "")
        given.seek(0)
        for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
            stack.enter_context(patch.object(sys, name, stream))
        stack.enter_context(patch.dict(os.environ, environment, clear=True))
        try:
            code = main([*arguments])
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
