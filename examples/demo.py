"""`make demo`: a broker, a worker on an embedded model, one answer, and a clean end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from mlxpool.cli.admin import ask
from mlxpool.cli.load_progress import progress_text
from mlxpool.common.errors import PoolError

MODEL = "demo-chat"
QUESTION = "Count to 30."
OPTIONS = ("--temperature", "0")
NOTE_DELAY = 4.0  # seconds after which the demo prints the reason of a delay
START_TIMEOUT = 60  # seconds until the broker answers, and until it has ended


def mlxpool(run_dir: Path, *arguments: str) -> list[str]:
    """Returns the command line of `mlxpool` on this run directory."""
    return [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), *arguments]


@contextlib.contextmanager
def broker(run_dir: Path) -> Iterator[None]:
    """Runs a broker inside the context; prints its log if it fails."""
    with (run_dir / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            mlxpool(run_dir, "serve", "--state-dir", ""), stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        if process.wait(timeout=START_TIMEOUT) != 0:
            print((run_dir / "broker.log").read_text(), file=sys.stderr)


def say(*arguments: str) -> None:
    print(f"\n$ mlxpool {' '.join(arguments)}", flush=True)


@contextlib.contextmanager
def note_on_delay(run_dir: Path) -> Iterator[None]:
    """Prints the progress of the model's load once, if the context lasts NOTE_DELAY seconds.

    On a terminal it prints nothing, because there `mlxpool run` shows the progress.
    """

    def note() -> None:
        with contextlib.suppress(PoolError):
            if text := progress_text(ask(run_dir, "ps"), MODEL):
                print(f"({text})", file=sys.stderr, flush=True)

    timer = threading.Timer(NOTE_DELAY, note)
    if not sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder, broker(Path(folder)):
        say("run", MODEL, "--chat", f'"{QUESTION}"', *OPTIONS)
        arguments = ("run", MODEL, "--chat", QUESTION, *OPTIONS)
        wait = ("--connect-timeout", str(START_TIMEOUT))
        with note_on_delay(Path(folder)):
            done = subprocess.run(mlxpool(Path(folder), *arguments, *wait))
        say("ps")
        subprocess.run(mlxpool(Path(folder), "ps"), check=True)
    print(
        "\nthe broker and its worker have ended; docs/quickstart.md goes on from here", flush=True
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
