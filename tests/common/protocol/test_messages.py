"""A typed message is parsed to the same message, also with keys of a later version."""

from __future__ import annotations

import inspect
from typing import Any

import msgpack
import pytest
from msgspec import Struct

from mlxpool.common.errors import BadRequest, QueueFull
from mlxpool.common.options import Options
from mlxpool.common.protocol import deltas, from_client, from_worker, to_client, to_worker
from mlxpool.common.protocol.deltas import Delta, Deltas, unpack_deltas
from mlxpool.common.protocol.frames import Content, Message, decode, encoded
from mlxpool.common.protocol.prompts import ChatPrompt, PackedPrompt, Prompt, TextPrompt
from mlxpool.common.protocol.resume import Facts, Resume
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds

ID = bytes(range(16))
FACTS = {"digest": "d", "context": 64, "max_tokens": 9, "prompt_tokens": 3, "now": 1.5, "new": [1]}
PROMPTS: list[Prompt] = [
    TextPrompt("a"),
    PackedPrompt("prompt", b"long"),
    PackedPrompt("tokens", pack_ids([1, 2])),
    ChatPrompt([{"role": "user", "content": "a"}], [{"name": "f"}], "low"),
    TextPrompt("[img-1] and [img-0]", (b"first", b"second")),
    PackedPrompt("prompt", b"long [img-0]", (b"first",)),
    ChatPrompt(
        [{"role": "user", "content": [{"type": "image", "blob": n} for n in (0, 1)]}],
        images=(b"first", b"second"),
    ),
]
PARSED_BY_BODY: list[Any] = [
    from_client.Ack([(ID, 3)]),
    from_client.Keep("m", -1),
    from_client.ListModels("m"),
    from_client.ListModels(),
    from_worker.Hello("m/0", "m", "t", 7, 1.5, "h", "d", 64),
    from_worker.Credit(2, 5),
    from_worker.Beat("decode", 3, 4, ID, 1.5, 1, 2, "paged", {"kv": 1}, {"hits": 2}),
    from_worker.Beat("load", load_progress=0.25),
    from_worker.PromptSizes([(ID, 4, 300)]),
    from_worker.Beat("idle", look=from_worker.ProgressSample(1, False, 2, 3)),
    from_worker.Yield([(ID, 4)]),
    from_worker.Bye(),
    from_worker.Bye({"code": "internal", "message": "x", "retryable": False}),
    to_worker.Welcome(9, "t"),
    to_worker.Stop(True),
    to_client.Accepted(1, 2, 0, 7),
    to_client.Fate("streaming", 3),
    to_client.Pong(1, 2, 1),
    to_client.Kept(-1),
    to_client.ModelList([{"name": "m"}]),
    to_client.Done("stop", "rest", {"prompt_tokens": 1}, {"total": 2.5}, 1),
]


def received(content: Content) -> Message:
    """Returns the message that the other side gets, with a key of a later version in its body."""
    message = decode(encoded(content, ID))
    return Message(message.header, {**message.body, "later": 1}, message.blobs)


@pytest.mark.parametrize("content", PARSED_BY_BODY, ids=lambda content: type(content).__name__)
def test_what_is_sent_is_parsed(content: Any) -> None:
    message = received(content)
    assert message.kind == content.kind
    assert type(content).parse(message.body) == content


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
@pytest.mark.parametrize(
    "resume", [None, Resume(pack_ids([1, 2, 3]), Facts.from_client(FACTS), seed=7, resumes=1)]
)
def test_a_request_travels_with_its_prompt_and_its_resume(
    prompt: Prompt, resume: Resume | None
) -> None:
    draft = from_client.GenerateDraft("m", prompt, {"seed": 7}, {"priority": 2}, resume)
    message = received(draft)
    request = from_client.Generate.parse(message.body, message.blobs)
    assert (request.model, request.prompt, request.priority) == ("m", prompt, 2)
    assert (request.options.seed, request.resume) == (7, resume)
    if resume is not None:
        assert message.body["resume"]["facts"] == FACTS  # unknown facts too come back


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
def test_work_travels(prompt: Prompt) -> None:
    resume = Resume(pack_ids([1, 2, 3]), Facts.from_worker(FACTS))
    work = to_worker.Work(prompt, Options(max_tokens=9), 7, 1500, resume, suspect=True)
    message = received(work)
    assert to_worker.Work.parse(message.body, message.blobs) == work
    assert to_worker.count_of_resume(message.body) == 3


def test_empty_facts_state_nothing() -> None:
    """An empty `facts` map in a resume is the same as no `facts`."""
    assert Resume.from_client({"count": 0, "facts": {}}, []) == Resume()


