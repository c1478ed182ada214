"""Tests our CUDA kernels: all cases on a GPU, some also by simt.py without one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.constraints.mask_table import ANY, only  # noqa: E402
from mlxpool.worker.kernels import (  # noqa: E402
    block_write,
    dequantise,
    kernel_builder,
    kernel_cache,
    matmul_4bit,
    matmul_4bit_tiles,
    matmul_small,
    matmul_tiled,
    ragged_attention,
    row_columns,
    row_ops,
    sampling,
    tiles_4bit,
)
from mlxpool.worker.kernels.matmul_small import FusedOps  # noqa: E402
from mlxpool.worker.layers.layer_types import PendingNorm  # noqa: E402
from mlxpool.worker.layers.linear import Linear, QuantisedLinear, RMSNorm  # noqa: E402
from mlxpool.worker.layers.quantisation import QuantLayout  # noqa: E402
from mlxpool.worker.layers.quantised_weight import QuantisedWeight  # noqa: E402
from mlxpool.worker.layers.tiled_weight import TiledWeight  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.sampling.batch import SamplingBatch, TokenMasks  # noqa: E402
from support.float64 import assert_near, dequantised, gated, normed, numbers  # noqa: E402

ON_GPU = mx.cuda.is_available()
LENGTHS = (1, 2, 15, 16, 17, 31, 255, 256, 257, 511, 512, 513, 1500)
WIDTH = 6  # blocks of a row's table
Packed = tuple[Any, Any, Any]  # a quantised weight, its scales and biases
HALVES = ("float16", "bfloat16")


runs = pytest.mark.usefixtures("machine")


def cases(few: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Returns `few` cases; on a GPU also `more` cases, because the simulator is slow."""
    few = list(few)
    return [*few, *(case for case in more if ON_GPU and case not in few)]


def test_constants_are_declared_in_cuda() -> None:
    text = kernel_builder.declarations({"A": 3, "B": True, "C": 0.125, "N": mx.bfloat16})
    assert text == (
        "constexpr int A = 3;\nconstexpr bool B = true;\nconstexpr float C = 0.125f;\n"
        "using N = __nv_bfloat16;\n"
    )


def test_the_text_of_a_kernel_includes_its_file() -> None:
    names, file = kernel_builder.source_text("rms_norm", ["x", "y"]).splitlines()
    assert (names.strip(), Path(file.split('"')[1]).name) == ("//", "rms_norm.cu")
    assert kernel_builder.source_text("block_write", ["pool", "slots"]).startswith(
        "// slots_shape\n"
    )
    for path in kernel_cache.CUDA_FOLDER.glob("*.cu*"):
        text = path.read_text()
        assert text.strip() and text.count("{") == text.count("}")


