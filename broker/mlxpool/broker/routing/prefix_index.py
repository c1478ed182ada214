"""What one incarnation of a worker may have cached, by the pieces of the prompts it was sent.

It is a guess from the broker's side: the worker has the truth, and tells of it in heartbeats (how
many tokens its cache dropped) and in the usage of each request (how many it found).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

import msgpack
from msgspec import Struct

from mlxpool.common.protocol.images import TOKENS_PER_IMAGE
from mlxpool.common.protocol.prompts import ChatPrompt, PackedPrompt, Prompt, TextPrompt
from mlxpool.common.protocol.token_ids import ID_WIDTH

PIECE_TOKENS = 256
MAX_PIECES = 1024  # of one prompt; what follows them is in none
BYTES_PER_TOKEN = 4  # of text, roughly, until a worker has counted
KEY_BYTES = 8


class PromptPieces(Struct, frozen=True):
    """A prompt as a chain of pieces: prompts that begin alike begin with equal pieces.

    The broker has no tokenizer and no chat template, so pieces are cut from what the client sent:
    256 token ids, 1 KiB of a text, a message of a chat (1 KiB of it where it is longer). `keys[i]`
    stands for the prompt up to the end of piece i.

    A worker that was sent a prompt with that key has cached about `ends[i]` tokens of this one: up
    to the end of the piece, and of the model's answer where one follows, for the worker made it.
    `tokens` are those of the whole prompt.
    """

    keys: tuple[bytes, ...]
    ends: tuple[int, ...]
    tokens: int


def pieces_of(prompt: Prompt) -> PromptPieces:
    """Cut a prompt. The first key also depends on its tools, its thinking and its images."""
    keys: list[bytes] = []
    ends: list[int] = []
    key, end = _base(prompt), _base_tokens(prompt)
    asked = 0  # pieces up to the newest that no model made
    for text, generated, width in _texts(prompt):
        for start in range(0, len(text), PIECE_TOKENS * width):
            piece = text[start : start + PIECE_TOKENS * width]
            end += -(-len(piece) // width)
            if len(keys) == MAX_PIECES:
                continue
            key = _hash(key, piece)
            keys.append(key)
            ends.append(end)
            if generated and asked:
                ends[asked - 1] = end
            elif not generated:
                asked = len(keys)
    return PromptPieces(tuple(keys), tuple(ends), end)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


def _base(prompt: Prompt) -> bytes:
    """What stands before all pieces, or changes what they mean."""
    settings: list[object] = [type(prompt).__name__]
    if isinstance(prompt, ChatPrompt):
        settings += [prompt.tools, prompt.think]
    if isinstance(prompt, PackedPrompt):
        settings = ["TextPrompt" if prompt.key == "prompt" else "tokens"]
    images = [hashlib.sha256(image).digest() for image in prompt.images]
    return _hash(msgpack.packb([settings, images]))


def _base_tokens(prompt: Prompt) -> int:
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    size = len(msgpack.packb(tools)) if tools else 0
    return size // BYTES_PER_TOKEN + TOKENS_PER_IMAGE * len(prompt.images)


def _texts(prompt: Prompt) -> Iterator[tuple[bytes, bool, int]]:
    """What the prompt is made of: bytes, whether a model made them, and bytes of a token."""
    if isinstance(prompt, ChatPrompt):
        for message in prompt.messages:
            yield msgpack.packb(message), message.get("role") == "assistant", BYTES_PER_TOKEN
    elif isinstance(prompt, TextPrompt):
        yield prompt.text.encode("utf-8", "surrogatepass"), False, BYTES_PER_TOKEN
    else:
        yield prompt.blob, False, BYTES_PER_TOKEN if prompt.key == "prompt" else ID_WIDTH


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
