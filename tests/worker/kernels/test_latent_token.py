"""Compares the kernels around latent attention of one token with float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import device, latent_token  # noqa: E402
from mlxpool.worker.kernels.block_write import RopeTables  # noqa: E402
from mlxpool.worker.kernels.latent_token import LatentTokenWeights  # noqa: E402
from support import simt  # noqa: E402
from support.float64 import assert_near  # noqa: E402

ON_GPU = mx.cuda.is_available()


pytestmark = pytest.mark.usefixtures("token_grid_machine")


@pytest.mark.parametrize(
    ("sizes", "dtype", "traditional"),
    [
        ((192, 128, 3, 64, 64, 32, 128), "bfloat16", True),
        ((2560, 64, 2, 128, 64, 8, 64), "float16", False),
    ],
    ids=["heads that are values mostly", "more columns than a lane asks for"],
)
def test_both_kernels_equal_float64(sizes: tuple[int, ...], dtype: str, traditional: bool) -> None:
    """The kernels run twice, because launches share memory.

    A token without a slot writes nothing.
    """
    size, queries, heads, rank, plain, turned, value = sizes
    kind = getattr(mx, dtype)
    mx.random.seed(size)

    def weight(*shape: int) -> Any:
        return (mx.random.normal(shape) * shape[-1] ** -0.5).astype(kind)

    weights = LatentTokenWeights(
        1 + weight(size),
        weight(queries + rank + turned, size),
        1 + weight(queries),
        1 + weight(rank),
        weight(heads * (plain + turned), queries),
        weight(heads, rank, plain),
        weight(heads, value, rank),
        weight(size, heads * value),
        1e-5,
        1e-6,
    )
    assert weights.queries == queries and weights.turned == turned
    assert latent_token.supports(weights, kind)
    angles = mx.random.uniform(0, 6, (1, 1, turned // 2))
    turns = RopeTables(mx.cos(angles), mx.sin(angles), traditional)
    pool = mx.zeros((2, 1, 4, rank + turned), dtype=kind)
    mx.eval(pool)
    for slot in (5, -1, 2):
        x, read = weight(1, size) * 40, weight(1, heads * rank) * 40
        before = np.array(pool.astype(mx.float32))
        output = latent_token.before_attention(
            x, weights, pool, mx.array([slot], dtype=mx.int32), turns
        )
        out = (
            latent_token.after_attention(read, weights),
            latent_token.after_attention(read, weights, x),
        )
        mx.eval(output, out)
        asked, latent = latent_token.expected_before(x, weights, turns)
        assert_near(output, asked)
        after = np.array(pool.astype(mx.float32)).reshape(8, -1)
        if slot >= 0:
            assert_near(mx.array(after[slot]), latent)
            before.reshape(8, -1)[slot] = after[slot]
        assert np.array_equal(before.reshape(8, -1), after)
        expected = latent_token.expected_after(read, weights)
        assert_near(out[0], expected)
        assert_near(out[1], expected + np.array(x.astype(mx.float32)))


def test_what_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _, _, _ = latent_token.trial(mx.bfloat16)
    assert latent_token.supports(weights, mx.bfloat16)
    assert not latent_token.supports(weights, mx.float16)
    other = replace(weights, gain=weights.gain.astype(mx.float32))
    assert not latent_token.supports(other, mx.bfloat16)
    wider = replace(weights, values=mx.zeros((2, 40, 64), dtype=mx.bfloat16))
    assert not latent_token.supports(wider, mx.bfloat16)
    monkeypatch.setattr(device, "shares_multiprocessors", lambda: True)
    assert not latent_token.supports(weights, mx.bfloat16)


@pytest.mark.skipif(ON_GPU, reason="simulates a GPU whose thread blocks are not all resident")
def test_thread_blocks_that_are_not_resident_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt, "resident", False)
    weights, _, _, _ = latent_token.trial(mx.bfloat16)
    assert not latent_token.supports(weights, mx.bfloat16)
