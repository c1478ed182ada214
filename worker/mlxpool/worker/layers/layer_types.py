"""Interfaces between models and the rest of the worker. Imports no MLX at run time.

Models use a ForwardBatch (the tokens of a step and their caches) and a LayerBuilder (the loaded
weights); the rest of the worker implements both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.kernels.score_params import ScoreParams

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxpool.worker.kernels.block_write import RopeTables
    from mlxpool.worker.kernels.recurrent.span_states import SpanStates
    from mlxpool.worker.layers.config_fields import Heads

Shape: TypeAlias = tuple[int, ...]
LayerFunction: TypeAlias = "Callable[[mx.array], mx.array]"
Activation: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"  # (gate, up) -> output
RecurrentState: TypeAlias = "tuple[mx.array, ...]"
# Inputs [B, n, ...] and state [B, ...] of B sequences -> outputs [B, n, ...] and the new state.
Scan: TypeAlias = (
    "Callable[[tuple[mx.array, ...], RecurrentState], tuple[mx.array, RecurrentState]]"
)
# Lines [T, ...] of all spans of a pass and their states -> outputs [T, ...] and new states.
SpanScan: TypeAlias = "Callable[[mx.array, SpanStates], tuple[mx.array, mx.array]]"


class Rope(Struct, frozen=True):
    """Rotary position embedding of queries and keys.

    `freqs` replaces `base` if it is not None. Rotated numbers are multiplied by `gain`. With `axes`
    None, a token has one position. Otherwise a token has three positions, in time, height and
    width; they differ only for inputs of images. `axes` then has, for each pair of dimensions, the
    number of the position that rotates the pair.
    """

    dims: int
    base: float
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None  # 1 / angular frequency of each pair of dimensions
    traditional: bool = False
    gain: float = 1.0
    axes: tuple[int, ...] | None = None


class LatentProjections(Protocol):
    """The projections with which a LatentSpec layer's heads read latents, in two forms.

    Absorbed: `absorb` converts queries so that the latents are their keys, and the first `rank`
    numbers of the latents their values; `to_values` converts the attention output to values.
    Decompressed: `decompress` computes keys and values from the latents. Both forms are equivalent.
    """

    @property
    def rank(self) -> int: ...

    def decompresses(self, count: int, length: int) -> bool:
        """Returns True if decompressing is cheaper for the last `count` of `length` tokens."""

    def absorb(self, q: mx.array) -> mx.array:
        """Converts queries q [T, H, D] to queries [T, H, dim] whose keys are the latents."""

    def absorb_and_rotate(self, q: mx.array, turns: RopeTables) -> mx.array | None:
        """Rotates the last numbers of queries by `turns`, then absorbs the queries.

        Returns None if one kernel cannot do both.
        """

    def to_values(self, read: mx.array) -> mx.array:
        """Returns the values [T, H, V] of the attention output `read` [T, H, rank]."""

    def decompress(self, latents: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the keys [H, L, D] and values [H, L, V] of latents [L, dim]."""


