"""A gateway for several pools, some of which die."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxpool.cli.main import parser
from mlxpool.cli.target import targets_of
from mlxpool.common.errors import BadRequest
from mlxpool.common.transport import sockets
from mlxpool.gateway.settings import Broker
from support.gateway_thread import GatewayThread
from support.http_owners import openai_client
from support.pool import PATIENCE, Pool, until

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


def get(url: str, **query: Any) -> httpx.Response:
    return httpx.get(url, params=query, timeout=PATIENCE)


def complete(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "seed": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def test_models_of_both_are_served_and_a_dead_pool_is_left_out(
    two: tuple[Pool, Pool], tmp_path: Path
) -> None:
    brokers = tuple(Broker(sockets.ipc(pool.run_dir, "front")) for pool in two)
    with GatewayThread(tmp_path, remote=brokers, broker_grace=5.0) as gateway:
        names = {row["id"] for row in get(f"{gateway.url}/v1/models").json()["data"]}
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
        assert get(f"{gateway.url}/health").status_code == 200
        two[1].start()
        until(lambda: complete(gateway.url, "second").status_code == 200, "it is asked again")


# ---- jobs and files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, ...]]:
    """Three pools: the first keeps no jobs; the others do."""
    folders = [tmp_path_factory.mktemp(name) for name in ("none", "first", "second")]
    flags: list[tuple[str, ...]] = [
        (),
        *(("--state-dir", str(folder / "jobs")) for folder in folders[1:]),
    ]
    with contextlib.ExitStack() as stack:
        yield tuple(
            stack.enter_context(Pool(folder, CONFIG.format(own=folder.name[:-1]), arguments=flag))
            for folder, flag in zip(folders, flags, strict=True)
        )


@pytest.fixture(scope="module")
def both(three: tuple[Pool, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the URL of one gateway for the three pools."""
    brokers = tuple(Broker(sockets.ipc(pool.run_dir, "front")) for pool in three)
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayThread(folder, remote=brokers, broker_grace=5.0) as gateway:
        yield gateway.url


@pytest.fixture
def client(both: str) -> Iterator[openai.OpenAI]:
    with openai_client(both) as api_client:
        yield api_client


def batch_of(client: openai.OpenAI, *models: str, **more: Any) -> Any:
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": "x", "max_tokens": 2, "seed": 7},
        }
        for number, model in enumerate(models)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("a", data), purpose="batch").id
    batch = client.batches.create(
        input_file_id=file, endpoint="/v1/completions", completion_window="24h", **more
    )
    return until(lambda: ended(client, batch.id), "the batch has ended")


def ended(client: openai.OpenAI, id: str) -> Any:
    batch = client.batches.retrieve(id)
    return batch if batch.status in ("completed", "failed") else None


def native_batches(pool: Pool) -> list[str]:
    with pool.client() as native:
        return [row["key"] for row in native.batches()]


def test_a_batch_runs_in_the_pool_of_its_models(
    client: openai.OpenAI, three: tuple[Pool, ...]
) -> None:
    first = batch_of(client, "first", "shared")
    second = batch_of(client, *["shared"] * 20, "second")
    assert (first.status, second.status) == ("completed", "completed")
    assert native_batches(three[1]) == [first.id] and native_batches(three[2]) == [second.id]
    for batch, count in ((first, 2), (second, 21)):
        text = client.files.content(batch.output_file_id).text
        assert len(text.splitlines()) == count
        assert client.files.retrieve(batch.output_file_id).bytes == len(text)
        assert client.files.retrieve(batch.input_file_id).purpose == "batch"
        client.batches.cancel(batch.id)
    assert {first.id, second.id} <= {batch.id for batch in client.batches.list(limit=1)}
    listed = [batch.id for batch in client.batches.list(limit=1)]
    assert listed == [second.id, first.id]
    files = [file.id for file in client.files.list(limit=1)]
    assert files == [second.input_file_id, first.input_file_id]
    # The files of both batches are in the first pool that keeps files.
    with three[1].client() as native:
        assert len(native.files(purpose="batch")) == 2


def test_a_batch_of_models_of_several_pools_is_refused_by_name(client: openai.OpenAI) -> None:
    batch = batch_of(client, "first", "second", "none", "nobody")
    assert batch.status == "failed"
    errors = [(error.line, error.code) for error in batch.errors.data]
    assert errors == [
        (2, "model_in_another_pool"), (3, "model_not_found"), (4, "model_not_found"),
    ]  # fmt: skip
    assert "'second' is in another pool than 'first'" in batch.errors.data[0].message


