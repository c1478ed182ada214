"""`decide` in a real pool: clients, gateway, command line; kills, cancels, deadlines, refusals."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import pytest

from mlxpool.client import Client, Decision
from mlxpool.common.errors import BadRequest, ContextExceeded, DeadlineExceeded, UnknownModel
from support.openapi_answers import faults
from support.pool import Pool, connection_of, until

CONFIG = """
[models.demo]
path = "builtin:demo"
replicas = 2
"""
TEXT = "Ada reads a book about ships. The weather in Lisbon is sunny and warm. " * 4
QUESTIONS: list[Any] = [
    "Is it sunny?",
    ("Which city is it?", ["Paris", "Lisbon", "Tokyo"]),
    ("How warm is it?", range(1, 11)),
]
MANY = [(f"Is {n} a number?", ["yes", "no", "neither"]) for n in range(64)]


def same(found: Decision, expected: Decision) -> bool:
    return found.probabilities == pytest.approx(
        expected.probabilities, abs=1e-4
    ) and found.outside == pytest.approx(expected.outside, abs=1e-4)


def test_one_question_and_several_agree(client: Client) -> None:
    together = client.decide_all("demo", TEXT, QUESTIONS)
    assert [list(item.probabilities) for item in together] == [
        [True, False],
        ["Paris", "Lisbon", "Tokyo"],
        list(range(1, 11)),
    ]
    for decision in together:
        assert (
            sum(decision.probabilities.values()) == pytest.approx(1) and 0 <= decision.outside <= 1
        )
    for decision, asked in zip(together, QUESTIONS, strict=True):
        (alone,) = client.decide_all("demo", TEXT, [asked])
        assert same(alone, decision)


def test_probabilities_are_those_of_a_completion_of_the_same_chat(client: Client) -> None:
    content = f"{TEXT}\n\nA. one\nB. two\nAnswer with one letter: Which?"
    ids = [client.tokenize("demo", text)[-1] for text in ("A", " A", "B", " B")]
    biases = {token: 50.0 for token in ids}  # so that these ids are among the likeliest
    result = client.generate(
        "demo",
        messages=[{"role": "user", "content": content}],
        max_tokens=1,
        temperature=0,
        logit_bias=biases,
        logprobs=True,
        top_logprobs=20,
    )
    assert result.logprobs is not None
    (drawn,) = result.logprobs
    (decision,) = client.decide_all("demo", TEXT, [("Which?", ["one", "two"])])
    inside = 1 - decision.outside
    share = decision.probabilities["one" if drawn["id"] in ids[:2] else "two"]
    assert drawn["id"] in ids and 0 < math.exp(drawn["logprob"]) <= share * inside * 1.001
    usage = client.decide_all("demo", TEXT, [("Which?", ["one", "two"])]).usage
    assert usage["prompt_tokens"] == result.usage["prompt_tokens"]


def test_more_questions_than_a_call_takes(client: Client) -> None:
    asked = [f"Is it {n}?" for n in range(70)]
    decisions = client.decide_all("demo", TEXT, asked)
    assert len(decisions) == 70
    assert same(decisions[69], client.decide_all("demo", TEXT, [asked[69]])[0])


def test_a_temperature_above_1_is_less_sure(client: Client) -> None:
    plain = client.decide("demo", TEXT, ["a", "b"])
    flat = client.decide("demo", TEXT, ["a", "b"], temperature=50)
    assert flat.answer == plain.answer and flat.probability < plain.probability
    assert flat.outside == pytest.approx(plain.outside, abs=1e-4)


def test_what_cannot_be_decided_is_refused_by_name(client: Client) -> None:
    long = "ships and books. " * 2000
    refusals: list[tuple[Any, str, type[Exception]]] = [
        (lambda: client.decide("counting", "x"), "it has no probabilities", BadRequest),
        (lambda: client.decide("demo-embed", "x"), "does not (decide|generate text)", BadRequest),
        (lambda: client.decide("nobody", "x"), "nobody", UnknownModel),
        (lambda: client.decide("demo", long), "context", ContextExceeded),
        (
            lambda: client.decide_all("demo", TEXT, ["a", "b " * 2000]),
            r"questions\[1\]: text and question have \d+ tokens, the context is 2048",
            ContextExceeded,
        ),
    ]
    for ask, said, kind in refusals:
        with pytest.raises(kind, match=said):
            ask()


def test_calls_survive_the_end_of_every_worker(pool: Pool, client: Client) -> None:
    expected = client.decide_all("demo", TEXT, MANY)

    async def storm() -> list[list[Decision]]:
        async with pool.async_client() as many:
            asked = [asyncio.create_task(many.decide_all("demo", TEXT, MANY)) for _ in range(4)]
            for slot in ("demo/0", "demo/1"):
                await asyncio.sleep(0.2)
                await asyncio.to_thread(pool.kill_worker, slot)
            return list(await asyncio.gather(*asked))

    for decisions in asyncio.run(storm()):
        assert len(decisions) == 64 and all(map(same, decisions, expected))


def test_a_deadline_and_a_cancelled_task_end_a_call(pool: Pool, client: Client) -> None:
    with pytest.raises(DeadlineExceeded, match="no answer to decide"):
        client.decide_all("demo", TEXT * 4, MANY, deadline_ms=1)

    async def cancelled() -> None:
        async with pool.async_client() as many:
            task = asyncio.create_task(many.decide_all("demo", TEXT * 4, MANY))
            while not connection_of(many).waits():  # until the call is sent
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    until(lambda: idle(pool), "the workers have nothing left to do")
    assert len(client.decide_all("demo", TEXT, QUESTIONS)) == 3


def idle(pool: Pool) -> bool:
    workers = json.loads(pool.cli("ps", "--json").stdout)["workers"]
    return all(worker["phase"] == "idle" for worker in workers if worker["model"] == "demo")


def test_streams_beside_questions_keep_their_tokens(client: Client) -> None:
    alone = client.generate("demo", "def main():", max_tokens=60, temperature=0, ignore_eos=True)
    with client.stream(
        "demo", "def main():", max_tokens=60, temperature=0, ignore_eos=True
    ) as stream:
        client.decide_all("demo", TEXT, MANY)
        assert stream.read().ids == alone.ids


def test_over_http(http: httpx.Client, client: Client) -> None:
    body = {
        "model": "demo",
        "prompt": TEXT,
        "questions": [
            {"question": "Is it sunny?"},
            {"question": "Which city is it?", "choices": ["Paris", "Lisbon", "Tokyo"]},
            {"question": "How warm is it?", "scale": [1, 10]},
        ],
        "temperature": 1,
    }
    answer = http.post("/v1/decisions", json=body)
    assert answer.status_code == 200 and not faults(answer.json(), "Decisions")
    decisions = answer.json()
    expected = client.decide_all("demo", TEXT, QUESTIONS)
    assert decisions["usage"]["prompt_tokens"] == expected.usage["prompt_tokens"]
    sunny, city, warm = decisions["data"]
    assert sunny["probabilities"] == pytest.approx(
        {"yes": expected[0].probabilities[True], "no": expected[0].probabilities[False]}, abs=1e-4
    )
    assert sunny["answer"] is expected[0].answer and city["answer"] == expected[1].answer
    assert list(warm["probabilities"]) == [str(n) for n in range(1, 11)]
    assert warm["expected"] == pytest.approx(expected[2].expected, abs=1e-2)
    assert "expected" not in city and city["outside"] == pytest.approx(
        expected[1].outside, abs=1e-4
    )


def test_on_the_command_line(pool: Pool, client: Client) -> None:
    city, labels = QUESTIONS[1]
    flags = [word for label in labels for word in ("--choice", label)]
    line = pool.cli("decide", "demo", "-", city, "?\n", *flags, stdin=TEXT).stdout.splitlines()
    assert len(line) == 2 and line[0].endswith(f": {city}") and "outside" in line[0]
    expected = client.decide_all("demo", TEXT, [QUESTIONS[1]])[0]
    assert line[0].startswith(f"{expected.answer} {expected.probability:.3f}")
    printed = pool.cli("decide", "demo", TEXT, "--scale", "1-10", "--json").stdout
    (decision,) = json.loads(printed)["decisions"]
    assert decision["labels"] == [str(n) for n in range(1, 11)]
    done = pool.cli("decide", "demo", "x", "--scale", "9")
    assert done.returncode == 2 and "must be two numbers such as 1-10" in done.stderr
    done = pool.cli("decide", "demo", "x", "--choice", "one")
    assert done.returncode == 2 and "2 to 26 texts, got 1" in done.stderr
