"""Kill workers during a completion, and check that the completion is unaffected.

    python examples/chaos_demo.py [--kills 3] [--tokens 240]

Starts its own broker with the embedded model. Requests the same completion twice: once without
faults, once while its worker is killed (SIGKILL) several times. Exit code 0: both completions are
the same, token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mlxpool.cli.admin import ask
from mlxpool.client import Client, Result
from mlxpool.common.errors import BrokerLost

PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self):
'''
# deterministic: a token computed in a prefill has the same bits as in a decode step. CPU only.
SETTINGS = """
[pool]
restart_delay = 0.1
[models.demo]
path = "builtin:demo"
deterministic = {deterministic}
"""
START_TIMEOUT = 60.0  # seconds until the broker answers


def on_a_cpu() -> bool:
    """Whether workers compute on a CPU.

    On a GPU the model may choose another of two almost equally likely tokens after a kill.
    """
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[None]:
    """Runs a broker, with its run directory in `folder`, inside the context."""
    settings = SETTINGS.format(deterministic="true" if on_a_cpu() else "false")
    (folder / "mlxpool.toml").write_text(settings)
    command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(folder), "serve"]
    command += ["--state-dir", ""]
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", str(folder / "mlxpool.toml")], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + START_TIMEOUT
        while not answers(folder):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit((folder / "broker.log").read_text())
        yield
    finally:
        process.terminate()
        process.wait()


def answers(folder: Path) -> bool:
    """Whether the broker answers."""
    try:
        return bool(ask(folder, "ps"))
    except BrokerLost:
        return False


def kill_worker(folder: Path) -> None:
    """Waits until there is a worker, and sends SIGKILL to it."""
    while not (pids := [w["pid"] for w in ask(folder, "ps")["workers"] if w["pid"]]):
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)
    print(f"⟨worker {pids[0]} killed⟩", end="", file=sys.stderr, flush=True)


def written(folder: Path, tokens: int, kills: int) -> Result:
    """Returns a completion of `tokens` tokens; kills its worker `kills` times, evenly spaced."""
    due = [tokens * (number + 1) // (kills + 1) for number in range(kills)]
    with (
        Client(folder) as client,
        client.stream("demo", PROMPT, max_tokens=tokens, seed=7, ignore_eos=True) as stream,
    ):
        for delta in stream:
            print(delta.text, end="", flush=True)
            if due and delta.pos + len(delta.ids) >= due[0]:
                due.pop(0)
                kill_worker(folder)
        print()
        return stream.result


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill workers while a text is written.")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as name, broker(Path(name)):
        folder = Path(name)
        print("--- in peace", file=sys.stderr)
        peace = written(folder, options.tokens, 0)
        print("--- under fire", file=sys.stderr)
        fire = written(folder, options.tokens, options.kills)
    same = peace.ids == fire.ids and peace.text == fire.text and len(fire.ids) == options.tokens
    verdict = "the same as in peace" if same else "NOT the same as in peace"
    print(
        f"--- {options.kills} workers killed, {fire.attempts} had a part in it;"
        f" {len(fire.ids)} tokens, {verdict}",
        file=sys.stderr,
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
