"""The messages of the client's methods, made from their arguments."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mlxpool.client import request
from mlxpool.client.stream import StreamState
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import REQUEST_KEYS, GenerateOptions
from mlxpool.common.protocol.frames import TEXT_AS_BLOB
from mlxpool.common.protocol.from_client import Generate, GenerateDraft
from mlxpool.common.protocol.prompts import PackedPrompt, TextPrompt
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import pack_ids


def made(**given: Any) -> tuple[dict[str, Any], list[bytes]]:
    prompt, messages, tokens = (given.pop(k, None) for k in ("prompt", "messages", "tokens"))
    draft = request.generate("m", prompt, messages, tokens, cast(GenerateOptions, given))
    return written(draft)


def written(draft: GenerateDraft) -> tuple[dict[str, Any], list[bytes]]:
    body, blobs = draft.body(), draft.blobs()
    Generate.parse(body, blobs)  # the broker reads what we write
    return body, list(blobs)


def test_a_prompt() -> None:
    assert made(prompt="a") == ({"model": "m", "batch": True, "options": {}, "prompt": "a"}, [])


def test_a_long_prompt_is_a_blob() -> None:
    short, long = "é" * (TEXT_AS_BLOB // 2), "é" * (TEXT_AS_BLOB // 2) + "x"
    assert made(prompt=short)[1] == []
    body, blobs = made(prompt=long)
    assert body["prompt"] is True
    assert blobs == [long.encode()]


def test_messages() -> None:
    messages = [{"role": "user", "content": "a"}]
    body, blobs = made(messages=messages)
    assert (body["messages"], blobs) == (messages, [])


def test_tools_go_with_messages() -> None:
    messages, tools = [{"role": "user", "content": "a"}], [{"name": "clock"}]
    body, _ = made(messages=messages, tools=tools)
    assert body["tools"] == tools
    with pytest.raises(BadRequest, match="tools go with messages, got prompt"):
        made(prompt="a", tools=tools)


def test_tokens() -> None:
    body, blobs = made(tokens=[1, 2])
    assert (body["tokens"], blobs) == (True, [pack_ids([1, 2])])


def test_keys_of_the_request_and_options_of_the_sampler() -> None:
    keys = {
        "deadline_ms": 5,
        "queue_ms": 6,
        "first_token_ms": 7,
        "priority": 1,
        "window": 9,
        "session": "s",
    }
    flags = {"batch": True, "durable": False}
    body, _ = made(prompt="a", temperature=0, seed=3, **keys, **flags)
    assert {k: body[k] for k in (*keys, *flags)} == {**keys, **flags}
    assert body["options"] == {"temperature": 0, "seed": 3}


def test_every_key_of_the_request_is_known() -> None:
    fields = set(Generate.__struct_fields__)
    assert fields >= set(REQUEST_KEYS) - {"tools", "think"}, "which are part of the prompt"


def test_none_is_not_given() -> None:
    body, _ = made(prompt="a", temperature=None, deadline_ms=None)
    assert body == {"model": "m", "batch": True, "options": {}, "prompt": "a"}


def test_biases_have_text_keys_on_the_wire() -> None:
    body, _ = made(prompt="a", logit_bias={5: 1.0})
    assert body["options"]["logit_bias"] == {"5": 1.0}


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, 0), ({"prompt": "a", "tokens": [1]}, 2), ({"prompt": "", "messages": []}, 2)],
)
def test_exactly_one_of_prompt_messages_and_tokens(given: dict[str, Any], count: int) -> None:
    with pytest.raises(BadRequest, match=f"got {count}"):
        made(**given)


def test_invalid_token_ids() -> None:
    with pytest.raises(BadRequest, match="token ids must be integers"):
        made(tokens=[-1])


SENT = GenerateDraft(
    "m",
    TextPrompt("a"),
    {},
    {"deadline_ms": 9000, "queue_ms": 5, "first_token_ms": 6, "priority": 2},
)


def state_of(*ids: int, boot: int = 7, **more: Any) -> StreamState:
    return StreamState(bytes(16), boot=boot, seed=42 if boot else -1, ids=list(ids), **more)


def test_a_resume_from_the_ids_received() -> None:
    state = state_of(4, 5, facts=Facts.from_worker({"now": 3}), barren_boots=1)
    body, blobs = written(request.resumed(SENT, state, 1.2341))
    resume = {"count": 2, "seed": 42, "resumes": 1, "facts": {"now": 3}}
    kept = {"model": "m", "prompt": "a", "options": {}, "priority": 2}
    assert body == {**kept, "deadline_ms": 1235, "resume": resume}
    assert blobs == [pack_ids([4, 5])]
    assert SENT.settings["queue_ms"] == 5


def test_a_resume_before_the_first_id() -> None:
    draft = GenerateDraft("m", TextPrompt("a"), {})
    body, _ = written(request.resumed(draft, state_of(), None))
    assert body["resume"] == {"count": 0, "seed": 42, "resumes": 0}
    assert "deadline_ms" not in body


def test_a_request_never_accepted_is_sent_without_resume() -> None:
    draft = GenerateDraft("m", PackedPrompt("prompt", b"x"), {}, SENT.settings)
    body, blobs = written(request.resumed(draft, state_of(boot=0), -4.0))
    assert "resume" not in body and body["deadline_ms"] == 1
    assert blobs == [b"x"]


def test_the_prompts_blob_comes_first() -> None:
    draft = GenerateDraft("m", PackedPrompt("tokens", pack_ids([1])), {})
    _, blobs = written(request.resumed(draft, state_of(2), None))
    assert blobs == [pack_ids([1]), pack_ids([2])]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (1500, 1.5), (0, None), (True, None), ("5", None), (-1, None)],
)
def test_the_deadline_of_a_request(given: Any, seconds: float | None) -> None:
    draft = GenerateDraft("m", TextPrompt("a"), {}, {"deadline_ms": given})
    assert request.deadline_of(draft) == seconds