def test_weights_are_divided_among_warps_tiles_and_splits() -> None:
    warps = [
        kernel_builder.warps_of(columns // 32, 16) for columns in (32, 96, 256, 2048, 2880, 14336)
    ]
    assert warps == [1, 1, 2, 16, 15, 16]
    assert [kernel_builder.warps_of(columns // 128, 8) for columns in (128, 2048, 14336)] == [
        1,
        4,
        8,
    ]
    tiles_of = [matmul_4bit.tiles_of(rows, 1, gated=False) for rows in (64, 2048, 4096, 28672)]
    assert tiles_of == [1, 1, 2, 4]
    assert matmul_4bit.tiles_of(2048, 1, gated=True) == 2
    assert matmul_4bit.tiles_of(28672, 4, gated=True) == 2
    splits = [matmul_tiled.splits_of(*size) for size in ((2048, 8192), (3072, 2048), (16384, 2048))]
    assert splits == [8, 5, 1]
    assert matmul_tiled.splits_of(128, 128) == 2
    assert [matmul_tiled.splits_of(rows, 2048) for rows in (64, 1344)] == [8, 6]


def test_shapes_and_dtypes_that_kernels_support() -> None:
    assert ragged_attention.supports(32, 8, 128, 128, mx.bfloat16)
    assert not ragged_attention.supports(32, 8, 128, 128, mx.float32)
    assert not ragged_attention.supports(34, 2, 128, 128, mx.bfloat16)
    assert not ragged_attention.supports(32, 8, 72, 72, mx.bfloat16)
    assert row_ops.supports_norm(64, mx.bfloat16) == sampling.supports(1000, mx.float32) == ON_GPU
    assert not row_ops.supports_norm(100, mx.bfloat16)
    assert matmul_small.supports(8, 2048, 4096, mx.bfloat16) == ON_GPU
    assert not matmul_small.supports(matmul_tiled.MAX_TOKENS + 1, 2048, 4096, mx.bfloat16)
    assert not matmul_tiled.supports(64, 4096, 28672, mx.bfloat16)
    assert matmul_4bit.supports(8, 4096, 2048, 64, mx.bfloat16) == ON_GPU
    assert not matmul_4bit.supports(8, 4096, 2048, 128, mx.bfloat16)
    assert dequantise.supports(4, 64, mx.bfloat16) == ON_GPU
    assert not dequantise.supports(4, 64, mx.float32)
    assert not matmul_small.supports(8, 2050, 4096, mx.bfloat16)


def test_a_kernel_that_fails_is_logged_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> bool:
        raise RuntimeError("no such instruction")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.cuda, "is_available", lambda: True)
        assert not kernel_builder.kernel_works("this", fails)
        assert not kernel_builder.kernel_works("that", lambda: False)
        assert kernel_builder.kernel_works("all", lambda: True)
    assert [record.message for record in caplog.records] == [
        "our CUDA kernel for this does not work here, the slow way is taken: no such instruction",
        "our CUDA kernel for that gives something else here, the slow way is taken",
    ]


@runs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", cases([2880], [8, 256, 2048, 4096, 8192]))
def test_the_norm_kernel_adds_and_norms(size: int, dtype: str) -> None:
    kind = getattr(mx, dtype)
    x, y = (mx.random.normal((5, size)).astype(kind) for _ in range(2))
    weight = mx.random.normal((size,)).astype(kind)
    added, output = row_ops.add_norm(x, y, weight, 1e-5)
    assert mx.array_equal(added, x + y).item()
    assert_near(output, normed(numbers(added), numbers(weight), 1e-5))


@runs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("lines", "width"), cases([(3, 40)], [(1, 8), (130, 8192), (1024, 14336)]))
def test_the_gate_kernel_equals_float64(lines: int, width: int, dtype: str) -> None:
    both = (4 * mx.random.normal((lines, 2 * width))).astype(getattr(mx, dtype))
    assert row_ops.supports_swiglu(width, both.dtype) and not row_ops.supports_swiglu(
        width + 1, both.dtype
    )
    assert np.allclose(numbers(row_ops.swiglu(both)), gated(numbers(both)), 0.03, 0.05)


@runs
@pytest.mark.parametrize("shape", cases([(7, 24)], [(1000, 4096), (300, 32, 128)]))
def test_the_kernel_that_takes_rows_equals_mlx(shape: tuple[int, ...]) -> None:
    table = mx.random.normal(shape).astype(mx.bfloat16)
    ids = mx.array([shape[0] - 1, 0, 3, 3], dtype=mx.int32)
    assert row_ops.supports_rows_of(table) and not row_ops.supports_rows_of(
        mx.zeros((3, 9), dtype=mx.bfloat16)
    )
    assert mx.array_equal(row_ops.take_rows(table, ids), table[ids]).item()


SIZES = [(32, 32), (64, 128), (96, 64), (2048, 1024), (4096, 256), (14336, 512), (2048, 1344)]


