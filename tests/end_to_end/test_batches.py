"""Batches in real pools: completed, cancelled, and after deaths of clients, workers and brokers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxpool.client import Client, LineResult
from mlxpool.common.errors import BadRequest, DuplicateId, Gone, UnknownJob
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, until

CONFIG = """\
[pool]
restart_delay = 0.05
[models.m]
path = "builtin:counting"
replicas = 2
[models.m.counting]
step_us = 200
"""
TOKENS = 4


def make_pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path, CONFIG, arguments=("--state-dir", str(tmp_path / "jobs")))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def prompts(count: int, name: str = "p") -> list[dict[str, Any]]:
    return [{"id": f"{name}{number}", "prompt": f"{name}{number}"} for number in range(count)]


OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "seed": 7}


def check(results: Sequence[LineResult], count: int, name: str = "p") -> None:
    """Asserts that each line is there once, in order, with the ids of its prompt."""
    assert [result.line for result in results] == list(range(count))
    for result in results:
        wanted = expected_ids(f"{name}{result.line}", 7, TOKENS)
        assert result.result is not None, result
        assert (result.id, list(result.result.ids)) == (f"{name}{result.line}", wanted)
        assert result.text == text_of(wanted)


def test_a_file_becomes_jobs_and_their_results(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in prompts(300)))
    sent: list[int] = []
    with pool.client() as client:
        batch = client.submit_batch(
            path, "m", metadata={"of": "tests"}, on_sent=sent.append, **OPTIONS
        )
        rows = list(batch.progress())
        ended = [row["done"] for row in rows]
        assert ended == sorted(ended) and ended[-1] == 300
        assert (rows[-1]["state"], rows[-1]["lines"]) == ("done", 300)
        check(list(batch.results()), 300)
        assert sent == [path.stat().st_size]
        assert client.batch(batch.key).row["metadata"] == {"of": "tests"}
        assert [row["key"] for row in client.batches()][:1] == [batch.key]
        assert len(client.jobs(batch=batch.key)) == 300
        assert client.submit_batch(path, "m", key=batch.key, **OPTIONS).row["state"] == "done"
        batch.release()
        until(lambda: batch.refresh()["state"] == "gone", "the batch is gone")
        with pytest.raises(Gone):
            client.submit_batch(path, "m", key=batch.key, **OPTIONS)


def test_two_readers_follow_a_batch_in_asyncio(pool: Pool) -> None:
    async def follow(key: str) -> list[dict[str, Any]]:
        async with pool.async_client() as client:
            batch = await client.batch(key)
            return [row async for row in batch.progress()]

    async def work() -> None:
        async with pool.async_client() as client:
            batch = await client.submit_batch(prompts(300, "a"), "m", **OPTIONS)
            first, second = await asyncio.gather(follow(batch.key), follow(batch.key))
            assert first[-1]["done"] == second[-1]["done"] == 300
            check([result async for result in batch.results()], 300, "a")
            assert (await batch.wait())["state"] == "done"
            assert (await client.batches(limit=1))[0]["key"] == batch.key

    asyncio.run(work())


def test_bad_lines_are_named_or_listed(pool: Pool) -> None:
    lines = [*prompts(2), {"id": "bad", "prompt": "x", "options": {"temperature": -1}}]
    with pool.client() as client:
        with pytest.raises(BadRequest, match=r"line 3 \(id 'bad'\): .*temperature.* 0 to 100"):
            client.submit_batch(lines, "m", key="bad", **OPTIONS)
        with pytest.raises(UnknownJob):
            client.batch("bad")
        with pytest.raises(BadRequest, match="line 1: no JSON"):
            client.submit_batch(["{"], "m")
        with pytest.raises(BadRequest, match="there is no line"):
            client.submit_batch([], "m")
        batch = client.submit_batch(lines, "m", key="bad", check=False, **OPTIONS)
        *good, bad = batch.results()
        check(good, 2)
        assert (bad.state, bad.id, bad.result) == ("failed", "bad", None)
        assert isinstance(bad.error, BadRequest) and "temperature" in str(bad.error)
        with pytest.raises(DuplicateId):
            client.submit_batch(prompts(2), "m", key="bad", **OPTIONS)


def test_a_cancelled_batch_ends(pool: Pool) -> None:
    with pool.client() as client:
        batch = client.submit_batch(prompts(4000), "m", max_tokens=2000, seed=7)
        until(lambda: batch.refresh()["running"], "lines run")
        batch.cancel()
        row = batch.wait()
        assert (row["state"], row["waiting"], row["running"]) == ("cancelled", 0, 0)
        with pytest.raises(BadRequest, match="was cancelled"):
            batch.retry()
    until(lambda: not pool.ask("requests")["requests"], "nothing runs")


def test_a_result_that_is_too_long_for_a_page_is_fetched_by_itself(pool: Pool) -> None:
    many = {"max_tokens": 4000, "logprobs": True, "top_logprobs": 20}  # over 2 MiB
    lines = [{"prompt": "p0", "options": many}, prompts(2)[1]]
    with pool.client() as client:
        batch = client.submit_batch(lines, "m", **OPTIONS)
        long, short = batch.results()
        assert long.result is not None and short.result is not None
        assert list(long.result.ids) == expected_ids("p0", 7, 4000)
        assert len(long.result.logprobs) == 4000 and len(short.result.ids) == TOKENS


UPLOAD = """
import os, sys
from mlxpool.client import Client
def stop(sent):
    if sent >= int(sys.argv[3]):
        os.kill(os.getpid(), 9)
