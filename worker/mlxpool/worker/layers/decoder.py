"""The skeleton of all models: token embedding, decoder layers, norm and output head. No MLX.

Some models have a second head, which predicts the token after the next one (MTP). Its inputs are a
token, and the model's state of the previous token after the last norm. The norms of the token's
embedding and of the state are concatenated, and projected to the input of the head's only layer.
This layer is a DecoderLayer, which reads earlier tokens by its own keys and values, or a FeedLayer,
which reads each token alone. The layer's output, after the head's own norm, replaces the model's
state for the next token, so the head can draft several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import flag, integer, number
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    Residual,
    WeightShapes,
    add_and_defer_norm,
    add_and_norm,
    linear_shapes,
    materialised,
)
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, no_derived_weights
from mlxpool.worker.layers.layer_types import (
    Embedding,
    ForwardBatch,
    LayerBuilder,
    LinearInput,
)
from mlxpool.worker.layers.model_plan import ModelPlan

if TYPE_CHECKING:
    import mlx.core as mx


OutputLayer: TypeAlias = "Callable[[LinearInput], mx.array]"  # [E, d] -> [E, vocabulary]


class HeadNames(Struct, frozen=True):
    """The module names of an MTP head in a checkpoint.

    If `embed` or `output` is empty, the head uses the model's module. `drafted`: the name of a
    tensor with the ids of the tokens that the head can draft; empty: it can draft the whole
    vocabulary.
    """

    token_norm: str  # the norm of the token's embedding
    state_norm: str
    joint: str  # the linear layer over the token's norm, then the state's norm
    layer: str
    norm: str  # the norm after the layer
    embed: str = ""
    output: str = ""
    drafted: str = ""


MTP = "mtp."  # the prefix of a head's tensors in the checkpoints of most families
MTP_NAMES = HeadNames(
    token_norm=f"{MTP}pre_fc_norm_embedding",
    state_norm=f"{MTP}pre_fc_norm_hidden",
    joint=f"{MTP}fc",
    layer=f"{MTP}layers.0",
    norm=f"{MTP}norm",
    drafted=f"{MTP}draft_tokens",
)


def is_further_layer(name: str) -> bool:
    """Returns True for a tensor of an MTP head's second layer, or of a later layer.

    Only the first layer is used: it computes all drafts, one after the other.
    """
    return name.startswith(f"{MTP}layers.") and not name.startswith(f"{MTP_NAMES.layer}.")


class PredictionHead(Struct, frozen=True):
    """The description of a head that predicts further tokens; it has the model's sizes.

    `drafted`: the number of tokens that the head can draft; their embeddings are its output head.
    0: the head can draft all tokens.
    """

    vocab_size: int
    hidden: int
    eps: float
    layer: DecoderLayer
    names: HeadNames
    drafted: int = 0

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor of the head, in the order of use."""
        names, d = self.names, self.hidden
        if names.embed:
            yield f"{names.embed}.weight", (self.vocab_size, d)
        yield f"{names.token_norm}.weight", (d,)
        yield f"{names.state_norm}.weight", (d,)
        yield from linear_shapes(names.joint, d, 2 * d)
        yield from self.layer.shapes(names.layer)
        yield f"{names.norm}.weight", (d,)
        if names.output:
            yield f"{names.output}.weight", (self.vocab_size, d)
        if self.drafted:
            yield names.drafted, (self.drafted,)

    def build(self, builder: LayerBuilder, embed: Embedding, output: OutputLayer) -> HeadModel:
        """Builds the head over the builder's weights.

        `embed` and `output`: the model's embedding and output head. The MTP head uses them if it
        has no weights of its own.
        """
        return HeadModel(self, builder, embed, output)


