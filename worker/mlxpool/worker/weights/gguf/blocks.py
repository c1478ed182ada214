"""Converts blocks of GGUF's types to MLX's packed numbers, scales and biases. No MLX.

All functions take the bytes of blocks [n, bytes of a block]. Each byte holds two numbers of four
bits. In a group of 32, the low bits of byte i are number i, the high bits number i + 16. In types
named _K, the high bits belong to the next group of 32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.weights.gguf.block_types import GROUP, BlockType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# Bytes of blocks that are converted together. The temporary arrays are about 30 times larger: they
# stay in reused heap memory (see device.MMAP_THRESHOLD), mostly in a processor's cache.
BLOCK_BYTES = 2**16
_LOW, _SIX, _FOUR = np.uint8(0x0F), np.uint8(0x3F), np.uint8(4)
_BITS, _PAIRS = np.arange(8, dtype=np.uint8)[:, None], np.arange(0, 8, 2, dtype=np.uint8)[:, None]


class Groups(Struct, frozen=True):
    """The quantised numbers [n, 32] of n groups, with the scale and the bias of each group."""

    numbers: Bytes
    scales: Floats
    biases: Floats


class PackedRows(Struct, frozen=True):
    """A weight [rows, columns]: packed uint32 [rows, words]; scales and biases [rows, groups]."""

    weight: npt.NDArray[np.uint32]
    scales: Floats | Bytes
    biases: Floats | None


def packed_rows(kind: BlockType, raw: Bytes, columns: int) -> PackedRows:
    """Returns the rows of `columns` numbers in `raw`, converted to the MLX layout of `kind`."""
    assert kind.layout is not None
    bits, blocks = kind.layout.bits, raw.reshape(-1, kind.nbytes)
    groups = len(blocks) * kind.numbers // GROUP
    weight = np.empty((groups, bits * GROUP // 8), np.uint8)
    is_affine = kind.layout.mode == "affine"
    scales: Floats | Bytes = (
        np.empty(groups, np.float32) if is_affine else np.empty(groups, np.uint8)
    )
    biases = np.empty(groups if is_affine else 0, np.float32)
    step = max(1, BLOCK_BYTES // kind.nbytes)
    for at in range(0, len(blocks), step):
        some = blocks[at : at + step]
        part = slice(at * kind.numbers // GROUP, (at + len(some)) * kind.numbers // GROUP)
        if is_affine:
            read = _groups(kind, some)
            weight[part] = packed(read.numbers, bits)
            scales[part], biases[part] = read.scales, read.biases
        else:
            weight[part] = packed(_halves(some[:, 1:]), bits)
            scales[part] = some[:, 0]
    rows = groups * GROUP // columns
    return PackedRows(
        weight.view(np.uint32).reshape(rows, -1),
        scales.reshape(rows, -1),
        biases.reshape(rows, -1) if is_affine else None,
    )


def packed(numbers: Bytes, bits: int) -> Bytes:
    """Packs numbers [n, 32] below 2**bits: each row becomes a bit stream, [n, 4 * bits] bytes."""
    if bits == 8:
        return numbers
    if bits == 4:
        return numbers[:, ::2] | numbers[:, 1::2] << _FOUR
    eights = numbers.reshape(-1, 8)  # 8 numbers fill `bits` bytes
    words = np.zeros(len(eights), np.uint64)
    for index in range(8):
        words |= eights[:, index].astype(np.uint64) << np.uint64(index * bits)
    streams = words.astype("<u8").view(np.uint8).reshape(-1, 8)
    return streams[:, :bits].reshape(len(numbers), -1)


def rounded_groups(weights: Floats, bits: int) -> Groups:
    """Rounds weights [n, 32] to `bits` bits.

    In each group, 0 is the least weight and 2**bits - 1 the greatest.
    """
    low, high = weights.min(axis=1), weights.max(axis=1)
    scales = (high - low) / np.float32(2**bits - 1)
    steps = np.where(scales > 0, scales, np.float32(1))
    numbers = np.rint((weights - low[:, None]) / steps[:, None])
    return Groups(numbers.astype(np.uint8), scales, low)


def _groups(kind: BlockType, blocks: Bytes) -> Groups:
    assert kind.layout is not None
    if kind.rounded:
        weights = _WEIGHTS[kind.name](blocks).reshape(-1, GROUP)
        return rounded_groups(weights, kind.layout.bits)
    return _GROUPS[kind.name](blocks)


def _half(blocks: Bytes, at: int) -> Floats:
    """Returns the float16 at byte `at` of each block."""
    pair: Bytes = np.ascontiguousarray(blocks[:, at : at + 2])
    return pair.view("<f2")[:, 0].astype(np.float32)


def _halves(data: Bytes) -> Bytes:
    """Splits bytes [n, 16] into numbers [n, 32]: all low halves (4 bits), then all high halves."""
    return np.concatenate([data & _LOW, data >> _FOUR], axis=1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Returns the bits of bytes [n, 4] as numbers [n, 32]: 16 for a set bit, else 0."""
    return np.unpackbits(data, axis=1, bitorder="little") << _FOUR