@runs
@pytest.mark.parametrize(
    ("columns", "rows", "dtype"),
    cases(
        [(96, 64, "float16"), (640, 128, "bfloat16"), (320, 192, "bfloat16")],
        [(*size, dtype) for size in SIZES for dtype in ("float16", "bfloat16")],
    ),
)
def test_the_matmul_kernels_equal_float64(columns: int, rows: int, dtype: str) -> None:
    """Tests up to sixteen tokens in one kernel, and more tokens with divided columns."""
    kind = getattr(mx, dtype)
    weight = (mx.random.normal((rows, columns)) * columns**-0.5).astype(kind)
    for lines in (1, 2, 7, 8, 9, 16, 17, 24, 25, 33, 64, 100, 128) if ON_GPU else (2, 9, 17, 100):
        if not matmul_small.supports(lines, columns, rows, kind):
            assert lines > matmul_small.MAX_WARP_TOKENS and (columns % 64 or rows % 64)
            continue
        x = mx.random.normal((lines, columns)).astype(kind)
        expected = numbers(x) @ numbers(weight).T
        for _ in range(2):  # the second call tests that counters are reset
            assert np.abs(numbers(matmul_small.kernel_matmul(x, weight)) - expected).max() < 0.03
        assert np.allclose(
            numbers(matmul_small.gated_matmul(x, weight)), gated(expected), 0.02, 0.03
        )


@runs
@pytest.mark.parametrize(("columns", "rows"), cases([(96, 64), (640, 128)], SIZES))
def test_the_small_matmul_kernel_fuses_norm_and_addition(columns: int, rows: int) -> None:
    """Tests inputs of very different RMS, one of them below the norm's epsilon."""
    weight = (mx.random.normal((rows, columns)) * columns**-0.5).astype(mx.bfloat16)
    for lines in (1, 2, 7, 8) if ON_GPU else (3, 8):
        lengths = mx.array([0.003, 1, 300] * 6)[:lines, None]
        x = (mx.random.normal((lines, columns)) * lengths).astype(mx.bfloat16)
        assert matmul_small.can_fuse(x, weight)
        assert matmul_small.can_fuse_norm(x, mx.zeros((columns,), mx.bfloat16))
        check_fused(partial(matmul_small.kernel_matmul, x, weight), x, numbers(weight))
        beside = mx.random.normal((lines, rows)).astype(mx.bfloat16)
        plain = numbers(x) @ numbers(weight).T
        output = matmul_small.kernel_matmul(x, weight, FusedOps(beside=beside))
        assert np.allclose(numbers(output), plain + numbers(beside), 0.01, 0.05)
    assert not matmul_small.can_fuse(x.astype(mx.float16), weight)
    assert not matmul_small.can_fuse(mx.concatenate([x, x]), weight)


def check_fused(
    multiply: Callable[[FusedOps], Any], x: Any, weight: Any, *, gates: bool = True
) -> None:
    """Compares a product of x, alone and with fused operations, with float64.

    The fused operations are a norm before the product, and a sum or gates after it. `weight` [out,
    in] is in float64.
    """
    rows, columns = weight.shape
    gain = (1 + 0.5 * mx.random.normal((columns,))).astype(x.dtype)
    beside = mx.random.normal((len(x), rows)).astype(x.dtype)
    expected = normed(numbers(x), numbers(gain), 1e-5) @ weight.T
    output = multiply(FusedOps(gain=gain, eps=1e-5))
    assert np.abs(numbers(output) - expected).max() < 0.05
    output = multiply(FusedOps(gain=gain, eps=1e-5, beside=beside))
    assert np.abs(numbers(output) - expected - numbers(beside)).max() < 0.06
    if gates:
        output = multiply(FusedOps(gated=True, gain=gain, eps=1e-5))
        assert np.allclose(numbers(output), gated(expected), 0.03, 0.05)


def quantised(rows: int, columns: int, group: int, kind: Any) -> tuple[Packed, Any]:
    """Returns a weight of 4 bits, and its numbers in float64."""
    drawn = (mx.random.normal((rows, columns)) * columns**-0.5).astype(kind)
    weight, scales, biases = mx.quantize(drawn, group_size=group, bits=4)
    return (weight, scales, biases), dequantised(weight, scales, biases, group, 4)


FOURS = itertools.product([(128, 64), (2048, 1024), (14336, 256)], matmul_4bit.GROUPS, HALVES)