class LatentLayer(Protocol):
    """The part of a latent-attention layer that follows the layer's first product.

    The first product gives lines [T, C + dim]: compressed queries, then latents, neither normed nor
    rotated.
    """

    @property
    def scale(self) -> float: ...

    @property
    def rope(self) -> Rope: ...

    @property
    def heads(self) -> LatentProjections: ...

    @property
    def norms(self) -> tuple[GainNorm, GainNorm]:
        """The norms of compressed queries, and of the first `rank` numbers of latents."""

    def queries(self, compressed: mx.array) -> mx.array:
        """Returns the queries [T, H, D], not rotated, of normed compressed queries [T, C]."""

    def rotated_queries(self, q: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns queries [T, H, D] with their last numbers rotated."""

    def split(self, lines: mx.array, batch: ForwardBatch) -> tuple[mx.array, mx.array]:
        """Returns the queries [T, H, D] and latents [T, dim] in lines, normed and rotated."""


class LatentToken(Protocol):
    """The products before and after the attention, in latent attention of a single token.

    `queries` computes the products before the attention. A call applies the output projection to
    the attention's output x [1, H * R], and returns [1, d].
    """

    def queries(
        self, x: PendingNorm, pool: mx.array, slots: mx.array, turns: RopeTables
    ) -> mx.array | None:
        """Returns queries [1, H, R + D] of x [1, d]; writes the latent of x into the pool.

        The latent is written into slots[0]. Returns None if one kernel cannot do both.
        """

    def __call__(self, x: LinearInput) -> mx.array: ...

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns `residual` plus the projection of x; None if no kernel computes both."""


class ForwardBatch(Protocol):
    """The tokens of one forward pass on one axis [T], with the caches of their sequences.

    Implemented in attention/. `layer` is an index into ModelPlan.caches.
    """

    @property
    def logits(self) -> bool:
        """True if the pass computes logits."""

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns the lines of x [T, ...] for the tokens that get logits, [E, ...]."""

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x [T, ...], or in the last layer `logit_rows` of x, [E, ...].

        The results of `attend`, `attend_latent` and `recur` have only the returned tokens. So a
        layer selects these tokens from each array that it adds to a result or multiplies with a
        result. If the pass wants no logits, one token remains.
        """

    @property
    def image_layers(self) -> int:
        """The number of layers with features of images in their output, see `add_images`."""

    def with_images(self, x: mx.array) -> mx.array:
        """Returns x [T, d] with features of images in the lines that are inputs of images."""

    def add_images(self, layer: int, x: mx.array) -> mx.array:
        """Returns x [T, d], the output of a layer, plus image features at inputs of images."""

    @property
    def sees_images(self) -> mx.array | None:
        """A mask [T, 1], true for tokens that attend to images in layers of cross-attention.

        None: no token attends to images, and the pass skips these layers.
        """

    def attend_images(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """Attends to the images that each token sees: q [T, H, D] -> [T, H, D].

        `layer`: the index among the layers of cross-attention. A token that sees no image gets
        zeros.
        """

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D], each token rotated by its position."""

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Attends in a KeyValueSpec layer; returns [T or E, H, V].

        q is [T, H, D], k [T, KV, D], v [T, KV, V].
        """

    def rotate_and_attend(
        self, layer: int, qk: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Attends as `attend` does, with unrotated queries and keys.

        `qk`: queries and keys, or one array [T, H + KV, D] of queries, then keys.
        """

    def attend_lines(
        self, layer: int, lines: mx.array, heads: Heads, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Rotates and attends with lines [T, (H + 2 * KV) * D]: queries, keys, then values.

        Returns [T or E, H * D] or [T or E, H, D].
        """

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Attends in a LatentSpec layer: q [T, H, D], latent [T, dim] -> [T or E, H, V]."""

    def attend_latent_lines(self, layer: int, lines: mx.array, attention: LatentLayer) -> mx.array:
        """Computes `attend_latent` for lines [T, C + dim] of the first product of `attention`."""

    def attend_latent_token(
        self, layer: int, x: PendingNorm, token: LatentToken, attention: LatentLayer
    ) -> mx.array | None:
        """Computes the attention of a pass with one token, x [1, d] -> [1, H * R].

        `token` computes the queries. Returns None if the pass has more tokens, or no kernel
        computes the queries.
        """

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Scans inputs [T, ...] of each sequence from its state; returns outputs [T or E, ...]."""

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Computes `recur` by a scan that takes the spans of all sequences in one call."""


class Norm(Protocol):
    """A norm over the last axis: x [T, d] -> [T, d]."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def add_and_norm(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """Returns x + y, and its norm."""

    def deferred(self, x: mx.array) -> LinearInput:
        """Returns the norm of x; it stays pending if the next linear layer can include it."""


class GainNorm(Norm, Protocol):
    """An RMS norm with a gain [d]."""

    @property
    def weight(self) -> mx.array: ...

    @property
    def eps(self) -> float: ...


class PendingNorm(NamedTuple):
    """The pending norm of x [T, d]: the next product can include the norm if x has few rows."""

    x: mx.array
    norm: Norm

    def __call__(self) -> mx.array:
        return self.norm(self.x)


LinearInput: TypeAlias = "mx.array | PendingNorm"  # [T, d]


class Linear(Protocol):
    """A linear layer x [T, in] -> [T, out]."""

    def __call__(self, x: LinearInput) -> mx.array: ...

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns `residual` [T, out] plus the product of x; None if one kernel cannot do both."""


class PendingProduct(NamedTuple):
    """A linear layer's pending product with x; a kernel can add the product to another array."""

    layer: Linear
    x: mx.array

    def __call__(self) -> mx.array:
        return self.layer(self.x)


class Embedding(Protocol):
    """The token embeddings; models with tied embeddings use them as the output head, too."""

    def __call__(self, tokens: mx.array) -> mx.array: ...

    def as_linear(self, x: LinearInput) -> mx.array: ...


class MultiLinear(Protocol):
    """One linear layer for each head: x [H, T, in] -> [H, T, out]."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def of_lines(self, x: mx.array) -> mx.array:
        """Multiplies each head's numbers with the head's weight: x [T, H, in] -> [T, H, out]."""

    def of_rotated_lines(self, x: mx.array, turns: RopeTables) -> mx.array | None:
        """Multiplies the first numbers of x [T, H, in + R] and rotates the last R by `turns`.

        Returns [T, H, out + R], or None if one kernel cannot do both.
        """

    def transposed(self, x: mx.array) -> mx.array:
        """Multiplies with the transposed weights: x [H, T, out] -> [H, T, in]."""


class LatentParts(NamedTuple):
    """The layers of latent attention (MLA) with compressed queries."""

    down: Linear  # x [T, d] -> compressed query and latent [T, C + R + D]
    query_norm: GainNorm
    latent_norm: GainNorm
    up: Linear  # compressed query -> the queries of all heads
    keys: MultiLinear  # projects a head's query into the space of latents
    values: MultiLinear  # projects the latent that a head reads into the head's value
    out: Linear


class SwitchLayer(Protocol):
    """Layers of experts: x [T, in] and each token's experts [T, k] -> [T, k, out].

    The layers of `LayerBuilder.switch_linear` also take x [T, k, in].
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array: ...


class SwitchGLU(SwitchLayer, Protocol):
    """The gated feed-forwards of all experts."""

    def routed_sum(
        self,
        x: LinearInput,
        router: Linear,
        routing: RoutingParams,
        added: mx.array | None = None,
        shared: LayerFunction | None = None,
    ) -> PendingProduct | None:
        """Returns the pending weighted sum [T, out] of experts' outputs for x [T, in].

        The logits router(x) choose the experts. `added` [E]: see RoutingParams. The sum includes
        the output of the expert `shared` for x. Returns None if no kernel computes the sum.
        """


class LayerBuilder(Protocol):
    """Builds layers from named weights. No other class depends on whether a weight is quantised."""

    def linear(self, name: str) -> Linear: ...

    def concatenated(self, names: Sequence[str]) -> Linear: ...

    def gated_linear_unit(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> Callable[[LinearInput], mx.array]: ...

    def rms_norm(self, name: str, eps: float) -> GainNorm: ...

    def embedding(self, name: str) -> Embedding: ...

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array: ...

    def whole_sum(self, x: mx.array) -> mx.array:
        """Returns x or, if each device has a part of the model, the sum of x over all devices."""

    def whole_product(self, product: PendingProduct) -> PendingProduct:
        """Returns `product`, or its sum over all devices if each has a part of the model."""

    def tensor(self, name: str) -> mx.array: ...

    def multi_linear(self, name: str) -> MultiLinear: ...

    def latent_token(self, parts: LatentParts) -> LatentToken | None: ...

    def switch_linear(self, name: str) -> SwitchLayer: ...

    def switch_glu(self, name: str, activation: Activation | None = None) -> SwitchGLU: ...
