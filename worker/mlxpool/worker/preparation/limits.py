"""Limits of the processes that prepare requests."""

from __future__ import annotations

from msgspec import Struct

SHORT_TEXT = 16 * 1024  # characters or bytes of a short text: encoded in a few milliseconds
QUIET_TIME = 0.003  # seconds after which steps leave a core to a preparation
SHORT_TIME = 0.05  # seconds after which a preparation counts as long, whatever its size
MAX_LANES = 6  # lanes with a job: one short job, all others long; one more lane may be idle
MAX_LANES_OF_OWNER = 3  # lanes with jobs of one owner; the owner's next short job waits for these
MAX_IMAGE_LANES = 2  # lanes with image jobs, of different owners: the other lanes are for texts
ENCODE_MEMORY = 3 * 2**29  # bytes of address space that the tokenizer may take
IMAGE_MEMORY = 2**30  # bytes of address space that decoding an image may take
IMAGE_SECONDS = 20.0  # processor seconds for all images of a request; the largest image takes two
GRAMMAR_MEMORY = 2**29  # bytes of address space that compiling a format may take
GRAMMAR_SECONDS = 1.0  # seconds of processor time for a format: 50 properties take 10 ms
BYTES_PER_SECOND = 100_000  # characters of text per second; every tokenizer is faster


class Limits(Struct, frozen=True):
    """The limits for the preparation of a request.

    `render`: processor seconds for a chat template. `tokenize`: those of the tokenizer for a
    short text, see `encoding`. `memory`: bytes of address space that the tokenizer may take.
    """

    render: float = 2.0
    tokenize: float = 5.0
    memory: int = ENCODE_MEMORY

    def encoding(self, size: int) -> float:
        """Returns the most processor seconds of the tokenizer for a text of `size` characters."""
        return self.tokenize + size / BYTES_PER_SECOND
