"""The skeleton that all models share: tokens, layers, a norm and a head. No MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxpool.worker.layers.config_fields import flag, integer, number
from mlxpool.worker.layers.decoder_layer import DecoderLayer, WeightShapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, no_derived_weights
from mlxpool.worker.layers.interface import ForwardBatch, LayerBuilder, PendingProduct
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.residual import Residual, ResidualSum, add_and_defer_norm, materialised

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model, described; its tensors have the names that most checkpoints give them."""

    vocab_size: int
    hidden: int
    context: int  # tokens
    eps: float  # of the last norm
    tied: bool  # the token table is the head, too
    blocks: tuple[DecoderLayer, ...]
    embed_scale: float = 1.0
    cap: float = 0.0  # logits are bent to stay below it; 0: they are not

    @classmethod
    def of(
        cls, config: Mapping[str, Any], blocks: tuple[DecoderLayer, ...], **more: Any
    ) -> Decoder:
        """With what most config.json files say alike; `more` are fields that one says otherwise.

        Raises ModelLoadFailed naming the key that is missing or cannot be used.
        """
        fields: dict[str, Any] = {
            "vocab_size": integer(config, "vocab_size"),
            "hidden": integer(config, "hidden_size"),
            "context": integer(config, "max_position_embeddings"),
            "eps": number(config, "rms_norm_eps"),
            "tied": flag(config, "tie_word_embeddings"),
        }
        return cls(blocks=blocks, **{**fields, **more})

    def plan(
        self,
        ignored: Callable[[str], bool] = lambda name: False,
        derived: Callable[[StoredTensors], Iterable[DerivedWeights]] = no_derived_weights,
    ) -> ModelPlan:
        """`ignored`: tensors of this architecture that may be there besides and are not used.

        `derived`: how to make those that checkpoints keep otherwise, see derived.py.
        """
        return ModelPlan(
            context=self.context,
            vocab_size=self.vocab_size,
            caches=tuple(block.cache for block in self.blocks),
            shapes=dict(self.shapes()),
            ignored=lambda name: self._spare(name) or ignored(name),
            build=self.build,
            derived=derived,
        )

    def shapes(self) -> WeightShapes:
        """Every tensor a checkpoint must have, in the order in which the model uses them."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden)
        for layer, block in enumerate(self.blocks):
            yield from block.shapes(f"model.layers.{layer}")
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, self.hidden)

    def build(self, parts: LayerBuilder) -> DecoderModel:
        """The model of these parts."""
        return DecoderModel(self, parts)

    def _spare(self, name: str) -> bool:
        """Old checkpoints carry their rotation table, and tied ones sometimes the head twice."""
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")


class DecoderModel:
    """tokens [T] -> logits [R, vocabulary], see base.Model."""

    def __init__(self, spec: Decoder, parts: LayerBuilder) -> None:
        self.spec = spec
        self.embed = parts.embedding("model.embed_tokens")
        self.blocks = [
            block.build(parts, f"model.layers.{layer}", layer)
            for layer, block in enumerate(spec.blocks)
        ]
        self.norm = parts.norm("model.norm", spec.eps)
        self.head = self.embed.as_linear if spec.tied else parts.linear("lm_head")

    def __call__(self, tokens: mx.array, step: ForwardBatch) -> mx.array:
        embedded = self.embed(tokens)
        scale = self.spec.embed_scale
        x: Residual = embedded if scale == 1.0 else embedded * scale
        for block in self.blocks:
            x = block(x, step)
        return self._logits(_wanted(x, step)) if step.logits else materialised(x)

    def _logits(self, x: Residual) -> mx.array:
        _, asked = add_and_defer_norm(self.norm, x)
        logits = self.head(asked)
        return soft_capped(logits, self.spec.cap) if self.spec.cap else logits


def _wanted(x: Residual, step: ForwardBatch) -> Residual:
    """The lines that logits are for."""
    if not isinstance(x, ResidualSum):
        return step.wanted(x)
    y = (
        PendingProduct(x.y.layer, step.wanted(x.y.x))
        if isinstance(x.y, PendingProduct)
        else step.wanted(x.y)
    )
    return ResidualSum(step.wanted(x.x), y)


def soft_capped(x: mx.array, cap: float) -> mx.array:
    """Numbers of any size, bent to lie between -cap and cap."""
    import mlx.core as mx

    return mx.tanh(x / cap) * cap
