"""BERT and RoBERTa: learned positions, a norm after each sublayer, an optional head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.activations import activation
from mlxpool.worker.layers.config_fields import Heads, integer, layer_count, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.encoder_plan import (
    EncoderPlan,
    label_count,
    layer_norm,
    layer_norm_shapes,
    renamed_tensors,
    text_batch,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction
from mlxpool.worker.layers.model_plan import ModelPlan

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {"bert.": "", "roberta.": ""}  # stored prefix, in a model with a head -> our prefix
ROBERTA = ("roberta", "xlm-roberta")
UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "classifier.")


def encoder_plan(config: Mapping[str, Any]) -> EncoderPlan:
    """Returns the plan of a BERT; raises ModelLoadFailed with the unusable key."""
    require(config, "position_embedding_type", ["absolute"])
    require(config, "is_decoder", [False])
    roberta = config.get("model_type") in ROBERTA
    hidden = integer(config, "hidden_size")
    # A RoBERTa's positions begin after the id of its padding token, by default 1.
    first = config.get("pad_token_id", 1) + 1 if roberta else 0
    model = Bert(
        vocab_size=integer(config, "vocab_size"),
        segments=integer(config, "type_vocab_size", 2),
        hidden=hidden,
        rows=integer(config, "max_position_embeddings"),
        first=first,
        heads=Heads.from_config(config),
        width=integer(config, "intermediate_size"),
        # A model may have no layers, as the built-in model: then a text is the mean of its tokens'
        # vectors.
        layers=layer_count(config) if config.get("num_hidden_layers") != 0 else 0,
        eps=number(config, "layer_norm_eps", 1e-12),
        activation=activation(config, "hidden_act"),
        labels=label_count(config),
        head=ROBERTA_HEAD if roberta else BERT_HEAD,
    )
    return EncoderPlan(model.plan(), hidden, labels=model.labels)


class HeadNames(Struct, frozen=True):
    """The names of the two linear layers of a head; tanh follows the first layer."""

    dense: str
    out: str


BERT_HEAD = HeadNames("pooler.dense", "classifier")
ROBERTA_HEAD = HeadNames("classifier.dense", "classifier.out_proj")


class Bert(Struct, frozen=True):
    """The hyperparameters of a BERT or RoBERTa model; its tensors keep the checkpoint's names."""

    vocab_size: int
    segments: int
    hidden: int
    rows: int  # rows of the table of positions
    first: int  # the table's row of the first position
    heads: Heads
    width: int  # width of the feed-forward
    layers: int
    eps: float
    activation: LayerFunction
    labels: int
    head: HeadNames

    def plan(self) -> ModelPlan:
        """Returns the model's plan."""
        dim = self.heads.dim
        shapes = dict(self.shapes())
        return ModelPlan(
            context=self.rows - self.first,
            vocab_size=self.vocab_size,
            caches=(KeyValueSpec(self.heads.kv, dim, dim),) * self.layers,
            shapes=shapes,
            ignored=lambda name: name not in shapes and name.startswith(UNUSED),
            build=lambda builder: BertModel(self, builder),
            derived=renamed_tensors(PREFIXES),
        )

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor of a checkpoint, in the order of use."""
        hidden = self.hidden
        yield "embeddings.word_embeddings.weight", (self.vocab_size, hidden)
        yield "embeddings.position_embeddings.weight", (self.rows, hidden)
        yield "embeddings.token_type_embeddings.weight", (self.segments, hidden)
        yield from layer_norm_shapes("embeddings.LayerNorm", hidden)
        for index in range(self.layers):
            name = f"encoder.layer.{index}"
            for part in ("query", "key", "value"):
                yield from linear_shapes(f"{name}.attention.self.{part}", hidden, hidden, True)
            yield from linear_shapes(f"{name}.attention.output.dense", hidden, hidden, True)
            yield from layer_norm_shapes(f"{name}.attention.output.LayerNorm", hidden)
            yield from linear_shapes(f"{name}.intermediate.dense", self.width, hidden, True)
            yield from linear_shapes(f"{name}.output.dense", hidden, self.width, True)
            yield from layer_norm_shapes(f"{name}.output.LayerNorm", hidden)
        if self.labels:
            yield from linear_shapes(self.head.dense, hidden, hidden, True)
            yield from linear_shapes(self.head.out, self.labels, hidden, True)


class BertModel:
    """A BERT or RoBERTa model with its weights; implements model_plan.Model, see EncoderPlan."""

    def __init__(self, spec: Bert, builder: LayerBuilder) -> None:
        self.spec = spec
        self.words = builder.embedding("embeddings.word_embeddings")
        self.positions = builder.embedding("embeddings.position_embeddings")
        self.segments = builder.embedding("embeddings.token_type_embeddings")
        self.norm = layer_norm(builder, "embeddings.LayerNorm", spec.eps)
        self.layers = [_Layer(spec, builder, index) for index in range(spec.layers)]
        if spec.labels:
            self.dense = builder.linear(spec.head.dense)
            self.out = builder.linear(spec.head.out)

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the head's logits of the tokens that the batch selects; see model_plan.Model."""
        return self.logits_of(batch.logit_rows(self.hidden_states(tokens, batch)))

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of all tokens; see EncoderPlan."""
        texts = text_batch(batch)
        places = self.positions(texts.positions + self.spec.first)
        x = self.norm(self.words(tokens) + places + self.segments(texts.types))
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the logits [n, labels] of pooled states; see EncoderPlan."""
        import mlx.core as mx

        return self.out(mx.tanh(self.dense(hidden)))


class _Layer:
    def __init__(self, spec: Bert, builder: LayerBuilder, index: int) -> None:
        name = f"encoder.layer.{index}"
        attention = f"{name}.attention"
        self.index, self.heads, self.activation = index, spec.heads, spec.activation
        self.scores = ScoreParams(spec.heads.dim**-0.5)
        parts = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
        self.qkv = builder.concatenated(parts)
        self.o = builder.linear(f"{attention}.output.dense")
        self.attention_norm = layer_norm(builder, f"{attention}.output.LayerNorm", spec.eps)
        self.up = builder.linear(f"{name}.intermediate.dense")
        self.down = builder.linear(f"{name}.output.dense")
        self.norm = layer_norm(builder, f"{name}.output.LayerNorm", spec.eps)

    def __call__(self, x: mx.array, batch: ForwardBatch) -> mx.array:
        count, heads = x.shape[0], self.heads.query
        qkv = self.qkv(x).reshape(count, 3 * heads, -1)
        q, k, v = qkv[:, :heads], qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
        read = batch.attend(self.index, q, k, v, self.scores)
        x = self.attention_norm(x + self.o(read.reshape(count, -1)))
        return self.norm(x + self.down(self.activation(self.up(x))))
