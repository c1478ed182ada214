"""The spans of tokens of a pass: their rows, their images, and their wanted results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.row_cache import RowCache

CacheRow = RowCache | SlabRow
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.int32]  # the ids of a pass's inputs


class ImageLines(Struct, frozen=True):
    """The tokens [begin, end) of a span that are inputs of one image.

    `features` [1 + L, n, d]: the image's features for the inputs, then for the outputs of L layers,
    see SeeingModel.encode_image. `group`: every token of the image attends to all its tokens, also
    to later tokens.
    """

    begin: int
    end: int
    features: mx.array
    group: bool


class ImageView(Struct, frozen=True):
    """The tokens [begin, end) of a span that attend to the same images in cross-attention.

    `features`: for each image [2 * C, KV, n, D], the keys and values of C layers, see
    SeeingModel.encode_image.
    """

    begin: int
    end: int
    features: tuple[mx.array, ...]

    def keys_values(self, layer: int) -> tuple[mx.array, mx.array]:
        """Returns the keys and values [1, KV, L, D] of all images in a layer of cross-attention."""
        keys, values = (
            [features[2 * layer + part][None] for features in self.features] for part in range(2)
        )
        if len(keys) == 1:
            return keys[0], values[0]
        return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


# Not frozen, like scheduling.Span.
class RowSpan(Struct):
    """`count` new tokens of `row`: one token of a row that decodes, or a chunk of a prompt.

    If the span is wanted, the pass returns logits of the span's last `lines` tokens or, with
    `hidden`, their hidden states. `images`: the images whose inputs are among the tokens, in order.
    `views`: the images that tokens see in layers of cross-attention, in order. `positions` [count,
    3]: three positions of each token, see Rope.axes; None: the position of a token is its number in
    the row.
    """

    row: CacheRow
    count: int
    lines: int = 1
    hidden: bool = False
    images: tuple[ImageLines, ...] = ()
    views: tuple[ImageView, ...] = ()
    positions: npt.NDArray[np.int32] | None = None

    @property
    def plain(self) -> bool:
        """True if the span involves no image, so that compiled passes support it."""
        return not self.images and not self.views and self.positions is None

    @property
    def wide(self) -> bool:
        """True if the span's results are more than the logits of one token."""
        return self.lines > 1 or self.hidden


class PassOutput(NamedTuple):
    """The results of a pass for its wanted spans, not evaluated yet.

    `logits` [E, vocabulary]; if no span wants logits, any array to evaluate. `hidden` [H, d]: the
    wanted hidden states, float32. `states` [T, d]: the states of all inputs after the last norm, in
    the inputs' order. `drawn` [E, d]: the states of the logits, after the last norm. `states` and
    `drawn` are None if the layout does not keep them.
    """

    logits: mx.array
    hidden: mx.array | None = None
    states: mx.array | None = None
    drawn: mx.array | None = None


def wanted_lines(spans: Sequence[RowSpan], wanted: Sequence[int]) -> int:
    """Returns the number of tokens of the spans `wanted` that get logits or give hidden states.

    Spans that give more than the logits of one token come last.
    """
    if not wanted or not spans[wanted[-1]].wide:
        return len(wanted)
    return sum(spans[number].lines for number in wanted)


def logit_spans(spans: Sequence[RowSpan], wanted: Sequence[int]) -> Sequence[int]:
    """Returns the spans of `wanted` that get logits, without spans that give hidden states.

    In `wanted`, spans that give hidden states come last.
    """
    if not wanted or not spans[wanted[-1]].hidden:
        return wanted
    return [number for number in wanted if not spans[number].hidden]


def checks_drafts(spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
    """Returns True if a span of `wanted` gets logits of several tokens."""
    drawing = logit_spans(spans, wanted)
    return bool(drawing) and spans[drawing[-1]].lines > 1


def all_plain(spans: Sequence[RowSpan]) -> bool:
    """Returns True if all spans are `plain`; faster than the property for many spans."""
    return not any(span.images or span.views or span.positions is not None for span in spans)


def is_check(span: RowSpan) -> bool:
    """Returns True if a span checks drafts: each of its tokens gives logits."""
    return span.count > 1 and span.lines == span.count and not span.hidden and span.plain


def leading_singles(spans: Sequence[RowSpan]) -> int:
    """Returns the number of spans of one token before the first span of several tokens."""
    return next((n for n, span in enumerate(spans) if span.count > 1), len(spans))


def is_plain_decode(spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
    """Returns True if every span is one token that gets logits, in the order of the spans.

    The position of each token must be its number in the row.
    """
    if list(wanted) != list(range(len(spans))) or spans[-1].hidden:
        return False
    return all(span.count == 1 and span.plain for span in spans)


def singles_first(
    spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
) -> tuple[Sequence[RowSpan], mx.array, Sequence[int]]:
    """Moves the spans of one token to the front; returns spans, ids and wanted numbers.

    `ids` [T] follow their spans. `wanted` has the new numbers of the same spans.
    """
    order = sorted(range(len(spans)), key=lambda number: spans[number].count > 1)
    if order == list(range(len(spans))):
        return spans, ids, wanted
    ends = list(accumulate(span.count for span in spans))
    lines = [line for at in order for line in range(ends[at] - spans[at].count, ends[at])]
    places = {at: number for number, at in enumerate(order)}
    return (
        [spans[at] for at in order],
        ids[mx.array(lines, dtype=mx.int32)],
        [places[at] for at in wanted],
    )
