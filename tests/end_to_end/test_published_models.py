"""Models of other makers through a pool: SmolLM2, Gemma 3 (in `make test-all`) and MiniLM.

Greedy ids and perplexities must equal those in support/published_answers.json. That file has the
results of mlx-lm in float32, from weights that llama.cpp's package has read;
worker/weights/gguf/test_published.py checks the file. At each step the logits of the two likeliest
ids are at least 0.05 apart. Each model is loaded twice, because one of its workers is killed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mlxpool.client import Client, Stream
from mlxpool.common.errors import BadRequest
from support import published_models
from support.pool import PATIENCE, Pool
from worker.encoders.plain_numpy import POOLS, bert

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
pytestmark = pytest.mark.skipif(mx.cuda.is_available(), reason="the ids are those of float32")

STORED = json.loads(published_models.ANSWERS.read_text(encoding="utf-8"))
FILES = {"smollm2": published_models.smollm2, "gemma3": published_models.gemma3}
MAX_PERPLEXITY_ERROR = {"smollm2": 1e-4, "gemma3": 5e-3}  # relative; Q6_K is rounded once more
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # several threads spin while they wait for each other
TEXTS = ("A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell by 3%.")


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    config = f'[models.{model}]\npath = "{FILES[model]()}"'
    with Pool(tmp_path_factory.mktemp("pool"), config, environment=ONE_THREAD) as running:
        yield running


def together(client: Client, model: str) -> dict[str, Stream]:
    """Starts a greedy stream for each stored prompt."""
    return {
        prompt: client.stream(model, prompt, temperature=0, max_tokens=len(ids), ignore_eos=True)
        for prompt, ids in STORED[model]["ids"].items()
    }


def test_eight_streams_together_have_mlx_lms_ids(client: Client, model: str) -> None:
    streams = together(client, model)
    ids = {prompt: list(stream.read().ids) for prompt, stream in streams.items()}
    assert ids == STORED[model]["ids"]


def test_the_perplexity_of_a_text_is_mlx_lms(client: Client, model: str) -> None:
    result = client.generate(model, STORED["text"], max_tokens=0, prompt_logprobs=0)
    logprobs = [entry["logprob"] for entry in result.prompt[1:]]
    assert len(logprobs) == result.usage["prompt_tokens"] - 1 > 190
    perplexity = math.exp(-sum(logprobs) / len(logprobs))
    assert perplexity == pytest.approx(STORED[model]["perplexity"], rel=MAX_PERPLEXITY_ERROR[model])


def test_a_chat(client: Client, model: str) -> None:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    if model == "gemma3":  # Gemma's file has no template
        with pytest.raises(BadRequest, match="template"):
            client.generate(model, messages=asked, max_tokens=1)
        return
    answer = client.generate(model, messages=asked, temperature=0, max_tokens=16)
    assert answer.text == "The capital of France is Paris." and answer.reason == "stop"


def test_a_tool_call_and_the_answer_with_its_result(url: str, model: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather = {"name": "weather", "description": "Get the weather.", "parameters": parameters}
    said: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    body: dict[str, Any] = {"model": model, "messages": said, "temperature": 0, "max_tokens": 40}
    asked = {
        **body,
        "tools": [{"type": "function", "function": weather}],
        "tool_choice": "required",
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE)
    if model == "gemma3":  # Gemma's file has no template
        assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]
        return
    message = answer.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}
    said += [message, {"role": "tool", "tool_call_id": call["id"], "content": "Sunny, 31 degrees"}]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
    content = answer.json()["choices"][0]["message"]["content"]
    assert "sunny" in content and "31" in content


def test_an_answer_in_a_format_knows_what_the_model_knows(client: Client, model: str) -> None:
    example = '{"city": "Paris", "inhabitants": 2100000}'
    answer = client.generate(
        model,
        f"Capitals as JSON.\nFrance: {example}\nFrance: {example}\nGermany: ",
        format={"type": "json_schema", "schema": CITY},
        temperature=0,
        max_tokens=40,
    )
    assert answer.reason == "stop" and answer.complete
    capital = json.loads(answer.text)
    jsonschema.validate(capital, CITY)
    assert capital["city"] == "Berlin"


def test_kill_9_of_the_worker_changes_no_stream(client: Client, model: str, pool: Pool) -> None:
    streams = together(client, model)
    prompt, first = next(iter(streams.items()))
    deltas = iter(first)
    ids = list(next(deltas).ids)
    killed = pool.kill_worker(f"{model}/0")
    all_ids = {prompt: ids + [token for delta in deltas for token in delta.ids]}
    all_ids |= {
        other: list(stream.read().ids) for other, stream in streams.items() if stream is not first
    }
    assert all_ids == STORED[model]["ids"]
    assert pool.worker(f"{model}/0")["pid"] != killed


def test_minilm_gives_the_vectors_of_float64(tmp_path: Path) -> None:
    folder = published_models.minilm()
    sizes = json.loads((folder / "config.json").read_text())
    stored = {k: v.astype(float) for k, v in load_file(folder / "model.safetensors").items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        states = bert(sizes, stored, ids, [0] * len(ids))
        vector = POOLS["mean"](states)
        expected.append(vector / np.linalg.norm(vector))
    config = f'[models.minilm]\npath = "{folder}"'
    with Pool(tmp_path, config, environment=ONE_THREAD) as pool, pool.client() as client:
        vectors = np.asarray(client.embed("minilm", TEXTS))
    assert vectors == pytest.approx(np.array(expected), abs=1e-5)
    near, far, _ = (vectors @ vectors.T)[np.triu_indices(3, 1)]
    assert near > 0.5 > 0.2 > far