def test_what_is_no_size_of_a_prompt_is_left_out() -> None:
    runs = [[ID, 4, 300], [ID, 4], ["x", 4, 3], [ID, 4, -1], [ID, 4, True], 5]
    assert from_worker.PromptSizes.parse({"runs": runs}).runs == [(ID, 4, 300)]
    assert from_worker.PromptSizes.parse({"runs": "x"}).runs == []


@pytest.mark.parametrize("share", ["x", -0.1, 1.1, True, None, float("nan")])
def test_what_is_no_share_of_a_load_counts_as_unknown(share: object) -> None:
    assert from_worker.Beat.parse({"load_progress": share}).load_progress is None


def test_work_without_a_resume_begins_with_an_empty_one() -> None:
    message = received(to_worker.Work(TextPrompt("a"), Options()))
    assert "resume" not in message.body and "suspect" not in message.body
    assert to_worker.Work.parse(message.body, message.blobs).resume == Resume()


def test_rows_travel_both_ways() -> None:
    rows = [Delta(ID, 1, 0, "a", pack_ids([1]), facts=FACTS), Delta(ID, 2, 3, "", b"")]
    assert unpack_deltas(decode(encoded(Deltas(rows)))) == rows


def test_messages_without_content() -> None:
    assert len(encoded(to_worker.Who())) == 1  # the header alone
    for content in (to_worker.Heard(), to_worker.Drain(), from_client.Ping(), from_client.Cancel()):
        assert decode(encoded(content)).body == {}


def test_an_error_is_the_one_that_was_raised() -> None:
    error = QueueFull("full", retry_after_ms=5)
    failed = to_client.Failed.of(error)
    again = to_client.Failed(decode(encoded(failed)).body).error()
    assert isinstance(again, QueueFull)
    assert (again.message, again.retry_after_ms, failed.code) == ("full", 5, "queue_full")
    assert to_client.Failed.about(error, ID).body()["about"] == ID


def test_a_chat_to_tokenize_travels() -> None:
    chat = ChatPrompt([{"role": "user", "content": "a"}], [{"name": "f"}], "low")
    body = {"model": "m", **chat.body(), "owner": "me"}
    assert to_worker.Tokenize.parse(body, ()) == to_worker.Tokenize(chat, "me")
    with pytest.raises(BadRequest, match="messages must be a list"):
        to_worker.Tokenize.parse({**body, "messages": "hi"}, ())
    with pytest.raises(BadRequest, match=r"text must be .* or messages a list"):
        to_worker.Tokenize.parse({"model": "m"}, ())


@pytest.mark.parametrize("kind", [kinds.TOKENIZE, kinds.DETOKENIZE])
def test_a_call_of_the_tokenizer_keeps_what_the_worker_reads(kind: str) -> None:
    body = {"model": "m", "text": True, "later": 1, "owner": "forged"}
    call = from_client.ModelCall.parse(kind, body, [b"long"], "me")
    assert (call.body(), call.blobs(), call.kind) == ({**body, "owner": "me"}, (b"long",), kind)
    with pytest.raises(BadRequest, match=f"{kind}: model must be a name"):
        from_client.ModelCall.parse(kind, {"model": 1}, [], "me")


@pytest.mark.parametrize("module", [deltas, from_client, to_worker, to_client])
def test_every_kind_is_known_and_every_message_is_frozen(module: Any) -> None:
    known = {value for name, value in vars(kinds).items() if name.isupper()}
    contents = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Content) and each is not Content
    ]
    assert contents
    for each in contents:
        # A delta is not frozen but filled step by step: new objects would slow down the hot path.
        frozen = issubclass(each, Struct) and each.__struct_config__.frozen
        assert frozen or each is to_client.StreamDelta, each
        assert each in (from_client.ModelCall, from_worker.CallAnswer) or each.kind in known


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (from_worker.Hello.parse, {"slot": 1, "pid": "x", "digest": None, "context": -1}),
        (from_worker.Credit.parse, {"sequences": "many", "works": -2}),
        (from_worker.Beat.parse, {"phase": 1, "memory": [], "look": "x", "prefill": 3}),
        (from_worker.Yield.parse, {"runs": [[ID], ["x", 1], 7]}),
        (to_worker.Welcome.parse, {"boot": "x", "token": 7}),
        (to_worker.Stop.parse, {"error": "x"}),
    ],
)
def test_wrong_types_of_the_other_process_count_as_absent(parse: Any, body: Any) -> None:
    content = parse(body)
    assert parse(msgpack.unpackb(msgpack.packb(content.body()))) == content
