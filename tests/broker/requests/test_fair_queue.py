"""The order of waiting requests: by priority first; then owners take turns, weighted by tokens."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.requests.fair_queue import MAX_COST, MAX_DECODE_COST, Queue, cost
from mlxpool.broker.requests.request import IDLE_RANK, RANKS, Request, rank_of
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_requests import new_request


def request(
    number: int, owner: str = "a", prompt: str = "p", tokens: int = 0, **body: Any
) -> Request:
    options = {"max_tokens": tokens} if tokens else {}
    ident = number.to_bytes(16, "big")
    return new_request(ident, owner, number, prompt=prompt, options=options, **body)


def filled(*requests: Request) -> Queue:
    queue = Queue()
    for each in requests:
        queue.add(each)
    return queue


def served(queue: Queue, count: int) -> list[Request]:
    order = []
    for _ in range(count):
        head = queue.head()
        assert head is not None
        queue.take(head)
        order.append(head)
    return order


def test_one_owner_is_served_in_order() -> None:
    requests = [request(n) for n in range(5)]
    assert served(filled(*requests), 5) == requests


def test_the_head_without_images_passes_those_with_images() -> None:
    seen = [request(n, "a", prompt="[img-0]", images=1, blobs=(b"x",)) for n in range(2)]
    texts = [request(10, "a"), request(11, "b")]
    queue = filled(*seen, *texts)
    heads = []
    while (head := queue.head(without_images=True)) is not None:
        queue.take(head)
        heads.append(head)
    assert set(heads) == set(texts) and len(heads) == 2
    assert served(queue, 2) == seen
    assert (queue.count, queue.bytes, queue.head(without_images=True)) == (0, 0, None)


def test_priorities_are_strict() -> None:
    requests = [request(n, owner, priority=n % 3) for n, owner in enumerate("abcabcabc")]
    order = [each.message.priority for each in served(filled(*requests), 9)]
    assert order == [2, 2, 2, 1, 1, 1, 0, 0, 0]


def test_a_flood_of_one_owner_leaves_the_other_its_share() -> None:
    flood = [request(n, "greedy", tokens=100) for n in range(100)]
    few = [request(200 + n, "modest", tokens=100) for n in range(10)]
    order = [each.owner for each in served(filled(*flood, *few), 20)]
    assert Counter(order) == {"greedy": 10, "modest": 10}


def test_shares_are_of_tokens_not_of_requests() -> None:
    long = [request(n, "long", prompt="x" * 14_000, tokens=500) for n in range(50)]
    short = [request(100 + n, "short", tokens=400) for n in range(500)]
    order = served(filled(*long, *short), 220)
    spent = Counter[str]()
    for each in order:
        spent[each.owner] += cost(each)
    assert 0.8 < spent["long"] / spent["short"] < 1.25


def test_the_owner_with_the_fewest_places_goes_first() -> None:
    queue = filled(request(1, "a"), request(2, "b"), request(3, "c"), request(4, "c"))
    for places, owners in (({"a": 2, "b": 1}, "c"), ({"a": 1, "b": 1, "c": 2}, "ab"), ({}, "abc")):
        head = queue.head(places)
        assert head is not None and head.owner in owners
        assert queue.heads(places)[0].owner == head.owner
    assert [each.arrival for each in queue.heads({"a": 1, "b": 1})] == [3, 4]


def test_the_fewest_places_count_among_owners_of_texts_where_a_text_is_wanted() -> None:
    seen = request(1, "a", prompt="[img-0]", images=1, blobs=(b"x",))
    queue = filled(seen, request(2, "b"))
    head = queue.head({"b": 3}, without_images=True)
    assert head is not None and head.owner == "b"


def test_a_preempted_request_is_its_owners_first_and_its_owner_the_last() -> None:
    queue = filled(request(5, "a"), request(6, "b"))
    for number in (4, 3):
        begun = request(number, "a")
        begun.rank = rank_of(0, kept=False, idle=False)
        queue.add_preempted(begun)
    assert [each.arrival for each in queue.in_turn()] == [6, 3, 4, 5]
    assert queue.begun and not queue.resumed
    assert [each.arrival for each in queue.of_owner("a")] == [3, 4, 5]
    assert {each.arrival for each in queue.unchecked_resumed((1,))} == {3, 4}
    assert not queue.unchecked_resumed((1,))
    assert {each.arrival for each in queue.unchecked_resumed((2,))} == {3, 4}
    for each in list(queue.of_owner("a")):
        queue.take(each)
    assert not queue.begun and queue.owners() == {"b"}
    idle = request(1, "b")
    idle.rank = IDLE_RANK
    queue.add_preempted(idle)
    assert [each.arrival for each in queue.in_turn()] == [6, 1], "an idle job waits for others"


def test_an_owner_without_waiting_requests_keeps_no_deficit() -> None:
    queue = filled(request(1, "a", tokens=5000))
    served(queue, 1)
    assert queue.head() is None
    assert not any(lane.deficits for lane in queue.lanes)


def test_the_cost_of_a_request_is_its_tokens() -> None:
    assert cost(request(1, prompt="x" * 400, tokens=50)) == 1 + 100 + 50
    assert cost(request(1, prompt="x")) == 1 + MAX_DECODE_COST
    assert cost(request(1, prompt="x", tokens=10**6)) == 1 + MAX_DECODE_COST, "it has turns"
    assert cost(request(1, prompt="x" * 4 * 10**6)) == MAX_COST
    begun = request(1, prompt="x", tokens=100)
    begun.run.ids = bytearray(pack_ids(range(90)))
    assert cost(begun) == 1 + 10, "what it has it does not pay for again"


def test_resumed_requests_keep_the_order_of_arrival() -> None:
    queue = filled(request(9))
    for number in (3, 1, 2):
        queue.add_resumed(request(number))
    queue.add_resumed(request(7, priority=1))
    assert [each.arrival for each in queue.resumed] == [7, 1, 2, 3]
    assert len(queue) == 5
    assert [queue.position(each) for each in queue.resumed] == [0, 1, 2, 3]
    head = queue.head()
    assert head is not None
    assert queue.position(head) == 4


def test_a_request_in_the_middle_can_be_dropped() -> None:
    requests = [request(n) for n in range(3)]
    queue = filled(*requests)
    queue.drop(requests[1])
    assert served(queue, 2) == [requests[0], requests[2]]
    with pytest.raises(KeyError):
        queue.drop(requests[1])


def test_the_bytes_of_waiting_prompts_are_counted() -> None:
    first, second = request(1, prompt="x" * 10), request(2, prompt="y" * 20)
    queue = filled(first)
    queue.add_resumed(second)
    assert (queue.count, queue.bytes) == (2, 30)
    queue.drop(second)
    queue.take(first)
    assert (queue.count, queue.bytes) == (0, 0)


def test_the_longest_wait_is_found_over_owners_priorities_and_resumed_ones() -> None:
    queue = Queue()
    assert queue.waiting_since() == math.inf
    for number, (owner, priority, at) in enumerate([("a", 0, 5.0), ("a", 0, 3.0), ("b", 2, 4.0)]):
        each = request(number, owner, priority=priority)
        each.accepted_at = at
        queue.add(each)
    assert queue.waiting_since() == 4.0, "the first of its owner, whatever the next ones say"
    resumed = request(9)
    resumed.accepted_at, resumed.run.measured_at = 1.0, 3.5
    queue.add_resumed(resumed)
    assert queue.waiting_since() == 3.5, "it has had tokens until then"


waiting = st.tuples(
    st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 3000), st.booleans(), st.booleans()
)


@given(st.lists(waiting, max_size=40))
def test_every_request_is_taken_once(entries: list[tuple[str, int, int, bool, bool]]) -> None:
    queue, left = Queue(), set()
    for number, (owner, priority, tokens, back, gone) in enumerate(entries):
        each = request(number, owner, tokens=tokens, priority=priority)
        (queue.add_resumed if back else queue.add)(each)
        if gone:
            queue.drop(each)
        else:
            left.add(number)
    assert {each.arrival for each in queue} == left
    for back_again in list(queue.resumed):
        queue.take(back_again)
        left.discard(back_again.arrival)
    order = served(queue, len(left))
    assert {each.arrival for each in order} == left
    assert [e.message.priority for e in order] == sorted(
        (e.message.priority for e in order), reverse=True
    )
    assert (queue.count, queue.bytes, queue.head()) == (0, 0, None)


class Incomparable(Request):
    """A request that raises if it is compared with other requests."""

    __slots__ = ()
    __hash__ = Request.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared with another one")


def test_none_of_many_is_looked_for_among_the_others() -> None:
    """Removing a request compares it with no other: a client may cancel thousands at once."""
    fresh, resumed = ([request(at + n) for n in range(9)] for at in (0, 100))
    for each in (*fresh, *resumed):
        each.__class__ = Incomparable
    queue = filled(*fresh)
    for each in resumed:
        queue.add_resumed(each)
    for remove in (queue.drop, queue.take):
        for waiting in (fresh, resumed):
            remove(waiting.pop(4))
    assert [queue.position(each) for each in resumed] == list(range(7))
    assert [each.arrival for each in queue.in_turn()] == [each.arrival for each in fresh]


def test_only_requests_of_a_higher_rank_outrank() -> None:
    idle, job, stream = (
        rank_of(0, kept=True, idle=True),
        rank_of(0, kept=True, idle=False),
        rank_of(0, kept=False, idle=False),
    )
    highest = rank_of(2, kept=False, idle=False)
    assert IDLE_RANK == idle < job < stream < rank_of(1, kept=True, idle=False)
    assert highest == RANKS - 1
    mine, other = request(1), request(2, "b")
    mine.rank, other.rank = job, job
    queue = filled(mine, other)
    assert not queue.outranks(mine), "as high is not higher"
    queue.drop(other)
    other.rank = stream
    queue.add_resumed(other)
    assert queue.outranks(mine) and not queue.outranks(other)
    queue.take(other)
    assert not queue.outranks(mine) and queue.ranked[job] == 1
