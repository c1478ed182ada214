"""An index of the prefixes that a worker may have cached, from the prompts sent to it.

The index is an estimate. The worker reports the true numbers of tokens: the evicted tokens of its
cache in heartbeats, and the cached tokens of a request in the request's usage.
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
MAX_PIECES = 1024  # most pieces of a prompt; the rest of a long prompt is not indexed
BYTES_PER_TOKEN = 4  # approximate bytes per token of text, until a worker has counted
KEY_BYTES = 8


class PromptPieces(Struct, frozen=True):
    """A prompt as a chain of pieces: prompts with a common prefix begin with equal pieces.

    The broker has neither tokenizer nor chat template, so it cuts the client's data. A piece is 256
    token ids, 1 KiB of text, or a message of a chat (1 KiB of a longer message). `keys[i]` is a
    hash of the prompt up to the end of piece i.

    A worker that got a prompt with the key `keys[i]` has cached about `ends[i]` tokens of this
    prompt. These tokens end with piece i. If an answer of the model follows piece i, they end with
    that answer, because the worker has computed it. `tokens` is the number of tokens of the whole
    prompt.
    """

    keys: tuple[bytes, ...]
    ends: tuple[int, ...]
    tokens: int


def pieces_of(prompt: Prompt) -> PromptPieces:
    """Cuts a prompt into pieces.

    All keys also depend on the prompt's tools, its setting for thoughts, and its images.
    """
    keys: list[bytes] = []
    ends: list[int] = []
    key, end = _base(prompt), _base_tokens(prompt)
    sent = 0  # number of pieces up to the client's newest piece
    for text, generated, width in _texts(prompt):
        for start in range(0, len(text), PIECE_TOKENS * width):
            piece = text[start : start + PIECE_TOKENS * width]
            end += -(-len(piece) // width)
            if len(keys) == MAX_PIECES:
                continue
            key = _hash(key, piece)
            keys.append(key)
            ends.append(end)
            if generated and sent:
                ends[sent - 1] = end
            elif not generated:
                sent = len(keys)
    return PromptPieces(tuple(keys), tuple(ends), end)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


def _base(prompt: Prompt) -> bytes:
    """Returns a hash of the data that precede all pieces or change their meaning."""
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
    """Yields parts of a prompt: (bytes, whether the model wrote the part, bytes per token)."""
    if isinstance(prompt, ChatPrompt):
        for message in prompt.messages:
            yield msgpack.packb(message), message.get("role") == "assistant", BYTES_PER_TOKEN
    elif isinstance(prompt, TextPrompt):
        yield prompt.text.encode("utf-8", "surrogatepass"), False, BYTES_PER_TOKEN
    else:
        yield prompt.blob, False, BYTES_PER_TOKEN if prompt.key == "prompt" else ID_WIDTH


MAX_KEYS = 1 << 16  # most pieces of a worker, about 8 MB


class PrefixIndex:
    """The pieces of the prompts that were sent to a worker, see PromptPieces.

    The least recently sent pieces are evicted first. The last pieces of a prompt are evicted before
    its first pieces.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[bytes, int] = OrderedDict()  # key -> tokens in the piece
        self.tokens = 0  # tokens of all pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def found(self, prompt: PromptPieces) -> int:
        """Returns the number of leading tokens of the prompt that are in the index."""
        # Invariant: the index contains a piece only together with all pieces before it.
        count = bisect_left(prompt.keys, True, key=lambda key: key not in self._pieces)
        return prompt.ends[count - 1] if count else 0

    def add(self, prompt: PromptPieces) -> None:
        """Adds a prompt that was sent to the worker."""
        # The first piece is touched last: a shared prefix is evicted after the pieces that follow.
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
        """Evicts the oldest pieces until at most `tokens` tokens are left."""
        while self._pieces and self.tokens > tokens:
            self._drop_oldest()

    def shrink(self, tokens: int) -> None:
        """Evicts the oldest pieces, because the worker's cache has evicted `tokens` tokens."""
        self.bound(max(0, self.tokens - tokens))

    def _drop_oldest(self) -> None:
        _, tokens = self._pieces.popitem(last=False)
        self.tokens -= tokens
