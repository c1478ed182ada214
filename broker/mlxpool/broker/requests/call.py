"""A `tokenize` or `detokenize` of a client that a worker is to answer."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.common.protocol.to_broker import TokenizerCall


@dataclass(eq=False, slots=True)
class Call:
    """An open call. `epoch`: of the worker that has it, 0 while it waits in the model's record.

    `losses` counts workers that had it and ended; its answer goes to `link` with `attempt`.
    """

    id: bytes
    model: str
    link: int
    attempt: int
    message: TokenizerCall
    epoch: int = 0
    losses: int = 0

    @property
    def size(self) -> int:
        """Bytes of its blobs."""
        return sum(map(len, self.message.blobs()))

    def same_as(self, message: TokenizerCall) -> bool:
        """Whether a message with its id is the same call, sent again."""
        mine = self.message
        return (mine.kind, mine.model, mine.owner) == (message.kind, message.model, message.owner)
