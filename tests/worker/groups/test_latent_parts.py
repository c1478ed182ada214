"""Latent attention of one token, divided by heads, adds up to the layer of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.groups.part_layers import SummedLatentToken  # noqa: E402
from mlxpool.worker.kernels import latent_token  # noqa: E402
from mlxpool.worker.layers.latent_token import LatentToken  # noqa: E402
from mlxpool.worker.layers.layer_types import PendingNorm  # noqa: E402
from mlxpool.worker.layers.linear import RMSNorm  # noqa: E402

pytestmark = pytest.mark.usefixtures("token_grid_machine")
RANKS = 2


class SumsLater:
    """Stands for a rank's collectives without other ranks: the test adds up all ranks' results."""

    def all_sum(self, x: Any) -> Any:
        """Returns this rank's part of the sum unchanged."""
        return x

    def adds(self, size: int, dtype: Any) -> bool:
        """Returns True: every array is added up."""
        return True

    def sum_onto(self, residual: Any, x: Any) -> Any:
        """Returns this rank's part of the sum, added to the residual."""
        return residual + x


def test_the_heads_of_ranks_add_up() -> None:
    weights, x, read, turns = latent_token.trial(mx.bfloat16)
    heads, rank, _ = weights.keys.shape
    mixed = PendingNorm(x, RMSNorm(weights.gain, weights.eps))
    slots, line = mx.array([1], dtype=mx.int32), rank + weights.turned
    collectives: Any = SumsLater()

    def asked(token: LatentToken | SummedLatentToken) -> tuple[Any, Any]:
        pool = mx.zeros((1, 1, 4, line), dtype=x.dtype)
        mx.eval(pool)
        output = token.queries(mixed, pool, slots, turns)
        assert output is not None
        mx.eval(output)
        return np.array(output.astype(mx.float32)), np.array(pool.astype(mx.float32))

    def cut(array: Any, number: int, axis: int) -> Any:
        return mx.contiguous(mx.split(array, RANKS, axis=axis)[number])

    whole = LatentToken(weights)
    queries, pool = asked(whole)
    expected = np.array(whole(read).astype(mx.float32))
    total = np.zeros_like(expected)
    for number in range(RANKS):
        part = SummedLatentToken(
            LatentToken(
                replace(
                    weights,
                    second=cut(weights.second, number, 0),
                    keys=cut(weights.keys, number, 0),
                    values=cut(weights.values, number, 0),
                    last=cut(weights.last, number, 1),
                )
            ),
            collectives,
        )
        own, written = asked(part)
        each = heads // RANKS
        assert np.array_equal(own, queries[:, number * each : (number + 1) * each])
        assert np.array_equal(written, pool)
        own_read = cut(read, number, 1)
        alone = part(own_read)
        total += np.array(alone.astype(mx.float32))
        beside = part.add_to(own_read, x)
        assert beside is not None
        assert np.array_equal(
            np.array((x + alone).astype(mx.float32)), np.array(beside.astype(mx.float32))
        )
    assert np.abs(total - expected).max() < 0.02 * np.abs(expected).max()