def test_responses_and_jobs_are_kept_where_their_model_is(
    client: openai.OpenAI, both: str, three: tuple[Pool, ...]
) -> None:
    given: Any = {"max_output_tokens": 3, "background": True}
    ids = {
        name: client.responses.create(model=name, input="x", **given).id
        for name in ("first", "second", "shared")
    }

    def over() -> bool:
        return all(client.responses.retrieve(id).status == "incomplete" for id in ids.values())

    until(over, "all have ended")
    for pool, name in ((three[1], "first"), (three[2], "second")):
        with pool.client() as native:
            assert native.job(ids[name])["model"] == name
    with pytest.raises(openai.APIStatusError, match="keeps no jobs"):
        client.responses.create(model="none", input="x", **given)
    client.responses.delete(ids["second"])
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids["second"])
    body = {"model": "shared", "prompt": "x", "options": {"max_tokens": 2, "seed": 1}}
    for number in range(6):
        keyed = {**body, "key": f"k{number}"}
        job, repeated = (
            httpx.post(f"{both}/v1/jobs", json=keyed, timeout=PATIENCE).json() for _ in range(2)
        )
        assert job["id"] == repeated["id"]
        assert get(f"{both}/v1/jobs/k{number}").json()["id"] == job["id"]
        assert get(f"{both}/v1/jobs/{job['id']}").json()["key"] == f"k{number}"
    assert get(f"{both}/v1/jobs").status_code == 501  # the first pool keeps no jobs
    assert get(f"{both}/v1/jobs", pool=4).status_code == 400
    keys = [{row["key"] for row in get(f"{both}/v1/jobs", pool=n).json()["data"]} for n in (2, 3)]
    assert not keys[0] & keys[1] and {f"k{number}" for number in range(6)} <= keys[0] | keys[1]
    headers = {"Idempotency-Key": "once"}
    same = {client.responses.create(model="shared", input="y", extra_headers=headers, **given).id
            for _ in range(4)}  # fmt: skip
    assert len(same) == 1


def test_what_a_dead_pool_keeps_is_not_said_to_be_unknown(
    client: openai.OpenAI, both: str, three: tuple[Pool, ...]
) -> None:
    batch = batch_of(client, "second")
    three[2].kill()
    try:

        def status() -> int:
            try:
                client.batches.retrieve(batch.id)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        until(lambda: status() == 503, "it is not known")
        until(lambda: batch_of(client, "first").status == "completed", "the other goes on")
        check_new_keys(client, both)
    finally:
        three[2].start()
    until(lambda: status() == 200, "it is there again")


def check_new_keys(client: openai.OpenAI, url: str) -> None:
    """Asserts that jobs with new keys are accepted while one pool does not answer.

    The silent pool might already have jobs with these keys.
    """
    header, body = {"Idempotency-Key": "while silent"}, {"prompt": "x", "key": "while silent"}

    def taken() -> bool:
        job = httpx.post(f"{url}/v1/jobs", json={**body, "model": "shared"}, timeout=PATIENCE)
        return job.status_code == 200

    until(taken, "a job with a new key is taken")
    given: Any = {"max_output_tokens": 3, "background": True, "extra_headers": header}
    assert client.responses.create(model="shared", input="x", **given).status
    assert batch_of(client, "shared", extra_headers=header).status == "completed"


def test_flags_name_several_pools() -> None:
    words = ["gateway", "--endpoint", "tcp://a:1", "--endpoint", "tcp://b:1"]

    def found(*more: str) -> list[tuple[str | None, str | None]]:
        options = parser(words).parse_args([*words, *more])
        options.run_dir, options.run_dir_flag = Path("/run/x"), None
        return [(target.endpoint, target.server_key) for target in targets_of(options, "front")]

    assert found() == [("tcp://a:1", None), ("tcp://b:1", None)]
    assert found("--server-key", "k") == [("tcp://a:1", "k"), ("tcp://b:1", "k")]
    each = found("--server-key", "k", "--server-key", "l")
    assert each == [("tcp://a:1", "k"), ("tcp://b:1", "l")]
    with pytest.raises(BadRequest, match="given 3 times and --endpoint 2 times"):
        found(*("--server-key", "k") * 3)
