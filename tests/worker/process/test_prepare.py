"""A `work` message becomes a sequence, or the error that its stream ends with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ContextExceeded, PoolError
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize, Work
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.engine.counting_engine import CountingText
from mlxpool.worker.preparation.jobs import Encoded, perform
from mlxpool.worker.preparation.limits import Limits
from mlxpool.worker.process.prepare import (
    Answer,
    CallKey,
    Prepared,
    Preparer,
    admit_of,
    began_at,
    job_of,
    service_of,
)
from mlxpool.worker.prompt.text_model import Opened

TEXT = CountingText()
OPENED = Opened("digest", 32, 300, TEXT)
ID = bytes(16)


def work(*blobs: bytes, **body: Any) -> Admit:
    """The run of a `work`, which came at 1000 s since 1970. Raises what ends its stream."""
    message = Work.parse(body, blobs)
    now = began_at(message, 1000.0)
    job = job_of(OPENED, message, now)
    result = job if isinstance(job, Encoded) else perform(TEXT, job)
    if isinstance(result, PoolError):
        raise result
    assert isinstance(result, Encoded)
    return admit_of(OPENED, (ID, 2), message, 1.5, 9.5, now, result)


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
    nothing = {"resume": None, "options": None, "seed": None, "tokens": None, "messages": None}
    admit = work(prompt="abc", **nothing)
    assert (admit.sequence.ids, admit.sequence.seed) == ([], 0)
    facts = dict.fromkeys(("digest", "context", "max_tokens", "prompt_tokens", "now"))
    assert work(prompt="a", resume={"count": None, "facts": facts}).facts.max_tokens == 31


def test_the_preparer_answers_in_order_and_survives_errors() -> None:
    import queue

    results: queue.SimpleQueue[Prepared | Answer] = queue.SimpleQueue()
    preparer = Preparer(OPENED, results.put, partial(service_of, limits=Limits()))
    preparer.start()
    preparer.prepare((ID, 1), Work.parse({"prompt": "abc"}, ()))
    with pytest.raises(BadRequest, match=r"messages\[0\] must be a map"):
        preparer.prepare((ID, 2), Work.parse({"messages": [5]}, ()))
    preparer.prepare(
        (ID, 2), Work.parse({"prompt": "abc", "resume": {"facts": {"digest": "x"}}}, ())
    )
    preparer.answer(CallKey(0), ID, Tokenize("ab"))
    preparer.answer(CallKey(1), ID, Tokenize(b"\xff"))
    preparer.answer(CallKey(2), ID, Detokenize(pack_ids([1, 2])))
    preparer.answer(CallKey(3), ID, Detokenize(b"abc"))
    good, bad, ids, wrong, text, odd = (results.get(timeout=30) for _ in range(6))
    assert isinstance(good, Prepared) and good.admit is not None
    assert isinstance(bad, Prepared) and bad.error is not None and bad.error.code == "bad_request"
    assert isinstance(ids, Answer) and unpack_ids(ids.content.packed[0]) == [97, 98]
    assert isinstance(wrong, Answer) and wrong.content.fields["code"] == "bad_request"
    assert isinstance(text, Answer) and text.content.fields == {"text": "1 2 "}
    assert isinstance(odd, Answer) and odd.content.fields["code"] == "bad_request"