class HeadModel:
    """A built MTP head; implements model_plan.Prediction."""

    def __init__(
        self, spec: PredictionHead, builder: LayerBuilder, embed: Embedding, output: OutputLayer
    ) -> None:
        names = spec.names
        self.embed = builder.embedding(names.embed) if names.embed else embed
        self.token_norm = builder.rms_norm(names.token_norm, spec.eps)
        self.state_norm = builder.rms_norm(names.state_norm, spec.eps)
        self.joint = builder.linear(names.joint)
        self.layer = spec.layer.build(builder, names.layer, 0)
        self.norm = builder.rms_norm(names.norm, spec.eps)
        self.output: OutputLayer = builder.linear(names.output) if names.output else output
        self.drafted: mx.array | None = None  # [N] the token of each logit; None: all tokens
        if spec.drafted:
            self.drafted = _token_numbers(builder.tensor(names.drafted), spec.vocab_size)
            self.output = PartOfVocabulary(self.embed, self.drafted)

    def __call__(self, tokens: mx.array, states: mx.array, batch: ForwardBatch | None) -> mx.array:
        """Returns the head's states for tokens and preceding states; see model_plan.Prediction."""
        import mlx.core as mx

        halves = [self.token_norm(self.embed(tokens)), self.state_norm(states)]
        joint = self.joint(mx.concatenate(halves, axis=-1))
        x = self.layer(joint, cast("ForwardBatch", batch))  # unused by a layer without a cache
        return add_and_norm(self.norm, x)[1]

    def logits_of(self, states: mx.array) -> mx.array:
        """Returns the head's logits of states; see model_plan.Prediction."""
        return self.output(states)

    def likeliest(self, states: mx.array) -> mx.array:
        """Returns the tokens with the highest logits; see model_plan.Prediction."""
        import mlx.core as mx

        likeliest = mx.argmax(self.output(states), axis=-1).astype(mx.int32)
        return likeliest if self.drafted is None else self.drafted[likeliest]


class Decoder(Struct, frozen=True):
    """The description of a whole model; its tensors have the names that most checkpoints use."""

    vocab_size: int
    hidden: int
    context: int  # tokens
    eps: float  # eps of the last norm
    tied: bool  # the token embedding is also the output head
    layers: tuple[DecoderLayer, ...]
    embed_scale: float = 1.0
    input_only: int = 0  # the number of input-only tokens after the vocabulary
    softcap: float = 0.0  # the bound of logits; 0: no bound
    prediction: PredictionHead | None = None  # the head for further tokens

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], layers: tuple[DecoderLayer, ...], **fields: Any
    ) -> Decoder:
        """Reads the keys that most config.json files have; `fields` replaces some of them.

        Raises ModelLoadFailed with a missing or unusable key.
        """
        common: dict[str, Any] = {
            "vocab_size": integer(config, "vocab_size"),
            "hidden": integer(config, "hidden_size"),
            "context": integer(config, "max_position_embeddings"),
            "eps": number(config, "rms_norm_eps"),
            "tied": flag(config, "tie_word_embeddings"),
        }
        return cls(layers=layers, **{**common, **fields})

    def plan(
        self,
        ignored: Callable[[str], bool] = lambda name: False,
        derived: Callable[[StoredTensors], Iterable[DerivedWeights]] = no_derived_weights,
    ) -> ModelPlan:
        """Returns the model's plan.

        `ignored` returns True for names of tensors that checkpoints of this architecture may have
        and the model does not use. `derived` makes weights that checkpoints store in another form,
        see derived_weights.py.
        """
        return ModelPlan(
            context=self.context,
            vocab_size=self.vocab_size,
            caches=tuple(layer.cache for layer in self.layers if layer.cache is not None),
            shapes=dict(self.shapes()),
            ignored=lambda name: self._unused(name) or ignored(name),
            build=self.build,
            derived=derived,
            layers=len(self.layers),
            input_only=self.input_only,
            predicts=self.prediction is not None,
            prediction_cache=None if self.prediction is None else self.prediction.layer.cache,
            built=0 if self.prediction is None else self.prediction.drafted * self.hidden,
        )

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor of a checkpoint, in the order of use."""
        yield "model.embed_tokens.weight", (self.vocab_size + self.input_only, self.hidden)
        for index, layer in enumerate(self.layers):
            yield from layer.shapes(f"model.layers.{index}")
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, self.hidden)
        if self.prediction is not None:
            yield from self.prediction.shapes()

    def build(self, builder: LayerBuilder) -> DecoderModel:
        """Builds the model over the builder's weights."""
        return DecoderModel(self, builder)

    def _unused(self, name: str) -> bool:
        """Returns True for rotary frequencies of old checkpoints, and for a tied head's weight."""
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")


