"""The gateway's embeddings, rerank, score and classify, called by OpenAI's and Ollama's clients."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ollama import Client as OllamaClient
from openai import BadRequestError, OpenAI

from mlxpool.client import Client
from support.gateway_thread import GatewayThread
from support.openapi_answers import faults
from support.pool import Pool
from worker.encoders.checkpoints import CASES, MAX_TOKENS, write

MODELS = {"embed": "bert", "rerank": "bert, rerank", "classify": "bert, classify"}
LONG = "vector search " * 200
TEXTS = [f"the quick fox {n}" for n in range(300)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root: Path = tmp_path_factory.mktemp("models")
    config = "".join(
        f'[models.{name}]\npath = "{write(root / name, CASES[case])}"\n'
        for name, case in MODELS.items()
    )
    with Pool(tmp_path_factory.mktemp("pool"), config) as running:
        yield running


@pytest.fixture
def openai(gateway: GatewayThread) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


def same(found: Any, expected: Any) -> bool:
    return bool(np.allclose(np.asarray(found), np.asarray(expected), atol=2e-3))


def test_openais_client_gets_floats_and_base64(openai: OpenAI, client: Client) -> None:
    expected = client.embed("embed", TEXTS)
    response = openai.embeddings.create(model="embed", input=TEXTS)  # the client requests base64
    assert same([row.embedding for row in response.data], expected)
    assert [row.index for row in response.data] == list(range(len(TEXTS)))
    assert (
        response.usage.prompt_tokens
        == response.usage.total_tokens
        == expected.usage["prompt_tokens"]
    )
    plain = openai.embeddings.create(model="embed", input="a dog", encoding_format="float")
    assert same(plain.data[0].embedding, client.embed("embed", "a dog")[0])


def test_base64_is_little_endian_float32(http: httpx.Client, client: Client) -> None:
    body = {"model": "embed", "input": ["a dog"], "encoding_format": "base64"}
    (row,) = http.post("/v1/embeddings", json=body).json()["data"]
    numbers = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    assert same(numbers, client.embed("embed", "a dog")[0])


def test_dimensions_prompts_and_ids(openai: OpenAI, client: Client) -> None:
    response = openai.embeddings.create(model="embed", input="a dog", dimensions=8)
    assert same(response.data[0].embedding, client.embed("embed", "a dog", dimensions=8)[0])
    response = openai.embeddings.create(
        model="embed", input="a dog", extra_body={"prompt_name": "query", "normalize": False}
    )
    expected = client.embed("embed", "a dog", prompt_name="query", normalise=False)
    assert same(response.data[0].embedding, expected[0])
    ids = client.tokenize("embed", "a dog")
    response = openai.embeddings.create(model="embed", input=[ids])
    assert same(response.data[0].embedding, client.embed("embed", "a dog")[0])


def test_a_text_that_is_too_long_is_an_error_or_cut(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError) as failed:
        openai.embeddings.create(model="embed", input=["a", LONG])
    assert failed.value.code == "context_length_exceeded" and failed.value.param == "input"
    assert "input 1 has" in failed.value.message
    response = openai.embeddings.create(model="embed", input=LONG, extra_body={"truncate": True})
    assert response.usage.prompt_tokens == MAX_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("embeddings", {"input": []}, "input", "1 to 2048"),
        ("embeddings", {"input": ["a", ""]}, "input", r"input\[1\] must be text, not empty"),
        ("embeddings", {"input": ["a", [1]]}, "input", "a list of either"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'int8'"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
        ("embeddings", {"input": "a", "dimensions": 33}, None, "from 1 to 32"),
        ("embeddings", {"input": "a", "inputs": 1}, "inputs", "did you mean 'input'"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "must be text"),
        ("rerank", {"query": "q", "documents": [{"x": 1}]}, "documents", "must be text"),
        (
            "score",
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "text_1",
            "'text_1' has 2 texts, must have 1$",
        ),
        ("classify", {"input": 3}, "input", "list of 1 to"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    model = path if path in MODELS else {"embeddings": "embed", "score": "rerank"}[path]
    answer = http.post(f"/v1/{path}", json={"model": model, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert re.search(said, error["message"])


def test_a_model_that_is_for_something_else_is_refused(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/embeddings", {"model": "rerank", "input": "a"}),
        ("/v1/rerank", {"model": "embed", "query": "q", "documents": ["d"]}),
        ("/v1/embeddings", {"model": "demo", "input": "a"}),
        ("/v1/completions", {"model": "embed", "prompt": "a"}),
        ("/api/embed", {"model": "demo", "input": "a"}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and "does not" in answer.text


def test_rerank_has_cohere_and_jinas_form(http: httpx.Client, client: Client) -> None:
    documents = ["the lazy dog", "a quick fox", "vector search over a passage"]
    expected = client.rerank("rerank", "quick fox", documents)
    body = {"model": "rerank", "query": "quick fox", "documents": documents}
    answer = http.post("/v1/rerank", json=body).json()
    assert [item["index"] for item in answer["results"]] == [item.index for item in expected]
    assert same(
        [item["relevance_score"] for item in answer["results"]], [item.score for item in expected]
    )
    assert answer["results"][0]["document"] == {"text": documents[expected[0].index]}
    assert answer["usage"]["total_tokens"] > 0 and not faults(answer, "Ranking")
    maps = [{"text": document} for document in documents]
    shorter = {**body, "top_n": 1, "return_documents": False, "documents": maps}
    (only,) = http.post("/v1/rerank", json=shorter).json()["results"]
    assert only["index"] == expected[0].index and "document" not in only


def test_scores_keep_the_order_of_the_texts(http: httpx.Client, client: Client) -> None:
    documents = ["the lazy dog", "a quick fox"]
    scores = {ranked.index: ranked.score for ranked in client.rerank("rerank", "fox", documents)}
    body = {"model": "rerank", "text_1": "fox", "text_2": documents}
    answer = http.post("/v1/score", json=body).json()
    assert same([row["score"] for row in answer["data"]], [scores[0], scores[1]])
    assert not faults(answer, "Scores")
    pairs = http.post("/v1/score", json={**body, "text_1": ["fox", "fox"]}).json()
    assert same([row["score"] for row in pairs["data"]], [scores[0], scores[1]])


def test_classes_have_a_label_and_all_probabilities(http: httpx.Client, client: Client) -> None:
    expected = client.classify("classify", ["a dog", "the fox"])
    body = {"model": "classify", "input": ["a dog", "the fox"]}
    answer = http.post("/v1/classify", json=body).json()
    assert same([item["probs"] for item in answer["data"]], expected)
    assert not faults(answer, "Classes")
    for row in answer["data"]:
        assert row["label"] == answer["labels"][int(np.argmax(row["probs"]))]
        assert row["num_classes"] == 3


def test_ollamas_client_embeds(gateway: GatewayThread, client: Client) -> None:
    with OllamaClient(gateway.url) as ollama:
        response = ollama.embed("embed", ["a dog", "the fox"])
        cut = ollama.embed("embed", LONG)
        old = ollama.embeddings("embed", "a dog")
        assert ollama.embed("embed:latest", "").embeddings == []
        assert ollama.show("embed").capabilities == ["embedding"]
    assert same(response.embeddings, client.embed("embed", ["a dog", "the fox"], normalise=True))
    assert response.prompt_eval_count and response.total_duration
    assert same(cut.embeddings, client.embed("embed", LONG, truncate=True))
    assert same(old.embedding, client.embed("embed", "a dog", normalise=False)[0])