def _q4_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_halves(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: Bytes) -> Groups:
    numbers = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(numbers, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale)  # q + 128, unsigned


def _q4_k(blocks: Bytes) -> Groups:
    numbers = _nibbles_k(blocks[:, 16:]).reshape(-1, GROUP)
    return Groups(numbers, *_scales_k(blocks))


def _q5_k(blocks: Bytes) -> Groups:
    high = blocks[:, None, 16:48] >> _BITS & np.uint8(1)  # [n, 8, 32]
    numbers = (_nibbles_k(blocks[:, 48:]) | high << _FOUR).reshape(-1, GROUP)
    return Groups(numbers, *_scales_k(blocks))


def _nibbles_k(data: Bytes) -> Bytes:
    """Splits bytes [n, 128] into 4-bit numbers [n, 8, 32].

    The low halves of 32 bytes are one group, the high halves of these bytes the next group.
    """
    parts = data.reshape(-1, 4, 1, 32)
    return np.concatenate([parts & _LOW, parts >> _FOUR], axis=2).reshape(-1, 8, 32)


def _scales_k(blocks: Bytes) -> tuple[Floats, Floats]:
    """Returns the scales and the biases of the 8 groups of each block, flat.

    A scale is d * s and a bias is -dmin * m: the block has the float16 numbers d and dmin, and for
    each group the 6-bit numbers s and m.
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & _SIX, (third & _LOW) | (first >> np.uint8(6)) << _FOUR], axis=1)
    least = np.concatenate(
        [second & _SIX, (third >> _FOUR) | (second >> np.uint8(6)) << _FOUR], axis=1
    )
    scales = _half(blocks, 0)[:, None] * scale.astype(np.float32)
    biases = -_half(blocks, 2)[:, None] * least.astype(np.float32)
    return scales.reshape(-1), biases.reshape(-1)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & _LOW, low >> _FOUR], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> _PAIRS & np.uint8(3)  # [n, 2, 4, 32]
    numbers = (low | high << _FOUR).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(numbers, _half(blocks, 208)[:, None] * scales)


def _q3_k(blocks: Bytes) -> Floats:
    mask = blocks[:, None, :32] >> _BITS & np.uint8(1)  # [n, 8, 32]
    low = _pairs(blocks[:, 32:96])
    numbers = low.astype(np.float32) - 4 * (1 - mask.astype(np.float32))
    packed_scales = blocks[:, 96:108]
    low4 = np.concatenate([packed_scales[:, :8] & _LOW, packed_scales[:, :8] >> _FOUR], axis=1)
    high2 = packed_scales[:, None, 8:] >> _PAIRS & np.uint8(3)
    scales = (low4 | high2.reshape(-1, 16) << _FOUR).astype(np.float32) - 32
    return _scaled(numbers, _half(blocks, 108)[:, None] * scales)


def _q2_k(blocks: Bytes) -> Floats:
    scales = _half(blocks, 80)[:, None] * (blocks[:, :16] & _LOW).astype(np.float32)
    biases = _half(blocks, 82)[:, None] * (blocks[:, :16] >> _FOUR).astype(np.float32)
    weights = _scaled(_pairs(blocks[:, 16:80]).astype(np.float32), scales)
    return weights.reshape(-1, 16, 16) - biases[:, :, None]


def _pairs(data: Bytes) -> Bytes:
    """Splits bytes [n, 64] into 2-bit numbers [n, 8, 32]: each 32 bytes become 4 groups."""
    parts = data.reshape(-1, 2, 1, 32) >> _PAIRS
    return parts.reshape(-1, 8, 32) & np.uint8(3)


def _scaled(numbers: Floats, scales: Floats) -> Floats:
    """Multiplies the 256 numbers of each block by the scales [n, 16], 16 numbers by each scale."""
    return numbers.reshape(-1, 16, 16) * scales[:, :, None]


_GROUPS: dict[str, Callable[[Bytes], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}  # fmt: skip
_WEIGHTS: dict[str, Callable[[Bytes], Floats]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k}
