"""Reads the tensors of safetensors files into the memory of a CUDA GPU.

MLX reads each tensor with one thread into new host memory, whose pages the system must clear first,
then copies it to the device. Here several threads read pieces into memory that is allocated once
and that the device can address. A kernel copies each piece while the next pieces are read.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels import device
from mlxpool.worker.transfers import downloads
from mlxpool.worker.transfers.downloads import write_to
from mlxpool.worker.transfers.shared_array import SharedArray
from mlxpool.worker.weights.cut_reads import DTYPES, WORD, CutReads, Runs, TensorPlaces

PIECE_BYTES = 64 * 1024**2
PIECES = 3  # buffers for pieces: one is filled while the device copies other buffers
THREADS = 8  # threads that read parts of a piece


def supported(dtypes: set[str]) -> bool:
    """Returns whether this module can read tensors of all these dtypes (safetensors' names)."""
    return device.on_gpu() and dtypes <= DTYPES.keys() and downloads.works()


class DeviceReads:
    """Reads tensors in pieces; used by one thread. `__exit__` frees the memory of the pieces."""

    def __init__(self, largest: int) -> None:
        """`largest`: bytes of the largest tensor, which bounds the size of a piece."""
        words = -(-min(PIECE_BYTES, max(largest, WORD)) // WORD)
        self._pieces = [SharedArray(words) for _ in range(PIECES)]
        # The copy of each piece; the piece's buffer is free when the copy is evaluated.
        self._copied: list[mx.array | None] = [None] * PIECES
        self._next = 0
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._threads.shutdown()
        mx.synchronize()
        # This memory stays on the host, so MLX must not reuse it for other arrays.
        self._pieces, self._copied = [], []
        mx.clear_cache()

    def open(self, file: Path) -> OpenFile:
        """Opens a file to read whole tensors. Raises ModelLoadFailed on failure."""
        return OpenFile(file, self)

    def open_parts(self, file: Path) -> CutReads:
        """Opens a file to read parts of tensors. Raises ModelLoadFailed on failure."""
        return CutReads(file, self.read)

    def read(self, stream: int, runs: Runs) -> mx.array:
        """Returns the bytes of `runs` as int32 numbers; the last number is padded.

        Raises OSError, or EOFError if the file ends too early.
        """
        size = runs.nbytes
        into = mx.zeros((-(-size // WORD),), dtype=mx.int32)
        mx.eval(into)
        whole = self._pieces[0].numbers.nbytes
        for at in range(0, size, whole):
            slot, count = self._next, min(whole, size - at)
            self._next = (slot + 1) % PIECES
            copied = self._copied[slot]
            if copied is not None:
                mx.eval(copied)
            piece = self._pieces[slot]
            self._fill(piece.numbers.data.cast("B")[:count], stream, runs, at)
            words = -(-count // WORD)
            done = write_to(piece.array[:words], into[at // WORD : at // WORD + words])
            mx.async_eval(done)  # type: ignore[no-untyped-call]
            self._copied[slot] = done
        return into

    def _fill(self, piece: memoryview, stream: int, runs: Runs, start: int) -> None:
        """Reads a piece with several threads, which release the GIL meanwhile."""
        share = -(-len(piece) // THREADS)
        parts = [(at, piece[at : at + share]) for at in range(0, len(piece), share)]
        for _ in self._threads.map(
            lambda part: runs.read_into(stream, start + part[0], part[1]), parts
        ):
            pass


class OpenFile:
    """The tensors of a file by name."""

    def __init__(self, file: Path, reads: DeviceReads) -> None:
        self._file, self._reads = file, reads
        self._places = TensorPlaces(file)

    def pop(self, name: str, default: None = None) -> mx.array | None:
        """Reads a tensor; returns `default` if the header lacks the name or the entry is unusable.

        Raises ModelLoadFailed if it cannot be read.
        """
        place = self._places.find(name)
        if place is None:
            return default
        if place.begin == place.end:
            return mx.zeros(place.shape, place.dtype)
        try:
            with self._file.open("rb", buffering=0) as opened:
                size = place.end - place.begin
                numbers = self._reads.read(opened.fileno(), Runs(place.begin, size, size))
        except (OSError, EOFError) as error:
            raise ModelLoadFailed(f"{self._file} cannot be read: {error}") from error
        return numbers.view(place.dtype)[: math.prod(place.shape)].reshape(place.shape)
