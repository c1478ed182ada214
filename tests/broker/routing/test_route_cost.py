"""The cost of a request on a worker, and the speeds of workers."""

from __future__ import annotations

import pytest

from mlxpool.broker.routing.prefix_index import PromptPieces
from mlxpool.broker.routing.route_cost import (
    MAX_SESSIONS,
    READ_WEIGHT,
    Demand,
    Pair,
    Route,
    cheapest_pair,
    cost_ms,
    crowd_of,
)
from mlxpool.broker.routing.worker_speed import PRIOR, WorkerSpeed, prompt_ms_of, step_ms_of


def demand(tokens: int, name: bytes = b"a", session: str = "") -> Demand:
    return Demand(PromptPieces((name,), (tokens,), tokens), 100, ("me", session))


def route(prompt_ms: float, *steps: tuple[int, float]) -> Route:
    worker_route = Route()
    worker_route.speed.observe_prompt(prompt_ms)
    for rows, ms in steps:
        worker_route.speed.observe_step(rows, ms)
    return worker_route


def test_the_cost_is_the_time_to_read_and_to_decode() -> None:
    worker_route = route(2.0, (1, 20.0), (5, 28.0))  # a step: 18 ms plus 2 ms per row
    assert cost_ms(demand(300), worker_route, 4, WorkerSpeed()) == pytest.approx(
        600 * READ_WEIGHT + 100 * 24
    )
    worker_route.sent(1, demand(50, b"other"))
    assert cost_ms(demand(300), worker_route, 4, WorkerSpeed()) == pytest.approx(
        600 * READ_WEIGHT + 100 + 100 * 24
    )
    worker_route.has_read(1)
    worker_route.sent(2, demand(300))
    worker_route.has_read(2)
    assert cost_ms(demand(300), worker_route, 4, WorkerSpeed()) == pytest.approx(100 * 24)


def test_a_slow_replica_costs_more_for_the_same_prompt() -> None:
    fast, slow = route(1.0, (1, 10.0)), route(4.0, (1, 40.0))
    slow.sent(1, demand(300))
    slow.has_read(1)
    assert cost_ms(demand(300), fast, 0, WorkerSpeed()) < cost_ms(
        demand(300), slow, 0, WorkerSpeed()
    )


def test_an_unknown_worker_is_taken_to_be_as_fast_as_the_others() -> None:
    model = WorkerSpeed()
    model.observe_prompt(3.0)
    model.observe_step(1, 7.0)
    assert cost_ms(demand(10), Route(), 0, model) == pytest.approx(30 * READ_WEIGHT + 700)


def test_predictions_are_corrected_by_what_was_cached() -> None:
    worker_route = route(1.0, (1, 10.0))
    worker_route.index.add(demand(400).pieces)
    for run in range(100):
        worker_route.sent(run, demand(400))
        worker_route.ended(run, cached=100)
    assert worker_route.trust == pytest.approx(0.25, abs=0.01)
    assert not worker_route.predicted and not worker_route.unread
    assert cost_ms(demand(400), worker_route, 0, WorkerSpeed()) == pytest.approx(
        300 * READ_WEIGHT + 1000, rel=0.01
    )


def test_evictions_shrink_the_index_once() -> None:
    worker_route = route(1.0)
    worker_route.sent(1, demand(400))
    worker_route.dropped(0)
    assert worker_route.index.tokens == 400
    worker_route.dropped(300)
    assert worker_route.index.tokens == 0
    worker_route.sent(2, demand(400))
    worker_route.dropped(300)
    assert worker_route.index.tokens == 400


def test_a_session_is_found_with_its_prompts_length_and_sessions_are_bounded() -> None:
    worker_route = Route()
    worker_route.sent(1, demand(400, b"a", "s"))
    assert worker_route.found(demand(500, b"b", "s")) == 400
    assert worker_route.found(demand(300, b"b", "s")) == 300
    assert worker_route.found(demand(500, b"b", "t")) == 0
    for number in range(MAX_SESSIONS):
        worker_route.sent(2 + number, demand(10, b"%d" % number, str(number)))
    assert worker_route.found(demand(500, b"b", "s")) == 0
    assert len(worker_route.sessions) == MAX_SESSIONS


