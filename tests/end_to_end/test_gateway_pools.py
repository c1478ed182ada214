"""One gateway before two pools, of which one dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxpool.cli.main import parser
from mlxpool.cli.target import targets_of
from mlxpool.common.errors import BadRequest
from mlxpool.common.transport import sockets
from mlxpool.gateway.settings import Broker
from support.gateway_thread import GatewayThread
from support.pool import Pool, until

CONFIG = """
[models.shared]
path = "builtin:counting"
[models.{own}]
path = "builtin:counting"
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Pool, Pool]]:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with (
        Pool(folders[0], CONFIG.format(own="first")) as first,
        Pool(folders[1], CONFIG.format(own="second")) as second,
    ):
        yield first, second


def complete(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "seed": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_models_of_both_are_served_and_a_dead_pool_is_left_out(
    two: tuple[Pool, Pool], tmp_path: Path
) -> None:
    brokers = tuple(Broker(sockets.ipc(pool.run_dir, "front")) for pool in two)
    with GatewayThread(tmp_path, remote=brokers, broker_grace=2.0) as gateway:
        names = {row["id"] for row in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
        assert {"first", "second", "shared"} <= names
        for name in ("first", "second"):
            assert complete(gateway.url, name).status_code == 200

        def both_have_worked() -> bool:
            assert complete(gateway.url, "shared").status_code == 200
            return all(pool.ask("stats")["requests"]["accepted"] > 1 for pool in two)

        until(both_have_worked, "requests are divided among both pools")
        two[1].kill()

        def left_out() -> bool:
            return complete(gateway.url, "second").status_code == 404

        until(left_out, "the model of the dead pool is gone")
        for _ in range(4):
            assert complete(gateway.url, "shared").status_code == 200
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        two[1].start()
        until(lambda: complete(gateway.url, "second").status_code == 200, "it is asked again")


def test_flags_name_several_pools() -> None:
    words = ["gateway", "--endpoint", "tcp://a:1", "--endpoint", "tcp://b:1"]

    def found(*more: str) -> list[tuple[str | None, str | None]]:
        options = parser(words).parse_args([*words, *more])
        options.run_dir, options.run_dir_flag = Path("/run/x"), None
        return [(one.endpoint, one.server_key) for one in targets_of(options, "front")]

    assert found() == [("tcp://a:1", None), ("tcp://b:1", None)]
    assert found("--server-key", "k") == [("tcp://a:1", "k"), ("tcp://b:1", "k")]
    each = found("--server-key", "k", "--server-key", "l")
    assert each == [("tcp://a:1", "k"), ("tcp://b:1", "l")]
    with pytest.raises(BadRequest, match="given 3 times and --endpoint 2 times"):
        found(*("--server-key", "k") * 3)
