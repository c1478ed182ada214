"""Bounds of the processes that prepare requests."""

from __future__ import annotations

SHORT_TEXT = 16 * 1024  # characters or bytes; to encode so many takes a few milliseconds
SHORT_TIME = 0.05  # seconds after which a preparation counts as long, whatever its size
MAX_LANES = 6  # processes at once: one for short preparations, the others for long ones
RENDER_TIMEOUT = 2.0  # seconds for the chat template of one request
ENCODE_MEMORY = 3 * 2**29  # bytes of address space that the tokenizer may take
BYTES_PER_SECOND = 100_000  # of text; every tokenizer is faster


def encode_limit(size: int, prepare_limit: float) -> float:
    """The processor seconds that the tokenizer may take for a text of `size` characters."""
    return prepare_limit + size / BYTES_PER_SECOND