def test_steps_are_fitted_by_a_line_over_rows() -> None:
    speed = WorkerSpeed()
    for _ in range(50):
        for rows in (1, 2, 4, 8):
            speed.observe_step(rows, 10 + 3 * rows)
    assert speed.step_ms(6) == pytest.approx(28, rel=1e-6)
    speed.observe_step(0, 99)
    speed.observe_step(3, 0)
    assert speed.step_ms(6) == pytest.approx(28, rel=1e-6)


def test_newer_steps_weigh_more() -> None:
    speed = WorkerSpeed()
    for ms in [10.0] * 300 + [40.0] * 300:
        speed.observe_step(4, ms)
    assert speed.step_ms(4) == pytest.approx(40, rel=0.01)
    assert speed.step_ms(1) > 0


def test_a_few_observations_of_a_worker_say_little_beside_those_of_all() -> None:
    """A few slow steps change a worker's estimated speed little; many steps change it much."""
    model, slow = WorkerSpeed(), WorkerSpeed()
    for _ in range(200):
        model.observe_prompt(1.0)
        model.observe_step(4, 20.0)
    slow.observe_prompt(8.0)
    slow.observe_step(4, 500.0)
    assert prompt_ms_of(slow, model) == pytest.approx((8 + PRIOR) / (1 + PRIOR))
    assert step_ms_of(slow, model, 4) == pytest.approx((500 + 20 * PRIOR) / (1 + PRIOR))
    for _ in range(200):
        slow.observe_prompt(8.0)
        slow.observe_step(4, 500.0)
    assert prompt_ms_of(slow, model) > 6 and step_ms_of(slow, model, 4) > 400


def test_what_was_observed_of_a_worker_grows_old_while_it_rests() -> None:
    model, once = WorkerSpeed(), WorkerSpeed()
    for _ in range(200):
        model.observe_prompt(1.0)
        model.observe_step(4, 20.0)
        once.observe_prompt(8.0)
        once.observe_step(4, 500.0)
    for _ in range(300):
        once.rest()
    assert prompt_ms_of(once, model) == pytest.approx(1.0, rel=0.01)
    assert step_ms_of(once, model, 4) == pytest.approx(20.0, rel=0.02)
    assert once.step_ms(4) == pytest.approx(500.0), "only its weight changes"


def test_the_more_requests_wait_the_more_it_costs_to_read_again() -> None:
    """A single request goes to an idle worker; many requests go to the worker with their cache.

    The prompt has 250 tokens. One worker has all of them cached, but must first prefill 400 other
    tokens. The other worker is idle.
    """
    cached, idle = route(1.0, (1, 10.0)), route(1.0, (1, 10.0))
    cached.index.add(demand(250).pieces)
    cached.sent(1, demand(400, b"other"))
    routes = [cached, idle]

    def cheaper(wanted: Demand, waiting: int, *others: Demand) -> Route:
        crowd = crowd_of(wanted, routes, waiting, [wanted, *others])
        return min(routes, key=lambda each: cost_ms(wanted, each, 0, WorkerSpeed(), crowd))

    assert cheaper(demand(250), 0) is idle
    assert cheaper(demand(250), 8, demand(9, b"x"), demand(9, b"y")) is cached
    assert cheaper(demand(250, b"new"), 8, demand(9, b"x")) is idle, "nobody has it yet"
    assert cheaper(demand(250), 8, demand(250), demand(250)) is idle, "all want the same"


def test_the_pair_that_loses_least_is_chosen() -> None:
    costs = {("a", "x"): 5.0, ("a", "y"): 1.0, ("b", "x"): 3.0, ("b", "y"): 2.0}

    def choose(*free: str) -> Pair[str, str] | None:
        return cheapest_pair(
            ["a", "b"], ["x", "y"], lambda r, w: costs[r, w], lambda _, worker: worker in free
        )

    assert choose("x", "y") == Pair("a", "y", 0.0)
    assert choose("x") == Pair("b", "x", 1.0), "a loses 4 there, b only 1"
    assert choose("y") == Pair("a", "y", 0.0)
    assert choose() is None