class DecoderModel:
    """The built model: tokens [T] -> logits [E, vocabulary], see model_plan.Model."""

    def __init__(self, spec: Decoder, builder: LayerBuilder) -> None:
        self.spec = spec
        self.embed = builder.embedding("model.embed_tokens")
        self.layers = [
            layer.build(builder, f"model.layers.{index}", number)
            for index, (layer, number) in enumerate(_numbered(spec.layers))
        ]
        self.norm = builder.rms_norm("model.norm", spec.eps)
        self.head = self.embed.as_linear if spec.tied else builder.linear("lm_head")
        self.prediction: HeadModel | None = None
        if spec.prediction is not None:
            self.prediction = spec.prediction.build(builder, self.embed, self.head)

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        x = self._residual(tokens, batch)
        return (
            self.logits_of(add_and_defer_norm(self.norm, x)[1]) if batch.logits else materialised(x)
        )

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states after the last norm; see model_plan.Model."""
        return add_and_norm(self.norm, self._residual(tokens, batch))[1]

    def logits_of(self, hidden: LinearInput) -> mx.array:
        """Returns the logits of hidden states, also of states whose norm is pending."""
        logits = self.head(hidden)
        return soft_capped(logits, self.spec.softcap) if self.spec.softcap else logits

    def _residual(self, tokens: mx.array, batch: ForwardBatch) -> Residual:
        """Returns the layers' output for tokens [T], not normed yet."""
        embedded = self.embed(tokens)
        scale = self.spec.embed_scale
        x: Residual = batch.with_images(embedded if scale == 1.0 else embedded * scale)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch)
            if index < batch.image_layers:
                x = batch.add_images(index, materialised(x))
        return x


def _numbered(layers: Iterable[DecoderLayer]) -> Iterator[tuple[DecoderLayer, int]]:
    """Yields each layer with its index among the layers of its kind: with or without a cache."""
    numbers = {True: count(), False: count()}
    return ((layer, next(numbers[layer.cache is not None])) for layer in layers)


def _token_numbers(stored: mx.array, vocabulary: int) -> mx.array:
    """Converts float32 numbers to token ids [N]. Raises ModelLoadFailed if they are no ids."""
    import mlx.core as mx

    tokens = stored.astype(mx.int32)
    wrong = mx.sum((tokens != stored) | (tokens < 0) | (tokens >= vocabulary)).item()
    if wrong:
        raise ModelLoadFailed(
            f"{wrong} of the {tokens.size} tokens that the head drafts are not whole numbers from 0"
            f" to {vocabulary - 1}; download the file of the head again"
        )
    return tokens


class PartOfVocabulary:
    """An output head [E, d] -> [E, N] over the embeddings `rows` [N, d] of some tokens [N]."""

    def __init__(self, embed: Embedding, tokens: mx.array) -> None:
        import mlx.core as mx

        self.rows = mx.contiguous(embed(tokens))
        self._columns = self.rows.T
        mx.eval(self.rows, self._columns)

    def __call__(self, x: LinearInput) -> mx.array:
        return cast("mx.array", x) @ self._columns


def soft_capped(x: mx.array, cap: float) -> mx.array:
    """Returns cap * tanh(x / cap), which is between -cap and cap."""
    import mlx.core as mx

    return mx.tanh(x / cap) * cap
