"""Reads the lines of a batch, and divides the file of these lines into parts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.kept.batch_lines import MAX_LINE, BadLine, parse_line
from mlxpool.common.protocol.kept.file_messages import PART_BYTES

Lines = str | os.PathLike[str] | Iterable[Mapping[str, Any] | str | bytes]


class Part(Struct, frozen=True):
    """Bytes of a file, from byte `start` on. `last` is True for the last part of the file."""

    start: int
    data: bytes
    last: bool


def _sha256() -> Any:
    import hashlib  # imported here: OpenSSL would be a twentieth of the client's import time

    return hashlib.sha256()


class Source(Struct, eq=False):
    """Reads lines when they are needed: only one part and one line are in memory.

    `lines` is the path of a file of JSON lines, or lines as maps, texts or bytes. With `check` the
    first line that the pool would refuse raises BadRequest naming its number, from 1.
    """

    lines: Lines
    defaults: Mapping[str, Any]
    check: bool = True
    count: int = 0  # number of lines read so far that are not empty
    size: int = 0  # bytes read
    digest: Any = field(default_factory=_sha256)

    @property
    def repeatable(self) -> bool:
        """True if the lines can be read a second time."""
        return isinstance(self.lines, str | os.PathLike | list | tuple)

    def again(self) -> Source:
        """Returns a source of the same lines from the beginning."""
        return Source(self.lines, self.defaults, self.check)

    def parts(self) -> Iterator[Part]:
        """Yields the parts in order. Raises OSError, and BadRequest or TooLarge naming the line."""
        waiting = bytearray()
        start = 0
        for line in self._checked():
            waiting += line
            while len(waiting) > PART_BYTES:
                yield self._part(start, bytes(waiting[:PART_BYTES]), last=False)
                start += PART_BYTES
                del waiting[:PART_BYTES]
        if not self.count:
            raise BadRequest("there is no line: a batch has at least one")
        yield self._part(start, bytes(waiting), last=True)

    def _part(self, start: int, data: bytes, *, last: bool) -> Part:
        self.digest.update(data)
        self.size += len(data)
        return Part(start, data, last)

    def _checked(self) -> Iterator[bytes]:
        """Yields whole lines with their line ends."""
        for number, line in enumerate(self._read(), 1):
            if line.strip():
                self.count += 1
                if self.check:
                    self._check(number, line)
            yield line if line.endswith(b"\n") else line + b"\n"

    def _check(self, number: int, line: bytes) -> None:
        try:
            parsed = parse_line(line.rstrip(b"\r\n"), self.defaults)
        except BadLine as bad:
            label = f" (id {bad.label!r})" if bad.label else ""
            raise type(bad.error)(f"line {number}{label}: {bad.error.message}") from None
        if not parsed.submit.work.model:
            raise BadRequest(f"line {number}: names no model")

    def _read(self) -> Iterator[bytes]:
        if isinstance(self.lines, str | os.PathLike):
            with Path(self.lines).open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE + 2):
                    number += 1
                    if len(line) > MAX_LINE + 1:
                        raise TooLarge(f"line {number} has more than {MAX_LINE} bytes")
                    yield line
            return
        for number, line_given in enumerate(self.lines, 1):
            yield _line_bytes(number, line_given)


def _line_bytes(number: int, line: object) -> bytes:
    """Returns a line as bytes. Raises BadRequest if it is not one line of JSON."""
    try:
        if isinstance(line, Mapping):
            return json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
        data = line.encode() if isinstance(line, str) else line
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"line {number} cannot be written as JSON: {error}") from None
    if not isinstance(data, bytes):
        raise BadRequest(f"line {number} must be a map, a text or bytes, got {shown(line)}")
    if b"\n" in data.rstrip(b"\r\n"):
        raise BadRequest(f"line {number} has a line end in it: give one JSON object a line")
    return data
