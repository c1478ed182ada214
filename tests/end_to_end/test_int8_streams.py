"""Streams of a model with 8-bit keys and values, whose workers die."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxpool.client import Client
from mlxpool.common.options import GenerateOptions
from support.pool import Pool, until

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="a GPU refuses `deterministic`"
)
CONFIG = """
[models.exact]
path = "builtin:demo"
deterministic = true
kv = "int8"
[models.plain]
path = "builtin:demo"
"""
ASKED: GenerateOptions = {"max_tokens": 60, "seed": 5, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def client(pool: Pool) -> Iterator[Client]:
    with pool.client() as connected:
        yield connected


def test_a_stream_goes_on_with_the_same_ids(pool: Pool, client: Client) -> None:
    """In a new worker, which reads prompt and ids at once; the random choices too."""
    prompt = "def main(arguments):\n    " * 8
    whole = client.generate("exact", prompt, **ASKED)
    ids: list[int] = []
    killed = False
    with client.stream("exact", prompt, **ASKED) as stream:
        for delta in stream:
            assert delta.pos == len(ids)
            ids += delta.ids
            if len(ids) >= 20 and not killed:
                pool.kill_worker("exact/0")
                killed = True
    assert killed and ids == list(whole.ids) and len(ids) == 60


def test_it_never_goes_on_with_another_kind_of_cache(pool: Pool, client: Client) -> None:
    """The stream's facts have the digest of a model, of which the kind is a part."""
    client.generate("exact", "x", max_tokens=1)
    client.generate("plain", "x", max_tokens=1)
    models = {one["name"]: one for one in pool.ask("models")["models"]}
    exact, plain = models["exact"], models["plain"]
    assert exact["digest"] != plain["digest"]
    shown = until(lambda: pool.worker("exact/0")["layout"], "a beat with its layout")
    assert shown == "slabs, int8"
