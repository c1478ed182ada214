"""Attention of one row, with chunks that are padded to blocks for cuDNN."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlxpool.worker.attention.dot_product import pad_to_blocks, padded_lengths, unfused_attention
from mlxpool.worker.kernels.score_params import ScoreParams

HEADS, PAIRS, SIZE = 4, 2, 8


@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 300), (255, 2), (200, 400), (4090, 20)])
def test_padding_changes_no_result(start: int, count: int) -> None:
    mx.random.seed(start + count)
    queries = mx.random.normal((1, HEADS, count, SIZE))
    keys, values = (mx.random.normal((1, PAIRS, start + count, SIZE)) for _ in range(2))
    scores = ScoreParams(SIZE**-0.5)
    ends = mx.arange(start, start + count)[:, None]
    visible = mx.arange(start + count)[None] <= ends
    expected = unfused_attention(queries, keys, values, scores, visible)
    actual = pad_to_blocks(queries, keys, values, scores)
    assert actual.shape == expected.shape
    assert mx.allclose(actual, expected, atol=1e-5).item()


def test_few_pairs_of_lengths_serve_all_prompts() -> None:
    draw = random.Random(0)
    pairs = set()
    for _ in range(500):
        prompt, start = draw.randrange(2, 4352), 0
        while start < prompt:
            count = min(prompt - start, draw.choice([2048, draw.randrange(64, 2048)]))
            before, queries, keys = padded_lengths(start, count)
            assert before + count <= queries
            assert start + count <= keys
            assert keys - queries == start - before
            pairs.add((queries, keys))
            start += count
    assert len(pairs) <= 120
