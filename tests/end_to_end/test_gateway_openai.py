"""OpenAI's own client against a gateway of a running pool, with the counting model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.pool import Pool, until

CONFIG = """
[pool]
queue_limit = 2
[models.small]
path = "builtin:counting"
context = 64
[models.slow]
path = "builtin:counting"
sequences = 1
counting.step_us = 20000
[models.failing]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_at = 5
"""
HI: Any = [{"role": "user", "content": "hi"}]
LINE = "user: hi\n"  # the counting model's prompt for the chat


@pytest.fixture(scope="module")
def gateway(pool: Pool) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir, keep_alive=0.2) as running:
        yield running


def told(prompt: str, seed: int, count: int) -> str:
    return text_of(expected_ids(prompt, seed, count))


def test_models(api: openai.OpenAI) -> None:
    assert {model.id for model in api.models.list()} == {
        "demo", "demo-chat", "demo-embed", "counting", "small", "slow", "failing",
    }  # fmt: skip
    assert api.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="no model 'smal'") as caught:
        api.models.retrieve("smal")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_whole_chat(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="counting", messages=HI, max_completion_tokens=5, seed=7, user="u"
    )
    (choice,) = answer.choices
    assert choice.message.content == told(LINE, 7, 5)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None and answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(LINE), len(LINE) + 5)


def test_a_streamed_chat_with_usage(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(
        model="counting", messages=HI, max_tokens=5, seed=7, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == told(LINE, 7, 5)
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_and_logprobs(api: openai.OpenAI) -> None:
    words = told(LINE, 7, 4).split(" ")
    ask: dict[str, Any] = {
        "model": "counting", "messages": HI, "seed": 7, "stop": f" {words[3]}", "max_tokens": 9,
        "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    (choice,) = api.chat.completions.create(**ask).choices
    assert (choice.message.content, choice.finish_reason) == (" ".join(words[:3]), "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = [entry.token for entry in choice.logprobs.content]
    assert tokens == [f"{word} " for word in words[:4]]
    assert bytes(choice.logprobs.content[0].bytes or []) == f"{words[0]} ".encode()
    assert choice.logprobs.content[0].top_logprobs[0].token == tokens[0]
    streamed = [
        entry.token
        for chunk in api.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else None) or []
    ]
    assert streamed == tokens


def test_completions_of_texts_and_of_ids(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model="counting", prompt=["hello", "you"], max_tokens=3, seed=7, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == [told("hello", 7, 3), told("you", 7, 3)]
    assert answer.usage is not None and answer.usage.prompt_tokens == 8
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [0, *(len("".join(logprobs.tokens[:n])) for n in (1, 2))]
    ids = api.completions.create(
        model="counting", prompt=list(b"hello"), max_tokens=3, seed=7, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in ids) == told("hello", 7, 3)
    usual = api.completions.create(model="counting", prompt="x").usage
    assert usual is not None and usual.completion_tokens == 16


def test_fields_of_vllm_go_in_the_extra_body(api: openai.OpenAI) -> None:
    extra = {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    answer = api.chat.completions.create(
        model="counting", messages=HI, max_tokens=2, seed=7, logit_bias={"5": -100},
        presence_penalty=0.5, frequency_penalty=0.5, temperature=0.3, top_p=0.5, extra_body=extra,
    )  # fmt: skip
    assert answer.choices[0].message.content == told(LINE, 7, 2)


def test_a_prompt_that_does_not_fit(api: openai.OpenAI, pool: Pool) -> None:
    with pytest.raises(openai.BadRequestError, match="the context is 64") as caught:
        api.completions.create(model="small", prompt="x" * 70)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    messages: Any = [{"role": "user", "content": "x" * 70}]
    with pytest.raises(openai.BadRequestError, match="the context is 64") as caught:
        api.chat.completions.create(model="small", messages=messages)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
    # In a stream, too, an error has its own status, if it comes before the first keep-alive.
    with (
        GatewayThread(pool.run_dir) as patient,
        openai.OpenAI(base_url=f"{patient.url}/v1", api_key="none") as other,
        pytest.raises(openai.BadRequestError),
    ):
        other.completions.create(model="small", prompt="x" * 70, stream=True)


def test_a_prompt_that_is_truncated_and_a_stream_that_shifts(api: openai.OpenAI) -> None:
    more = {"truncate": True, "shift": True, "num_keep": 2, "num_ctx": 20}
    answer = api.completions.create(
        model="small", prompt="ab" + "x" * 70, max_tokens=50, seed=3, extra_body=more
    )
    assert answer.choices[0].text == text_of(expected_ids("ab" + "x" * 17, 3, 50))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 50)
    with pytest.raises(openai.BadRequestError, match="use `truncate`") as caught:
        api.completions.create(model="small", prompt="x", extra_body={"truncate_prompt_tokens": 3})
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_failure_before_and_in_the_stream(api: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "failing", "prompt": "x", "max_tokens": 20}
    with pytest.raises(openai.InternalServerError) as caught:
        api.completions.create(**ask)
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError) as streamed:
        list(api.completions.create(**ask, stream=True))
    assert type(streamed.value) is openai.APIError and streamed.value.code == "internal"


def test_a_full_queue_answers_with_retry_after(pool: Pool, api: openai.OpenAI) -> None:
    """One request runs, two are queued, the next is refused."""
    endless: dict[str, Any] = {"model": "slow", "prompt": "x", "max_tokens": 10**6}
    streams = [api.completions.create(**endless, stream=True)]
    next(iter(streams[0]))
    streams += [api.completions.create(**endless, stream=True) for _ in range(2)]
    try:
        until(lambda: pool.ask("stats")["queued"] == 2, "both are queued")
        with pytest.raises(openai.RateLimitError) as caught:
            api.completions.create(**endless)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in caught.value.response.headers
    finally:
        for stream in streams:
            stream.close()
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "all were cancelled")


def test_a_queued_stream_gets_keep_alive_comments(pool: Pool, api: openai.OpenAI) -> None:
    endless: dict[str, Any] = {"model": "slow", "prompt": "x", "max_tokens": 10**6, "stream": True}
    with api.completions.create(**endless) as first:
        next(iter(first))
        raw = api.completions.with_streaming_response.create(**endless)
        with raw as waiting:
            assert waiting.status_code == 200
            assert next(iter(waiting.iter_lines())) == ": waiting"
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "both were cancelled")


def test_a_disconnect_cancels_the_stream(pool: Pool, api: openai.OpenAI) -> None:
    before = pool.ask("stats")["requests"]["cancelled"]
    ask: dict[str, Any] = {
        "model": "slow",
        "messages": HI,
        "max_tokens": 10**6,
        "n": 2,
        "stream": True,
    }
    with api.chat.completions.create(**ask) as stream:
        until(lambda: next(iter(stream)).choices[0].delta.content, "it runs")
    until(lambda: pool.ask("stats")["requests"]["cancelled"] == before + 2, "both have ended")
    assert pool.ask("stats")["requests"]["live"] == 0


def test_a_disconnect_cancels_a_request_without_streaming(
    pool: Pool, gateway: GatewayThread
) -> None:
    async def ask_and_leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
            asked = asyncio.create_task(
                client.completions.create(model="slow", prompt="x", max_tokens=10**6)
            )
            while pool.ask("stats")["requests"]["live"] == 0:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(ask_and_leave())
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "it was cancelled")


@pytest.mark.parametrize("choices", [1, 2])
def test_a_killed_worker_only_delays_the_stream(
    pool: Pool, api: openai.OpenAI, choices: int
) -> None:
    stream = api.completions.create(
        model="slow", prompt="hello", max_tokens=20, seed=7, n=choices, stream=True
    )
    texts = [""] * choices
    for number, chunk in enumerate(stream):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if number == 2:
            pool.kill_worker("slow/0")
    assert texts == [told("hello", 7 + number, 20) for number in range(choices)]


def test_a_cancel_by_an_operator_is_an_error(pool: Pool, api: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "slow", "prompt": "x", "max_tokens": 10**6, "stream": True}
    stream = api.completions.create(**ask)
    first = next(stream)
    assert pool.cli("cancel", first.id.removeprefix("cmpl-")).returncode == 0
    with pytest.raises(openai.APIError, match="cancelled by an operator"):
        list(stream)


def test_the_example_of_the_documentation(
    gateway: GatewayThread, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "http://127.0.0.1:11434/v1" in code
    exec(code.replace("http://127.0.0.1:11434/v1", f"{gateway.url}/v1") + "\nclient.close()", {})
    assert capsys.readouterr().out.strip()
