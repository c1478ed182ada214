"""The target of a load: a model of a pool, or a server with OpenAI's completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct, field

from mlxpool.bench.load import http_stream
from mlxpool.bench.load.http_stream import HttpFailure
from mlxpool.bench.load.workload import Request, text_of

MODELS_TIMEOUT = 30.0  # seconds until a server has named its models


class Target(Struct, frozen=True):
    """A model of the pool at a run directory, or of the server at a URL that ends with /v1."""

    model: str
    run_dir: str = ""
    url: str = ""
    api_key: str = ""
    as_text: bool = False  # prompts are text instead of token ids; servers only
    ignore_eos: bool = True
    connect_first: bool = False  # connect before the load starts; servers only

    def __repr__(self) -> str:  # without the key
        return f"Target({self.model!r}, {self.run_dir or self.url!r})"


class Answer(Struct):
    """The received part of an answer. Its times are seconds after the monotonic time `begin`."""

    begin: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    exact: bool = True  # False: the server did not report numbers of tokens
    counts: list[int] = field(default_factory=list)  # tokens of each piece
    ids: list[int] = field(default_factory=list)  # ids, if they are known

    def add(self, tokens: int, ids: Sequence[int] = ()) -> None:
        """Records a piece of the answer that has just arrived."""
        self.times.append(time.monotonic() - self.begin)
        self.counts.append(tokens)
        self.output_tokens += tokens
        self.ids += ids


Send: TypeAlias = Callable[[Request, Answer], Awaitable[None]]


@asynccontextmanager
async def opened(target: Target, requests: int = 0) -> AsyncIterator[Send]:
    """Yields a function that sends a request and records its answer until the end.

    The function raises PoolError, HttpFailure or OSError for a request that fails. If the target
    has `connect_first`, the connections for `requests` requests are opened first, one after the
    other. If all were opened at once, they could fill a short listen backlog, and a client retries
    a connection to a full backlog only after seconds.
    """
    if target.url:
        ready = requests if target.connect_first else 0
        links = [await http_stream.connected(target.url) for _ in range(ready)]
        yield lambda request, answer: _to_server(target, request, answer, links)
        return
    from mlxpool.client import AsyncClient

    async with AsyncClient(Path(target.run_dir)) as client:
        await client.models()  # connects the client
        yield lambda request, answer: _to_pool(client, target, request, answer)


async def _to_pool(client: Any, target: Target, request: Request, answer: Answer) -> None:
    text = isinstance(request.prompt, str)
    stream = client.stream(
        target.model,
        request.prompt if text else None,
        tokens=None if text else request.prompt,
        max_tokens=request.output,
        temperature=0.0,
        ignore_eos=target.ignore_eos,
    )
    async with stream:
        async for delta in stream:
            if delta.ids:
                answer.add(len(delta.ids), delta.ids)


async def _to_server(
    target: Target, request: Request, answer: Answer, links: list[http_stream.Link]
) -> None:
    async with http_stream.opened(
        f"{target.url}/completions",
        api_key=target.api_key,
        body=body_of(target, request),
        link=links.pop() if links else None,
    ) as response:
        ended = False
        async for line in response.lines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            _take(json.loads(data), answer)
    if not ended:
        raise HttpFailure("the stream ended without [DONE]")


def body_of(target: Target, request: Request) -> dict[str, Any]:
    """Returns the body of POST /v1/completions."""
    prompt = request.prompt
    if not isinstance(prompt, str):
        prompt = text_of(prompt) if target.as_text else list(prompt)
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": request.output,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "ignore_eos": True} if target.ignore_eos else body


def _take(event: Mapping[str, Any], answer: Answer) -> None:
    """Records an event of a stream. An event with only a finish reason has no token."""
    if event.get("error"):
        raise HttpFailure(http_stream.message_of(json.dumps(event)))
    choices = event.get("choices") or ()
    if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
        answer.add(1)
        answer.exact = False
    usage = event.get("usage")
    if usage:
        answer.output_tokens = usage["completion_tokens"]
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.exact = True


# ---- the name of a server and of its model -------------------------------------------------------


def server_url(url_given: str) -> str:
    """Returns the URL with /v1 at its end. Raises ValueError for a URL other than http or https."""
    parts = urlsplit(url_given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--against {url_given}: give a URL such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"--against {url_given}: give a URL without a query, a fragment or a user")
    url = url_given.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def first_model(url: str, api_key: str) -> str:
    """Returns the first model in the server's list. Raises ValueError if the list is empty."""

    async def ask() -> bytes:
        async with (
            asyncio.timeout(MODELS_TIMEOUT),
            http_stream.opened(f"{url}/models", api_key=api_key) as response,
        ):
            return await response.body()

    try:
        return str(json.loads(asyncio.run(ask()))["data"][0]["id"])
    except (HttpFailure, OSError) as error:
        raise ValueError(f"{url}/models: {str(error) or type(error).__name__}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{url}/models names no model; give --against-model NAME") from error
