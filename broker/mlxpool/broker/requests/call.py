"""A `tokenize` or `detokenize` of a client that a worker is to answer."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.common.protocol.to_broker import TokenizerCall


@dataclass(frozen=True, slots=True)
class Call:
    """A call; `tries` counts the workers that it was sent to."""

    id: bytes
    link: int
    attempt: int
    message: TokenizerCall
    tries: int = 0

    @property
    def size(self) -> int:
        """Bytes of its blobs."""
        return sum(map(len, self.message.blobs()))

    def same_as(self, message: TokenizerCall) -> bool:
        """Whether a message with its id is the same call, sent again."""
        mine = self.message
        return (mine.kind, mine.model) == (message.kind, message.model)
