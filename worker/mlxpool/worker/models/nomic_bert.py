"""Nomic's BERT: rotary positions, a gated feed-forward, a norm after each sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.config_fields import Heads, integer, layer_count, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.encoder_plan import (
    EncoderPlan,
    layer_norm,
    layer_norm_shapes,
    renamed_tensors,
    text_batch,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    import mlx.core as mx

# Keys of GPT-2, as in released files -> keys that this file reads.
KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
REQUIRED: Mapping[str, list[Any]] = {  # the only values that this file implements
    "activation_function": ["swiglu"],
    "hidden_act": ["silu"],
    "prenorm": [False],
    "parallel_block": [False],
    "use_rms_norm": [False],
    "qkv_proj_bias": [False],
    "mlp_fc1_bias": [False],
    "mlp_fc2_bias": [False],
    "rotary_emb_fraction": [1, 1.0],
    "rotary_emb_interleaved": [False],
    "rotary_scaling_factor": [],
    "num_experts": [0],
}
PREFIXES = {"bert.": "", "nomic_bert.": ""}
UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
ROPE_BASE = 1000.0


def encoder_plan(config: Mapping[str, Any]) -> EncoderPlan:
    """Returns a Nomic BERT's plan; raises ModelLoadFailed with the unusable key."""
    for key, allowed in REQUIRED.items():
        require(config, key, allowed)
    config = {**{KEYS.get(key, key): value for key, value in config.items()}}
    heads = Heads.from_config(config)
    model = NomicBert(
        vocab_size=integer(config, "vocab_size"),
        segments=integer(config, "type_vocab_size", 2),
        hidden=integer(config, "hidden_size"),
        context=integer(config, "max_position_embeddings"),
        heads=heads,
        rope=parse_rope(config, heads.dim, base=ROPE_BASE),
        width=integer(config, "intermediate_size"),
        layers=layer_count(config),
        eps=number(config, "layer_norm_eps", 1e-12),
    )
    return EncoderPlan(model.plan(), model.hidden)


class NomicBert(Struct, frozen=True):
    """The hyperparameters of a Nomic BERT model; its tensors keep the checkpoint's names."""

    vocab_size: int
    segments: int
    hidden: int
    context: int  # tokens
    heads: Heads
    rope: Rope
    width: int
    layers: int
    eps: float

    def plan(self) -> ModelPlan:
        """Returns the model's plan."""
        dim = self.heads.dim
        return ModelPlan(
            context=self.context,
            vocab_size=self.vocab_size,
            caches=(KeyValueSpec(self.heads.kv, dim, dim),) * self.layers,
            shapes=dict(self.shapes()),
            ignored=lambda name: name.startswith(UNUSED),
            build=lambda builder: NomicBertModel(self, builder),
            derived=renamed_tensors(PREFIXES),
        )

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor of a checkpoint, in the order of use."""
        hidden = self.hidden
        yield "embeddings.word_embeddings.weight", (self.vocab_size, hidden)
        yield "embeddings.token_type_embeddings.weight", (self.segments, hidden)
        yield from layer_norm_shapes("emb_ln", hidden)
        for index in range(self.layers):
            name = f"encoder.layers.{index}"
            yield from linear_shapes(f"{name}.attn.Wqkv", 3 * hidden, hidden)
            yield from linear_shapes(f"{name}.attn.out_proj", hidden, hidden)
            yield from layer_norm_shapes(f"{name}.norm1", hidden)
            yield from linear_shapes(f"{name}.mlp.fc11", self.width, hidden)
            yield from linear_shapes(f"{name}.mlp.fc12", self.width, hidden)
            yield from linear_shapes(f"{name}.mlp.fc2", hidden, self.width)
            yield from layer_norm_shapes(f"{name}.norm2", hidden)


class NomicBertModel:
    """A Nomic BERT model with its weights; implements model_plan.Model, see EncoderPlan."""

    def __init__(self, spec: NomicBert, builder: LayerBuilder) -> None:
        self.words = builder.embedding("embeddings.word_embeddings")
        self.segments = builder.embedding("embeddings.token_type_embeddings")
        self.norm = layer_norm(builder, "emb_ln", spec.eps)
        self.layers = [_Layer(spec, builder, index) for index in range(spec.layers)]

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of the tokens that the batch selects; the model has no head."""
        return self.logits_of(batch.logit_rows(self.hidden_states(tokens, batch)))

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of all tokens; see EncoderPlan."""
        x = self.norm(self.words(tokens) + self.segments(text_batch(batch).types))
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the hidden states unchanged: the model has no head."""
        return hidden


class _Layer:
    def __init__(self, spec: NomicBert, builder: LayerBuilder, index: int) -> None:
        name = f"encoder.layers.{index}"
        self.index, self.rope = index, spec.rope
        self.heads = spec.heads.query
        self.scores = ScoreParams(spec.heads.dim**-0.5)
        self.qkv = builder.linear(f"{name}.attn.Wqkv")
        self.o = builder.linear(f"{name}.attn.out_proj")
        self.norm1 = layer_norm(builder, f"{name}.norm1", spec.eps)
        # fc12 is the gate, fc11 the gated part.
        self.gated = builder.gated_linear_unit([f"{name}.mlp.fc12", f"{name}.mlp.fc11"], spec.width)
        self.down = builder.linear(f"{name}.mlp.fc2")
        self.norm2 = layer_norm(builder, f"{name}.norm2", spec.eps)

    def __call__(self, x: mx.array, batch: ForwardBatch) -> mx.array:
        count, qk = x.shape[0], 2 * self.heads
        qkv = self.qkv(x).reshape(count, 3 * self.heads, -1)
        read = batch.rotate_and_attend(
            self.index, (qkv[:, :qk],), qkv[:, qk:], self.scores, self.rope
        )
        x = self.norm1(x + self.o(read.reshape(count, -1)))
        return self.norm2(x + self.down(self.gated(x)))
