"""The tokenizer calls of this worker: from a `tokenize` or `detokenize` to its answer or cancel."""

from __future__ import annotations

from itertools import count

from mlxpool.common.errors import PoolError, TooLarge
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.to_broker import TokenizerAnswer
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.prepare import Answer, CallKey, Preparer


class TokenizerCalls:
    """A table of open calls. Belongs to the main thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._preparer: Preparer | None = None
        self._keys = map(CallKey, count())
        self._open: dict[bytes | None, CallKey] = {}  # by the id of the call

    def opened(self, preparer: Preparer) -> None:
        """The model's text functions are there."""
        self._preparer = preparer

    def begin(self, message: Message, fence: int) -> None:
        """Take a call; one that cannot be read is answered at once."""
        if self._preparer is None:
            return
        id = message.header.id
        parse = Tokenize.parse if message.kind == Tokenize.kind else Detokenize.parse
        try:
            call = parse(message.body, message.blobs)
        except PoolError as error:
            self._send(id, TokenizerAnswer(error.body()))
            return
        key = self._open[id] = next(self._keys)
        self._preparer.answer(key, id, call, fence)

    def cancel(self, id: bytes) -> None:
        """Stop the preparation of a call, which gets no answer."""
        key = self._open.pop(id, None)
        if key is not None and self._preparer is not None:
            self._preparer.cancel(key)

    def answered(self, answer: Answer) -> None:
        """The preparer is done with a call; its answer is sent unless the call was cancelled."""
        if self._open.get(answer.id) == answer.key:
            del self._open[answer.id]
            self._send(answer.id, answer.content)

    def drop_all(self) -> None:
        """Forget all calls: the broker gives them to another worker. `Runs` stops the preparer."""
        self._open.clear()

    def _send(self, id: bytes | None, answer: TokenizerAnswer) -> None:
        try:
            self._link.send(answer, id)
        except TooLarge as error:
            self._link.send(TokenizerAnswer(error.body()), id)
