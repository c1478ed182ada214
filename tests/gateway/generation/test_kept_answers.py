"""Stored answers: the steps into which they are divided, and the ids of their tool calls."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mlxpool.client import Delta
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats import NO_CHAT
from mlxpool.gateway.formats.events import Content
from mlxpool.gateway.generation.choice_streams import call_ids
from mlxpool.gateway.generation.kept_answers import KeptAnswer, has_failed, steps_of
from mlxpool.gateway.openai.responses_api.kept import KeptResponse, ResponseNote
from mlxpool.gateway.resumption import GENERATION

ENTRIES = ({"logprob": -1.0}, {"logprob": -2.0}, {"logprob": -3.0})
NOTE = ResponseNote(7, {"model": "m", "instructions": "x"}, False, ("hermes", None), (), True, True)


def test_a_delta_is_divided_into_its_steps() -> None:
    delta = Delta("abc", (1, 2, 3), 0, ENTRIES, steps=((1, 1), (3, 3)))
    assert steps_of(delta) == [("a", 1, ENTRIES[:1]), ("bc", 2, ENTRIES[1:])]


def test_the_text_behind_the_last_id_is_a_step() -> None:
    assert steps_of(Delta("rest", pos=3)) == [("rest", 0, ())]


def test_ids_of_calls_are_the_same_each_time_and_differ() -> None:
    ids = [call_ids("a")(0), call_ids("a")(1), call_ids("b")(0)]
    assert ids == [call_ids("a")(0), call_ids("a")(1), call_ids("b")(0)]
    assert len(set(ids)) == 3 and all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_a_note_is_read_as_it_was_written() -> None:
    note = ResponseNote.unpacked(NOTE.packed())
    assert note is not None and note.packed() == NOTE.packed()
    for other in (b"", b"x", b'{"kind": "response"}'):
        assert ResponseNote.unpacked(other) is None


def test_the_number_of_an_event_names_its_generation() -> None:
    kept = KeptResponse("a", {"gen": 2}, {}, (), NOTE)
    assert kept.first_number == 2 * GENERATION
    for after in (None, 2 * GENERATION, 3 * GENERATION - 1):
        kept.check_number(after)
    for after in (0, 5, 3 * GENERATION):
        with pytest.raises(HttpError, match="started again because") as caught:
            kept.check_number(after)
        assert caught.value.status == 409


def test_instructions_are_no_part_of_what_goes_on() -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    kept = KeptResponse("a", {"gen": 0}, {"messages": messages}, (), NOTE)
    assert kept.messages == messages[1:]


class DeadJob:
    """Replaces a client: every job that it returns is dead, and has 5 ids."""

    async def job(self, name: str) -> dict[str, Any]:
        return {"key": name, "state": "dead", "gen": 0, "ids": 5}


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("worker_lost", True),
        ("context_exceeded", True),
        ("slow_consumer", False),
        ("store_unavailable", False),
        ("broker_lost", False),
        ("draining", False),
    ],
)
def test_a_reading_that_ends_early_is_no_end_of_a_dead_job(code: str, failed: bool) -> None:
    """An error may end the reading of a dead job without being the job's end: ids may follow."""
    client = cast(Any, DeadJob())
    assert asyncio.run(has_failed(client, "j", code, 0, 5)) is failed


@pytest.mark.parametrize(
    ("gen", "pos", "failed"),
    [
        (0, 5, True),
        (0, 6, False),  # a read from a position after the end, which is refused
        (0, 3, False),  # the job was tried again, made two ids, and failed again
        (1, 5, False),
    ],
)
def test_only_the_error_behind_the_last_id_is_the_end_of_a_dead_job(
    gen: int, pos: int, failed: bool
) -> None:
    client = cast(Any, DeadJob())
    assert asyncio.run(has_failed(client, "j", "worker_lost", gen, pos)) is failed


class Pages:
    """Replaces a stream by one that yields these pages of deltas."""

    facts: dict[str, Any] = {}  # noqa: RUF012  # of a test
    result = None

    def __init__(self, *pages: list[Delta]) -> None:
        self._pages = [*pages, []]

    async def ready(self) -> list[Delta]:
        return self._pages.pop(0)


def failures(*pages: list[Delta]) -> list[int | str]:
    """Returns the updates of a reading, in order: a number of failures, or a text."""

    async def read() -> list[int | str]:
        updates: list[int | str] = []
        answer = KeptAnswer(cast(Any, Pages(*pages)), NO_CHAT, (), several_calls=True)
        async for update in answer.updates():
            assert update is not None
            updates += [update.failures] if update.failures else []
            updates += [event.text for event in update.events if isinstance(event, Content)]
        return updates

    return asyncio.run(read())


AGAIN = (0, 0)


def test_failures_after_which_a_job_went_on_are_told_once() -> None:
    first, second = Delta("a", (1,), 0, steps=((1, 1),)), Delta("b", (2,), 1, steps=(AGAIN, (1, 1)))
    assert steps_of(second) == [("b", 1, ())]
    assert failures([first, second]) == ["a", 1, "b"]
    at_end = Delta("", (), 2, steps=(AGAIN, AGAIN))
    assert failures([first, second, at_end]) == ["a", 1, "b", 2]
    # Between the deltas the client repeated its read, after another failure at the same position.
    before, after = (
        Delta("", (), 1, steps=(AGAIN,)),
        Delta("b", (2,), 1, steps=3 * (AGAIN,) + ((1, 1),)),
    )
    assert failures([first], [before], [after]) == ["a", 1, 2, "b"]
    assert failures([first, before, second, at_end]) == ["a", 1, "b", 2]


class PageStream:
    """Replaces a stream by one whose first page has 1,000 steps, all of them ready at once."""

    facts: dict[str, Any] = {}  # noqa: RUF012  # of a test
    result = None

    def __init__(self) -> None:
        steps = tuple((count, count) for count in range(1, 1001))
        self._pages = [[Delta("x" * 1000, tuple(range(1000)), steps=steps)], []]

    async def ready(self) -> list[Delta]:
        return self._pages.pop(0)


def test_other_requests_are_served_between_the_steps_of_a_page() -> None:
    async def read() -> tuple[int, int]:
        turns = updates = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        answer = KeptAnswer(cast(Any, PageStream()), NO_CHAT, (), several_calls=True)
        async for _ in answer.updates():
            updates += 1
        task.cancel()
        return updates, turns

    updates, turns = asyncio.run(read())
    assert updates == 1001 and turns >= 20
