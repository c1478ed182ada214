"""The file of bearer keys for HTTP: a key a line, or a name and a key; `#` begins a comment.

A third word, `operator`, says that the key may read the gateway's metrics.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from pathlib import Path

from msgspec import Struct

from mlxpool.common.regular_files import open_regular

MIN_KEY_LENGTH = 16  # characters; a shorter key can be guessed
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # of a key, in logs
SHOWN_DIGITS = 32  # of the digest of a key without a name, in its place: it names an owner
OPERATOR = "operator"
OTHERS = 0o077  # of a mode


class ApiKey(Struct, frozen=True):
    """What the file says of a key. `name` is its owner."""

    name: str
    operator: bool = False


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(file: Path) -> dict[bytes, ApiKey]:
    """The file's keys by their digests; one without a name is named by digits of its digest.

    Raises ValueError naming the file, and the line or the mode with which others can read it.
    """
    try:
        with open_regular(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            lines = opened.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {file} cannot be read: {error}") from error
    if mode & OTHERS:
        raise ValueError(
            f"the keys in {file} can be read or written by others (mode {mode:04o}):"
            f" chmod 600 {shlex.quote(str(file))}, and make new ones if somebody may have seen them"
        )
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        operator = len(words) == 3 and words[2] == OPERATOR
        key, name = words[min(len(words), 2) - 1], words[0] if len(words) > 1 else None
        if len(words) > 2 + operator or len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"{file}, line {number}: a line is KEY or NAME KEY or NAME KEY {OPERATOR}, and a"
                f" key is one word of at least {MIN_KEY_LENGTH} characters; it has {len(words)}"
                f" words, the key {len(key)} characters (make a key with `openssl rand -hex 32`)"
            )
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(
                f"{file}, line {number}: a name has 1 to 64 letters, digits and . _ @ -"
            )
        found = digest(key)
        keys[found] = ApiKey(name or f"sha256:{found.hex()[:SHOWN_DIGITS]}", operator)
    if not keys:
        raise ValueError(f"{file} has no key: write one a line")
    return keys
