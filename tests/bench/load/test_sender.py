"""A client of a load test: its request to a server of OpenAI's completions, and its record."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from mlxpool.bench.load.http_stream import HttpFailure, message_of, opened
from mlxpool.bench.load.samples import Sample
from mlxpool.bench.load.sender import Job, name_of, sample_of
from mlxpool.bench.load.targets import Answer, Target, first_model
from mlxpool.bench.load.targets import opened as target_opened
from mlxpool.bench.load.workload import Lengths, Request, Workload
from mlxpool.common.errors import QueueFull
from mlxpool.common.records import as_map

REQUEST = Request(0.0, [5, 6, 7], 4)
DONE = b"data: [DONE]\n\n"


def event(text: str | None = "x", finish: str | None = None, **members: Any) -> bytes:
    choices = [] if text is None else [{"text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **members}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    return event(None, usage={"prompt_tokens": prompt, "completion_tokens": completion})


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + body + b"0\r\n\r\n"


class FakeServer:
    """Answers every connection with the same bytes, and keeps the requests."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = [line for line in head.splitlines() if line.lower().startswith("content-length")]
        if length:
            self.bodies.append(await reader.readexactly(int(length[0].partition(":")[2])))
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    async def ask(self, **target: Any) -> Sample:
        """Sends REQUEST and returns the sample."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Target("m", url=f"http://127.0.0.1:{port}/v1", **target)
            async with target_opened(endpoint) as send:
                return await sample_of(send, REQUEST, time.monotonic(), exact=endpoint.ignore_eos)


def sample(*pieces: bytes, **target: Any) -> Sample:
    return asyncio.run(FakeServer(chunked(*pieces)).ask(**target))


def test_tokens_come_from_usage_and_times_from_events() -> None:
    record = sample(event(), event("xx"), event("", "length"), usage(3, 4), DONE)
    assert (record.output_tokens, record.prompt_tokens, record.exact) == (4, 3, True)
    assert len(record.times) == 2 and record.error == ""
    assert 0 <= record.sent <= record.times[0] <= record.times[1]


def test_lines_may_be_cut_anywhere() -> None:
    whole = event() + b": comment\n\n" + event("y", "length") + usage(3, 4) + DONE
    record = sample(*(whole[at : at + 7] for at in range(0, len(whole), 7)))
    assert record.error == "" and len(record.times) == 2


def test_events_count_as_tokens_without_usage() -> None:
    record = sample(event(), event(""), event(), event("z", "length"), DONE)
    assert (record.output_tokens, record.exact, record.error) == (4, False, "")


def test_a_body_until_the_end_of_the_connection() -> None:
    answer = b"HTTP/1.0 200 OK\r\n\r\n" + event() + usage(3, 4) + DONE
    assert asyncio.run(FakeServer(answer).ask()).error == ""


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(event(), usage(3, 2), DONE), "fewer tokens than asked for"),
        (chunked(event(), usage(3, 5), DONE), "more tokens than asked for"),
        (chunked(usage(3, 4), DONE), "no token"),
        (chunked(event()), "the stream ended without [DONE]"),
        (chunked(event())[:-20], "the connection ended within the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "the connection ended within the"),
        (b"nonsense\r\n\r\n", "no HTTP answer"),
        (b"", "no HTTP answer"),
        (chunked(b'data: {"error": {"message": "out of\\nmemory"}}\n\n'), "out of memory"),
        (chunked(b"data: {x\n\n"), "JSONDecodeError: "),
        (
            b'HTTP/1.1 429 no\r\nContent-Length: 37\r\n\r\n{"error": {"message": "try it later"}}',
            'HTTP 429: {"error": {"message": "try it later"}',
        ),
        (
            b'HTTP/1.1 400 no\r\n\r\n{"object": "error", "message": "no ignore_eos"}',
            "HTTP 400: no ignore_eos",
        ),
    ],
)
def test_a_failure_has_a_name(answer: bytes, error: str) -> None:
    assert asyncio.run(FakeServer(answer).ask()).error.startswith(error)


def test_any_number_of_tokens_is_right_where_the_model_may_stop() -> None:
    assert sample(event(), usage(3, 2), DONE, ignore_eos=False).error == ""


def test_a_server_that_is_not_there_is_named() -> None:
    async def ask() -> Sample:
        async with target_opened(Target("m", url="http://127.0.0.1:9/v1")) as send:
            return await sample_of(send, REQUEST, time.monotonic(), exact=True)

    assert asyncio.run(ask()).error == "ConnectionRefusedError"


def test_the_request_that_is_sent() -> None:
    server = FakeServer(chunked(event(), usage(3, 4), DONE))
    asyncio.run(server.ask(api_key="k3y"))
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k3y\r\n" in server.heads[0]
    body = json.loads(server.bodies[0])
    assert body["prompt"] == [5, 6, 7] and body["stream_options"] == {"include_usage": True}


def test_a_request_waits_until_it_is_due_and_says_how_late_it_was() -> None:
    sent: list[float] = []

    async def send(request: Request, answer: Answer) -> None:
        sent.append(time.monotonic())
        answer.add(request.output)

    async def both(begin: float) -> Sequence[Sample]:
        late, later = Request(-5.0, [1], 2), Request(0.05, [1], 2)
        return await asyncio.gather(*(sample_of(send, r, begin, exact=True) for r in (later, late)))

    begin = time.monotonic()
    waited, overdue = asyncio.run(both(begin))
    assert max(sent) - begin >= 0.05 and waited.sent >= waited.due
    assert overdue.sent - overdue.due >= 5.0 and overdue.ttft >= 5.0


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (QueueFull("512 wait"), "queue_full"),
        (TimeoutError(), "no end after 600 s"),
        (HttpFailure("HTTP 500: x"), "HTTP 500: x"),
        (ConnectionResetError(104, "reset"), "ConnectionResetError"),
        (KeyError("usage"), "KeyError: 'usage'"),
    ],
)
def test_names_of_errors(problem: Exception, name: str) -> None:
    assert name_of(problem) == name


def test_messages_are_one_short_line() -> None:
    assert message_of('{"detail": "a\\n  b"}') == "a b"
    assert message_of("x" * 500) == "x" * 160


def test_shares_of_a_load_are_the_whole_of_it() -> None:
    work = Workload(11, Lengths(9, 0.5, 1, 20), Lengths(9, 0.5, 1, 20))
    jobs = [Job(Target("m"), work, 2.0, "0 1", number, 3) for number in range(3)]
    due = sorted(request.due for job in jobs for request in job.requests())
    whole = Job(Target("m"), work, 2.0, "0 1", 0, 1)
    assert due == [request.due for request in whole.requests()]
    assert Job.from_json(json.loads(json.dumps(as_map(whole)))) == whole


def test_a_server_without_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^http://127.0.0.1:9/v1/models: .+"):
        first_model("http://127.0.0.1:9/v1", "")

    async def ask(answer: bytes) -> bytes:
        server = await asyncio.start_server(FakeServer(answer).serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with opened(f"http://127.0.0.1:{port}/v1/models") as response:
                return await response.body()

    assert asyncio.run(ask(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) == b"{}"
