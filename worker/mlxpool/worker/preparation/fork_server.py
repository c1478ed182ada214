"""`python -m mlxpool.worker.preparation.fork_server`: loads a tokenizer once, forks lane processes.

The process's stdin is one end of a socket pair; lanes.py in the worker has the other end. A lane
process performs jobs. It starts within milliseconds and shares the tokenizer's memory, so it is
cheap to kill it in the middle of a job. The fork server has one thread, so that forking is safe.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from mlxpool.worker.system.parent_death import STDIN, die_with_parent, kill_with_parent

if TYPE_CHECKING:
    from mlxpool.worker.encoders.text import EncoderText
    from mlxpool.worker.preparation.limits import Limits
    from mlxpool.worker.prompt.tokenizer import ChatTokenizer

    TextFunctions = ChatTokenizer | EncoderText

NICENESS = 10  # niceness: lane processes give way to the decoding threads
REQUEST = struct.Struct("!ci")  # a request: an action (below) and the pid of a lane process
FORK = b"f"  # reply: the pid of a new lane process, which serves the sent descriptor
REAP = b"r"  # after a lane process closed its connection; reply: exit code, below 0 for a signal
KILL = b"k"  # reply: 0, immediately
REPLY = struct.Struct("!i")


def main() -> int:
    """Forks and ends lane processes until the worker closes the socket. Returns the exit code."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the broker
    os.nice(NICENESS)
    from mlxpool.common import logs  # late, because its imports take long
    from mlxpool.worker.preparation.jobs import receive
    from mlxpool.worker.preparation.limits import Limits

    logs.set_up(json_lines=False, level=logging.WARNING)
    with socket.socket(fileno=os.dup(STDIN)) as worker:
        first: dict[str, Any] | None = next(receive(worker), None)
        if first is None:
            return 0
        limits = Limits(**first.pop("limits"))
        text = text_functions(first)
        worker.sendall(REPLY.pack(os.getpid()))
        killed: set[int] = set()  # to reap; at the lowest priority, lane processes end slowly
        while True:
            data, descriptors, _, _ = socket.recv_fds(worker, REQUEST.size, 1)
            if not data:
                return 0
            what, pid = REQUEST.unpack(data)
            if what == FORK:
                reply = _fork(worker, descriptors[0], text, limits)
            elif what == REAP:
                reply = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            else:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
                killed.add(pid)
                reply = 0
            worker.sendall(REPLY.pack(reply))
            killed = {lane for lane in killed if not os.waitpid(lane, os.WNOHANG)[0]}


def text_functions(source: dict[str, Any]) -> TextFunctions:
    """Returns a model's text functions: its tokenizer and its chat templates.

    `source`: the fields of a TextSource or an EncoderTextSource, and `encodes`, which is true for
    an encoder model. Imports only the modules that this type of model needs.
    """
    if source.pop("encodes"):
        from mlxpool.worker.encoders.text import EncoderText, EncoderTextSource

        return EncoderText(EncoderTextSource(**source))
    from mlxpool.worker.prompt.text_model import TextSource
    from mlxpool.worker.prompt.tokenizer import ChatTokenizer

    text = ChatTokenizer.from_source(TextSource.from_map(source))
    if text.images is not None:
        import mlxpool.worker.media.decode  # noqa: F401  # lane processes share its memory
    return text


def _fork(worker: socket.socket, descriptor: int, text: TextFunctions, limits: Limits) -> int:
    """Forks a lane process that serves `descriptor`. Returns the process's pid."""
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    code = 1
    try:
        worker.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, STDIN)  # replaces the worker's socket
        os.close(nothing)
        kill_with_parent()
        from mlxpool.worker.preparation.lane import serve

        with socket.socket(fileno=descriptor) as connection:
            serve(connection, text, limits)
        code = 0
    except BaseException:
        logging.getLogger("mlxpool.worker").exception("a lane failed")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
