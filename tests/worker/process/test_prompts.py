"""Tests that a `work` message becomes a sequence, or the error with which its stream ends."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ContextExceeded, PoolError
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.engine.counting_engine import CountingText
from mlxpool.worker.preparation.jobs import Encoded, perform
from mlxpool.worker.process.prompts import Arrival, prepare_run
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.scheduling.context_policy import MAX_SHIFTED_IDS, ContextShift
from support.context_window import window

TEXT = CountingText()
OPENED = Opened("digest", 32, 300, TEXT)
ID = bytes(16)


def work(*blobs: bytes, opened: Opened = OPENED, **body: Any) -> Admit:
    """Returns the admitted run of a `work` message that arrived 1000 s after 1970.

    Raises the PoolError with which its stream would end.
    """
    message = Work.parse(body, blobs)
    preparation = prepare_run(opened, (ID, 2), message, Arrival(1.5, 1000.0))
    job = preparation.job
    result = job if isinstance(job, Encoded) else perform(TEXT, job)
    if isinstance(result, PoolError):
        raise result
    admit = preparation.finish(result)
    assert isinstance(admit, Admit)
    return admit


def test_text_becomes_a_sequence_with_its_facts() -> None:
    admit = work(prompt="abc", options={"max_tokens": 5}, seed=9)
    assert admit.sequence.prompt == (97, 98, 99)
    assert (admit.sequence.id, admit.sequence.run_number, admit.sequence.seed) == (ID, 2, 9)
    assert admit.facts.body() == {
        "digest": "digest",
        "context": 32,
        "max_tokens": 5,
        "prompt_tokens": 3,
        "now": 1000.0,
    }


@pytest.mark.parametrize(("wanted", "given"), [(-1, 29), (0, 29), (5, 5), (1000, 29)])
def test_max_tokens_is_bounded_by_the_context(wanted: int, given: int) -> None:
    assert work(prompt="abc", options={"max_tokens": wanted}).sequence.max_tokens == given


def test_blobs_of_text_and_of_ids() -> None:
    assert work("né".encode(), prompt=True).sequence.prompt == (110, 195, 169)
    assert work(pack_ids([7, 299]), tokens=True).sequence.prompt == (7, 299)


@pytest.mark.parametrize(
    ("blobs", "body", "words"),
    [
        ((b"\xff\xfe",), {"prompt": True}, "not UTF-8"),
        ((pack_ids([300]),), {"tokens": True}, "300"),
        ((), {"prompt": "a", "options": {"logit_bias": {"300": 1}}}, "300"),
        ((), {"prompt": ""}, "empty"),
        ((pack_ids([999]),), {"prompt": "a", "resume": {"count": 1}}, "999"),
        (
            (pack_ids([1, 2]),),
            {"prompt": "a", "options": {"max_tokens": 1}, "resume": {"count": 2}},
            "2 ids",
        ),
        (
            (),
            {"prompt": "a", "resume": {"count": 0, "facts": {"digest": "other"}}},
            "other.*digest",
        ),
        ((), {"prompt": "a", "resume": {"count": 0, "facts": {"prompt_tokens": 9}}}, "9.* 1"),
        ((), {"prompt": "a", "resume": {"facts": {"context": 33}}}, "33.* 32"),
        ((), {"prompt": "a", "resume": {"facts": {"context": 8, "max_tokens": 8}}}, "1 to 7"),
        ((), {"prompt": "a", "resume": {"facts": {"max_tokens": 32}}}, "32.* 1 to 31"),
        ((), {"prompt": "a", "resume": {"facts": {"max_tokens": 0}}}, "1 to 31"),
        ((), {"prompt": "a", "resume": {"facts": {"max_tokens": 2**70}}}, "max_tokens"),
        ((), {"prompt": "a", "resume": {"facts": {"max_tokens": True}}}, "max_tokens"),
        ((), {"prompt": "a", "resume": {"facts": {"context": "32"}}}, "context"),
        ((), {"prompt": "a", "resume": {"facts": {"digest": 5}}}, "digest"),
        ((), {"prompt": "a", "resume": {"facts": {"now": "noon"}}}, "now"),
        ((), {"prompt": "a", "resume": {"facts": {"now": float("nan")}}}, "now"),
        ((), {"prompt": "a", "resume": {"facts": {"now": 1e300}}}, "now"),
        ((), {"prompt": "a", "resume": {"facts": []}}, "facts"),
        ((), {"prompt": "a", "resume": {"facts": {"truncated": -1}}}, "truncated"),
        ((), {"prompt": "a", "resume": {"facts": {"truncated": 5}}}, "truncated 5.* 0"),
        ((), {"prompt": "a", "options": {"num_ctx": 33}}, "num_ctx is 33.* 32"),
        ((pack_ids([999] * 99),), {"tokens": True, "options": {"truncate": True}}, "999"),
        ((), {"prompt": "a", "resume": [1]}, "resume"),
        ((), {"prompt": "a", "resume": {"count": 1}}, "count is 1.* 0 ids"),
        ((b"abc",), {"prompt": "a", "resume": {"count": 1}}, "multiple of 4"),
        ((), {"prompt": "a", "options": 5}, "options"),
        ((), {"prompt": "a", "seed": "x"}, "seed"),
        ((), {"prompt": True}, "blob"),
        ((), {}, "prompt"),
    ],
)
def test_a_bad_request_names_the_wrong_value(
    blobs: tuple[bytes, ...], body: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        work(*blobs, **body)


@pytest.mark.parametrize("size", [32, 33, 1000])
def test_a_prompt_beyond_the_context_names_both_sizes(size: int) -> None:
    with pytest.raises(ContextExceeded, match=f"{size} tokens.* 32") as caught:
        work(prompt="a" * size)
    assert caught.value.details == {"prompt_tokens": size, "context": 32}
    with pytest.raises(ContextExceeded, match=f"{size} tokens.* 32"):
        work(pack_ids([7] * size), tokens=True)
    assert work(prompt="a" * 31).sequence.max_tokens == 1


LONG = "".join(chr(97 + n % 26) for n in range(100))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, LONG[:4] + LONG[73:]),
        ({"num_keep": 0}, LONG[69:]),
        ({"num_keep": 30}, LONG[:30] + LONG[99:]),
        ({"num_ctx": 11}, LONG[:4] + LONG[94:]),
        ({"num_ctx": 100, "num_keep": 2}, LONG[:2] + LONG[3:]),
    ],
)
def test_truncation_removes_the_fewest_tokens_after_the_kept_ones(
    options: dict[str, Any], left: str
) -> None:
    context = options.get("num_ctx", 32)
    opened = Opened("digest", max(32, context), 300, TEXT)
    body = {"options": {"truncate": True, **options}}
    of_text = work(prompt=LONG, opened=opened, **body)
    of_bytes = work(LONG.encode(), prompt=True, opened=opened, **body)
    of_ids = work(pack_ids(list(LONG.encode())), tokens=True, opened=opened, **body)
    for admit in (of_text, of_bytes, of_ids):
        assert bytes(admit.sequence.prompt).decode() == left
        assert admit.sequence.max_tokens == 1
        assert admit.facts.prompt_tokens == len(left) == context - 1
        assert admit.facts.body()["truncated"] == 100 - len(left)


def test_a_chat_is_truncated_too() -> None:
    messages = [{"role": "user", "content": LONG}]
    with pytest.raises(ContextExceeded, match="set the option truncate"):
        work(messages=messages)
    admit = work(messages=messages, options={"truncate": True})
    assert bytes(admit.sequence.prompt).decode() == "user" + LONG[-26:] + "\n"


def test_a_prompt_that_fits_is_not_truncated() -> None:
    admit = work(prompt=LONG[:31], options={"truncate": True})
    assert bytes(admit.sequence.prompt).decode() == LONG[:31]
    assert "truncated" not in admit.facts.body()


@pytest.mark.parametrize("num_keep", [-1, 31, 10**6])
def test_a_truncation_that_leaves_nothing_is_refused(num_keep: int) -> None:
    with pytest.raises(ContextExceeded, match=r"100 tokens.* 32:.*num_keep.*leaves nothing"):
        work(prompt=LONG, options={"truncate": True, "num_keep": num_keep})
    with pytest.raises(BadRequest, match="empty"):
        work(prompt="", options={"truncate": True})


@pytest.mark.parametrize("options", [{}, {"truncate": True}, {"shift": True}])
def test_a_context_without_a_place_for_the_completion_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="num_ctx is 1, must be at least 2"):
        work(prompt="a", options={"num_ctx": 1, **options})
    resume = {"count": 0, "facts": {"context": 1}}
    with pytest.raises(BadRequest, match=r"facts.context is 1, must be at least 2"):
        work(b"", prompt="a", options=options, resume=resume)
    assert work(prompt="a", options={"num_ctx": 2, **options}).sequence.prompt == (97,)


def test_errors_of_the_context_name_the_bound() -> None:
    with pytest.raises(ContextExceeded, match=r"has 32 tokens, the context is 32, .* at most 31"):
        work(prompt=LONG[:32])
    with pytest.raises(ContextExceeded, match=r"first 31 .* set num_keep to at most 30"):
        work(prompt=LONG, options={"truncate": True, "num_keep": 1000})
    assert len(work(prompt=LONG, options={"truncate": True, "num_keep": 30}).sequence.prompt) == 31


def test_a_resume_truncates_its_prompt_in_the_same_way() -> None:
    options = {"truncate": True, "num_ctx": 20, "shift": True}
    first = work(prompt=LONG, options=options)
    resume = {"count": 2, "facts": first.facts.body()}
    again = work(pack_ids([1, 2]), prompt=LONG, options=options, resume=resume)
    assert again.sequence.prompt == first.sequence.prompt
    assert again.facts == first.facts
    assert (again.sequence.shift, again.sequence.discarded) == (ContextShift(20, 4), 8)


@pytest.mark.parametrize(
    ("place", "moved"),
    [(0, 0), (3, 3), (4, 4), (5, 0), (73, 0), (74, 5), (99, 30)],
)
def test_a_restore_point_moves_with_its_token(place: int, moved: int) -> None:
    message = Work.parse({"prompt": LONG, "options": {"truncate": True}}, ())
    prompt = Encoded(pack_ids(list(LONG.encode())), place)
    admit = prepare_run(OPENED, (ID, 1), message, Arrival(1.5, 1000.0)).finish(prompt)
    assert isinstance(admit, Admit) and admit.sequence.restore_at == moved


def test_a_context_of_its_own_is_a_real_bound() -> None:
    admit = work(prompt="abc", options={"num_ctx": 10})
    assert (admit.facts.context, admit.sequence.max_tokens) == (10, 7)
    with pytest.raises(ContextExceeded, match=r"10 tokens.* 10"):
        work(prompt="a" * 10, options={"num_ctx": 10})
    with pytest.raises(ContextExceeded, match=r"10 tokens.* 10"):
        work(pack_ids([7] * 10), tokens=True, options={"num_ctx": 10})
    assert work(prompt="abc", options={"num_ctx": 32}).facts.context == 32


def test_shift_is_off_unless_it_is_asked_for() -> None:
    assert work(prompt="abc").sequence.shift is None
    assert work(prompt="abc", options={"num_keep": 7}).sequence.shift is None


@pytest.mark.parametrize(
    ("options", "keep", "max_tokens"),
    [
        ({}, 4, 320),
        ({"num_keep": -1}, 3, 320),
        ({"num_keep": 99}, 31, 320),
        ({"max_tokens": 5}, 4, 5),
        ({"max_tokens": 50_000}, 4, 50_000),
        ({"max_tokens": 2**31 - 1}, 4, MAX_SHIFTED_IDS),
    ],
)
def test_a_stream_with_shifts(options: dict[str, Any], keep: int, max_tokens: int) -> None:
    admit = work(prompt="abc", options={"shift": True, **options})
    assert admit.sequence.shift == ContextShift(32, keep)
    assert admit.sequence.max_tokens == admit.facts.max_tokens == max_tokens
    assert admit.sequence.discarded == 0


@pytest.mark.parametrize(("had", "discarded"), [(29, 0), (30, 14), (43, 14), (44, 28), (300, 280)])
def test_a_resume_begins_behind_the_cuts_of_its_stream(had: int, discarded: int) -> None:
    ids = [n % 300 for n in range(had)]
    admit = work(
        pack_ids(ids), prompt="abc", options={"shift": True}, resume={"count": had, "facts": None}
    )
    assert admit.sequence.ids == ids and admit.sequence.discarded == discarded
    assert admit.sequence.tokens == window([97, 98, 99, *ids], 32, 4)


def test_a_resume_keeps_its_ids_and_facts() -> None:
    facts = {"digest": "digest", "prompt_tokens": 1, "now": 5.0, "max_tokens": 9, "context": 20}
    blob, resume = pack_ids([1, 2]), {"count": 2, "facts": facts}
    admit = work(blob, prompt="a", options={"max_tokens": 3}, resume=resume)
    assert admit.sequence.ids == [1, 2] and admit.sequence.max_tokens == 9
    assert admit.facts.body() == facts, "the first worker's word counts, the smaller context holds"
    assert admit.detokenizer.push(3) == "3 "


def test_a_resume_without_ids_keeps_its_facts() -> None:
    admit = work(prompt="a", resume={"count": 0, "facts": {"max_tokens": 4}})
    assert (admit.sequence.ids, admit.sequence.max_tokens) == ([], 4)
    assert admit.facts.now == 1000.0


def test_the_resume_blob_follows_the_prompt_blob() -> None:
    ids = work(pack_ids([7]), pack_ids([8]), tokens=True, resume={"count": 1}).sequence
    assert (ids.prompt, ids.ids) == ((7,), [8])
    alone = work(pack_ids([7]), tokens=True, resume={"count": 0}).sequence
    assert (alone.prompt, alone.ids) == ((7,), [])


def test_nil_means_absent() -> None:
    nothing: dict[str, Any] = {
        "resume": None,
        "options": None,
        "seed": None,
        "tokens": None,
        "messages": None,
    }
    admit = work(prompt="abc", **nothing)
    assert (admit.sequence.ids, admit.sequence.seed) == ([], 0)
    facts = dict.fromkeys(("digest", "context", "max_tokens", "prompt_tokens", "now"))
    assert work(prompt="a", resume={"count": None, "facts": facts}).facts.max_tokens == 31
