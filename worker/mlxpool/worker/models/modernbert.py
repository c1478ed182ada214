"""ModernBERT: rotary positions, windows in most layers, a norm before each sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.activations import activation
from mlxpool.worker.layers.config_fields import (
    FULL,
    SLIDING,
    Heads,
    flag,
    integer,
    layer_count,
    layer_types,
    number,
)
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.encoder_plan import (
    EncoderPlan,
    Pooling,
    label_count,
    layer_norm,
    layer_norm_shapes,
    renamed_tensors,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction, Rope
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {"model.": ""}  # stored prefix, in a model with a head -> our prefix
UNUSED = ("head.", "decoder.", "classifier.")
FULL_INTERVAL = 3  # by default every third layer has full attention
ROPE_BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
HEAD_POOLING: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean"}


def encoder_plan(config: Mapping[str, Any]) -> EncoderPlan:
    """Returns a ModernBERT's plan; raises ModelLoadFailed with the unusable key."""
    heads, types = Heads.from_config(config), _types(config)
    window = integer(config, "local_attention", 128) // 2 + 1  # tokens to each side and the token
    model = ModernBert(
        vocab_size=integer(config, "vocab_size"),
        hidden=integer(config, "hidden_size"),
        context=integer(config, "max_position_embeddings"),
        heads=heads,
        ropes=tuple(_rope(config, kind, heads.dim) for kind in types),
        windows=tuple(window if kind == SLIDING else 0 for kind in types),
        width=integer(config, "intermediate_size"),
        eps=number(config, "norm_eps", 1e-5),
        activation=activation(config, "hidden_activation"),
        head_activation=activation(config, "classifier_activation"),
        biases=Biases(
            norm=flag(config, "norm_bias"),
            attention=flag(config, "attention_bias"),
            mlp=flag(config, "mlp_bias"),
            head=flag(config, "classifier_bias"),
        ),
        labels=label_count(config),
    )
    pooling = config.get("classifier_pooling") or "cls"
    if pooling not in HEAD_POOLING:
        raise ModelLoadFailed(
            f"config.json has classifier_pooling {pooling!r}, must be 'cls' or 'mean'"
        )
    return EncoderPlan(
        model.plan(), model.hidden, labels=model.labels, pooling=HEAD_POOLING[pooling]
    )


def _types(config: Mapping[str, Any]) -> tuple[str, ...]:
    layers = layer_count(config)
    interval = integer(config, "global_attn_every_n_layers", FULL_INTERVAL)
    default = tuple(SLIDING if at % interval else FULL for at in range(layers))
    return layer_types(config, layers) or default


def _rope(config: Mapping[str, Any], kind: str, dims: int) -> Rope:
    """Returns the RoPE of the layers of type `kind`.

    Older config files have only a RoPE base for each type.
    """
    key, base = ROPE_BASES[kind]
    base = number(config, key, base)
    named = config.get("rope_parameters") or {}
    return parse_rope({**config, "rope_parameters": named.get(kind)}, dims, base=base)


class Biases(Struct, frozen=True):
    """Flags: which layers have biases."""

    norm: bool
    attention: bool
    mlp: bool
    head: bool


