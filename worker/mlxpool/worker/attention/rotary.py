"""Rotary position embedding of the tokens of one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.kernels.block_write import RopeTables, makes_tables, rope_tables
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.config_fields import Heads
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LatentLayer,
    LatentProjections,
    LatentToken,
    PendingNorm,
    Rope,
    Scan,
    SpanScan,
)

# For fewer dimensions and more than 64 tokens, MLX's CUDA kernel has too deep thread blocks and
# fails.
MIN_KERNEL_DIMS = 32


class RotaryEmbedding:
    """Rotates queries and keys by their tokens' positions [T], or by three positions each [T, 3].

    `start`: the first position if the positions are consecutive. A GPU has a kernel for rotation.
    On the CPU cosines and sines are computed once for all layers of a step.
    """

    def __init__(self, positions: mx.array, start: int | None = None) -> None:
        self._positions, self._start = positions, start
        self._tables: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._wide: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._fused = mx.default_device().type == mx.DeviceType.gpu

    def __call__(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D] rotated; dimensions from `rope.dims` on stay unchanged."""
        fused = self._fused and rope.dims >= MIN_KERNEL_DIMS and self._positions.ndim == 1
        return self.by_kernel(x, rope) if fused else self.by_table(x, rope)

    def turns(self, rope: Rope) -> RopeTables:
        """Returns the cosines and sines of all tokens, for kernels that rotate queries and keys."""
        if rope not in self._tables and makes_tables():
            frequencies = mx.array(frequencies_of(rope))
            self._tables[rope] = rope_tables(self._positions, frequencies, rope.scale, rope.gain)
        cosines, sines = self._table(rope)
        return RopeTables(cosines, sines, rope.traditional)

    def by_kernel(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D] rotated by MLX's kernel."""
        freqs = None if rope.freqs is None else mx.array(rope.freqs)
        if rope.gain != 1.0:
            gain = mx.where(mx.arange(x.shape[-1]) < rope.dims, rope.gain, 1.0)
            x = x * gain.astype(x.dtype)
        together = self._start is not None
        rotated = mx.fast.rope(
            x.swapaxes(0, 1)[None] if together else x[:, :, None, :],
            rope.dims,
            traditional=rope.traditional,
            base=None if freqs is not None else rope.base,
            scale=rope.scale,
            offset=self._positions if self._start is None else self._start,
            freqs=freqs,
        )
        return rotated.squeeze(0).swapaxes(0, 1) if together else rotated[:, :, 0, :]

    def by_table(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D] rotated by operations with tables of cosines and sines."""
        turned = x[..., : rope.dims]
        if rope.traditional:
            cos, sin = self._table(rope)
            a, b = turned[..., ::2], turned[..., 1::2]
            pairs = [a * cos - b * sin, b * cos + a * sin]
            out = mx.stack(pairs, axis=-1).reshape(turned.shape)
        else:
            a, b = mx.split(turned, 2, axis=-1)
            cos, sin = self._halves(rope)
            out = turned * cos + mx.concatenate([b, a], axis=-1) * sin
        if rope.dims == x.shape[-1]:
            return out.astype(x.dtype)
        return mx.concatenate([out.astype(x.dtype), x[..., rope.dims :]], axis=-1)

    def _halves(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """Returns two arrays [T, 1, dims] of factors: of each number, and of its partner.

        The partner of a number has the same index in the other half of the rotated numbers.
        """
        if rope not in self._wide:
            cos, sin = self._table(rope)
            self._wide[rope] = (
                mx.concatenate([cos, cos], axis=-1),
                mx.concatenate([-sin, sin], axis=-1),
            )
        return self._wide[rope]

    def _table(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """Returns cosines and sines [T, 1, dims / 2] in float32."""
        if rope not in self._tables:
            if rope.freqs is None:
                steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
                turns = mx.exp(-steps * math.log(rope.base))
            else:
                turns = 1 / mx.array(rope.freqs)
            places = self._positions.astype(mx.float32)
            if places.ndim == 1:
                places = places[:, None]
            else:  # [T, dims / 2]
                places = places[:, list(rope.axes or (0,) * (rope.dims // 2))]
            angles = places * rope.scale * turns
            cos, sin = mx.cos(angles) * rope.gain, mx.sin(angles) * rope.gain
            self._tables[rope] = cos[:, None], sin[:, None]
        return self._tables[rope]


@cache
def frequencies_of(rope: Rope) -> npt.NDArray[np.float32]:
    """Returns the angular frequency of each pair of dimensions, in float32."""
    if rope.freqs is not None:
        return (1 / np.array(rope.freqs)).astype(np.float32)
    steps = np.arange(0, rope.dims, 2) / rope.dims
    return np.exp(-steps * math.log(rope.base)).astype(np.float32)


class WithoutImages:
    """A base class with ForwardBatch's methods for images, for passes without images."""

    image_layers = 0
    sees_images: mx.array | None = None

    def attend_images(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """Raises NotImplementedError; models do not call it for a batch that sees no images."""
        raise NotImplementedError

    def with_images(self, x: mx.array) -> mx.array:
        """Returns x: the batch has no images."""
        return x

    def add_images(self, layer: int, x: mx.array) -> mx.array:
        """Returns x: the batch has no images."""
        return x


class RotateThenAttend(WithoutImages):
    """The base of ForwardBatch classes that first rotate queries and keys, and then attend."""

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D], each token rotated by its position. Abstract."""
        raise NotImplementedError

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Attends in one layer, see ForwardBatch.attend for the shapes. Abstract."""
        raise NotImplementedError

    def rotate_and_attend(
        self, layer: int, qk: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Rotates queries and keys by `rope`, then attends by `attend`."""
        q, k = split_queries_keys([self.rope(x, rope) for x in qk], v)
        return self.attend(layer, q, k, v, scores)

    def attend_lines(
        self, layer: int, lines: mx.array, heads: Heads, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Splits lines [T, (H + 2 * KV) * D] into queries, keys and values; rotates and attends."""
        qk, v = split_lines(lines, heads)
        return self.rotate_and_attend(layer, (qk,), v, scores, rope)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Attends in a layer of latents (MLA), see ForwardBatch.attend_latent. Abstract."""
        raise NotImplementedError

    def attend_latent_lines(self, layer: int, lines: mx.array, attention: LatentLayer) -> mx.array:
        """Splits lines [T, C + dim] into queries and latents, then calls `attend_latent`."""
        q, latent = attention.split(lines, cast("ForwardBatch", self))
        return self.attend_latent(layer, q, latent, attention.scale, attention.heads)

    def attend_latent_token(
        self, layer: int, x: PendingNorm, token: LatentToken, attention: LatentLayer
    ) -> mx.array | None:
        """Returns None: no kernel attends for a single token."""
        return None


class DecodingRows(RotateThenAttend):
    """The base of ForwardBatch classes for passes in which all lines give logits.

    Such passes do not support layers with states; `no_states` is the message of their error.
    """

    logits = True
    no_states = ""

    def __init__(self, positions: mx.array) -> None:
        """`positions` [R]: the positions of the lines."""
        self._rotation = RotaryEmbedding(positions)

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns x: all lines get logits."""
        return x

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x: all lines get logits."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [R, H, D], each line rotated by its position."""
        return self._rotation(x, rope)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Raises NotImplementedError with the message `no_states`; subclasses may support it."""
        raise NotImplementedError(self.no_states)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Raises NotImplementedError with the message `no_states`."""
        raise NotImplementedError(self.no_states)

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Raises NotImplementedError with the message `no_states`."""
        raise NotImplementedError(self.no_states)


def split_lines(lines: mx.array, heads: Heads) -> tuple[mx.array, mx.array]:
    """Returns queries and keys [T, H + KV, D] and values [T, KV, D] of lines, as views."""
    qk = heads.query + heads.kv
    vectors = lines.reshape(-1, qk + heads.kv, heads.dim)
    return vectors[:, :qk], vectors[:, qk:]


def split_queries_keys(qk: Sequence[mx.array], v: mx.array) -> tuple[mx.array, mx.array]:
    """Returns queries [T, H, D] and keys [T, KV, D].

    `qk` has either these two arrays, or one array [T, H + KV, D] with both. `v` [T, KV, D].
    """
    if len(qk) == 1:
        queries = qk[0].shape[1] - v.shape[1]
        return qk[0][:, :queries], qk[0][:, queries:]
    q, k = qk
    return q, k
