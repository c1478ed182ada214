"""Bounds of the processes that prepare requests."""

from __future__ import annotations

from msgspec import Struct

SHORT_TEXT = 16 * 1024  # characters or bytes; to encode so many takes a few milliseconds
QUIET_TIME = 0.003  # seconds after which steps leave a core to a preparation
SHORT_TIME = 0.05  # seconds after which a preparation counts as long, whatever its size
MAX_LANES = 6  # with a job: one with a short one, the others with long ones; another may be idle
MAX_LANES_OF_OWNER = 3  # with a job of this owner, whose next short one waits for them
MAX_IMAGE_LANES = 2  # with a job that reads images, each of another owner: texts have the others
ENCODE_MEMORY = 3 * 2**29  # bytes of address space that the tokenizer may take
IMAGE_MEMORY = 2**30  # bytes of address space that decoding an image may take
IMAGE_SECONDS = 20.0  # of processor time for all images of a request: the largest takes two
GRAMMAR_MEMORY = 2**29  # bytes of address space that compiling a format may take
GRAMMAR_SECONDS = 1.0  # of processor time for a format: one of 50 properties takes 10 ms
BYTES_PER_SECOND = 100_000  # of text; every tokenizer is faster


class Limits(Struct, frozen=True):
    """Of one request. `render`: seconds of a chat template; `tokenize`: see `encoding`."""

    render: float = 2.0
    tokenize: float = 5.0

    def encoding(self, size: int) -> float:
        """The processor seconds that the tokenizer may take for a text of `size` characters."""
        return self.tokenize + size / BYTES_PER_SECOND
