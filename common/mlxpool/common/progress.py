"""The progress block: a worker's activity in shared memory, for a broker whose worker hangs.

The broker and one worker share a few 64-bit words of memory. The worker's compute thread writes
them, its main thread writes `edge_tid` and `edge_ns`, and the broker reads them. Each word is
written atomically, but two words that are read together may be from different times. A reader must
therefore not draw conclusions from one reading.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

from msgspec import Struct

PHASES = ("boot", "load", "idle", "prefill", "decode", "blocked", "unload")
NO_REQUEST = bytes(16)

_MAGIC = 0x6D6C78706F6F6C31  # "mlxpool1"
_WORDS = (
    "magic",
    "phase",  # index into PHASES
    "since_ns",  # start of the phase on the monotonic clock
    "count",  # grows at each load shard, prefill chunk and decode step
    "tokens",  # prompt tokens of the running chunk
    "fresh",  # 1: the running step has a new shape of arrays
    "usual_token_ns",  # usual prefill time per token; 0: unknown
    "usual_step_ns",  # usual duration of a decode step; 0: unknown
    "request_high",  # id of the request whose prompt is read, 16 bytes in two words
    "request_low",
    "compute_tid",  # kernel ids of the compute thread and the main thread; 0: unknown
    "edge_tid",
    "edge_ns",  # start of the newest pass of the main thread's loop on the monotonic clock
    "pid",  # in a group: the process id of a rank after the first; 0: unknown
    "orders",  # in a group: messages that rank 0 has sent, or that another rank has carried out
)
_INDEX = {name: index for index, name in enumerate(_WORDS)}
SIZE = mmap.PAGESIZE


class ProgressReading(Struct, frozen=True):
    """The values of a progress block at one reading; `_WORDS` explains the fields."""

    phase: str = "boot"
    since_ns: int = 0
    count: int = 0
    tokens: int = 0
    fresh: bool = False
    usual_token_ns: int = 0
    usual_step_ns: int = 0
    request: bytes | None = None
    compute_tid: int = 0
    edge_tid: int = 0
    edge_ns: int = 0
    pid: int = 0
    orders: int = 0


class Block:
    """A progress block, mapped into memory. The broker calls `create`, the worker `open`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")

    @classmethod
    def create(cls) -> tuple[Block, int]:
        """Returns a new block, and the descriptor for the worker to inherit. Raises OSError."""
        descriptor = _anonymous_file()
        try:
            os.ftruncate(descriptor, SIZE)
            block = cls.open(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        block.write("magic", _MAGIC)
        return block, descriptor

    @classmethod
    def open(cls, descriptor: int) -> Block:
        """Maps the block of a descriptor, which may be closed afterwards."""
        return cls(mmap.mmap(descriptor, SIZE))

    @classmethod
    def private(cls) -> Block:
        """Returns a block that no other process reads."""
        return cls(mmap.mmap(-1, SIZE))

    def write(self, word: str, value: int) -> None:
        """Sets one word; a negative value counts as 0."""
        self._words[_INDEX[word]] = max(0, value)

    def write_request(self, request: bytes | None) -> None:
        """Sets the id of the request whose prompt is read; None if no prompt is read."""
        high, low = (request or NO_REQUEST)[:8], (request or NO_REQUEST)[8:]
        self.write("request_high", int.from_bytes(high, "big"))
        self.write("request_low", int.from_bytes(low, "big"))

    def read(self) -> ProgressReading:
        """Returns the present words. A block without writes has the default values."""
        words = dict(zip(_WORDS, self._words[: len(_WORDS)].tolist(), strict=True))
        request = b"".join(words[f"request_{half}"].to_bytes(8, "big") for half in ("high", "low"))
        return ProgressReading(
            PHASES[words["phase"] % len(PHASES)],
            words["since_ns"],
            words["count"],
            words["tokens"],
            bool(words["fresh"]),
            words["usual_token_ns"],
            words["usual_step_ns"],
            None if request == NO_REQUEST else request,
            words["compute_tid"],
            words["edge_tid"],
            words["edge_ns"],
            words["pid"],
            words["orders"],
        )

    def close(self) -> None:
        """Unmaps the block."""
        self._words.release()
        self._memory.close()


def _anonymous_file() -> int:
    """Returns the descriptor of an unnamed file: in memory on Linux, else a temporary file."""
    if sys.platform == "linux":
        return os.memfd_create("mlxpool-progress", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="mlxpool-progress-")
    os.unlink(path)
    return descriptor