client = Client(sys.argv[1], connect_timeout=200)
client.submit_batch(sys.argv[2], "m", key="up", on_sent=stop, max_tokens=4, seed=7)
"""


def test_a_client_that_dies_while_it_sends_is_gone_on_with(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [{**line, "options": {"stop": ["x" * 900]}} for line in prompts(1000, "u")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    died = subprocess.run(
        [sys.executable, "-c", UPLOAD, str(pool.run_dir), str(path), "500000"], check=False
    )
    assert died.returncode == -signal.SIGKILL
    with pool.client() as client:
        with pytest.raises(UnknownJob):
            client.batch("up")
        batch = client.submit_batch(path, "m", key="up", **OPTIONS)
        assert batch.row["lines"] == 1000
        check(list(batch.results()), 1000, "u")


def test_another_file_under_the_key_of_an_unfinished_one_replaces_it(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in prompts(20_000, "long")))
    program = UPLOAD.replace('"up"', '"other"')
    subprocess.run(
        [sys.executable, "-c", program, str(pool.run_dir), str(path), "200000"], check=False
    )
    with pool.client() as client:
        batch = client.submit_batch(prompts(3), "m", key="other", **OPTIONS)
        check(list(batch.results()), 3)


def test_everything_is_killed_and_no_line_is_lost_or_doubled(tmp_path: Path) -> None:
    count = 1500
    path = tmp_path / "lines.jsonl"
    lines = [{**line, "options": {"stop": ["x" * 500]}} for line in prompts(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with make_pool(tmp_path) as pool:

        def kill_broker(sent: int) -> None:
            pool.kill()
            pool.start()

        with pool.client(broker_grace=PATIENCE) as client:
            batch = client.submit_batch(path, "m", key="killed", on_sent=kill_broker, **OPTIONS)
            for share in (0.2, 0.5, 0.7):
                wait_for_done(client, batch.key, share * count)
                pool.kill_worker("m/0", over=lambda: is_over(client, batch.key))
                kill_broker(0)
            assert batch.wait()["done"] == count
            results = []
            for result in batch.results():
                results.append(result)
                if len(results) == count // 2:
                    kill_broker(0)
            check(results, count)
        assert pool.ask("stats")["internal_errors"] == 0


def is_over(client: Client, key: str) -> bool:
    return bool(client.batch(key).row["state"] == "done")


def wait_for_done(client: Client, key: str, count: float) -> None:
    until(lambda: client.batch(key).row["done"] >= count, f"{count} lines are done")


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_line_sees_a_batch_to_its_end(pool: Pool, tmp_path: Path) -> None:
    path, output = tmp_path / "lines.jsonl", tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in prompts(5)))
    flags = ("--key", "cli", "--max-tokens", str(TOKENS), "--seed", "7")
    done = pool.cli("submit", "--batch", str(path), "m", *flags, "--output", str(output))
    assert (done.returncode, done.stdout) == (0, "cli\n")
    assert done.stderr == "cli: done, 5 done\n"
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["text"] for row in rows] == [
        text_of(expected_ids(f"p{number}", 7, TOKENS)) for number in range(5)
    ]
    assert not output.with_name("results.jsonl.part").exists()
    listed = pool.cli("jobs", "--batches").stdout.splitlines()
    assert listed[0].split()[:3] == ["KEY", "STATE", "LINES"]
    assert listed[1].split()[:6] == ["cli", "done", "5", "0", "0", "5"]
    of_lines = pool.cli("jobs", "--batch", "cli").stdout
    assert "p4" in of_lines and "LINE" in of_lines
    again = pool.cli("fetch", "--batch", "cli")
    assert again.stdout == output.read_text()
    assert pool.cli("release", "--batch", "cli").returncode == 0


def test_the_command_line_names_bad_lines(pool: Pool) -> None:
    text = '{"id": "a", "prompt": "p0"}\n{"id": "b"}\n'
    refused = pool.cli("submit", "--batch", "-", "m", stdin=text)
    assert refused.returncode == 2 and refused.stdout == ""
    assert "line 2 (id 'b'): give one of prompt, messages, tokens" in refused.stderr
    flags = ("--allow-bad-lines", "--wait", "--max-tokens", "3", "--key", "listed")
    taken = pool.cli("submit", "--batch", "-", "m", *flags, stdin=text)
    assert (taken.returncode, taken.stdout) == (1, "listed\n")
    assert taken.stderr == "listed: done, 1 done, 1 failed\n"
    (good, bad) = map(json.loads, pool.cli("fetch", "--batch", "listed").stdout.splitlines())
    assert good["state"] == "done" and bad["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit",), "give MODEL and PROMPT, or --batch FILE"),
        (("submit", "m", "x", "--batch", "-"), "give no PROMPT"),
        (("submit", "m", "x", "--wait"), "--wait goes with --batch FILE"),
        (("submit", "m", "--batch", "-", "--chat"), "--chat is for a single job"),
        (("submit", "m", "--batch", "/none/there"), "/none/there"),
        (("fetch", "x", "--output", "y"), "--output goes with --batch"),
        (("fetch", "--batch", "nosuch"), "there is no batch 'nosuch'"),
        (("cancel", "--batch", "nosuch"), "there is no batch 'nosuch'"),
        (("retry", "--batch", "nosuch"), "there is no batch 'nosuch'"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    pool: Pool, words: tuple[str, ...], said: str
) -> None:
    refused = pool.cli(*words, stdin="")
    assert refused.returncode in (1, 2) and said in refused.stderr
