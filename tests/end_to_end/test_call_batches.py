"""Jobs and batches of calls in a real pool, also under faults: embed, rerank, classify, decide."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.client import Client, DecisionList, LineResult, Vectors
from mlxpool.common.errors import BadRequest, ContextExceeded, DuplicateId, UnknownJob
from support.pool import PATIENCE, Pool, until
from worker.encoders.checkpoints import CASES, MAX_TOKENS, write

CONFIG = """\
[pool]
restart_delay = 0.05
[models.embed]
path = "{embed}"
replicas = 2
[models.rerank]
path = "{rerank}"
[models.classify]
path = "{classify}"
[models.demo]
path = "builtin:demo"
[models.counting]
path = "builtin:counting"
"""
FOLDERS = {"embed": "bert", "rerank": "bert, rerank", "classify": "bert, classify"}
WORDS = ("the quick brown fox", "a dog", "vector search", "lazy", "query over passage")


def text(line: int) -> str:
    return f"{WORDS[line % 5]} {WORDS[line % 3]} {line}"


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"l{n}", "kind": "embed", "inputs": [text(n)], **more} for n in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write(root / name, CASES[case]) for name, case in FOLDERS.items()}


def make_pool(tmp_path: Path, folders: dict[str, Path]) -> Pool:
    config = CONFIG.format(**folders)
    return Pool(tmp_path, config, arguments=("--state-dir", str(tmp_path / "jobs")))


@pytest.fixture(scope="module")
def pool(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool"), folders) as running:
        yield running


def check(client: Client, results: list[LineResult], count: int) -> None:
    """Asserts that each line is there once, in order, with the vector of its text."""
    assert [result.line for result in results] == list(range(count))
    assert [(result.id, result.state) for result in results] == [
        (f"l{n}", "done") for n in range(count)
    ]
    vectors = np.concatenate([np.asarray(result.vectors) for result in results])
    wanted = np.asarray(client.embed("embed", [text(n) for n in range(count)]))
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)


# ---- single jobs --------------------------------------------------------------------------------


def test_a_call_is_a_job_whose_answer_is_read_later(client: Client, pool: Pool) -> None:
    texts = [text(n) for n in range(3)]
    job = client.submit_call("embed", "embed", key="one", inputs=texts, dimensions=8, note=b"mine")
    result = client.fetch("one").read()
    vectors = Vectors.of(result)
    assert (vectors.rows, vectors.columns) == (3, 8)
    assert vectors.usage == client.embed("embed", texts).usage
    np.testing.assert_allclose(vectors, client.embed("embed", texts, dimensions=8), atol=1e-5)
    assert (result.text, result.ids, result.reason) == ("", (), "stop")
    row = client.job(job)
    assert (row["state"], row["ids"]) == ("done", 0) and row["bytes"] > 3 * 8 * 4
    submitted = client.submitted(job)
    assert submitted.request["inputs"] == texts and submitted.note == b"mine"
    again = client.submit_call("embed", "embed", key="one", inputs=texts, dimensions=8)
    assert again.id == job.id and again.state == "done"
    with pytest.raises(DuplicateId):
        client.submit_call("embed", "embed", key="one", inputs=texts)
    printed = pool.cli("fetch", "one")
    assert json.loads(printed.stdout)["vectors"] == vectors.tolist()
    assert json.loads(pool.cli("fetch", "one", "--json").stdout.splitlines()[-1])["rows"] == 3


def test_every_kind_of_call_is_a_job(client: Client) -> None:
    documents = ["the quick brown fox", "vector search"]
    client.submit_call("rerank", "rerank", key="rank", query="quick fox", documents=documents)
    client.submit_call("classify", "classify", key="class", inputs=documents)
    questions: list[dict[str, Any]] = [
        {"question": "Is it raining?"},
        {"question": "Which?", "choices": ["a", "b"]},
    ]
    client.submit_call("decide", "demo", key="decide", prompt="It rains.", questions=questions)
    scores = Vectors.of(client.fetch("rank").read())
    direct = sorted(client.rerank("rerank", "quick fox", documents), key=lambda item: item.index)
    np.testing.assert_allclose(
        np.asarray(scores)[:, 0], [ranked.score for ranked in direct], atol=1e-5
    )
    shares = Vectors.of(client.fetch("class").read())
    direct_shares = client.classify("classify", documents)
    assert shares.labels == direct_shares.labels
    np.testing.assert_allclose(shares, direct_shares, atol=1e-5)
    result = client.fetch("decide").read()
    asked: list[Any] = ["Is it raining?", ("Which?", ["a", "b"])]
    direct_decisions = client.decide_all("demo", "It rains.", asked)
    wanted: list[Any] = [asked, questions]
    for decisions in (DecisionList.of(result, form) for form in wanted):
        assert [decision.answer for decision in decisions] == [
            decision.answer for decision in direct_decisions
        ]
    with pytest.raises(ValueError, match="no vectors"):
        Vectors.of(result)


def test_what_cannot_be_a_job_is_refused_by_name(client: Client) -> None:
    with pytest.raises(BadRequest, match="does not embed: it generates text"):
        client.submit_call("embed", "counting", inputs=["a"])
    client.submit_call("embed", "embed", key="long", inputs=["fox " * 4 * MAX_TOKENS])
    with pytest.raises(ContextExceeded, match=f"at most {MAX_TOKENS}"):
        client.fetch("long").read()
    assert client.job("long")["state"] == "dead"


async def test_calls_wait_run_and_end_in_asyncio(pool: Pool) -> None:
    async with pool.async_client() as client:
        job = await client.submit_call("embed", "embed", inputs="a dog")
        async with client.fetch(job) as stream:
            assert Vectors.of(await stream.read()).rows == 1
        batch = await client.submit_batch(lines(20), "embed")
        vectors = [result.vectors async for result in batch.results()]
        assert len(vectors) == 20 and all(vector is not None for vector in vectors)


# ---- batches ------------------------------------------------------------------------------------


def test_a_batch_of_embed_lines_has_the_vectors_of_its_texts(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    path, output = tmp_path / "lines.jsonl", tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(300)))
    flags = ("--key", "embed", "--output", str(output))
    done = pool.cli("submit", "--batch", str(path), "embed", *flags)
    assert (done.returncode, done.stderr) == (0, "embed: done, 300 done\n")
    check(client, list(client.batch("embed").results()), 300)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"l{n}" for n in range(300)]
    assert rows[0]["rows"] == 1 and len(rows[0]["vectors"][0]) == rows[0]["columns"]
    assert set(rows[0]["usage"]) == {"prompt_tokens", "total_tokens"}
    assert pool.cli("jobs", "--verify").stdout.endswith(" 0 damaged\n")
    copy = tmp_path / "copy.jsonl"
    assert pool.cli("jobs", "--export", str(copy)).returncode == 0
    items = [json.loads(line) for line in copy.read_text().splitlines()]
    jobs = {item["job"]["job"]: item["job"] for item in items if "job" in item}
    lines_of = {id: job for id, job in jobs.items() if job["batch"] is not None}
    answers = {item["answer"]["job"]: item["answer"]["data"] for item in items if "answer" in item}
    assert len(lines_of) >= 300 and lines_of.keys() <= answers.keys()
    by_line = {job["line"]: answers[id] for id, job in lines_of.items() if job["id"] == "l7"}
    packed = np.frombuffer(base64.b64decode(by_line[7]), "<f4")
    np.testing.assert_array_equal(packed, np.float32(rows[7]["vectors"][0]))


def test_lines_of_a_batch_fail_alone(client: Client) -> None:
    batch = client.submit_batch(
        [
            {"id": "good", "kind": "embed", "inputs": "a dog", "dimensions": 4},
            {"id": "long", "kind": "embed", "inputs": ["fox " * 4 * MAX_TOKENS]},
            {"id": "cut", "kind": "embed", "inputs": ["fox " * 4 * MAX_TOKENS], "truncate": True},
            {"id": "wide", "kind": "embed", "inputs": ["a"], "dimensions": 4096},
            {"id": "kind", "kind": "rerank", "query": "q", "documents": ["a"]},
            {"id": "text", "model": "counting", "prompt": "x", "options": {"max_tokens": 2}},
            {"id": "ids", "kind": "embed", "tokens": [[2, 5, 3], [2, 6, 7, 3]]},
            {"id": "twin", "kind": "embed", "inputs": "a dog", "dimensions": 4},
        ],
        "embed",
    )
    results = {result.id: result for result in batch.results()}
    states = {name: result.state for name, result in results.items()}
    assert states == {
        "good": "done", "long": "dead", "cut": "done", "wide": "dead", "kind": "failed",
        "text": "done", "ids": "done", "twin": "done",
    }  # fmt: skip
    assert isinstance(results["long"].error, ContextExceeded)
    assert "dimensions" in str(results["wide"].error)
    assert "does not rerank" in str(results["kind"].error)
    assert results["text"].vectors is None and results["text"].result is not None
    assert len(results["text"].result.ids) == 2
    good, twin, ids = (results[name].vectors for name in ("good", "twin", "ids"))
    assert good is not None and twin is not None and ids is not None
    assert (good.columns, ids.rows) == (4, 2)
    np.testing.assert_allclose(good, twin, atol=1e-6)


def test_a_bad_line_is_named_before_anything_is_sent(client: Client) -> None:
    bad = [*lines(2), {"id": "bad", "kind": "embed", "input": "x"}]
    with pytest.raises(BadRequest, match=r"line 3 \(id 'bad'\): embed has no key 'input'"):
        client.submit_batch(bad, "embed", key="bad")
    with pytest.raises(UnknownJob):
        client.batch("bad")


def test_lines_have_many_texts_and_results_come_over_pages(client: Client) -> None:
    many = [{"kind": "embed", "inputs": [text(n) for n in range(256)]}] * 12
    batch = client.submit_batch(many, "embed")
    results = list(batch.results())
    assert len(results) == 12
    whole = np.asarray(client.embed("embed", [text(n) for n in range(256)]))
    for result in results:
        np.testing.assert_allclose(np.asarray(result.vectors), whole, atol=1e-5)


def test_workers_and_brokers_die_and_no_line_is_lost_doubled_or_mixed(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """The feed of ended jobs has each line once, and each vector belongs to its line's text."""
    count = 600
    with make_pool(tmp_path, folders) as pool, pool.client(broker_grace=PATIENCE) as client:
        batch = client.submit_batch(lines(count), "embed", key="killed")
        for number, share in enumerate((0.1, 0.3, 0.5, 0.7)):
            until(lambda: client.batch("killed").row["done"] >= share * count, "lines are done")  # noqa: B023
            pool.kill_worker(
                f"embed/{number % 2}", over=lambda: client.batch("killed").row["state"] == "done"
            )
            if number % 2:
                pool.kill()
                pool.start()
        assert batch.wait()["done"] == count
        check(client, list(batch.results()), count)
        ends = [row for row in client.jobs(after=0) if "line" in row]
        assert sorted(row["line"] for row in ends) == list(range(count))
        assert pool.ask("stats")["internal_errors"] == 0
        assert pool.cli("jobs", "--verify").returncode == 0
