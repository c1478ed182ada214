"""A real worker process; its broker is a plain ROUTER socket of the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import WORKER_VARIABLE, Counting, ModelConfig, WorkerConfig
from mlxpool.common.progress import Block
from mlxpool.common.protocol import deltas, frames
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.trace import VARIABLE
from mlxpool.common.transport import sockets
from support import kinds
from support.pool import PATIENCE

TOKEN = "first-token"


def id_of(name: int) -> bytes:
    return bytes([name] * frames.ID_BYTES)


class WorkerProcess(Closing):
    """A worker and its broker. While `hearing` is False, the broker does not answer heartbeats."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        sequences: int = 8,
        incarnation: int = 0,
        path: str = "builtin:counting",
        **counting: Any,
    ) -> None:
        self.tmp_path = tmp_path
        self.hearing = True
        self.epoch = 0
        self.peer = b""
        self.worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="mlxpool-")
        endpoint = sockets.ipc(Path(self._folder.name), "back")
        self.router = sockets.router(self.worker_context, endpoint)
        self.block, block_fd = Block.create()
        self.dump = tmp_path / "dump"
        dump_fd = os.open(self.dump, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.config = WorkerConfig(
            endpoint,
            "counting/0",
            TOKEN,
            "counting",
            ModelConfig(
                path=path,
                sequences=sequences,
                counting=Counting(**{"step_us": 0, **counting}),
            ),
            block_fd=block_fd,
            dump_fd=dump_fd,
            incarnation=incarnation,
        )
        environment = {**os.environ, WORKER_VARIABLE: self.config.to_environment()}
        with (tmp_path / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlxpool.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**environment, VARIABLE: str(tmp_path)},
                pass_fds=(block_fd, dump_fd),
            )
        os.close(block_fd)
        os.close(dump_fd)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.router.close(linger=0)
        self.worker_context.term()
        self.block.close()
        self._folder.cleanup()

    # ---- frames --------------------------------------------------------------------------------

    def log(self) -> str:
        return (self.tmp_path / "worker.log").read_text()

    def next(self, patience: float = PATIENCE) -> Message | None:
        """Returns the next message; None if none arrives in time. Heartbeats are answered."""
        if not self.router.poll(int(patience * 1000)):
            return None
        self.peer, *parts = self.router.recv_multipart()
        message = frames.decode(parts, max_body=frames.MAX_BACK_BODY)
        if message.kind == kinds.BEAT and self.hearing:
            with contextlib.suppress(zmq.ZMQError):  # the worker may have ended in the meantime
                self.say(kinds.HEARD)
        return message

    def receive(self, *kinds: str, no: tuple[str, ...] = ()) -> Message:
        """Returns the next message of these kinds; fails if a kind of `no` arrives."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            message = self.next(1.0)
            if message is None:
                assert self.process.poll() is None, f"the worker ended:\n{self.log()}"
                continue
            assert message.kind not in no, message
            if message.kind in kinds:
                return message
        raise AssertionError(f"no {kinds} came; the worker said:\n{self.log()}")

    def say(
        self,
        kind: str,
        body: dict[str, Any] | None = None,
        *blobs: bytes,
        id: bytes | None = None,
        attempt: int = 0,
    ) -> None:
        header = Header(kind, id, self.epoch, attempt)
        self.router.send_multipart([self.peer, *frames.encode(header, body or {}, blobs)])

    def welcome(self, epoch: int, token: str = "") -> Message:
        """Waits for `hello`, answers `welcome`, waits for the first credit; returns `hello`."""
        hello = self.receive(kinds.HELLO)
        self.epoch = epoch
        self.say(kinds.WELCOME, {"boot": 1, "token": token or f"token-{epoch}"})
        credit = self.receive(kinds.CREDIT, no=(kinds.DELTAS, kinds.YIELD))
        assert credit.header.epoch == epoch
        return hello

    def work(
        self, name: int, prompt: str = "xyz", *blobs: bytes, resume: Any = None, **options: Any
    ) -> None:
        body = {"prompt": prompt, "options": options, "seed": name, "resume": resume}
        self.say(kinds.WORK, body, *blobs, id=id_of(name), attempt=1)

    def deltas_until(self, *names: int) -> dict[int, list[Delta]]:
        """Returns all deltas that arrive until these streams have ended."""
        by_stream: dict[int, list[Delta]] = {}
        left = set(names)
        while left:
            for delta in deltas.unpack_deltas(self.receive(kinds.DELTAS)):
                by_stream.setdefault(delta.id[0], []).append(delta)
                if delta.end is not None:
                    left.discard(delta.id[0])
        return by_stream

    # ---- ends ----------------------------------------------------------------------------------

    def ended(self) -> int:
        """Waits for the end; returns the exit code."""
        return self.process.wait(timeout=PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def history(self) -> list[dict[str, Any]]:
        (path,) = self.tmp_path.glob("worker-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]
