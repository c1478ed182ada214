"""The file of bearer keys for HTTP: one key a line, `#` begins a comment."""

from __future__ import annotations

import hashlib
from pathlib import Path

MIN_KEY_LENGTH = 16  # characters; a shorter key can be guessed


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_digests(file: Path) -> tuple[bytes, ...]:
    """The digests of the file's keys. Raises ValueError naming the file and the line."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {file} cannot be read: {error}") from error
    digests = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < MIN_KEY_LENGTH or len(key.split()) > 1:
            raise ValueError(
                f"{file}, line {number}: a key is one word of at least {MIN_KEY_LENGTH} characters;"
                f" it has {len(key)} (make one with `openssl rand -hex 32`)"
            )
        digests.append(digest(key))
    if not digests:
        raise ValueError(f"{file} has no key: write one a line")
    return tuple(digests)
