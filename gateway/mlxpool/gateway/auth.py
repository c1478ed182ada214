"""Bearer keys, one a line in a file, and how much each may ask at once.

The file is read again when the process gets SIGHUP.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mlxpool.gateway.errors import Fault

log = logging.getLogger("mlxpool.gateway")

SHORTEST = 16  # characters; a key that can be guessed keeps nobody out


class Keys:
    """Who may ask. Without a file everybody may."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises ValueError for a file that cannot be used, naming it and the line."""
        self._file = file
        self._digests = () if file is None else _read(file)

    @property
    def wanted(self) -> bool:
        return self._file is not None

    def reread(self) -> None:
        """Take the file as it is now; one that cannot be used changes nothing."""
        if self._file is None:
            return
        try:
            self._digests = _read(self._file)
        except ValueError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%s has %d keys", self._file, len(self._digests))

    def who(self, authorization: str | None) -> bytes | None:
        """Who asks with this header, None for nobody known; takes equally long for every key."""
        if self._file is None:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if any(known) and scheme.lower() == "bearer" else None


class Places:
    """How many requests each has under way."""

    def __init__(self, most: int | None) -> None:
        """`most` for each; None: any number."""
        self._most = most
        self._taken: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def taken(self, who: bytes) -> Iterator[None]:
        """A place for a request. Raises Fault when all are taken."""
        if self._most is not None and self._taken[who] >= self._most:
            words = f"{self._most} requests of this key are under way, which is all it may have"
            raise Fault(429, words, "over_quota", retry_after=1.0)
        self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            self._taken += Counter()  # forgets whoever has none


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read(file: Path) -> tuple[bytes, ...]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {file} cannot be read: {error}") from error
    digests = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < SHORTEST or len(key.split()) > 1:
            raise ValueError(
                f"{file}, line {number}: a key is one word of at least {SHORTEST} characters;"
                f" it has {len(key)} (make one with `openssl rand -hex 32`)"
            )
        digests.append(_digest(key))
    if not digests:
        raise ValueError(f"{file} has no key: write one a line")
    return tuple(digests)
