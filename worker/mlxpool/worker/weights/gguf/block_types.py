"""The types of GGUF's tensors, and the MLX layouts for these types. No MLX, no numpy.

A row of a weight is divided into blocks. A block is converted to groups of 32 numbers q, each group
with a scale and a bias: weight = scale * q + bias. If the groups of a type have 32 numbers, too,
every number stays the same. Q6_K, Q3_K and Q2_K have groups of 16, which MLX lacks: their weights
are rounded once more, to 8 bits. docs/models.md has measured results. When Q3_K was rounded to 6
bits, its perplexity rose by 5 %.
"""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.layers.quantisation import QuantLayout

GROUP = 32


class BlockType(Struct, frozen=True):
    """A type of GGUF's tensors: a block has `numbers` numbers in `nbytes` bytes.

    `dtype`: the dtype of an unquantised type. `layout`: the MLX layout of a quantised type.
    """

    name: str
    numbers: int
    nbytes: int
    dtype: str = ""
    layout: QuantLayout | None = None
    rounded: bool = False  # numbers are rounded once more, because the groups do not fit `layout`


def _affine(name: str, numbers: int, nbytes: int, bits: int, rounded: bool = False) -> BlockType:
    return BlockType(name, numbers, nbytes, "", QuantLayout("affine", bits, GROUP), rounded)


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: _affine("Q4_0", 32, 18, 4),
    3: _affine("Q4_1", 32, 20, 4),
    6: _affine("Q5_0", 32, 22, 5),
    7: _affine("Q5_1", 32, 24, 5),
    8: _affine("Q8_0", 32, 34, 8),
    10: _affine("Q2_K", 256, 84, 8, rounded=True),
    11: _affine("Q3_K", 256, 110, 8, rounded=True),
    12: _affine("Q4_K", 256, 144, 4),
    13: _affine("Q5_K", 256, 176, 5),
    14: _affine("Q6_K", 256, 210, 8, rounded=True),
    30: BlockType("BF16", 1, 2, "BF16"),
    39: BlockType("MXFP4", 32, 17, "", QuantLayout("mxfp4", 4, GROUP)),
}
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
