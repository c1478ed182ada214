"""Which worker a request is given to."""

from __future__ import annotations

from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.placement import (
    MAX_PREFIXES,
    choose_worker,
    prefix_keys,
    remember_prefixes,
)
from mlxpool.broker.workers.worker import Worker
from mlxpool.broker.workers.worker_states import WorkerState
from mlxpool.common.protocol.from_client import Generate
from support.core_requests import new_request


def request(number: int, priority: int = 0) -> Request:
    return new_request(number.to_bytes(16, "big"), priority=priority)


def worker(name: str, free: int, ready_at: float = 1.0, **fields: int) -> Worker:
    made = Worker(name, "m", state=WorkerState.READY, sequences=free, ready_at=ready_at)
    made.works_sent = fields.get("unseen", 0)
    return made


def test_without_workers_none_is_chosen() -> None:
    assert choose_worker([], request(1)) is None
    assert choose_worker([worker("a", 0), worker("b", 2, unseen=2)], request(1)) is None


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    suspect = worker("a", 9)
    suspect.move("suspect")
    assert choose_worker([suspect], request(1)) is None
    other = worker("b", 1)
    assert choose_worker([suspect, other], request(1)) is other


def test_the_worker_with_most_credit_is_chosen_then_the_longest_ready() -> None:
    few, many = worker("a", 1), worker("b", 3, unseen=1)
    assert choose_worker([few, many], request(1)) is many
    young, old = worker("a", 2, ready_at=9.0), worker("b", 2, ready_at=3.0)
    assert choose_worker([young, old], request(1)) is old


def with_prompt(prompt: str, session: str = "", owner: str = "uid:1") -> Request:
    return new_request(owner=owner, prompt=prompt, session=session)


def test_a_worker_that_knows_the_prompts_head_goes_before_an_emptier_one() -> None:
    few, many = worker("a", 1), worker("b", 3)
    head = "x" * 300
    remember_prefixes(few, prefix_keys(with_prompt(head + "one")))
    assert choose_worker([few, many], with_prompt(head + "two")) is few
    assert choose_worker([few, many], with_prompt("y" + head)) is many


def test_a_known_session_goes_before_a_known_head() -> None:
    by_head, by_session = worker("a", 9), worker("b", 1)
    remember_prefixes(by_head, prefix_keys(with_prompt("hello")))
    remember_prefixes(by_session, prefix_keys(with_prompt("other", "s1")))
    both = [by_head, by_session]
    assert choose_worker(both, with_prompt("hello", "s1")) is by_session
    assert choose_worker(both, with_prompt("hello", "s2")) is by_head
    assert choose_worker(both, with_prompt("third", "s1", owner="uid:2")) is by_head


def test_messages_are_known_by_the_first_of_them() -> None:
    def chat(last: str) -> Request:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": last}]
        return new_request(messages=messages)

    assert prefix_keys(chat("a")) == prefix_keys(chat("b"))


def test_all_text_of_a_chat_counts() -> None:
    call = {"function": {"name": "ab", "arguments": {"k": "é"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "abc"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    body = {"model": "m", "messages": messages, "tools": [{"name": "clock"}]}
    message = Generate.parse(body, ())
    words = ("user", "text", "abc", "assistant", "ab", "é", "clock")
    assert message.size == sum(len(word.encode()) for word in words)
    assert message.prompt.body() == {"messages": messages, "tools": [{"name": "clock"}]}
    assert Generate.parse({**body, "tools": []}, ()).prompt.body() == {"messages": messages}


def test_known_prefixes_are_bounded() -> None:
    one = worker("a", 1)
    for number in range(MAX_PREFIXES + 10):
        remember_prefixes(one, [b"%d" % number])
    remember_prefixes(one, [b"10"])
    assert len(one.prefixes) == MAX_PREFIXES
    assert next(iter(one.prefixes)) == b"11" and list(one.prefixes)[-1] == b"10"
