"""Compressed bodies of clients: each coding, several in a row, bombs, and broken data."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import zstandard

from mlxpool.gateway.content_encoding import MAX_CODINGS, PIECE, decoded
from mlxpool.gateway.errors import HttpError

TEXT = b'{"model": "demo", "prompt": "' + b"abcdefgh" * 40_000 + b'"}'


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def streamed_zstd(data: bytes) -> bytes:
    """Compresses data as a stream, so that the frame lacks the size of the data."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


CODED: dict[str, tuple[Sequence[str], Callable[[bytes], bytes]]] = {
    "none": ([], bytes),
    "identity": (["identity"], bytes),
    "gzip": (["gzip"], gzip.compress),
    "its old name": (["x-gzip"], gzip.compress),
    "letters": (["GZip"], gzip.compress),
    "members": (["gzip"], lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": (["deflate"], zlib.compress),
    "deflate without a header": (["deflate"], raw_deflate),
    "zstd": (["zstd"], zstandard.compress),
    "zstd of a stream": (["zstd"], streamed_zstd),
    "frames": (["zstd"], lambda data: zstandard.compress(data[:9]) + streamed_zstd(data[9:])),
    "in a row": (["gzip, zstd"], lambda data: zstandard.compress(gzip.compress(data))),
    "fields": (["deflate", "gzip"], lambda data: gzip.compress(zlib.compress(data))),
}


def undone(data: bytes, fields: Sequence[str], step: int = 10**9) -> bytes:
    async def sent() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), step):
            yield data[begin : begin + step]

    async def read() -> bytes:
        return b"".join([piece async for piece in decoded(sent(), fields)])

    return asyncio.run(read())


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("step", [1, 1000, 10**9])
def test_every_coding_is_undone_however_its_bytes_arrive(name: str, step: int) -> None:
    fields, encode = CODED[name]
    text = TEXT if step > 1 else TEXT[:200]
    assert undone(encode(text), fields, step) == text
    assert undone(b"", fields) == b""


@pytest.mark.parametrize("name", [name for name, (fields, _) in CODED.items() if len(fields) == 1])
def test_data_that_end_too_early_or_are_others_are_named(name: str) -> None:
    fields, encode = CODED[name]
    if fields == ["identity"]:
        return
    data = encode(TEXT)
    for broken in (data[:-1], data[: len(data) // 2], b"{" + data, b"x", data + b"more"):
        with pytest.raises(HttpError, match=fields[0]) as caught:
            undone(broken, fields)
        assert (caught.value.status, caught.value.code) == (400, "broken_encoding")


@pytest.mark.parametrize("fields", [["br"], ["gzip, br"], ["compress", "gzip"]])
def test_unknown_codings_are_refused_with_those_that_are_known(fields: list[str]) -> None:
    with pytest.raises(HttpError, match="gzip, deflate, zstd") as caught:
        undone(b"{}", fields)
    assert caught.value.status == 415
    assert caught.value.headers()["accept-encoding"] == "gzip, deflate, zstd"
    with pytest.raises(HttpError, match=f"at most {MAX_CODINGS}"):
        undone(b"{}", ["gzip"] * (MAX_CODINGS + 1))


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd", "in a row"])
def test_of_a_bomb_only_what_is_asked_for_is_decoded(name: str) -> None:
    fields, encode = CODED[name]
    bomb = encode(bytes(200 * 2**20))
    assert len(bomb) < 2**19

    async def sent() -> AsyncIterator[bytes]:
        yield bomb

    async def read() -> list[int]:
        pieces = decoded(sent(), fields)
        return [len(await anext(pieces)) for _ in itertools.repeat(None, 5)]

    sizes = asyncio.run(read())
    # A piece of zstd's input has at most 16 blocks of 128 KiB.
    assert max(sizes) <= (16 * 2**17 if "zstd" in fields[0] else PIECE), sizes
