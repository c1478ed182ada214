"""Writes a model folder of a named shape with random weights as fast as its disk takes them.

python -m mlxpool.bench.large_checkpoint FOLDER --shape llama-3.1-70b

As checkpoint.py, for models that take too long to draw number by number: each tensor has the
numbers of one block that is drawn once, from another place of it on. In bfloat16 alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlxpool.bench import checkpoint
from mlxpool.bench.tensors import CORRECTION
from mlxpool.worker import models
from mlxpool.worker.layers.layer_types import Shape

BLOCK = 2**24 + 1  # numbers that are drawn; odd, so that rows do not repeat
STEP = 104_729  # numbers from where a tensor begins in the block to where the next one does
NOISE, NORM = "noise", "norm"  # kinds of tensors, as is CORRECTION
NORM_NOISE = 0.1  # of the weights of norms, which are about 1
BYTES = 2  # of a number
THREADS = 16

Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of a shard; `number` counts those of all shards."""

    name: str
    shape: Shape
    number: int

    @property
    def size(self) -> int:
        """The numbers of it."""
        return int(np.prod(self.shape))


@dataclass(slots=True)
class Blocks:
    """The drawn numbers, scaled as each kind of tensor has them."""

    noise: npt.NDArray[np.float32]
    made: dict[tuple[str, int], Bits] = field(default_factory=dict)

    def of(self, tensor: Planned) -> Bits:
        """The block whose numbers a tensor has."""
        kind, width = _kind(tensor.name), tensor.shape[-1]
        if (kind, width) not in self.made:
            scaled = self.noise * np.float32(width**-0.5)
            if kind == NORM:
                scaled = 1 + NORM_NOISE * scaled
            elif kind == CORRECTION:
                scaled = np.zeros_like(scaled)
            self.made[kind, width] = _bfloat16(scaled)
        return self.made[kind, width]


def write(
    folder: Path,
    shape: str,
    *,
    layers: int = 0,
    max_shard_bytes: int = checkpoint.MAX_SHARD_BYTES,
    threads: int = THREADS,
) -> Path:
    """Writes the folder and returns it. Raises ValueError for an unknown shape.

    `layers` 0: as many as the shape has. `threads`: that write a shard each.
    """
    config = checkpoint.config_of(shape, layers)
    checkpoint.write_settings(folder, config, "bfloat16")
    shards = _shards(models.plan(config).shapes, max_shard_bytes)
    blocks = Blocks(np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32))
    for shard in shards:
        for tensor in shard:
            blocks.of(tensor)
    files = {checkpoint.file_name(number): shard for number, shard in enumerate(shards)}
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(partial(_write_shard, folder, blocks), *zip(*files.items(), strict=True)):
            pass
    checkpoint.write_index(folder, {one.name: name for name in files for one in files[name]})
    return folder


def _kind(name: str) -> str:
    """Of the numbers of a tensor of this name."""
    if "norm" in name:
        return NORM
    return CORRECTION if name.endswith(CORRECTION) else NOISE


def _shards(shapes: Mapping[str, Shape], most: int) -> list[list[Planned]]:
    """The tensors of each file, which has one or at most `most` bytes."""
    shards: list[list[Planned]] = [[]]
    free = most
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = Planned(name, tuple(shape), number)
        if shards[-1] and free < BYTES * tensor.size:
            shards.append([])
            free = most
        shards[-1].append(tensor)
        free -= BYTES * tensor.size
    return shards


def _write_shard(folder: Path, blocks: Blocks, name: str, shard: list[Planned]) -> None:
    header: dict[str, object] = {}
    end = 0
    for one in shard:
        begin, end = end, end + BYTES * one.size
        header[one.name] = {"dtype": "BF16", "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / name).open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for one in shard:
            _write_numbers(file.fileno(), blocks.of(one), STEP * one.number, one.size)


def _write_numbers(descriptor: int, block: Bits, first: int, count: int) -> None:
    """Writes `count` numbers of a block that is repeated, from number `first` on."""
    while count:
        at = first % len(block)
        some = min(count, len(block) - at)
        _write(descriptor, block[at : at + some].data.cast("B"))
        first, count = first + some, count - some


def _write(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _bfloat16(numbers: npt.NDArray[np.float32]) -> Bits:
    """The upper halves of the numbers, rounded to even."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    began = time.monotonic()
    write(options.folder, options.shape, layers=options.layers, threads=options.threads)
    took = time.monotonic() - began
    size = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    print(f"{size / 1e9:.1f} GB in {took:.1f} s, {size / took / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
