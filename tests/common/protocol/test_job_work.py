"""The work of jobs: a `generate` or a call, checked as a worker would check it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.frames import MAX_BLOB, unpack
from mlxpool.common.protocol.from_client import Generate, ModelCall
from mlxpool.common.protocol.kept.batch_lines import BadLine, Line, parse_line
from mlxpool.common.protocol.kept.job_messages import Submit
from mlxpool.common.protocol.kept.job_work import parse_work, seed_of

EMBED: dict[str, Any] = {"kind": "embed", "model": "e", "inputs": ["a", "b"]}


def parsed(line: dict[str, Any], **defaults: Any) -> Line:
    return parse_line(json.dumps(line).encode(), defaults)


def test_a_request_without_a_kind_is_a_generate() -> None:
    work = parse_work({"model": "m", "prompt": "x"}, ())
    assert isinstance(work, Generate) and seed_of(work, 7) == 7
    work = parse_work({"kind": "generate", "model": "m", "prompt": "x", "options": {"seed": 3}}, ())
    assert isinstance(work, Generate) and seed_of(work, 7) == 3 and not work.warnings


@pytest.mark.parametrize(
    "body",
    [
        {**EMBED, "dimensions": 8, "normalise": False, "truncate": True},
        {"kind": "rerank", "model": "r", "query": "q", "documents": ["a"]},
        {"kind": "classify", "model": "c", "inputs": [["a", "b"]]},
        {"kind": "decide", "model": "m", "prompt": "x", "questions": [{"question": "Is it?"}]},
    ],
)
def test_a_call_keeps_its_fields(body: dict[str, Any]) -> None:
    work = parse_work({**body, "deadline_ms": 9}, (), "alice")
    assert isinstance(work, ModelCall)
    assert (work.kind, work.model, work.owner, work.deadline_ms) == (
        body["kind"],
        body["model"],
        "alice",
        9,
    )
    assert dict(work.fields) == {k: v for k, v in body.items() if k not in ("kind", "model")}
    assert seed_of(work, 7) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "sing"}, "kind must be one of generate, embed, rerank, classify, decide"),
        ({"kind": 3}, "kind must be one of"),
        ({"model": ""}, "model must be a name"),
        ({"model": None}, "model must be a name"),
        ({"inputs": []}, "inputs must be a list of 1 to 256 texts"),
        ({"inputs": ["a"] * 257}, "inputs must be a list of 1 to 256 texts.* got 257"),
        ({"inputs": [1]}, r"inputs\[0\] must be a text"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1"),
        ({"dimension": 5}, "embed has no key 'dimension'; did you mean 'dimensions'"),
        ({"options": {}}, "embed has no key 'options'"),
        ({"query": "x"}, "embed has no key 'query'"),
        ({"owner": "bob"}, "owner is only for calls, not"),
        ({"alone": True}, "alone is only for calls"),
        ({"first": 1}, "first is only for calls"),
    ],
)
def test_a_bad_call_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_work({**EMBED, **change}, ())


def test_a_call_has_one_blob_of_bounded_size() -> None:
    for blobs in ((b"a", b"b"), (bytes(MAX_BLOB + 1),)):
        with pytest.raises(TooLarge, match="one blob"):
            parse_work({**EMBED, "inputs": True}, blobs)


def test_inputs_beside_tokens_are_named_whatever_their_blobs() -> None:
    with pytest.raises(BadRequest, match="embed takes one of inputs and tokens, got both"):
        parse_work({**EMBED, "inputs": True, "tokens": [1]}, (bytes(9), bytes(4)))


# ---- submit and lines --------------------------------------------------------------------------


def test_a_submit_holds_a_call_and_the_settings_of_its_job() -> None:
    submit = Submit.parse({**EMBED, "key": "k", "keep_ms": 5, "priority": -1}, ())
    assert submit.work == ModelCall("embed", "e", {"inputs": ["a", "b"]})
    assert (submit.key, submit.keep_ms, submit.priority) == ("k", 5, -1)
    assert submit.request == EMBED
    with pytest.raises(BadRequest, match="window is of streams"):
        Submit.parse({**EMBED, "key": "k", "window": 5}, ())


def test_a_line_is_a_call_and_takes_the_model_of_its_batch_alone() -> None:
    line = parsed(
        {"id": "x", "kind": "embed", "inputs": "text"}, model="e", options={"seed": 1}, session="s"
    )
    assert line.label == "x" and not line.blobs
    assert line.submit.work == ModelCall("embed", "e", {"inputs": ["text"]})
    assert unpack(line.packed) == {"kind": "embed", "model": "e", "inputs": ["text"]}


def test_much_text_of_a_line_becomes_a_blob() -> None:
    texts = ["ä" * 20_000] * 3
    work = parsed({**EMBED, "inputs": texts}).submit.work
    assert isinstance(work, ModelCall) and work.fields["inputs"] is True
    assert EncoderCall.parse("embed", work.fields, work.packed).texts == tuple(texts)
    documents = {"kind": "rerank", "model": "r", "query": "q", "documents": texts}
    assert len(parsed(documents).blobs) == 1
    asked = {"kind": "decide", "model": "m", "prompt": "x" * 80_000, "questions": [{}]}
    assert parsed(asked).blobs == (b"x" * 80_000,)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [[1, 2], [3]]])
def test_token_ids_of_a_line_are_one_list_or_several(tokens: list[Any]) -> None:
    line = parsed({"kind": "embed", "model": "e", "tokens": tokens})
    work = line.submit.work
    assert isinstance(work, ModelCall)
    ids = EncoderCall.parse("embed", work.fields, work.packed).ids
    assert [list(row) for row in ids] == (tokens if isinstance(tokens[0], list) else [tokens])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"kind": "embed", "inputs": True}, "has no blobs"),
        ({"kind": "rerank", "query": "q", "documents": True}, "has no blobs"),
        ({"kind": "embed", "inputs": ["\ud800" * 20_000]}, "not Unicode"),
        ({"kind": "embed", "tokens": [-1]}, "must be ids from 0"),
        ({"kind": "embed", "tokens": "abc"}, "tokens must be a list of ids"),
        ({"kind": "embed", "prompt_name": "a", "prompt": "b", "inputs": ["x"]}, "got both"),
        ({"kind": "embed", "inputs": ["x"], "deadline_ms": 4}, "deadline_ms is of the batch"),
        ({"kind": "tokenize", "text": "x"}, "kind must be one of"),
    ],
)
def test_bad_lines_of_calls_are_named(line: dict[str, Any], said: str) -> None:
    with pytest.raises(BadLine, match=said):
        parsed({"id": "l", **line}, model="m")


def test_what_a_gateway_keeps_in_a_line_is_no_key_of_its_call() -> None:
    line = parsed({**EMBED, "asked": {"model": "name", "as_base64": True}})
    assert "asked" not in unpack(line.packed)
