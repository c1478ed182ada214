"""Tests blocks of every GGUF type against the numbers that llama.cpp's own package reads."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.weights.gguf.block_types import BLOCK_TYPES, BlockType  # noqa: E402
from mlxpool.worker.weights.gguf.blocks import packed, packed_rows  # noqa: E402

ROWS, COLUMNS = 6, 512
HALVES = {  # type -> offsets of the float16 numbers in a block
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
# The largest RMS error relative to the RMS of the weights, for types whose numbers are rounded a
# second time, to 8 bits. The errors of the types themselves are some 0.3, 0.12 and 0.02.
ROUNDED = {"Q2_K": 0.003, "Q3_K": 0.004, "Q6_K": 0.006}
LAID_OUT = {kind: block for kind, block in BLOCK_TYPES.items() if block.layout is not None}


def blocks_of(block: BlockType) -> np.ndarray:
    """Returns random blocks [ROWS, bytes] with finite scales."""
    draw = np.random.default_rng(block.nbytes)
    raw = draw.integers(0, 256, (ROWS, COLUMNS // block.numbers, block.nbytes), dtype=np.uint8)
    for at in HALVES.get(block.name, ()):
        signed = (draw.random(raw.shape[:2]) - 0.3).astype("<f2")
        raw[..., at : at + 2] = signed[..., None].view(np.uint8)
    if block.name == "MXFP4":
        raw[..., 0] = draw.integers(100, 130, raw.shape[:2])
    return raw.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", LAID_OUT)
def test_numbers_are_those_of_llama_cpp(kind: int) -> None:
    block, layout = LAID_OUT[kind], LAID_OUT[kind].layout
    assert layout is not None
    raw = blocks_of(block)
    expected = dequantize(raw, GGMLQuantizationType(kind))
    read = packed_rows(block, raw, COLUMNS)
    ours = np.array(
        mx.dequantize(
            mx.array(read.weight),
            mx.array(read.scales),
            None if read.biases is None else mx.array(read.biases),
            group_size=layout.group_size,
            bits=layout.bits,
            mode=layout.mode,
            dtype=mx.float32,
        )
    )
    error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
    assert error <= ROUNDED.get(block.name, 0.0)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_numbers_are_packed_as_mlx_packs_them(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (12, 32), dtype=np.uint8)
    words = packed(numbers, bits).view(np.uint32)
    ones, zeros = mx.ones((12, 1)), mx.zeros((12, 1))
    read = mx.dequantize(mx.array(words), ones, zeros, group_size=32, bits=bits)
    assert np.array_equal(np.array(read), numbers)


def test_many_blocks_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    block = LAID_OUT[12]
    raw = blocks_of(block)
    whole = packed_rows(block, raw, COLUMNS)
    monkeypatch.setattr("mlxpool.worker.weights.gguf.blocks.BLOCK_BYTES", 5 * block.nbytes)
    parts = packed_rows(block, raw, COLUMNS)
    assert np.array_equal(whole.weight, parts.weight)
    assert np.array_equal(whole.scales, parts.scales)


def test_equal_weights_stay_what_they_are() -> None:
    block, raw = LAID_OUT[14], np.zeros((1, 210), np.uint8)  # a scale of 0
    read = packed_rows(block, raw, 256)
    assert read.biases is not None and not read.scales.any() and not read.biases.any()
