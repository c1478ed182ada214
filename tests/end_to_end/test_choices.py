"""Several choices of one prompt, and log-probabilities of prompts, in a pool of two replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxpool.client import Choices, Client
from mlxpool.common.errors import BadRequest, Internal, QueueFull
from support.counting_checker import expected_ids, text_of
from support.numpy_llama import demo_logprobs
from support.pool import Pool, until

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

CONFIG = """
[pool]
queue_limit = 24
[models.demo]
path = "builtin:demo"
replicas = 2
sequences = 8
[models.off]
path = "builtin:demo"
prefix_cache = "off"
[models.slow]
path = "builtin:counting"
sequences = 2
counting.step_us = 20000
[models.failing]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_at = 5
"""
WORDS = " ".join(f"def name{i}(x): return x" for i in range(40))


def live(pool: Pool) -> int:
    return int(pool.ask("stats")["requests"]["live"])


def rows_of(pool: Pool, model: str) -> list[int]:
    """Returns the number of sequences of each replica, the fewest first."""
    workers = pool.ask("ps")["workers"]
    return sorted(worker["running"] for worker in workers if worker["slot"].startswith(f"{model}/"))


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["", " and more", " and some more of it"])
@pytest.mark.parametrize("n", [3, 16])
def test_a_prompt_is_read_once_on_one_of_two_replicas(client: Client, n: int, extra: str) -> None:
    """All choices run on one replica, which reads the prompt once.

    The prompt ends inside a KV block. In the case with 16 choices, some wait for a free sequence.
    """
    prompt = f"{n}{extra} {WORDS}"
    choices = client.choices("demo", prompt, n=n, max_tokens=8, seed=100)
    size = choices.usage["prompt_tokens"]
    cached = [choice.usage["cached_tokens"] for choice in choices]
    assert size > 300 and size % 256
    first, *others = sorted(cached)  # the first choice reads the prompt
    assert first < 20 and {*others} == {size - 1}
    assert choices.usage == {
        "prompt_tokens": size,
        "cached_tokens": first,
        "completion_tokens": sum(len(choice.ids) for choice in choices),
        "total_tokens": size + sum(len(choice.ids) for choice in choices),
    }
    assert [choice.index for choice in choices] == [*range(n)]
    assert [choice.seed for choice in choices] == [*range(100, 100 + n)]
    again = client.generate("demo", prompt, max_tokens=8, seed=101)
    assert again.ids == choices[1].ids


def test_without_a_prefix_cache_every_choice_reads_the_prompt(client: Client) -> None:
    choices = client.choices("off", WORDS, n=3, max_tokens=4, seed=1)
    assert [choice.usage["cached_tokens"] for choice in choices] == [0, 0, 0]
    assert len({choice.ids for choice in choices}) > 1


def test_a_seed_is_drawn_once_and_told(client: Client) -> None:
    first, second = (client.choices("counting", "hello", n=3, max_tokens=4) for _ in range(2))
    assert first.seed != second.seed
    for index, choice in enumerate(first):
        assert choice.seed == first.seed + index
        assert list(choice.ids) == expected_ids("hello", choice.seed, 4)


def test_a_stream_gives_the_deltas_of_all_choices(client: Client) -> None:
    with client.stream_choices("counting", "hello", n=4, max_tokens=20, seed=7) as stream:
        texts = [""] * 4
        for delta in stream:
            texts[delta.index] += delta.text
        choices: Choices = stream.result
    assert texts == [text_of(expected_ids("hello", 7 + index, 20)) for index in range(4)]
    assert [choice.text for choice in choices] == texts and len(stream.ids) == 4
    assert [choice.text for choice in choices.choices[1:3]] == [
        choice.text for choice in choices[1:3]
    ]


def test_stop_strings_hold_for_each_choice(client: Client) -> None:
    whole = client.choices("counting", "hello", n=2, max_tokens=9, seed=7)
    stop = whole[1].text.split(" ")[3]
    choices = client.choices("counting", "hello", n=2, max_tokens=9, seed=7, stop=stop)
    assert (choices[0].text, choices[0].reason) == (whole[0].text, "length")
    assert (choices[1].text, choices[1].reason) == (whole[1].text.split(stop)[0], "stop")


def test_the_async_client_has_them_together_and_one_by_one(pool: Pool) -> None:
    expected = [text_of(expected_ids("hello", 7 + index, 6)) for index in range(3)]
    ask: dict[str, Any] = {"n": 3, "max_tokens": 6, "seed": 7}

    async def run() -> None:
        async with pool.async_client() as client:
            choices: Choices = await client.choices("counting", "hello", **ask)
            assert [choice.text for choice in choices] == expected
            texts = ["", "", ""]
            async with client.stream_choices("counting", "hello", **ask) as stream:
                async for delta in stream:
                    texts[delta.index] += delta.text
            assert texts == expected == [choice.text for choice in stream.result]
            streams = client.streams("counting", "hello", **ask)
            assert [(await choice_stream.read()).text for choice_stream in streams] == expected
            assert all(choice_stream.accepted for choice_stream in streams)

    asyncio.run(run())


def test_leaving_one_call_cancels_every_choice(pool: Pool, client: Client) -> None:
    with client.stream_choices("slow", "hello", n=8, max_tokens=100_000) as stream:
        deltas = iter(stream)
        next(deltas)
        until(lambda: live(pool) == 8, "all are live")
    until(lambda: live(pool) == 0, "all are cancelled")


def test_choices_that_do_not_fit_into_the_queue_are_refused_together(
    pool: Pool, client: Client
) -> None:
    with pytest.raises(QueueFull, match="more do not fit"):
        client.choices("slow", "hello", n=40, max_tokens=100_000)
    until(lambda: live(pool) == 0, "none is left")
    before = pool.ask("stats")["requests"]["accepted"]
    with pytest.raises(BadRequest, match="n is 65, must be an integer from 1 to 64"):
        client.choices("slow", "hello", n=65)
    with pytest.raises(BadRequest, match="choice 1 would have 18446744073709551616"):
        client.choices("slow", "hello", n=2, seed=2**64 - 1)
    assert pool.ask("stats")["requests"]["accepted"] == before


def test_an_error_of_one_choice_ends_all(pool: Pool, client: Client) -> None:
    with (
        pytest.raises(Internal),
        client.stream_choices("failing", "hello", n=3, max_tokens=1000) as stream,
    ):
        list(stream)
    with pytest.raises(Internal):
        _ = stream.result
    until(lambda: live(pool) == 0, "none is left")


def test_others_go_past_choices_that_wait_for_their_worker(pool: Pool, client: Client) -> None:
    """One replica runs 8 of the 12 choices; the other replica runs requests that came later."""
    ask: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "window": 1}
    with client.stream_choices("demo", "one " + WORDS, n=12, **ask) as stream:
        deltas = iter(stream)
        next(deltas)
        until(lambda: live(pool) == 12, "all are live")
        another = client.generate("demo", "another text", max_tokens=2, ignore_eos=True)
        assert another.usage["completion_tokens"] == 2
        until(lambda: rows_of(pool, "demo") == [0, 8], "the choices are on one replica")
    until(lambda: live(pool) == 0, "all are cancelled")


# ---- reports of prompts --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [True, False])
def test_log_probabilities_of_a_prompt(client: Client, batch: bool) -> None:
    ask: dict[str, Any] = {"prompt_logprobs": 3, "max_tokens": 5, "seed": 1, "batch": batch}
    answer = client.generate("demo", WORDS, **ask)
    plain = client.generate("demo", WORDS, max_tokens=5, seed=1)
    assert (answer.text, answer.ids) == (plain.text, plain.ids)
    ids = [entry["id"] for entry in answer.prompt]
    expected = demo_logprobs(ids)
    assert [entry["prompt"] for entry in answer.prompt] == [*range(answer.usage["prompt_tokens"])]
    assert answer.prompt[0]["logprob"] is None
    for entry, row in zip(answer.prompt[1:], expected, strict=True):
        assert entry["logprob"] == pytest.approx(row[entry["id"]], abs=1e-4)
        best = sorted(row.tolist(), reverse=True)[:3]
        assert [other["logprob"] for other in entry["top"]] == pytest.approx(best, abs=1e-4)


def test_an_echo_begins_with_the_text_of_the_prompt(client: Client) -> None:
    """A prompt that is a text is echoed as sent, without tokens that the tokenizer adds.

    A prompt of ids is echoed completely.
    """
    text = "caf\u00e9 \u2014 def f(x):\n    return '\U0001f642'"
    answer = client.generate("demo", text, echo=True, max_tokens=4, seed=3)
    plain = client.generate("demo", text, max_tokens=4, seed=3)
    assert answer.text == text + plain.text and answer.ids == plain.ids
    assert answer.prompt[0].get("added") and "logprob" not in answer.prompt[1]
    ids = [entry["id"] for entry in answer.prompt]
    again = client.generate("demo", tokens=ids[1:], echo=True, max_tokens=0)
    assert (again.text, again.ids, again.reason) == (text, (), "length")
    assert again.usage["completion_tokens"] == 0


def test_a_prompt_alone_is_reported_without_a_completion(client: Client) -> None:
    answer = client.generate("demo", WORDS, max_tokens=0, prompt_logprobs=0)
    assert (answer.text, answer.ids, answer.reason) == ("", (), "length")
    assert len(answer.prompt) == answer.usage["prompt_tokens"]
    single = client.generate("demo", tokens=[5], max_tokens=0, prompt_logprobs=2)
    assert [(e["id"], e["logprob"], e["top"]) for e in single.prompt] == [(5, None, [])]


def test_choices_report_the_prompt_once(client: Client) -> None:
    ask: dict[str, Any] = {"n": 4, "max_tokens": 4, "echo": True, "prompt_logprobs": 1}
    choices = client.choices("demo", "once " + WORDS, **ask)
    size = choices.usage["prompt_tokens"]
    cached, *others = [item.usage["cached_tokens"] for item in choices]
    assert cached == 0  # the first choice reports the prompt, so it reads the whole prompt
    first, *rest = sorted(others)  # one of the others may have read the prompt before
    assert (first < 20 or first == size - 1) and rest == [size - 1] * 2
    assert len(choices.prompt) == size
    for choice in choices:
        assert choice.prompt == choices.prompt and choice.text.startswith("once " + WORDS)


def test_long_reports_come_in_messages_that_fit(client: Client) -> None:
    tokens = [5 + i % 3000 for i in range(1900)]
    answer = client.generate("demo", tokens=tokens, max_tokens=1, prompt_logprobs=20)
    assert [entry["id"] for entry in answer.prompt] == tokens
    assert {len(entry["top"]) for entry in answer.prompt[1:]} == {20}


def test_reports_that_cannot_be_had_are_refused(client: Client) -> None:
    with pytest.raises(BadRequest, match="294921 entries, at most 262144"):
        client.generate("counting", "x" * 32769, prompt_logprobs=8)


# ---- the command line ----------------------------------------------------------------------------


def test_run_prints_one_choice_after_the_other(pool: Pool) -> None:
    words = ("run", "counting", "hello", "-n", "2", "--seed", "7", "--max-tokens", "3")
    done = pool.cli(*words)
    texts = [text_of(expected_ids("hello", 7 + index, 3)) for index in range(2)]
    assert done.stdout == f"--- choice 0\n{texts[0]}\n--- choice 1\n{texts[1]}\n"
    assert "2 choices, 6 tokens, prompt 5" in done.stderr and "seeds from 7" in done.stderr
    lines = [json.loads(line) for line in pool.cli(*words, "--json").stdout.splitlines()]
    ends = [line for line in lines if line.get("done")]
    assert [(end["index"], end["text"]) for end in ends] == [*enumerate(texts)]
    assert {line["index"] for line in lines} == {0, 1}
    refused = pool.cli("run", "counting", "hello", "-n", "0")
    assert refused.returncode == 2 and "n is 0, must be an integer from 1 to 64" in refused.stderr


def test_run_echoes_and_reports(pool: Pool) -> None:
    done = pool.cli("run", "demo", "def f(x):", "--echo", "--max-tokens", "0", "--quiet")
    assert done.stdout == "def f(x):\n"
    words = ("run", "demo", "def f(x):", "--prompt-logprobs", "1", "--max-tokens", "0", "--json")
    lines = [json.loads(line) for line in pool.cli(*words).stdout.splitlines()]
    entries = [entry for line in lines for entry in line.get("prompt", [])]
    assert lines[-1]["done"] and len(entries) == lines[-1]["usage"]["prompt_tokens"]
    assert entries[0]["logprob"] is None and len(entries[1]["top"]) == 1
