"""The worker's side of the fork server and of its lane processes. Used by one thread.

The kernel kills the processes when the thread that started them ends. So this thread must live as
long as the worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref

import psutil

from mlxpool.common.errors import Internal
from mlxpool.common.records import as_map
from mlxpool.worker.encoders.text import EncoderTextSource
from mlxpool.worker.preparation import fork_server
from mlxpool.worker.preparation.fork_server import FORK, KILL, REAP, REPLY, REQUEST
from mlxpool.worker.preparation.jobs import (
    READ_BYTES,
    Result,
    Unpacker,
    pack_map,
    unpack,
)
from mlxpool.worker.preparation.limits import Limits
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.system.cpu_threads import OPENBLAS_THREADS

START_TIMEOUT = 60.0  # seconds for the fork server to start
REPLY_TIMEOUT = 2.0  # seconds for each reply of the fork server
MAX_STARTS = 2  # consecutive starts if fork servers are ended from outside
_LEFT_OUT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")  # a preloaded BLAS would only waste memory


class LaneEnded(Exception):
    """A lane process has closed its connection."""


class ForkServer:
    """The process that forks lane processes; it is started at the first `fork`."""

    def __init__(self, source: TextSource | EncoderTextSource, limits: Limits) -> None:
        self.limits = limits
        encodes = isinstance(source, EncoderTextSource)
        fields = source.as_map() if isinstance(source, TextSource) else as_map(source)
        self._first = pack_map({**fields, "encodes": encodes, "limits": as_map(limits)})
        self._process: _ServerProcess | None = None

    def fork(self) -> Lane:
        """Returns a new lane process. Raises Internal if none can be started."""
        why = ""
        for _ in range(MAX_STARTS + (self._process is not None)):
            try:
                if self._process is None:
                    self._process = _ServerProcess(self._first)
                return self._process.fork()
            except OSError as error:
                why = f"{type(error).__name__}: {error}"
                self.close()
        raise Internal(f"no process could be started to prepare the request: {why}")

    def close(self) -> None:
        """Ends the server and its lane processes."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def memory(self) -> int:
        """Returns the server's resident bytes, shared by lane processes; 0 if it does not run."""
        return 0 if self._process is None else _resident(self._process.pid)


class _ServerProcess:
    """The fork server's process and our end of its socket. The methods raise OSError."""

    def __init__(self, first: bytes) -> None:
        self._socket, child_end = socket.socketpair()
        environment = {name: text for name, text in os.environ.items() if name not in _LEFT_OUT}
        environment["TOKENIZERS_PARALLELISM"] = "false"  # tokenizer threads do not survive a fork
        environment[OPENBLAS_THREADS] = "1"  # the same for numpy, which needs none here
        environment["RUST_BACKTRACE"] = "0"  # a tokenizer's panic concerns only one request
        try:
            with child_end:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", fork_server.__name__],
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                )
        except OSError:
            self._socket.close()
            raise
        self.pid = process.pid
        self.close = weakref.finalize(self, _end, process, self._socket)
        self._socket.settimeout(START_TIMEOUT)
        self._socket.sendall(first)
        self._reply()
        self._socket.settimeout(REPLY_TIMEOUT)

    def fork(self) -> Lane:
        """Returns a new lane process of this server."""
        own, lanes = socket.socketpair()
        try:
            with lanes:
                return Lane(self._ask(FORK, 0, [lanes.fileno()]), own, self)
        except OSError:
            own.close()
            raise

    def reap(self, pid: int) -> int:
        """Returns the exit code of an ended lane process; negative: the signal that ended it."""
        try:
            return self._ask(REAP, pid)
        except OSError:  # lane processes end with their server
            return -signal.SIGKILL

    def kill(self, pid: int) -> None:
        """Kills a lane process, without waiting for its end."""
        with contextlib.suppress(OSError):
            self._ask(KILL, pid)

    def _ask(self, what: bytes, pid: int, descriptors: list[int] | None = None) -> int:
        """Returns the server's reply to one request. Kills a server that does not reply."""
        try:
            socket.send_fds(self._socket, [REQUEST.pack(what, pid)], descriptors or [])
            return self._reply()
        except OSError:
            self.close()
            raise

    def _reply(self) -> int:
        data = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
        if len(data) < REPLY.size:
            raise ConnectionResetError("the fork server ended")
        number: int = REPLY.unpack(data)[0]
        return number


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # the process has ended
        return 0


class Lane:
    """A lane process, which performs one job at a time. Its socket is non-blocking.

    `server` is the fork server of the lane: a pid is only valid for its own server.
    """

    def __init__(self, pid: int, connection: socket.socket, server: _ServerProcess) -> None:
        self.pid = pid
        self._socket = connection
        self._socket.setblocking(False)
        self._server = server
        self._unpacker = Unpacker()
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, message: bytes) -> None:
        """Begins to send a packed job; while `has_unsent` is True, `flush` has to send the rest."""
        self._unsent = memoryview(message)
        self.flush()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Sends as many bytes as the socket takes now."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended; `result` reports it
            self._unsent = memoryview(b"")

    def result(self) -> Result | None:
        """Returns the job's result; None while it is incomplete. Raises LaneEnded."""
        with contextlib.suppress(BlockingIOError):
            try:
                while data := self._socket.recv(READ_BYTES):
                    for fields in self._unpacker.feed(data):
                        result: Result = unpack(fields)
                        return result
            except ConnectionError:
                pass
            raise LaneEnded
        return None

    def kill(self) -> None:
        """Ends the process."""
        self._socket.close()
        self._server.kill(self.pid)

    def reap(self) -> int:
        """Returns the exit code of the process after it has closed the connection."""
        self._socket.close()
        return self._server.reap(self.pid)

    def is_stopped(self) -> bool:
        """Returns whether a signal has stopped the process, so that its timers cannot end it."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def memory(self) -> int:
        """Returns the process's resident bytes, including memory shared with the server."""
        return _resident(self.pid)
