"""GQA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import (
    KeyValueSpec,
)
from mlxpool.worker.layers.config_fields import Heads
from mlxpool.worker.layers.decoder_layer import (
    MixerFunction,
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.interface import (
    ForwardBatch,
    LayerBuilder,
    LinearInput,
    PendingProduct,
    Rope,
)
from mlxpool.worker.layers.residual import (
    FusableSublayer,
)

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention whose queries share keys and values in groups."""

    hidden: int
    heads: Heads
    rope: Rope
    window: int = 0  # tokens that a token sees; 0: all
    scale: float = 0.0  # of the scores; 0: the usual one of the heads' size
    cap: float = 0.0  # see Step.attend
    biases: str = ""  # which of the projections q, k, v and o have one
    norm_eps: float = 0.0  # of the norms over each head's query and key; 0: there are none
    sinks: bool = False  # each query head has a score of its own, see Step.attend

    @property
    def cache(self) -> KeyValueSpec:
        """Keys and values of its heads."""
        return KeyValueSpec(self.heads.pairs, self.heads.size, self.heads.size, self.window)

    def shapes(self, name: str) -> WeightShapes:
        """See Mixer."""
        queries, pairs = self.heads.queries * self.heads.size, self.heads.pairs * self.heads.size
        for one, rows in (("q", queries), ("k", pairs), ("v", pairs)):
            yield from linear_shapes(f"{name}.{one}_proj", rows, self.hidden, one in self.biases)
        if self.norm_eps:
            yield f"{name}.q_norm.weight", (self.heads.size,)
            yield f"{name}.k_norm.weight", (self.heads.size,)
        if self.sinks:
            yield f"{name}.sinks", (self.heads.queries,)
        yield from linear_shapes(f"{name}.o_proj", self.hidden, queries, "o" in self.biases)

    def build(self, parts: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """See Mixer."""
        return _Attention(self, parts, name, layer)


class _Attention(FusableSublayer):
    def __init__(
        self, spec: GroupedQueryAttention, parts: LayerBuilder, name: str, layer: int
    ) -> None:
        self.spec, self.layer = spec, layer
        self.qkv = parts.joined([f"{name}.{one}_proj" for one in "qkv"])
        self.norms = None
        if spec.norm_eps:
            q_norm = parts.norm(f"{name}.q_norm", spec.norm_eps)
            self.norms = q_norm, parts.norm(f"{name}.k_norm", spec.norm_eps)
        sinks = parts.array(f"{name}.sinks") if spec.sinks else None
        self.scores = ScoreParams(spec.scale or spec.heads.size**-0.5, sinks, spec.cap)
        self.o = parts.linear(f"{name}.o_proj")

    def late(self, x: LinearInput, *steps: ForwardBatch) -> PendingProduct:
        """See Late."""
        (step,), heads = steps, self.spec.heads
        both = heads.queries + heads.pairs
        every = self.qkv(x).reshape(-1, both + heads.pairs, heads.size)
        asked = self._normed(every[:, :both])
        out = step.attend_turned(self.layer, asked, every[:, both:], self.scores, self.spec.rope)
        return PendingProduct(self.o, out.reshape(every.shape[0], -1))

    def _normed(self, qk: mx.array) -> tuple[mx.array, ...]:
        if self.norms is None:
            return (qk,)
        queries = self.spec.heads.queries
        q_norm, k_norm = self.norms
        return q_norm(qk[:, :queries]), k_norm(qk[:, queries:])