@runs
@pytest.mark.parametrize(
    ("columns", "rows", "group", "dtype"),
    cases(
        [(128, 64, 32, "float16"), (1024, 64, 64, "bfloat16")],
        [(*size, group, dtype) for size, group, dtype in FOURS],
    ),
)
def test_the_4_bit_matmul_kernel_equals_float64(
    columns: int, rows: int, group: int, dtype: str
) -> None:
    kind = getattr(mx, dtype)
    packed, opened = quantised(rows, columns, group, kind)
    for lines in (1, 2, 8, 9, 16, 17, 24, 32) if ON_GPU else (2, 9):
        assert matmul_4bit.supports(lines, rows, columns, group, kind)
        x = mx.random.normal((lines, columns)).astype(kind)
        expected = numbers(x) @ opened.T
        multiply = partial(matmul_4bit.kernel_matmul, x, *packed, group)
        assert np.abs(numbers(multiply()) - expected).max() < 0.03
        assert np.allclose(numbers(multiply(FusedOps(gated=True))), gated(expected), 0.02, 0.03)
        if matmul_small.is_fusable(x):
            check_fused(multiply, x, opened)


PRODUCTS_WITH_BIAS: dict[str, tuple[int, ...]] = {  # weights -> numbers of lines
    "16 bits": (3, 12, 30),
    "4 bits": (3, 9),
    "4 bits in tiles": (3, 30),
}


@runs
@pytest.mark.parametrize("weight_kind", PRODUCTS_WITH_BIAS)
def test_products_with_a_bias_equal_float64(weight_kind: str) -> None:
    """Tests plain and gated products, and products with a norm before and a sum after them."""
    rows, columns, group = 128, 256, 64
    packed, opened = quantised(rows, columns, group, mx.bfloat16)
    dense = mx.array(opened, mx.bfloat16)
    tiles = tiles_4bit.in_tiles(*packed, group)
    rowwise = QuantisedWeight(*packed, None, QuantLayout("affine", 4, group))
    layer: Any = {
        "16 bits": Linear(dense, None),
        "4 bits": QuantisedLinear(rowwise, None),
        "4 bits in tiles": QuantisedLinear(TiledWeight(tiles, group, mx.bfloat16), None),
    }[weight_kind]
    if weight_kind == "16 bits":
        opened = numbers(dense)
    layer = replace(layer, bias=mx.random.normal((rows,)).astype(mx.bfloat16))
    bias = numbers(layer.bias)
    norm = RMSNorm((1 + 0.5 * mx.random.normal((columns,))).astype(mx.bfloat16), 1e-5)
    for lines in PRODUCTS_WITH_BIAS[weight_kind]:
        x = mx.random.normal((lines, columns)).astype(mx.bfloat16)
        expected = numbers(x) @ opened.T + bias
        assert np.abs(numbers(layer(x)) - expected).max() < 0.03
        output = layer.gated(x)
        assert output is not None
        assert np.allclose(numbers(output), gated(expected), 0.02, 0.03)
        if lines > matmul_small.MAX_FUSED_TOKENS:
            continue
        after = normed(numbers(x), numbers(norm.weight), norm.eps) @ opened.T + bias
        assert np.abs(numbers(layer(PendingNorm(x, norm))) - after).max() < 0.06
        beside = mx.random.normal((lines, rows)).astype(mx.bfloat16)
        output = layer.add_to(x, beside)
        assert np.abs(numbers(output) - expected - numbers(beside)).max() < 0.06


IN_TILES = itertools.product([(192, 64), (2048, 1024), (14336, 256)], tiles_4bit.GROUPS, HALVES)


