"""Makes room in a full context: the truncation of a prompt, and the shifts of a stream. Pure.

Counts are tokens. A cut keeps the first `keep` tokens of a stream and removes some tokens directly
after them. It depends only on counts and on the positions of images, so every worker makes the same
cuts in a stream. A cut that would end inside an image also removes the remainder of the image.
"""

from __future__ import annotations

from msgspec import Struct

from mlxpool.common.errors import ContextExceeded
from mlxpool.worker.media.spans import MediaSpan, Spans, cut_end, kept_end

# The most ids of a completion with shifts, unless the context leaves room for more. A resume has
# these ids in a blob of 2 MiB. A message has 8 MiB; the blob of the prompt may be half of it.
MAX_SHIFTED_IDS = 2**19
MIN_CONTEXT = 2  # tokens of a request: one prompt token and one completion token
OPEN_ENDED_CONTEXTS = 10  # length, in contexts, of a completion with shifts and without max_tokens


def kept_tokens(num_keep: int, prompt: int, context: int, media: Spans = ()) -> int:
    """Returns how many first tokens of a stream to keep; negative `num_keep`: the whole prompt.

    An image that would be divided is not kept, unless `num_keep` fills the context. In that case a
    prompt that is too long cannot be cut, see `truncated_tokens`.
    """
    keep = prompt if num_keep < 0 else num_keep
    return context - 1 if keep >= context - 1 else kept_end(media, keep)


def truncated_tokens(prompt: int, context: int, keep: int, media: Spans = ()) -> int:
    """Returns the tokens to remove after the kept ones, so that the context has room for one more.

    Raises ContextExceeded if no token would be left after the kept tokens.
    """
    removed = max(0, prompt - (context - 1))
    if removed:
        removed = cut_end(media, keep + removed) - keep
    if removed and keep + removed >= prompt:
        raise ContextExceeded(
            f"the prompt has {prompt} tokens, the context has {context}: truncation that keeps the"
            f" first {keep} (num_keep) leaves nothing of its end; set num_keep to at most"
            f" {context - 2}, or shorten the prompt",
            details={"prompt_tokens": prompt, "context": context, "num_keep": keep},
        )
    return removed


def shift_discard(tokens: int, context: int, keep: int) -> int:
    """Returns how many of a stream's `tokens` a shift discards, directly after the kept tokens.

    After the shift, half of the context beyond the kept tokens is free, at least 1 token.
    """
    discard = max((context - keep) // 2, 1) - (context - tokens)
    return min(max(0, discard), max(0, tokens - keep))


class ContextShift(Struct, frozen=True):
    """The shifts of one stream: a shift keeps the first `keep` tokens of a full context.

    `context`: the tokens of a full context. A shift is due when the stream exceeds the context by
    one token. `media`: the images of the stream; a shift removes or keeps each image as a whole.
    """

    context: int
    keep: int
    media: tuple[MediaSpan, ...] = ()

    def discarded(self, tokens: int) -> int:
        """Returns the number of tokens discarded by all shifts of a stream of `tokens` tokens."""
        excess = tokens - self.context
        if excess <= 0:
            return 0
        each = shift_discard(self.context, self.context, self.keep)
        if not self.media:
            return -(-excess // each) * each
        gone = 0
        while tokens - gone > self.context:
            gone = cut_end(self.media, self.keep + gone + each) - self.keep
        return gone


def completion_limit(prompt: int, context: int, *, shift: bool) -> int:
    """Returns the most ids that a completion may have."""
    left = context - prompt
    return max(left, MAX_SHIFTED_IDS) if shift else left


def completion_tokens(wanted: int, prompt: int, context: int, *, shift: bool) -> int:
    """Returns the most ids of a completion; `wanted` <= 0: the request has no bound.

    Without a bound, a completion with shifts ends after OPEN_ENDED_CONTEXTS contexts.
    """
    limit = completion_limit(prompt, context, shift=shift)
    if wanted > 0:
        return min(wanted, limit)
    return min(limit, OPEN_ENDED_CONTEXTS * context) if shift else limit
