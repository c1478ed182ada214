"""The choice of the worker for a request."""

from __future__ import annotations

import pytest

from mlxpool.broker.requests.request import Request
from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.placement import choose_pair, demand_of
from mlxpool.broker.workers.worker import Worker, WorkerState, restart_delay
from mlxpool.common.protocol.from_client import Generate
from support.core_requests import new_request


def request(number: int, priority: int = 0) -> Request:
    return new_request(number.to_bytes(16, "big"), priority=priority)


def worker(name: str, free: int, ready_at: float = 1.0, **fields: int) -> Worker:
    new_worker = Worker(name, "m", state=WorkerState.READY, sequences=free, ready_at=ready_at)
    new_worker.works_sent = fields.get("unseen", 0)
    return new_worker


def chosen(workers: list[Worker], *requests: Request) -> tuple[Request, Worker] | None:
    return choose_pair(requests, workers, WorkerSpeed())


def worker_for(workers: list[Worker], request: Request) -> Worker | None:
    pair = chosen(workers, request)
    return None if pair is None else pair[1]


def send(worker: Worker, request: Request, run: int = 1) -> None:
    """Sends the worker a request, which ends immediately."""
    worker.route.sent(run, demand_of(request, 100))
    worker.route.ended(run)


def test_without_workers_none_is_chosen() -> None:
    assert chosen([], request(1)) is None
    assert chosen([worker("a", 0), worker("b", 2, unseen=2)], request(1)) is None


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    suspect = worker("a", 9)
    suspect.move("suspect")
    assert worker_for([suspect], request(1)) is None
    other = worker("b", 1)
    assert worker_for([suspect, other], request(1)) is other


def test_of_equal_costs_the_worker_with_most_credit_is_chosen_then_the_longest_ready() -> None:
    few, many = worker("a", 1), worker("b", 3, unseen=1)
    assert worker_for([few, many], request(1)) is many
    young, old = worker("a", 2, ready_at=9.0), worker("b", 2, ready_at=3.0)
    assert worker_for([young, old], request(1)) is old


def with_prompt(prompt: str, session: str = "", owner: str = "uid:1") -> Request:
    return new_request(owner=owner, prompt=prompt, session=session)


def test_a_worker_that_was_sent_the_prompts_beginning_goes_before_an_emptier_one() -> None:
    few, many = worker("a", 1), worker("b", 3)
    beginning = "x" * 3000
    send(few, with_prompt(beginning + "one"))
    assert worker_for([few, many], with_prompt(beginning + "two")) is few
    assert worker_for([few, many], with_prompt("y" + beginning)) is many


def test_a_session_is_known_by_its_owner_and_name() -> None:
    first, other = worker("a", 1), worker("b", 3)
    send(first, with_prompt("z" * 3000, "s1"))
    later = "not the same beginning" + "z" * 3000
    assert worker_for([first, other], with_prompt(later, "s1")) is first
    assert worker_for([first, other], with_prompt(later, "s1", owner="uid:2")) is other
    assert worker_for([first, other], with_prompt(later, "s2")) is other


def test_a_busy_worker_is_left_although_it_knows_the_prompt() -> None:
    busy, idle = worker("a", 1), worker("b", 1)
    send(busy, with_prompt("x" * 3000))
    waiting = with_prompt("q" * 40_000)
    busy.route.sent(7, demand_of(waiting, 100))  # the worker has to prefill 10,000 tokens first
    assert worker_for([busy, idle], with_prompt("x" * 3000)) is idle
    busy.route.has_read(7)
    assert worker_for([busy, idle], with_prompt("x" * 3000)) is busy


def test_a_later_request_of_the_owner_passes_one_that_would_lose_more() -> None:
    free, full = worker("a", 1), worker("b", 0)
    first, second = with_prompt("x" * 8000), with_prompt("y" * 8000)
    send(full, first)
    send(free, second)
    assert chosen([free, full], first, second) == (second, free)
    assert chosen([free, full], first) == (first, free), "no request waits beside a free worker"


def test_the_model_learns_how_long_answers_are() -> None:
    short = new_request(options={"max_tokens": 5})
    assert demand_of(short, 80).output_tokens == 5
    assert demand_of(request(1), 80).output_tokens == 80


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


# ---- worker --------------------------------------------------------------------------------------
# The time that a slot stays empty after failures.


@pytest.mark.parametrize(
    ("failures", "delay"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10**9, 60)]
)
def test_the_restart_delay_doubles_up_to_a_bound(failures: int, delay: float) -> None:
    assert restart_delay(failures, 1.0, 60.0) == delay