@runs
@pytest.mark.parametrize(
    ("columns", "rows", "group", "dtype"),
    cases(
        [(192, 128, 32, "float16"), (192, 192, 32, "bfloat16"), (1216, 256, 64, "bfloat16")],
        [(*size, group, dtype) for size, group, dtype in IN_TILES],
    ),
)
def test_products_with_4_bit_weights_in_tiles_equal_float64(
    columns: int, rows: int, group: int, dtype: str
) -> None:
    """Tests few and many tokens, more columns than pipeline stages, and an odd number of tiles."""
    kind = getattr(mx, dtype)
    packed, opened = quantised(rows, columns, group, kind)
    assert matmul_4bit_tiles.works(group, kind)
    tiles = tiles_4bit.in_tiles(*packed, group)
    for lines in (1, 2, 8, 9, 16, 17, 33, 100, 128, 129, 256) if ON_GPU else (1, 2, 8, 9, 30, 130):
        x = mx.random.normal((lines, columns)).astype(kind)
        expected = numbers(x) @ opened.T
        multiply = partial(matmul_4bit_tiles.kernel_matmul, x, tiles, group)
        for _ in range(2):  # the second call tests that counters are reset
            assert np.abs(numbers(multiply()) - expected).max() < 0.03
        gates = matmul_4bit_tiles.supports(lines, rows, gated=True)
        assert gates == (rows % 128 == 0)
        if gates:
            assert np.allclose(numbers(multiply(FusedOps(gated=True))), gated(expected), 0.02, 0.03)
        if matmul_small.is_fusable(x):
            check_fused(multiply, x, opened, gates=gates)


