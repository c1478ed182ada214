"""What one incarnation of a worker may have cached, by the pieces of the prompts it was sent.

It is a guess from the broker's side: the worker has the truth, and tells of it in heartbeats (how
many tokens its cache dropped) and in the usage of each request (how many it found).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

from mlxpool.broker.routing.prompt_pieces import PromptPieces

MAX_KEYS = 1 << 16  # pieces of one worker: about 8 MB


class PrefixIndex:
    """Least recently sent pieces are dropped first, and of one prompt the last pieces first."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[bytes, int] = OrderedDict()  # key -> tokens of the piece
        self.tokens = 0  # of all pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def found(self, prompt: PromptPieces) -> int:
        """Returns how many of the prompt's first tokens are in the index."""
        # Invariant: a piece is in the index only together with all pieces before it.
        count = bisect_left(prompt.keys, True, key=lambda key: key not in self._pieces)
        return prompt.ends[count - 1] if count else 0

    def add(self, prompt: PromptPieces) -> None:
        """The worker was sent this prompt."""
        # The first piece is touched last: a shared beginning outlives what follows it.
        for index in range(len(prompt.keys) - 1, -1, -1):
            key = prompt.keys[index]
            if key in self._pieces:
                self._pieces.move_to_end(key)
                continue
            tokens = prompt.ends[index] - (prompt.ends[index - 1] if index else 0)
            self._pieces[key] = tokens
            self.tokens += tokens
        while len(self._pieces) > MAX_KEYS:
            self._drop_oldest()

    def bound(self, tokens: int) -> None:
        """Drops the oldest pieces until at most so many tokens are left."""
        while self._pieces and self.tokens > tokens:
            self._drop_oldest()

    def shrink(self, tokens: int) -> None:
        """The worker's cache has dropped so many tokens."""
        self.bound(max(0, self.tokens - tokens))

    def _drop_oldest(self) -> None:
        _, tokens = self._pieces.popitem(last=False)
        self.tokens -= tokens
