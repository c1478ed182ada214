"""Encoder models in a real pool: embed, rerank and classify, bad input, deadlines, cancels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, ContextExceeded, TooLarge
from mlxpool.worker.encoders.folder import inspect_encoder
from mlxpool.worker.encoders.text import EncoderText
from mlxpool.worker.encoders.vectors import finished
from mlxpool.worker.engine.encoding.encoder_engine import EncoderEngine
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.load import load
from support.pool import Pool
from worker.encoders.checkpoints import CASES, MAX_TOKENS, write

CONFIG = """
[models.embed]
path = "{embed}"
replicas = 2
[models.rerank]
path = "{rerank}"
[models.classify]
path = "{classify}"
[models.counting]
path = "builtin:counting"
"""
FOLDERS = {"embed": "bert", "rerank": "bert, rerank", "classify": "bert, classify"}
WORDS = ("the quick brown fox", "a dog", "vector search", "lazy", "query over passage")
TEXTS = [f"{WORDS[n % 5]} {WORDS[n % 3]} {n}" for n in range(700)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write(root / name, CASES[case]) for name, case in FOLDERS.items()}


@pytest.fixture(scope="module")
def pool(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG.format(**folders)) as running:
        yield running


def computed_here(folder: Path, texts: list[str]) -> np.ndarray:
    """Computes the vectors of texts by an engine in this process, one pass for each text."""
    encoder = inspect_encoder(folder_files(folder))
    engine, text = EncoderEngine(encoder, load(encoder.folder)), EncoderText(encoder.source)
    rows = [engine.encode(text.encode_texts([passage]))[0] for passage in texts]
    return finished(np.stack(rows), 0, normalise=engine.normalises)


def test_many_texts_are_embedded_in_their_order(client: Client, folders: dict[str, Path]) -> None:
    vectors = client.embed("embed", TEXTS)
    assert (vectors.rows, vectors.columns) == (len(TEXTS), 32)
    sample = [0, 1, 255, 256, 257, 511, 512, 699]
    expected = computed_here(folders["embed"], [TEXTS[index] for index in sample])
    assert np.allclose(np.asarray(vectors)[sample], expected, atol=2e-3)
    assert vectors[-1] == vectors.tolist()[-1] and len(vectors[0]) == 32
    assert vectors.usage["prompt_tokens"] == vectors.usage["total_tokens"] > len(TEXTS)


def test_one_text_a_prompt_dimensions_and_length(client: Client) -> None:
    plain = np.asarray(client.embed("embed", "a dog"))[0]
    assert np.linalg.norm(plain) == pytest.approx(1, abs=1e-5)
    raw = np.asarray(client.embed("embed", "a dog", normalise=False))[0]
    assert np.allclose(raw / np.linalg.norm(raw), plain, atol=1e-5)
    short = np.asarray(client.embed("embed", "a dog", dimensions=8))[0]
    assert np.allclose(short, raw[:8] / np.linalg.norm(raw[:8]), atol=1e-5)
    query = np.asarray(client.embed("embed", "a dog", prompt_name="query"))[0]
    assert np.allclose(query, np.asarray(client.embed("embed", "query: a dog"))[0], atol=1e-3)
    assert not np.allclose(query, plain, atol=1e-2)


def test_ids_in_place_of_texts(client: Client) -> None:
    ids = client.tokenize("embed", "a dog")
    vectors = np.asarray(client.embed("embed", [ids, ids]))
    assert np.allclose(vectors, np.asarray(client.embed("embed", ["a dog", "a dog"])), atol=1e-3)
    with pytest.raises(BadRequest, match="input 1 has token ids from 0 to 1000000"):
        client.embed("embed", [ids, [0, 1_000_000]])


def test_documents_are_ranked(client: Client) -> None:
    documents = ["the lazy dog", "a quick fox", "vector search over a passage"]
    ranking = client.rerank("rerank", "quick fox", documents)
    assert sorted(ranked.index for ranked in ranking) == [0, 1, 2]
    assert [ranked.score for ranked in ranking] == sorted(
        (ranked.score for ranked in ranking), reverse=True
    )
    assert client.rerank("rerank", "quick fox", documents, top=1) == ranking[:1]


def test_texts_and_pairs_are_classified(client: Client) -> None:
    classes = client.classify("classify", ["a dog", "the fox"])
    assert classes.labels == ("label 0", "label 1", "label 2")
    assert np.asarray(classes).sum(axis=1) == pytest.approx(1, abs=1e-4)
    pairs = client.classify("classify", [("a dog", "the fox")])
    assert (pairs.rows, pairs.columns) == (1, 3)


def test_a_text_that_is_too_long_is_refused_or_truncated(client: Client) -> None:
    long = "vector search " * 200
    with pytest.raises(ContextExceeded, match=f"input 1 has .* at most {MAX_TOKENS}") as failed:
        client.embed("embed", ["a dog", long])
    assert failed.value.details["index"] == 1
    with pytest.raises(ContextExceeded, match="input 299 has") as failed:
        client.embed("embed", [*["a"] * 299, long, *["b"] * 300])
    assert failed.value.details["index"] == 299
    vectors = client.embed("embed", ["a dog", long], truncate=True)
    assert vectors.usage["prompt_tokens"] == MAX_TOKENS + len(client.tokenize("embed", "a dog"))


def test_what_a_model_is_not_for_is_refused_by_name(client: Client) -> None:
    for ask, said in (
        (lambda: client.classify("rerank", ["x"]), "does not classify"),
        (lambda: client.embed("counting", ["x"]), "generates text"),
        (lambda: client.generate("embed", "x"), "does not generate"),
        (lambda: client.embed("embed", ["x"], dimensions=33), "dimensions is 33, must be from 1"),
        (lambda: client.embed("embed", ["x"], prompt_name="no"), "there is no prompt 'no'"),
        (lambda: client.rerank("rerank", "q", ["d"], top=0), "top must be an integer from 1"),
    ):
        with pytest.raises(BadRequest, match=said):
            ask()


def test_an_answer_over_the_bound_is_refused(client: Client) -> None:
    with pytest.raises((BadRequest, TooLarge)):
        client.embed("embed", ["x" * (5 * 2**20)])


def test_asyncio_and_threads_share_passes(pool: Pool) -> None:
    async def ask() -> list[np.ndarray]:
        async with pool.async_client() as client:
            answers = await asyncio.gather(*(client.embed("embed", TEXTS[n]) for n in range(100)))
            return [np.asarray(answer)[0] for answer in answers]

    with pool.client() as client:
        whole = np.asarray(client.embed("embed", TEXTS[:100]))
    assert np.allclose(np.stack(asyncio.run(ask())), whole, atol=2e-3)


def test_a_kill_of_every_worker_loses_no_call(pool: Pool, client: Client) -> None:
    expected = np.asarray(client.embed("embed", TEXTS))

    async def storm() -> list[np.ndarray]:
        async with pool.async_client() as many:
            asked = [asyncio.create_task(many.embed("embed", TEXTS)) for _ in range(8)]
            for slot in ("embed/0", "embed/1", "embed/0"):
                await asyncio.sleep(0.2)
                await asyncio.to_thread(pool.kill_worker, slot)
            return [np.asarray(answer) for answer in await asyncio.gather(*asked)]

    for vectors in asyncio.run(storm()):
        assert np.allclose(vectors, expected, atol=2e-3)


def test_the_command_line_prints_vectors_ranks_and_labels(pool: Pool, client: Client) -> None:
    lines = pool.cli("embed", "embed", "-", stdin="a dog\n\nthe fox\n").stdout.splitlines()
    assert np.allclose(
        [json.loads(line) for line in lines], client.embed("embed", ["a dog", "the fox"]), atol=2e-3
    )
    ranks = pool.cli("rerank", "rerank", "quick fox", "the lazy dog", "a fox", "--top", "1").stdout
    assert ranks.splitlines()[0].split() == ["score", "index", "document"]
    best = client.rerank("rerank", "quick fox", ["the lazy dog", "a fox"])[0]
    assert ranks.splitlines()[1].split()[:2] == [f"{best.score:.4f}", str(best.index)]
    labels = pool.cli("classify", "classify", "a dog").stdout
    assert labels.endswith(": a dog\n") and labels.count("label ") == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("embed", "embed", "vector search " * 200), 1, "context_exceeded: input 0 has"),
        (("embed", "embed", "x", "--dimensions", "0"), 2, "must be a whole number above 0"),
        (("rerank", "embed", "q", "d"), 2, "does not rerank"),
        (("embed", "nobody", "x"), 1, "unknown_model"),
        (("embed", "embed"), 2, "there is no text"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    pool: Pool, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = pool.cli(*arguments, stdin="")
    assert done.returncode == code and said in done.stderr
