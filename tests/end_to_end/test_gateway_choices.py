"""`n`, `best_of`, `echo` and log-probabilities of prompts, with OpenAI's own client."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from mlxpool.client import Client
from support.counting_checker import expected_ids, text_of
from support.numpy_llama import demo_logprobs
from support.pool import Pool, until

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

CONFIG = """
[models.demo]
path = "builtin:demo"
replicas = 2
[models.slow]
path = "builtin:counting"
sequences = 1
counting.step_us = 1000
[pool]
queue_limit = 64
"""
PROMPT = "def walk(top, topdown=True):\n    for name in os.listdir(top):\n"


def completion(client: openai.OpenAI, prompt: Any, **body: Any) -> dict[str, Any]:
    """Returns the answer as plain values; the keyword `extra` has fields unknown to the client."""
    extra = body.pop("extra", None)
    asked = {"model": "demo", "temperature": 0, "max_tokens": 6, **body}
    answer: dict[str, Any] = client.completions.create(
        prompt=prompt, extra_body=extra, **asked
    ).model_dump()
    return answer


@pytest.mark.parametrize("prompt", ["", [""]])
def test_an_empty_prompt_is_the_begin_token(api: openai.OpenAI, prompt: Any) -> None:
    answer = completion(api, prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["choices"][0]["text"] == completion(api, [0], max_tokens=1)["choices"][0]["text"]


def told(seed: int, count: int, prompt: str = "hello") -> str:
    return text_of(expected_ids(prompt, seed, count))


# ---- n and best_of -------------------------------------------------------------------------------


def test_sixty_four_choices_in_order_and_the_prompt_counts_once(api: openai.OpenAI) -> None:
    answer = completion(api, "hello", model="counting", n=64, seed=3, max_tokens=2)
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(index, told(3 + index, 2)) for index in range(64)]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 128)


def test_streamed_choices_are_interleaved_by_index(api: openai.OpenAI) -> None:
    texts, order = [""] * 3, []
    for chunk in api.chat.completions.create(
        model="counting", messages=[{"role": "user", "content": "hi"}], max_tokens=30, seed=5, n=3,
        stream=True, stream_options={"include_usage": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
        last = chunk
    assert texts == [told(5 + index, 30, "user: hi\n") for index in range(3)]
    assert order[-1] != order[0] or order != sorted(order)
    assert last.usage is not None and last.usage.completion_tokens == 90


def test_the_prompt_is_read_once(api: openai.OpenAI, client: Client) -> None:
    """One of four choices reads the prompt, and the other three find it cached.

    The answer's usage is that of choice 0. If choice 0 read the prompt, few tokens are cached. If
    another choice read it, all prompt tokens but one are cached. With the seed of choice 2, the
    native client gets the text of choice 2.
    """
    answer = completion(api, PROMPT * 12, n=4, temperature=1, seed=9)
    size = answer["usage"]["prompt_tokens"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (cached < 20 or cached == size - 1) and size > 200
    again = client.generate("demo", PROMPT * 12, max_tokens=6, temperature=1, top_p=1, top_k=0,
                            seed=11, repeat_last_n=-1)  # fmt: skip
    assert again.usage["cached_tokens"] == size - 1
    assert answer["choices"][2]["text"] == again.text


def test_best_of_gives_the_most_likely_and_counts_all(api: openai.OpenAI) -> None:
    answer = completion(api, PROMPT, n=6, temperature=1.2, seed=4, logprobs=0)
    means = [
        sum(values) / len(values)
        for choice in answer["choices"]
        if (values := choice["logprobs"]["token_logprobs"])
    ]
    ranked = sorted(range(6), key=lambda index: -means[index])
    best = completion(api, PROMPT, n=2, best_of=6, temperature=1.2, seed=4)
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["text"] for choice in best["choices"]] == [texts[n] for n in ranked[:2]]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    with pytest.raises(openai.BadRequestError, match="best_of") as caught:
        completion(api, PROMPT, best_of=3, stream=True)
    assert caught.value.param == "best_of"


def test_formats_stops_and_log_probabilities_hold_for_each_choice(api: openai.OpenAI) -> None:
    answer = completion(
        api, "go ", n=8, temperature=1, seed=1, logprobs=1, extra={"guided_regex": "[a-z]{3}"}
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-z]{3}", text) for text in texts) and len(set(texts)) > 1
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    stop = told(4, 6, "user: hi\n").split(" ")[2]
    chat = api.chat.completions.create(
        model="counting", messages=[{"role": "user", "content": "hi"}], max_tokens=6, seed=3, n=2,
        stop=stop, logprobs=True, top_logprobs=1,
    )  # fmt: skip
    first, second = chat.choices
    assert (first.finish_reason, first.message.content) == ("length", told(3, 6, "user: hi\n"))
    assert second.finish_reason == "stop"
    assert second.message.content == told(4, 6, "user: hi\n").split(stop)[0]
    assert first.logprobs is not None and len(first.logprobs.content or []) == 6


def test_choices_over_the_queue_are_refused_together(pool: Pool, api: openai.OpenAI) -> None:
    """One of two choices runs and the other waits, so that 64 more do not fit into the queue."""
    with api.completions.create(
        model="slow", prompt="x", max_tokens=10**6, n=2, stream=True
    ) as held:
        next(iter(held))
        until(lambda: pool.ask("stats")["queued"] == 1, "one waits")
        with pytest.raises(openai.RateLimitError, match="more do not fit") as caught:
            completion(api, "hello", model="slow", n=64, max_tokens=9)
    assert caught.value.code == "queue_full"
    until(lambda: not pool.ask("stats")["requests"]["live"], "both are cancelled")


# ---- echo and log-probabilities ------------------------------------------------------------------


def check(logprobs: dict[str, Any], ids: list[int], begin: int) -> None:
    """Asserts that the log-probabilities equal those of a single pass over `ids`.

    `begin`: the expected length of `ids`.
    """
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = demo_logprobs(ids)
    for number in range(1, len(ids)):
        row = expected[number - 1]
        assert logprobs["token_logprobs"][number] == pytest.approx(row[ids[number]], abs=1e-4)
        top = logprobs["top_logprobs"][number]
        assert max(top.values()) == pytest.approx(row.max(), abs=1e-4)
    assert begin == len(ids)


def test_an_evaluation_of_token_ids(api: openai.OpenAI, client: Client) -> None:
    """Evaluates lists of token ids as lm-evaluation-harness does: echo, logprobs, one new token."""
    contexts = ["def add(a, b):\n", "class Stack:\n    def push(self, item):\n"]
    rest = ["    return a + b\n", "        self.items.append(item)\n"]
    pairs = []
    for context, following in zip(contexts, rest, strict=True):
        left, right = (client.tokenize("demo", text)[1:] for text in (context, following))
        pairs.append((left, right))
    prompts = [left + right for left, right in pairs]
    answer = completion(api, prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, (left, right), ids in zip(answer["choices"], pairs, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        check(logprobs, ids, len(ids))
        # Computes the score as the evaluation harness does.
        score = sum(logprobs["token_logprobs"][len(left) : -1])
        row = demo_logprobs(ids)
        wanted = sum(row[len(left) + n - 1][token] for n, token in enumerate(right))
        assert score == pytest.approx(wanted, abs=1e-3)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][at : at + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(api: openai.OpenAI, client: Client, stream: bool) -> None:
    ids = client.tokenize("demo", PROMPT)
    if stream:
        merged: dict[str, Any] = {"text": "", "logprobs": {}}
        for chunk in api.completions.create(
            model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2, stream=True
        ):
            choice = chunk.choices[0].model_dump()
            merged["text"] += choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                merged["logprobs"].setdefault(key, []).extend(values or ())
            merged["finish_reason"] = choice["finish_reason"]
    else:
        answer = completion(api, PROMPT, max_tokens=0, echo=True, logprobs=2)
        merged = answer["choices"][0]
        assert answer["usage"]["completion_tokens"] == 0
    assert (merged["text"], merged["finish_reason"]) == (PROMPT, "length")
    logprobs = merged["logprobs"]
    check(logprobs, ids, len(logprobs["tokens"]))
    # The first token is added by the tokenizer and is not part of the text.
    assert logprobs["text_offset"][:2] == [0, 0]
    ends = zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True)
    assert all(PROMPT[at : at + len(token)] == token for token, at in ends)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_begins_with_the_echo(api: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {
        "model": "demo", "prompt": [PROMPT, PROMPT[:30]], "n": 3, "max_tokens": 5, "seed": 2,
        "echo": True, "logprobs": 1,
    }  # fmt: skip
    plain = api.completions.create(**{**ask, "echo": False})
    texts, values = [""] * 6, [list[float | None]() for _ in range(6)]
    if stream:
        answers = api.completions.create(**ask, stream=True)
        choices = [choice for chunk in answers for choice in chunk.choices]
    else:
        choices = api.completions.create(**ask).choices
    for choice in choices:
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            values[choice.index] += choice.logprobs.token_logprobs or []
    for index in range(6):
        prompt = ask["prompt"][index // 3]
        assert texts[index] == prompt + plain.choices[index].text
        first = values[index - index % 3]
        assert values[index][0] is None and len(values[index]) > 8
        generated = plain.choices[index - index % 3].logprobs
        assert generated is not None
        size = len(first) - len(generated.token_logprobs or [])
        assert values[index][:size] == first[:size]
        assert None not in values[index][1:]


def test_an_echo_without_log_probabilities(api: openai.OpenAI) -> None:
    answer = completion(api, "hello", model="counting", echo=True, max_tokens=2, seed=1)
    assert answer["choices"][0]["text"] == "104 101 108 108 111 " + told(1, 2)
    assert answer["choices"][0]["logprobs"] is None
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        completion(api, "hello", max_tokens=0)


def test_prompt_logprobs_as_vllm_has_them(api: openai.OpenAI, client: Client) -> None:
    ids = client.tokenize("demo", PROMPT)
    expected = demo_logprobs(ids)
    answer = completion(api, PROMPT, max_tokens=1, extra={"prompt_logprobs": 2})
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    for number, entry in enumerate(entries[1:], 1):
        own = entry[str(ids[number])]
        assert own["logprob"] == pytest.approx(expected[number - 1][ids[number]], abs=1e-4)
        assert sorted(row["rank"] for row in entry.values() if row["rank"]) == [1, 2]
    chat = api.chat.completions.create(
        model="counting", messages=[{"role": "user", "content": "hi"}], max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    ).model_dump()  # fmt: skip
    assert len(chat["prompt_logprobs"]) == len("user: hi\n")
