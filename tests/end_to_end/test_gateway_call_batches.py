"""Batches and jobs of embeddings, reranking, classification and decisions over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.openai_batches import begin, over, results, sent
from support.openapi_answers import faults, unknown_members
from support.pool import Pool
from worker.encoders.checkpoints import CASES, MAX_TOKENS, write

MODELS = {"embed": "bert", "rerank": "bert, rerank", "classify": "bert, classify"}
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
CLASSIFY, DECISIONS = "/v1/classify", "/v1/decisions"
TEXTS = ["the quick brown fox", "a dog", "vector search"]
LONG = "fox " * 4 * MAX_TOKENS


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("models")
    encoders = "".join(
        f'[models.{name}]\npath = "{write(root / name, CASES[case])}"\n'
        for name, case in MODELS.items()
    )
    demo = '[models.demo]\npath = "builtin:demo"\n'
    return f"[pool]\nrestart_delay = 0.05\n{encoders}{demo}"


@pytest.fixture(scope="module")
def pool(config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("pool")
    with Pool(folder, config, arguments=("--state-dir", str(folder / "jobs"))) as running:
        yield running


def line(name: str, endpoint: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": body}


def bodies(client: openai.OpenAI, endpoint: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the bodies of the answers to the lines of a batch, which must all be answered."""
    batch = over(client, begin(client, sent(client, lines), endpoint).id)
    assert (batch.status, batch.error_file_id) == ("completed", None), batch
    assert batch.request_counts.completed == len(lines)
    return {
        name: row["response"]["body"] for name, row in results(client, batch.output_file_id).items()
    }


