"""Prefixes of conversations on disk outlive workers and brokers: restarts, drains, kills.

Answers are compared with those of a pool without prefixes on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxpool.client import Client, Result
from support.pool import Pool, until

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

TEXT = " ".join(
    f"{number} men went to the garden and {number * 7} came back." for number in range(90)
)
SETTINGS = 'path = "builtin:demo"\nkeep_alive = "-1"\n'


def config(path: Path, *, more: str = "", budget: str = "64MiB") -> str:
    return (
        f'[pool]\nprefix_dir = "{path}"\ndrain_grace = 1\n'
        "restart_delay = 0\nrestart_limit = 1000\npoison_life = 0\n"
        "stop_grace = 60\n"  # a busy disk may need more than 5 s for saving at the end
        f'[models.demo]\n{SETTINGS}prefix_disk = "{budget}"\n{more}'
    )


def ask(client: Client, prompt: str, **options: Any) -> Result:
    result: Result = client.generate("demo", prompt, temperature=0, max_tokens=24, **options)
    return result


def cached(result: Result) -> int:
    usage: Mapping[str, Any] = result.usage or {}
    return int(usage["cached_tokens"])


def prompt_of(number: int, length: int = 2600) -> str:
    return f"Story {number}. {TEXT}"[:length]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[int]]]:
    """Yields a function that returns the ids of a prompt's answer, without prefixes on disk."""
    known: dict[str, list[int]] = {}
    settings = f'[models.demo]\n{SETTINGS}prefix_cache = "off"\n'
    with Pool(tmp_path_factory.mktemp("plain"), settings) as pool, pool.client() as client:

        def ids(prompt: str) -> list[int]:
            if prompt not in known:
                known[prompt] = list(ask(client, prompt).ids)
            return known[prompt]

        yield ids


def figures(pool: Pool) -> dict[str, int]:
    """Returns the counters of the disk tier, summed over all workers."""
    total: dict[str, int] = {}
    for worker in pool.ask("ps")["workers"]:
        for name, value in (worker.get("prefix") or {}).items():
            total[name] = total.get(name, 0) + value
    return total


def saved(pool: Pool, records: int) -> None:
    """Waits until the workers, which are idle, have at least `records` records on the disk."""
    until(lambda: len(_records(pool)) >= records, f"{records} records are written")


def _records(pool: Pool) -> list[int]:
    done = pool.cli_json("prefix", "ls", "--config", str(pool.config))
    return [0] * sum(model["records"] for model in done["models"])


def test_a_restart_brings_conversations_back(
    tmp_path: Path, expected: Callable[[str], list[int]]
) -> None:
    prompt = prompt_of(1)
    pool = Pool(tmp_path, config(tmp_path / "prefixes"))
    with pool, pool.client() as client:
        first = ask(client, prompt)
        assert list(first.ids) == expected(prompt) and cached(first) < 100
    size = int((first.usage or {})["prompt_tokens"])
    assert size > 512
    with pool, pool.client() as client:
        again = ask(client, prompt)
        assert list(again.ids) == expected(prompt) and cached(again) == size - 1
        turn = f"{prompt}{first.text} And then"
        following = ask(client, turn)
        assert list(following.ids) == expected(turn) and cached(following) >= 512
        until(lambda: figures(pool).get("disk_tokens", 0) >= 512, "the figures are told")
        assert figures(pool)["disk_bad"] == figures(pool)["disk_dropped"] == 0


def test_a_drain_and_a_kill_bring_conversations_back(
    tmp_path: Path, expected: Callable[[str], list[int]]
) -> None:
    prompt, other = prompt_of(2), prompt_of(3)
    with Pool(tmp_path, config(tmp_path / "prefixes")) as pool, pool.client() as client:
        ask(client, prompt)
        pid = pool.worker("demo/0")["pid"]
        pool.ask("drain", slot="demo/0", grace=0.0)
        until(lambda: pool.worker("demo/0").get("pid") not in (pid, None), "another worker")
        pool.in_state("demo/0", state="ready")
        again = ask(client, prompt)
        assert list(again.ids) == expected(prompt) and cached(again) > 512
        ask(client, other)
        saved(pool, 4)
        until(lambda: _written(pool) > 0, "the idle worker has saved")
        pool.kill_worker("demo/0")
        again = ask(client, other)
        assert list(again.ids) == expected(other)


def _written(pool: Pool) -> int:
    return figures(pool).get("disk_written_bytes", 0)


def test_kills_at_any_moment_lose_no_token(
    tmp_path: Path, expected: Callable[[str], list[int]]
) -> None:
    """Two workers share one folder, and one of them is killed in each round of requests.

    The killed worker is reading a prompt or the disk, computing, or saving.
    """
    prompts = [prompt_of(number, 1800) for number in range(10, 14)]
    more = "replicas = 2\nsequences = 2\npin = true\n"
    with Pool(tmp_path, config(tmp_path / "prefixes", more=more)) as pool, pool.client() as client:
        for least in (0, 1, 20, None):
            for slot in ("demo/0", "demo/1"):
                pool.in_state(slot, state="ready")
            outputs: list[list[int]] = [[] for _ in prompts]
            with ThreadPoolExecutor(len(prompts)) as threads:
                answers = [
                    threads.submit(stream, client, prompt, ids)
                    for prompt, ids in zip(prompts, outputs, strict=True)
                ]
                if least is not None:
                    until(partial(_one_has, outputs, least), f"a stream has {least} ids")
                    pool.kill_worker(f"demo/{least % 2}")
                for answer in answers:
                    answer.result()
            assert outputs == [expected(prompt) for prompt in prompts]
            if least == 1:
                pool.kill_worker("demo/0")  # while the worker saves
        assert figures(pool).get("disk_bad", 0) == 0


def stream(client: Client, prompt: str, ids: list[int]) -> None:
    with client.stream("demo", prompt, temperature=0, max_tokens=24) as answer:
        for delta in answer:
            ids += delta.ids


def _one_has(found: list[list[int]], least: int) -> bool:
    return any(len(ids) >= least for ids in found)


def test_two_workers_share_a_folder(tmp_path: Path, expected: Callable[[str], list[int]]) -> None:
    prompts = [prompt_of(number) for number in range(20, 24)]
    more = 'replicas = 2\nsequences = 2\nrouting = "least_loaded"\n'
    pool = Pool(tmp_path, config(tmp_path / "prefixes", more=more))
    for turn in range(2):
        with pool, pool.client() as client:
            results = [ask(client, prompt) for prompt in prompts]
            assert [list(result.ids) for result in results] == [
                expected(prompt) for prompt in prompts
            ]
            if turn:
                assert min(map(cached, results)) > 512
    verified = pool.cli_json("prefix", "verify", "--config", str(pool.config))
    assert verified["bad"] == 0 and verified["records"] >= 12