@runs
@pytest.mark.parametrize("group", tiles_4bit.GROUPS)
def test_few_blocks_multiply_all_strips_of_a_weight_in_tiles(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small GPU has few thread blocks, each of which multiplies several strips of rows."""
    monkeypatch.setattr(matmul_4bit_tiles, "BUSY_BLOCKS", 1)
    monkeypatch.setattr(matmul_4bit_tiles, "FULL_GPU_BLOCKS", 2)
    columns = 832
    assert matmul_4bit_tiles.fragments_of(512, gated=True) == 4
    kinds = ((512, 97, (16, 4, 1)), (192, 97, (16, 2, 1)))
    for rows, lines, kind in kinds:
        assert matmul_4bit_tiles.parts_of(lines, rows, 13, gated=False).kind == kind
    packed, opened = quantised(512, columns, group, mx.bfloat16)
    tiles = tiles_4bit.in_tiles(*packed, group)
    for lines in (1, 5, 97):
        x = mx.random.normal((lines, columns)).astype(mx.bfloat16)
        expected = numbers(x) @ opened.T
        multiply = partial(matmul_4bit_tiles.kernel_matmul, x, tiles, group)
        assert np.abs(numbers(multiply()) - expected).max() < 0.03
        assert np.allclose(numbers(multiply(FusedOps(gated=True))), gated(expected), 0.02, 0.03)
        if matmul_small.is_fusable(x):
            check_fused(multiply, x, opened)


@runs
@pytest.mark.parametrize(
    ("rows", "lines", "kind"),
    [(192, 97, (16, 3, 1)), (128, 130, (32, 2, 1)), (128, 256, (32, 2, 1))],
)
def test_large_blocks_multiply_a_weight_in_tiles(
    rows: int, lines: int, kind: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests thread blocks with 192 rows, and with more than 128 tokens."""
    monkeypatch.setattr(matmul_4bit_tiles, "FULL_GPU_BLOCKS", 1)
    columns, group = 13 * tiles_4bit.TILE, 64
    packed, opened = quantised(rows, columns, group, mx.bfloat16)
    tiles = tiles_4bit.in_tiles(*packed, group)
    x = mx.random.normal((lines, columns)).astype(mx.bfloat16)
    for gates in (False, True)[: 1 + (rows == 128)]:
        assert matmul_4bit_tiles.parts_of(lines, rows, 13, gated=gates).kind == kind
        output = numbers(matmul_4bit_tiles.many(x, tiles, group, gated=gates))
        expected = numbers(x) @ opened.T
        assert np.allclose(output, gated(expected) if gates else expected, 0.02, 0.03)


@runs
def test_warpgroups_take_columns_of_a_weight_in_tiles_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tests more columns than the pipeline has stages, undivided and divided into two parts."""
    rows, columns, group = 128, 20 * tiles_4bit.TILE, 64
    packed, opened = quantised(rows, columns, group, mx.bfloat16)
    tiles = tiles_4bit.in_tiles(*packed, group)
    for blocks, lines, sets in ((1, 30, 4), (1, 100, 16), (2, 30, 4)):
        monkeypatch.setattr(matmul_4bit_tiles, "FULL_GPU_BLOCKS", blocks)
        parts = matmul_4bit_tiles.parts_of(lines, rows, 20, gated=True)
        assert (parts.kind, parts.splits) == ((sets, 2, 2), blocks)
        x = mx.random.normal((lines, columns)).astype(mx.bfloat16)
        output = matmul_4bit_tiles.many(x, tiles, group, gated=True)
        assert np.allclose(numbers(output), gated(numbers(x) @ opened.T), 0.02, 0.03)


def test_rows_of_a_weight_in_tiles_are_divided_among_blocks() -> None:
    fragments = matmul_4bit_tiles.fragments_of
    assert [fragments(rows, gated=False) for rows in (64, 4096, 6144, 28672)] == [1, 2, 4, 4]
    assert fragments(64, gated=True) == 2
    integers = matmul_4bit_tiles.integers_of
    assert [integers(lines, 224, 64) for lines in (1, 2, 3)] == [(1, 14), (2, 14), None]
    assert [integers(lines, 832, 32) for lines in (1, 2)] == [None, None]  # too many columns
    parts = matmul_4bit_tiles.parts_of
    two, alone = (2, 1), (2, 2)  # two thread blocks on a multiprocessor, or one
    divisions = [parts(lines, 28672, 64, gated=True) for lines in (64, 96, 128, 1024)]
    assert [division.kind for division in divisions] == [
        (8, *two),
        (12, 4, 1),
        (16, 4, 1),
        (32, 2, 1),
    ]
    assert [division.blocks for division in divisions] == [224, 112, 112, 896]
    divisions = [parts(lines, 6144, 64, gated=False) for lines in (9, 128, 512, 1024)]
    kinds = [(2, *alone), (16, *alone), (16, 3, 1), (16, 3, 1)]
    assert [(division.kind, division.splits) for division in divisions] == list(
        zip(kinds, (2, 2, 1, 1), strict=True)
    )
    assert parts(32, 4096, 223, gated=False).kind == (4, *two)  # an odd number of steps
    # Blocks of 128 lines pad 800 lines less than blocks of 256 lines.
    assert parts(800, 28672, 64, gated=True).kind == (16, 4, 1)
    splits = matmul_4bit_tiles.splits_of
    assert [splits(blocks, 64) for blocks in (1, 16, 48, 224)] == [8, 8, 2, 1]
    assert splits(16, 3) == 3


@runs
@pytest.mark.parametrize(
    ("group", "dtype"),
    cases([(64, "bfloat16"), (32, "float16")], itertools.product((32, 64), HALVES)),
)
def test_4_bit_weights_in_tiles_are_dequantised(group: int, dtype: str) -> None:
    kind = getattr(mx, dtype)
    packed, expected = quantised(128, 192, group, kind)
    tiles = tiles_4bit.in_tiles(*packed, group)
    matrix = tiles_4bit.dequantised_rows(tiles, None, group, kind)
    assert np.allclose(numbers(matrix), expected, 0.01, 0.01)
    ids = [127, 0, 9, 8, 64, 63, 0]
    rows = tiles_4bit.dequantised_rows(tiles, mx.array(ids, dtype=mx.int32), group, kind)
    assert np.array_equal(numbers(rows), numbers(matrix)[ids])


@runs
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    cases(
        [(3, 64, "bfloat16"), (4, 32, "float16"), (8, 128, "bfloat16")],
        itertools.product([2, 3, 4, 5, 6, 8], [32, 64, 128], HALVES),
    ),
)
def test_the_dequantise_kernel_equals_mlx(bits: int, group: int, dtype: str) -> None:
    kind = getattr(mx, dtype)
    drawn = mx.random.normal((33, 3 * group)).astype(kind)
    weight, scales, biases = mx.quantize(drawn, group_size=group, bits=bits)
    packed = weight, scales, biases
    assert dequantise.supports(bits, group, kind)
    matrix = dequantise.unpack(*packed, bits, group, kind)
    assert dequantise.supports_rows(bits, group, kind)
    ids = mx.array([5, 0, 32, 5, 2], dtype=mx.int32)
    rows = dequantise.unpack_rows(*packed, ids, bits, group, kind)
    assert mx.array_equal(rows, matrix[ids]).item()
    assert np.allclose(numbers(matrix), dequantised(*packed, group, bits), 0.01, 0.01)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.6, "top_k": 5, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 0.3, "top_k": 0, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 2000, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.2},
    {"temperature": 0.9, "top_k": 3, "logit_bias": {"7": 5.0}, "repeat_penalty": 1.3},
)


@runs
@pytest.mark.parametrize(
    ("size", "spread", "dtype"),
    cases(
        [(257, 0.0, "float32"), (5000, 8.0, "bfloat16")],
        itertools.product([3, 257, 5000, 128_256], [0.0, 1.0, 8.0], ["float32", "bfloat16"]),
    ),
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_sampling_kernel_samples_the_same_tokens(
    size: int, spread: float, dtype: str, masked: bool
) -> None:
    """The kernel samples the same tokens as MLX's operations, except for near-ties.

    Masks allow many tokens, a few, or one.
    """
    picked = random.Random(size)
    rows = [Options.parse(picked.choice(OPTIONS)) for _ in range(64)]
    seeds = [picked.randrange(2**64) for _ in rows]
    positions = [picked.randrange(1000) for _ in rows]
    histories = [[picked.randrange(size) for _ in range(30)] for _ in rows]
    logits = (mx.random.normal((len(rows), size)) * spread).astype(getattr(mx, dtype))
    company = SamplingBatch(rows, seeds, size)
    shares = np.where(np.arange(len(rows) // 2) % 2, 0.3, 4 / size)[:, None]
    allowed = np.random.default_rng(size).random((len(shares), size)) < shares
    allowed[:, 1] = True
    wide = np.zeros((len(allowed), -(-size // 32) * 32), dtype=bool)
    wide[:, :size] = allowed
    words = np.packbits(wide, axis=1, bitorder="little").view(np.int32)
    lines = np.arange(len(rows), dtype=np.int32) // 2  # masks of every second row
    lines[1::4] = [only(row % size) for row in range(len(rows) // 4)]
    lines[3::4] = ANY
    both = mx.array(np.concatenate([lines, words.reshape(-1)]))
    masks = TokenMasks(both, len(rows)) if masked else None
    others = (positions, histories, None, (), masks)
    fast: Any = sampler.sample_batch(logits, company, *others).tokens.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "supports", lambda size, dtype: False)
        slow: Any = sampler.sample_batch(logits, company, *others).tokens.tolist()
    if masked:
        assert all(allowed[range(len(allowed)), fast[::2]])
        free: Any = sampler.sample_batch(logits, company, *others[:-1]).tokens.tolist()
        assert fast[1::4] == [row % size for row in range(len(rows) // 4)]
        assert fast[3::4] == free[3::4]
    differing = [row for row in range(len(rows)) if fast[row] != slow[row]]
    assert len(differing) <= 1, [(row, rows[row], fast[row], slow[row]) for row in differing]


@runs
@pytest.mark.parametrize(("rows", "size", "width"), cases([(3, 700, 1500)], [(128, 128_256, 300)]))
def test_values_are_added_to_columns_and_taken_of_them(rows: int, size: int, width: int) -> None:
    assert row_columns.works()
    random_ = np.random.default_rng(size)
    ids = random_.integers(-1, size + 1, (rows, width), dtype=np.int32)
    values = random_.integers(-9, 9, ids.shape).astype(np.float32)
    expected = np.zeros((2, rows, size), dtype=np.float32)
    for row, line in enumerate(ids):
        for given, column in zip(values[row], line, strict=True):
            if 0 <= column < size:
                expected[:, row, column] += 1, given
    counts = row_columns.column_sums(mx.array(ids), mx.ones((1, 1)), size)
    assert np.array_equal(np.array(counts), expected[0])
    sums = row_columns.column_sums(mx.array(ids), mx.array(values), size)
    assert np.array_equal(np.array(sums), expected[1])
    some = ids[:, :9].clip(0, size - 1)
    taken = row_columns.take_columns(sums, mx.array(some))
    assert np.array_equal(np.array(taken), np.take_along_axis(expected[1], some, axis=1))


@runs
def test_the_kernels_of_columns_do_not_change_draws() -> None:
    """The kernels of row_columns.py give the same samples and counts as MLX's operations.

    The cases are penalties, with padding and with a token in flight, biases, and log-probabilities.
    """
    size = 300
    given: tuple[dict[str, Any], ...] = (
        {"repeat_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {"7": 5.0, "299": 4.0, "900": 9.0}, "logprobs": True, "top_logprobs": 3},
        {"presence_penalty": 0.7, "logit_bias": {"2": -6.0}, "repeat_last_n": 5},
        {},
    )
    options = [Options.parse({"temperature": 0.0, **settings}) for settings in given]
    batch = SamplingBatch(options, [0] * 4, size, scored=[(), (1, 299), (), (4,)])
    logits = mx.random.normal((4, size), key=mx.random.key(3))
    histories = [[7, 7, 250], (), [*range(20)], ()]
    pending = mx.array([7, -1, 299, -1], dtype=mx.int32)
    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        for works in (True, False):
            patch.setattr(row_columns, "works", lambda works=works: works)
            drawn = sampler.sample_batch(logits, batch, (), histories, pending, [1, 0, 1, 0])
            nothing = sampler.window_counts(batch, [()] * 4, None, (), size)
            outputs.append(
                [sampler.window_counts(batch, histories, pending, [1, 0, 1, 0], size), nothing]
            )
            outputs[-1] += [
                sampler.processed_logits(logits, batch, histories, pending, [1, 0, 1, 0])
            ]
            outputs[-1] += drawn.arrays()
    with_them, without = outputs
    assert len(with_them) == 8
    for array, other in zip(with_them, without, strict=True):
        assert np.array_equal(np.array(array), np.array(other))


@runs
def test_the_sampling_kernel_reports_logits_that_are_nonumbers() -> None:
    logits = mx.zeros((4, 500))
    logits[0, 3] = float("nan")
    logits[1, 499] = float("inf")
    logits[2] = -float("inf")
    logits[3, 17] = 1.0
    rows = [Options.parse({"temperature": temperature}) for temperature in (0.0, 1.0, 0.0, 0.0)]
    company = SamplingBatch(rows, [0] * 4, 500)
    assert sampler.sample_batch(logits, company, [0] * 4, [()] * 4).tokens.tolist() == [
        -1,
        -1,
        -1,
        17,
    ]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("lines", "half", "scale", "gain"), [(1, 4, 1.0, 1.0), (300, 3, 0.25, 1.5)]
)
def test_cosines_and_sines_of_positions(lines: int, half: int, scale: float, gain: float) -> None:
    positions = np.arange(lines, dtype=np.int32) * 17
    frequencies = np.exp(-np.arange(half) * 1.7).astype(np.float32)
    tables = block_write.rope_tables(mx.array(positions), mx.array(frequencies), scale, gain)
    angles = positions[:, None].astype(np.float64) * scale * frequencies
    for table, expected in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        assert table.shape == (lines, 1, half)
        assert np.allclose(np.array(table)[:, 0], expected * gain, atol=2e-3)


@pytest.mark.usefixtures("machine")
def test_ids_below_zero_are_tokens_in_flight() -> None:
    assert block_write.makes_tables()
    ids, drawn = mx.array([5, -1, 0, -3, -2], dtype=mx.int32), mx.array([7, 8, 9], dtype=mx.int32)
    assert sampling.known_tokens(ids, drawn).tolist() == [5, 7, 0, 9, 8]
