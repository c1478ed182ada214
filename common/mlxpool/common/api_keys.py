"""The file of bearer keys for HTTP: a key a line, or a name and a key; `#` begins a comment."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mlxpool.common.regular_files import open_regular

MIN_KEY_LENGTH = 16  # characters; a shorter key can be guessed
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # of a key, in logs
SHOWN_DIGITS = 32  # of the digest of a key without a name, in its place: it names an owner


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(file: Path) -> dict[bytes, str]:
    """The name of each of the file's keys by its digest; digits of the digest for one without.

    Raises ValueError naming the file and the line.
    """
    try:
        with open_regular(file) as opened:
            lines = opened.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {file} cannot be read: {error}") from error
    names: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, name = words[-1], words[0] if len(words) > 1 else None
        if len(words) > 2 or len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"{file}, line {number}: a line is KEY or NAME KEY, and a key is one word of at"
                f" least {MIN_KEY_LENGTH} characters; it has {len(words)} words, the last of"
                f" {len(key)} characters (make a key with `openssl rand -hex 32`)"
            )
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(
                f"{file}, line {number}: a name has 1 to 64 letters, digits and . _ @ -"
            )
        found = digest(key)
        names[found] = name or f"sha256:{found.hex()[:SHOWN_DIGITS]}"
    if not names:
        raise ValueError(f"{file} has no key: write one a line")
    return names