def same(found: Any, wanted: Any) -> None:
    """Asserts that two bodies are equal, apart from ids and from the rounding of numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted.keys() - {"id"}:
            same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for item, other in zip(found, wanted, strict=True):
            same(item, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert found == wanted


# ---- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "requests"),
    [
        (
            EMBEDDINGS,
            [
                {"model": "embed", "input": TEXTS[0]},
                {"model": "embed", "input": TEXTS, "dimensions": 8},
                {"model": "embed", "input": [2, 5, 3], "encoding_format": "float"},
                {"model": "embed", "input": LONG, "truncate": True, "normalize": False},
            ],
        ),
        (
            RERANK,
            [
                {"model": "rerank", "query": "fox", "documents": TEXTS, "top_n": 2},
                {
                    "model": "rerank",
                    "query": "fox",
                    "documents": [{"text": TEXTS[0]}],
                    "return_documents": False,
                },
            ],
        ),
        (SCORE, [{"model": "rerank", "text_1": "fox", "text_2": TEXTS}]),
        (CLASSIFY, [{"model": "classify", "input": TEXTS}]),
        (
            DECISIONS,
            [
                {
                    "model": "demo",
                    "prompt": "It rains.",
                    "questions": [
                        {"question": "Is it wet?"},
                        {"question": "How wet?", "scale": [1, 5]},
                        {"question": "Which?", "choices": ["rain", "sun"]},
                    ],
                    "temperature": 2.0,
                }
            ],
        ),
    ],
)
def test_a_line_has_the_answer_of_its_endpoint(
    api: openai.OpenAI,
    http: httpx.Client,
    endpoint: str,
    requests: list[dict[str, Any]],
) -> None:
    lines = [line(str(n), endpoint, **body) for n, body in enumerate(requests)]
    answers = bodies(api, endpoint, lines)
    for number, body in enumerate(requests):
        direct = http.post(endpoint, json=body).raise_for_status().json()
        same(answers[str(number)], direct)


def test_vectors_in_base64_are_those_in_numbers(api: openai.OpenAI) -> None:
    asked = {"model": "embed", "input": TEXTS, "dimensions": 16}
    lines = [
        line("packed", EMBEDDINGS, **asked, encoding_format="base64"),
        line("plain", EMBEDDINGS, **asked),
    ]
    answers = bodies(api, EMBEDDINGS, lines)
    packed = [base64.b64decode(row["embedding"]) for row in answers["packed"]["data"]]
    numbers = [row["embedding"] for row in answers["plain"]["data"]]
    assert [len(blob) for blob in packed] == [4 * 16] * 3
    np.testing.assert_allclose([np.frombuffer(blob, "<f4") for blob in packed], numbers, atol=1e-6)
    usage = answers["plain"]["usage"]
    assert usage == answers["packed"]["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    assert {row["object"] for row in answers["plain"]["data"]} == {"embedding"}
    assert [row["index"] for row in answers["plain"]["data"]] == [0, 1, 2]


def test_errors_of_lines_are_told_by_name(api: openai.OpenAI) -> None:
    lines = [
        line("fits", EMBEDDINGS, model="embed", input="a dog"),
        line("long", EMBEDDINGS, model="embed", input=LONG),
        line("wide", EMBEDDINGS, model="embed", input="a", dimensions=4096),
        line("kind", EMBEDDINGS, model="rerank", input="a"),
        line("text", EMBEDDINGS, model="demo", input="a"),
    ]
    batch = over(api, begin(api, sent(api, lines), EMBEDDINGS).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
    assert [*results(api, batch.output_file_id)] == ["fits"]
    rows = results(api, batch.error_file_id)
    assert {row["response"]["status_code"] for row in rows.values()} == {400}
    errors = {name: row["response"]["body"]["error"] for name, row in rows.items()}
    assert errors["long"]["code"] == "context_length_exceeded"
    assert "dimensions" in errors["wide"]["message"]
    assert "does not embed: it is a model for rerank" in errors["kind"]["message"]
    assert "does not embed: it generates text" in errors["text"]["message"]


def test_lines_with_faults_are_named(api: openai.OpenAI) -> None:
    lines = [
        line("many", EMBEDDINGS, model="embed", input=["a"] * 257),
        line("empty", EMBEDDINGS, model="embed", input=[]),
        line("field", EMBEDDINGS, model="embed", inputs=["a"]),
        line("format", EMBEDDINGS, model="embed", input="a", encoding_format="hex"),
        line("other", RERANK, model="rerank", query="q", documents=["a"]),
        line("nobody", EMBEDDINGS, model="nobody", input="a"),
    ]
    batch = begin(api, sent(api, lines), EMBEDDINGS)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    errors = {error.line: (error.code, str(error.message)) for error in batch.errors.data}
    assert sorted(errors) == [1, 2, 3, 4, 5, 6]
    assert "has 257 texts, a line takes 256" in errors[1][1]
    assert errors[5][0] == "mismatched_endpoint" and errors[6][0] == "model_not_found"
    several = [line("two", SCORE, model="rerank", text_1=["a", "b"], text_2=["a", "b"])]
    batch = begin(api, sent(api, several), SCORE)
    assert batch.errors is not None and batch.errors.data is not None
    assert "a line has one text" in str(batch.errors.data[0].message)


# ---- the pool's own jobs ------------------------------------------------------------------------


def events(http: httpx.Client, key: str) -> dict[str, Any]:
    """Returns the data of the events of a job, by their kind."""
    text = http.get(f"/v1/jobs/{key}/events").raise_for_status().text
    by_kind = {}
    for event in text.strip().split("\n\n"):
        fields = dict(part.split(": ", 1) for part in event.splitlines() if ": " in part)
        if "event" in fields:
            by_kind[fields["event"]] = json.loads(fields["data"])
    return by_kind


def test_a_job_is_a_call(http: httpx.Client) -> None:
    body = {"kind": "embed", "model": "embed", "inputs": TEXTS, "dimensions": 4, "key": "vectors"}
    job = http.post("/v1/jobs", json=body).raise_for_status().json()
    assert not faults(job, "Job")
    assert not [*unknown_members(job, {"$ref": "#/components/schemas/Job"})]
    done = events(http, "vectors")["done"]
    assert (done["rows"], done["columns"], done["reason"]) == (3, 4, "stop")
    assert [len(row) for row in done["vectors"]] == [4] * 3
    assert done["usage"]["prompt_tokens"] > 0
    questions = [{"question": "Is it wet?"}]
    asked = {"kind": "decide", "model": "demo", "prompt": "It rains.", "questions": questions}
    http.post("/v1/jobs", json={**asked, "key": "wet"}).raise_for_status()
    (row,) = events(http, "wet")["done"]["decisions"]
    assert len(row["probabilities"]) == 2
