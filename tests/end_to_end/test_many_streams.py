"""Concurrent streams of models with weights, through real processes and sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpool.client import Result
from mlxpool.common.errors import DeadlineExceeded
from mlxpool.common.options import GenerateOptions
from support.pool import Pool
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
ON_GPU = mx.default_device().type == mx.DeviceType.gpu

CONFIG = """
[models.exact]
path = "builtin:demo"
deterministic = true
sequences = 4
[models.tiny]
path = "{tiny}"
context = 16
[models.long]
path = "{tiny}"
"""
PROMPTS = ["import os\n", "def f(x):\n    ", "class A:\n" * 40, "# " * 300, "x = 1\n", "while "]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    tiny = write_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096
    )
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG.format(tiny=tiny)) as running:
        yield running


def all_of(pool: Pool, model: str, asked: list[dict[str, Any]]) -> list[Result]:
    """Runs all requests concurrently."""

    async def together() -> list[Result]:
        async with pool.async_client() as client:
            return await asyncio.gather(*(client.generate(model, **request) for request in asked))

    return asyncio.run(together())


@pytest.mark.skipif(ON_GPU, reason="a GPU refuses `deterministic`")
def test_a_request_gives_the_same_alone_and_in_a_batch(pool: Pool) -> None:
    asked = [
        {"prompt": prompt, "seed": n, "max_tokens": 40, "temperature": n % 2, "ignore_eos": True}
        for n, prompt in enumerate(PROMPTS)
    ]
    together = all_of(pool, "exact", asked)
    alone = [all_of(pool, "exact", [request])[0] for request in asked]
    assert [result.ids for result in together] == [result.ids for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    assert {len(result.ids) for result in together} == {40}


def test_a_context_of_16_serves_many(pool: Pool) -> None:
    asked = [
        {"prompt": "abcdefghij"[: n + 1], "ignore_eos": True, "temperature": 0} for n in range(10)
    ]
    results = all_of(pool, "tiny", asked)
    assert [len(result.ids) for result in results] == [15 - n for n in range(10)]
    assert {result.reason for result in results} == {"length"}


def test_a_deadline_ends_one_stream_of_many(pool: Pool) -> None:
    async def both() -> list[Any]:
        async with pool.async_client() as client:
            await client.generate("long", "warm", max_tokens=1)
            asked: tuple[GenerateOptions, ...] = (
                {"deadline_ms": 150, "ignore_eos": True},
                {"max_tokens": 30, "ignore_eos": True},
            )
            streams = (
                client.generate("long", "a" * n, **options) for n, options in enumerate(asked, 1)
            )
            return await asyncio.gather(*streams, return_exceptions=True)

    late, whole = asyncio.run(both())
    assert isinstance(late, DeadlineExceeded)
    assert len(whole.ids) == 30
    assert pool.worker("long/0")["memory"]["limit"] > 0