class ModernBert(Struct, frozen=True):
    """The hyperparameters of a ModernBERT model; its tensors keep the checkpoint's names."""

    vocab_size: int
    hidden: int
    context: int  # tokens
    heads: Heads
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]
    width: int
    eps: float
    activation: LayerFunction
    head_activation: LayerFunction
    biases: Biases
    labels: int

    def plan(self) -> ModelPlan:
        """Returns the model's plan."""
        dim, shapes = self.heads.dim, dict(self.shapes())
        return ModelPlan(
            context=self.context,
            vocab_size=self.vocab_size,
            caches=tuple(KeyValueSpec(self.heads.kv, dim, dim, window) for window in self.windows),
            shapes=shapes,
            ignored=lambda name: name not in shapes and name.startswith(UNUSED),
            build=lambda builder: ModernBertModel(self, builder),
            derived=renamed_tensors(PREFIXES),
        )

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor of a checkpoint, in the order of use."""
        hidden, biases = self.hidden, self.biases
        yield "embeddings.tok_embeddings.weight", (self.vocab_size, hidden)
        yield from layer_norm_shapes("embeddings.norm", hidden, biases.norm)
        for index in range(len(self.windows)):
            name = f"layers.{index}"
            if index:  # the first layer reads the embeddings, which are normed
                yield from layer_norm_shapes(f"{name}.attn_norm", hidden, biases.norm)
            yield from linear_shapes(f"{name}.attn.Wqkv", 3 * hidden, hidden, biases.attention)
            yield from linear_shapes(f"{name}.attn.Wo", hidden, hidden, biases.attention)
            yield from layer_norm_shapes(f"{name}.mlp_norm", hidden, biases.norm)
            yield from linear_shapes(f"{name}.mlp.Wi", 2 * self.width, hidden, biases.mlp)
            yield from linear_shapes(f"{name}.mlp.Wo", hidden, self.width, biases.mlp)
        yield from layer_norm_shapes("final_norm", hidden, biases.norm)
        if self.labels:
            yield from linear_shapes("head.dense", hidden, hidden, biases.head)
            yield from layer_norm_shapes("head.norm", hidden, biases.norm)
            yield from linear_shapes("classifier", self.labels, hidden, True)


class ModernBertModel:
    """A ModernBERT model with its weights; implements model_plan.Model, see EncoderPlan."""

    def __init__(self, spec: ModernBert, builder: LayerBuilder) -> None:
        self.spec, eps, bias = spec, spec.eps, spec.biases.norm
        self.words = builder.embedding("embeddings.tok_embeddings")
        self.embedding_norm = layer_norm(builder, "embeddings.norm", eps, bias)
        self.layers = [_Layer(spec, builder, index) for index in range(len(spec.windows))]
        self.norm = layer_norm(builder, "final_norm", eps, bias)
        if spec.labels:
            self.head = builder.linear("head.dense")
            self.head_norm = layer_norm(builder, "head.norm", eps, bias)
            self.classifier = builder.linear("classifier")

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the head's logits of the tokens that the batch selects; see model_plan.Model."""
        return self.logits_of(batch.logit_rows(self.hidden_states(tokens, batch)))

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of all tokens; see EncoderPlan."""
        x = self.embedding_norm(self.words(tokens))
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the logits [n, labels] of pooled states; see EncoderPlan."""
        return self.classifier(self.head_norm(self.spec.head_activation(self.head(hidden))))


class _Layer:
    def __init__(self, spec: ModernBert, builder: LayerBuilder, index: int) -> None:
        name, eps, bias = f"layers.{index}", spec.eps, spec.biases.norm
        self.index, self.rope, self.width = index, spec.ropes[index], spec.width
        self.heads, self.activation = spec.heads.query, spec.activation
        self.scores = ScoreParams(spec.heads.dim**-0.5)
        self.attention_norm = layer_norm(builder, f"{name}.attn_norm", eps, bias) if index else None
        self.qkv = builder.linear(f"{name}.attn.Wqkv")
        self.o = builder.linear(f"{name}.attn.Wo")
        self.mlp_norm = layer_norm(builder, f"{name}.mlp_norm", eps, bias)
        self.up = builder.linear(f"{name}.mlp.Wi")
        self.down = builder.linear(f"{name}.mlp.Wo")

    def __call__(self, x: mx.array, batch: ForwardBatch) -> mx.array:
        count, qk = x.shape[0], 2 * self.heads
        normed = x if self.attention_norm is None else self.attention_norm(x)
        qkv = self.qkv(normed).reshape(count, 3 * self.heads, -1)
        read = batch.rotate_and_attend(
            self.index, (qkv[:, :qk],), qkv[:, qk:], self.scores, self.rope
        )
        x = x + self.o(read.reshape(count, -1))
        both = self.up(self.mlp_norm(x))
        return x + self.down(self.activation(both[:, : self.width]) * both[:, self.width :])
