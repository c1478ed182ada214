"""What leaves a context that is full: the cut of a prompt, and the shifts of a stream. Pure.

Counts are tokens. A cut removes the tokens right after the kept ones, the first `keep` of a stream.
It depends on counts and on the places of images alone, so every worker makes the same cuts in a
stream. A cut that would end inside an image takes the rest of it, too.
"""

from __future__ import annotations

from msgspec import Struct

from mlxpool.common.errors import ContextExceeded
from mlxpool.worker.media.spans import MediaSpan, Spans, cut_end, kept_end

# Ids that a completion with shifts may have where the context holds fewer. A resume carries them in
# a blob beside the prompt's, which may take half of a message: 2 MiB of 8.
MAX_SHIFTED_IDS = 2**19
MIN_CONTEXT = 2  # tokens of a request: one of its prompt and one of its completion
OPEN_ENDED_CONTEXTS = 10  # contexts of ids of a completion with shifts that names no max_tokens


def kept_tokens(num_keep: int, prompt: int, context: int, media: Spans = ()) -> int:
    """Returns how many first tokens of a stream stay; a negative `num_keep`: the whole prompt.

    An image that would be kept in part is not kept, unless all that fits is to be kept: then a
    prompt that is too long cannot be cut, see `truncated_tokens`.
    """
    wanted = prompt if num_keep < 0 else num_keep
    return context - 1 if wanted >= context - 1 else kept_end(media, wanted)


def truncated_tokens(prompt: int, context: int, keep: int, media: Spans = ()) -> int:
    """Returns how many tokens a prompt loses after the kept ones, so that one token stays free.

    Raises ContextExceeded when that leaves none behind the kept ones.
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
    """Returns how many of `tokens` a shift discards after the kept ones.

    Afterwards half of what the context has besides the kept ones is free, and at least 1.
    """
    wanted = max((context - keep) // 2, 1) - (context - tokens)
    return min(max(0, wanted), max(0, tokens - keep))


class ContextShift(Struct, frozen=True):
    """The shifts of one stream: a full context of `context` tokens keeps its first `keep`.

    A shift is due when one token more than the context holds has to be read. `media`: the images of
    the stream, each of which goes or stays as a whole.
    """

    context: int
    keep: int
    media: tuple[MediaSpan, ...] = ()

    def discarded(self, tokens: int) -> int:
        """Returns how many tokens of a stream of `tokens` all shifts so far have discarded."""
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
    """Returns how many ids a completion may have."""
    left = context - prompt
    return max(left, MAX_SHIFTED_IDS) if shift else left


def completion_tokens(wanted: int, prompt: int, context: int, *, shift: bool) -> int:
    """Returns the most ids of a completion; `wanted` 0 and below: no bound was named.

    Without a bound a completion with shifts ends after OPEN_ENDED_CONTEXTS contexts.
    """
    limit = completion_limit(prompt, context, shift=shift)
    if wanted > 0:
        return min(wanted, limit)
    return min(limit, OPEN_ENDED_CONTEXTS * context) if shift else limit
