"""The blocking client."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxpool.client import request
from mlxpool.client.retry import BROKER_GRACE, CONNECT_GRACE, Pace
from mlxpool.client.stream import Delta, Result, StreamState
from mlxpool.client.transport import Link
from mlxpool.client.transport import Stream as LinkStream
from mlxpool.common.closing import Closing
from mlxpool.common.errors import DeadlineExceeded, PoolError
from mlxpool.common.protocol import frames, kinds, token_ids
from mlxpool.common.protocol.frames import Message
from mlxpool.common.transport.keys import Credentials

CALL_TIMEOUT = 60.0  # seconds; a tokenize may have to wait for the model's load


class Stream(Closing):
    """Deltas as they come. Leaving the loop, `close` or the end of a `with` cancels the rest.

    After the last delta `result` holds the whole completion.
    """

    def __init__(self, link: Link, state: StreamState) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._state = state
        self._part = LinkStream(state, self._queue.put, lambda: self._queue.put(None))
        self._finished = False

    @property
    def id(self) -> bytes:
        """The request's 16 bytes."""
        return self._state.id

    @property
    def result(self) -> Result:
        """Raises the stream's error, or RuntimeError while it is not over, which `read` awaits."""
        if self._state.error is not None:
            raise self._state.error
        if self._state.result is None:
            raise RuntimeError("the stream is not over")
        return self._state.result

    def __iter__(self) -> Iterator[Delta]:
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.close()

    def _next(self) -> Delta | None:
        if self._finished:
            return None
        delta = self._queue.get()
        if delta is None:
            self._finished = True
            if self._state.error is not None:
                raise self._state.error
        else:
            self._link.took(self._part, len(delta.ids))
        return delta

    def read(self) -> Result:
        """Read to the end. Raises the stream's error."""
        while self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancel what is not finished; harmless afterwards."""
        if not self._finished:
            self._finished = True
            if not self._state.over:
                self._link.cancel(self._part)


class Client(Closing):
    """One connection to a broker, for any number of threads and streams.

    `run_dir` names a local broker's run directory (default: the usual one), `endpoint` any front
    endpoint. An endpoint that speaks CURVE needs `server_key`, the broker's public key (text or a
    file), and `key`, the file of a key that the broker knows; BadKey when they cannot be used.
    Errors are those of mlxpool.common.errors; BrokerLost when no broker answers within
    `connect_timeout` seconds, or falls silent for `broker_grace`; Unauthorized when it refuses the
    key. A stream outlives its connection
    and its broker, unless it was asked for with durable=False; `pace` says how soon it is sent
    again.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        *,
        server_key: str | None = None,
        key: str | Path | None = None,
        connect_timeout: float = CONNECT_GRACE,
        broker_grace: float = BROKER_GRACE,
        pace: Pace | None = None,
    ) -> None:
        pace = replace(pace or Pace(), broker_grace=broker_grace, connect_grace=connect_timeout)
        self._link = Link(run_dir, endpoint, pace, Credentials.of(server_key, key))

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Any,
    ) -> Stream:
        """Start a completion of one of prompt, messages ({role, content} each) or token ids.

        Options, `tools` too: see docs/protocol.md, `generate`. Raises BadRequest for what cannot be
        sent; every other error ends the stream and is raised where it is read.
        """
        body, blobs = request.generate(model, prompt, messages, tokens, options)
        stream = Stream(self._link, StreamState(os.urandom(frames.ID_BYTES)))
        self._link.open(stream._part, body, blobs)
        return stream

    def generate(self, model: str, prompt: str | None = None, **options: Any) -> Result:
        """A whole completion; takes what `stream` takes, and raises the stream's error."""
        with self.stream(model, prompt, **options) as stream:
            return stream.read()

    def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return list(self._call(kinds.MODELS, {}).body["models"])

    def tokenize(self, model: str, text: str) -> list[int]:
        """The ids of a text, as the model would read it as a prompt. Loads the model if need be.

        Raises UnknownModel, or DeadlineExceeded without an answer in 60 s.
        """
        value, blobs = request.text(text)
        message = self._call(kinds.TOKENIZE, {"model": model, "text": value}, blobs)
        return token_ids.unpack_ids(message.blobs[0]) if message.blobs else []

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of these ids. Raises what `tokenize` does."""
        message = self._call(kinds.DETOKENIZE, {"model": model}, [token_ids.pack_ids(ids)])
        return str(message.body["text"])

    def cancel(self, request_id: bytes) -> dict[str, Any]:
        """Cancel any of this owner's requests by its 16 bytes.

        Returns its fate: the state it was in, `unknown` if there is none, and `pos`, the ids sent.
        """
        return dict(self._call(kinds.CANCEL, {}, ident=request_id).body)

    def _call(
        self,
        kind: str,
        body: Mapping[str, Any],
        blobs: Sequence[bytes] = (),
        ident: bytes | None = None,
    ) -> Message:
        answers: queue.SimpleQueue[Message | PoolError] = queue.SimpleQueue()
        asked = self._link.ask(kind, body, answers.put, ident, blobs)
        started = time.monotonic()
        try:
            answer = answers.get(timeout=CALL_TIMEOUT)
        except queue.Empty:
            self._link.forget(asked)
            took = time.monotonic() - started
            raise DeadlineExceeded(f"no answer to {kind} after {took:.0f} s") from None
        if isinstance(answer, PoolError):
            raise answer
        return answer

    def close(self) -> None:
        """Close the connection; open streams end."""
        self._link.close()
