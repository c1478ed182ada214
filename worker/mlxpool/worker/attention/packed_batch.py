"""The texts of one pass of an encoder model, one after the other, whole and without padding.

Texts of equal length attend together. As texts are sorted by length, a pass has few lengths, and no
text is padded or masked because of other texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.attention.dot_product import MAX_CPU_PAIRS, MAX_SCORES, unfused_attention
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.kernels.cpu_exp import on_linux_cpu, softmax_in_place
from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan, SpanScan


class EqualTexts(Struct, frozen=True):
    """`count` texts of `length` tokens; the first text begins at token `begin` of the pass."""

    begin: int
    count: int
    length: int

    @property
    def end(self) -> int:
        """The number of the token after the last token."""
        return self.begin + self.count * self.length


def equal_texts(lengths: Sequence[int]) -> tuple[EqualTexts, ...]:
    """Groups the texts of equal length, in the order of the sorted lengths."""
    groups, begin = [], 0
    for length, some in groupby(lengths):
        groups.append(EqualTexts(begin, sum(1 for _ in some), length))
        begin = groups[-1].end
    return tuple(groups)


class PackedBatch(RotateThenAttend):
    """The tokens of one pass of an encoder model; implements TextBatch.

    `windows`: for each layer the number of tokens that a token sees to each side, itself included;
    0: it sees all tokens. `causal`: a token sees no later tokens. The last `padding` tokens of each
    text are padding: they see the text's other tokens, but not each other. The other tokens see all
    tokens of the text.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        types: Sequence[int],
        windows: Sequence[int],
        *,
        causal: bool = False,
        padding: int = 0,
    ) -> None:
        """`lengths`: the sorted lengths of the texts. `types`: the segment number of each token."""
        self.texts = equal_texts(lengths)
        self._windows, self._causal, self._padding = windows, causal, padding
        places = [np.tile(np.arange(texts.length), texts.count) for texts in self.texts]
        self._positions = mx.array(np.concatenate(places).astype(np.int32))
        self._types = mx.array(np.array(types, np.int32))
        self._rotary = RotaryEmbedding(self._positions)
        self._masks: dict[tuple[int, int], mx.array | None] = {}

    @property
    def positions(self) -> mx.array:
        """The position [T] of each token in its text."""
        return self._positions

    @property
    def types(self) -> mx.array:
        """The segment number [T] of each token."""
        return self._types

    @property
    def logits(self) -> bool:
        """False: the states of all tokens are computed, and no logits."""
        return False

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns x unchanged: all tokens are computed."""
        return x

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x unchanged: the remaining operations of the layer compute all tokens."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D], each token rotated by its position in its text."""
        return self._rotary(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Attends inside each text: q [T, H, D], k, v [T, KV, D] -> [T, H, D]."""
        outs = []
        for texts in self.texts:
            qs, ks, vs = (_heads_first(x[texts.begin : texts.end], texts.count) for x in (q, k, v))
            mask = self._mask(texts.length, self._windows[layer])
            seen = texts.length - self._padding
            out = _attend(qs[:, :, :seen], ks, vs, scores, mask)
            if self._padding:
                rest = _attend(qs[:, :, seen:], ks[:, :, :seen], vs[:, :, :seen], scores, None)
                out = mx.concatenate([out, rest], axis=2)
            outs.append(out.swapaxes(1, 2).reshape(-1, *out.shape[1::2]))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Raises NotImplementedError: encoder models have no latent attention."""
        raise NotImplementedError

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Raises NotImplementedError: encoder models have no recurrent layers."""
        raise NotImplementedError

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Raises NotImplementedError: encoder models have no recurrent layers."""
        raise NotImplementedError

    def _mask(self, length: int, window: int) -> mx.array | None:
        """Returns the mask [length, length] of the keys that queries see; None: all keys."""
        window = window if window < length else 0
        if not window and not self._causal:
            return None
        if (length, window) not in self._masks:
            distance = np.arange(length)[:, None] - np.arange(length)
            seen = distance >= 0 if self._causal else np.ones_like(distance, bool)
            if window:
                seen &= abs(distance) < window
            self._masks[length, window] = mx.array(seen)
        return self._masks[length, window]


def _heads_first(x: mx.array, count: int) -> mx.array:
    """Returns x [B * L, H, D] of B texts as [B, H, L, D]."""
    return x.reshape(count, -1, *x.shape[1:]).swapaxes(1, 2)


def _attend(
    q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams, mask: mx.array | None
) -> mx.array:
    """Attends part by part, to save memory: q [B, H, L, D], k, v [B, KV, L, D] -> [B, H, L, D]."""
    if on_gpu() and not scores.softcap:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scores.scale, mask=mask)
    rows = []
    for texts, queries in _parts(q.shape[0], q.shape[1], q.shape[2]):
        seen = None if mask is None else mask[queries]
        some = q[texts, :, queries], k[texts], v[texts]
        rows.append((texts, _attend_part(*some, scores, seen)))
    grouped = [
        mx.concatenate([out for _, out in some], axis=2)
        for _, some in groupby(rows, key=lambda row: row[0].start)
    ]
    return mx.concatenate(grouped) if len(grouped) > 1 else grouped[0]


def _attend_part(
    q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams, mask: mx.array | None
) -> mx.array:
    """Computes `_attend` for some of the texts and queries."""
    if scores.softcap or scores.sinks is not None or q.dtype != mx.float32 or not on_linux_cpu():
        return unfused_attention(q, k, v, scores, mask)
    shape = (
        q.shape[0],
        k.shape[1],
        -1,
        q.shape[3],
    )  # queries of one key head follow each other
    logits = (q * scores.scale).reshape(shape) @ k.swapaxes(-1, -2)
    if mask is not None:
        logits = logits.reshape(*q.shape[:3], -1) + mx.where(mask, 0.0, -mx.inf)
        logits = logits.reshape(*shape[:2], -1, k.shape[2])
    weights, sums = softmax_in_place(logits)
    return ((weights @ v) / sums).reshape(*q.shape[:3], -1)


def _parts(count: int, heads: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yields ranges of texts and of queries whose attention scores fit into memory together.

    A pair of ranges covers all queries of some texts, or some queries of one text.
    """
    pairs = MAX_SCORES // heads if on_gpu() else MAX_CPU_PAIRS
    texts = max(pairs // length**2, 1)
    queries = length if length**2 <= pairs else max(pairs // length, 1)
    for text in range(0, count, texts):
        for query in range(0, length, queries):
            yield slice(text, text + texts), slice(query, query + queries)
