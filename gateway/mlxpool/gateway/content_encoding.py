"""Decodes compressed bodies of clients (Content-Encoding), in pieces of a bounded size."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

import zstandard

from mlxpool.gateway.errors import HttpError, bad_request

PIECE = 64 * 1024  # most bytes that one call of a zlib decoder returns
# Bytes that the zstd decoder gets in one call: a block of 4 bytes may decode to 128 KiB.
ZSTD_FED = 64
ZSTD_WINDOW = 2**23  # bytes; RFC 9659 forbids larger ones in HTTP
MAX_CODINGS = 4  # most codings of a body, one inside the other
GZIP, ZLIB, RAW = 31, 15, -15  # zlib's `wbits` for each form of data


class Decoder(Protocol):
    """A decoder of one content coding.

    Its methods raise ValueError, zlib.error and zstandard.ZstdError.
    """

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decodes the next bytes of the body; yields the result in pieces of bounded size."""
        ...

    def finish(self) -> None:
        """Raises ValueError if the compressed data end too early."""
        ...


class ZlibDecoder:
    """A decoder of gzip, with several members, and of deflate, with or without zlib's header."""

    def __init__(self, *, deflate: bool) -> None:
        self._deflate = deflate
        self._form = GZIP
        self._head = b""  # a first byte of deflate, too short to recognise the form
        self._stream = None if deflate else zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._stream is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
            self._form = ZLIB if _has_zlib_header(data) else RAW
            self._stream = zlib.decompressobj(self._form)
        while data:
            if self._stream.eof:
                self._stream = zlib.decompressobj(self._form)
            decoded = self._stream.decompress(data, PIECE)
            data = self._stream.unconsumed_tail or self._stream.unused_data
            while decoded:
                yield decoded
                # The decoder may hold more output after it has read all input.
                full = len(decoded) == PIECE and not data
                decoded = self._stream.decompress(b"", PIECE) if full else b""

    def finish(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise ValueError("the data end too early")


def _has_zlib_header(data: bytes) -> bool:
    return data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0


class ZstdDecoder:
    """A decoder of zstd, with any number of frames."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
        self._stream = self._decompressor.decompressobj()

    def feed(self, data: bytes) -> Iterator[bytes]:
        for begin in range(0, len(data), ZSTD_FED):
            rest = data[begin : begin + ZSTD_FED]
            while rest:
                if self._stream.eof:
                    self._stream = self._decompressor.decompressobj()
                decoded = self._stream.decompress(rest)
                rest = self._stream.unused_data if self._stream.eof else b""
                if decoded:
                    yield decoded

    def finish(self) -> None:
        if not self._stream.eof:
            raise ValueError("the data end too early")


DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: ZlibDecoder(deflate=False),
    "deflate": lambda: ZlibDecoder(deflate=True),
    "zstd": ZstdDecoder,
}
OTHER_NAMES = {"x-gzip": "gzip"}
NO_CODING = ("", "identity")


def decoders_of(fields: Sequence[str]) -> list[Decoder]:
    """Returns the decoders for a request's Content-Encoding fields, in the order of their use.

    Raises HttpError for an unknown coding and for too many codings.
    """
    names = [name.strip().lower() for field in fields for name in field.split(",")]
    names = [OTHER_NAMES.get(name, name) for name in names if name not in NO_CODING]
    supported = ", ".join(DECODERS)
    for name in names:
        if name not in DECODERS:
            message = f"content-encoding has {name!r:.80}; supported are {supported}"
            raise HttpError(
                415, message, "unsupported_encoding", retry=False,
                more_headers={"accept-encoding": supported},
            )  # fmt: skip
    if len(names) > MAX_CODINGS:
        message = f"content-encoding has {len(names)} codings in a row, at most {MAX_CODINGS}"
        raise bad_request(message, code="broken_encoding")
    return [DECODERS[name]() for name in reversed(names)]


async def decoded(body: AsyncIterator[bytes], fields: Sequence[str]) -> AsyncIterator[bytes]:
    """Yields the pieces of a body without the codings of its Content-Encoding fields.

    Raises HttpError also for data that are broken or end too early; an empty body may have any
    coding.
    """
    decoders = decoders_of(fields)
    if not decoders:
        async for data in body:
            yield data
        return
    is_empty = True
    try:
        async for data in body:
            is_empty = is_empty and not data
            for piece in _through(decoders, data):
                yield piece
        if not is_empty:
            for decoder in decoders:
                decoder.finish()
    except (ValueError, zlib.error, zstandard.ZstdError) as error:
        message = f"the body does not have its content-encoding ({', '.join(fields)}): {error}"
        raise bad_request(message, code="broken_encoding") from None


def _through(decoders: Sequence[Decoder], data: bytes) -> Iterator[bytes]:
    """Yields the bytes that a chain of decoders makes of some input bytes."""
    if not decoders:
        yield data
        return
    for piece in decoders[0].feed(data):
        yield from _through(decoders[1:], piece)
