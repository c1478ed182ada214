"""Decoders that embed or rate whole texts: Qwen3, and Gemma 3 with bidirectional attention.

Released embedding models are stored without the output head, and their tensor names have no prefix.
A Qwen3 that rates texts answers a yes-or-no question: the score is the logit of `yes` minus the
logit of `no`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import flag, integer
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors
from mlxpool.worker.layers.encoder_plan import EncoderPlan, label_count
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder
from mlxpool.worker.layers.model_plan import Model, ModelPlan
from mlxpool.worker.models import gemma3, qwen3

if TYPE_CHECKING:
    import mlx.core as mx

BODY = ("embed_tokens.", "layers.", "norm.")  # tensor names in models without a head
PREFIX = "model."
BIDIRECTIONAL = "use_bidirectional_attention"


class Answers(Struct, frozen=True):
    """The token ids of the two compared answers, yes and no."""

    yes: int
    no: int


def encoder_plan(config: Mapping[str, Any], answers: Answers | None = None) -> EncoderPlan:
    """Returns the plan of a decoder that embeds or rates whole texts.

    With `answers`, the score of a text is the difference between the logits of the two answers.
    Raises ModelLoadFailed with the unusable key.
    """
    labels = label_count(config)
    if answers is None:
        config = {**config, "tie_word_embeddings": True}  # the output head is not used
    gemma = config.get("model_type") == "gemma3_text"
    plan = _gemma(config) if gemma else qwen3.plan(config)
    causal = not (gemma and flag(config, BIDIRECTIONAL))
    hidden = integer(config, "hidden_size")
    plan = replace(plan, derived=_PrefixedTensors(plan))
    if answers is not None:
        build = plan.build
        plan = replace(plan, build=lambda builder: _AnsweringModel(build(builder), answers))
        return EncoderPlan(plan, hidden, causal, labels=1, pooling="lasttoken")
    if labels:
        plan = _with_score(plan, labels, hidden)
    return EncoderPlan(plan, hidden, causal, labels, "lasttoken")


def _gemma(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a Gemma. The stored window counts both sides, so it is halved."""
    if not flag(config, BIDIRECTIONAL):
        return gemma3.plan(config)
    window = integer(config, "sliding_window", 4096) // 2 + 1
    return gemma3.plan({**config, BIDIRECTIONAL: False, "sliding_window": window})


class _PrefixedTensors(Struct, frozen=True):
    """The `derived` function of a plan, for a checkpoint whose tensor names lack a prefix.

    Adds the prefix, then calls the `derived` of `plan`.
    """

    plan: ModelPlan

    def __call__(self, found: StoredTensors) -> Iterator[DerivedWeights]:
        stored = {PREFIX + name if name.startswith(BODY) else name: name for name in found}
        renamed = {name: found[original] for name, original in stored.items()}
        done: set[str] = set()
        for weights in self.plan.derived(renamed):
            done.update(weights.sources)
            sources = tuple(stored.get(name, name) for name in weights.sources)
            yield replace(weights, sources=sources)
        for name, original in stored.items():
            if name != original and name not in done:
                yield DerivedWeights((original,), {name: renamed[name]}, tuple)


def _with_score(plan: ModelPlan, labels: int, hidden: int) -> ModelPlan:
    build = plan.build
    return replace(
        plan,
        shapes={**plan.shapes, "score.weight": (labels, hidden)},
        build=lambda builder: _ScoredModel(build(builder), builder),
    )


class _States:
    """A Model that returns the hidden states of a decoder."""

    def __init__(self, decoder: Model) -> None:
        self.decoder = decoder

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the head's logits of the tokens that the batch selects; see model_plan.Model."""
        return self.logits_of(batch.logit_rows(self.hidden_states(tokens, batch)))

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of all tokens; see EncoderPlan."""
        return self.decoder.hidden_states(tokens, batch)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Raises NotImplementedError: only subclasses have a head."""
        raise NotImplementedError


class _ScoredModel(_States):
    """A decoder with a linear layer over the last token's hidden state."""

    def __init__(self, decoder: Model, builder: LayerBuilder) -> None:
        super().__init__(decoder)
        self.score = builder.linear("score")

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the scores of texts from their last tokens' states."""
        return self.score(hidden)


class _AnsweringModel(_States):
    """A decoder whose score is the logit of the answer `yes` minus the logit of `no`."""

    def __init__(self, decoder: Model, answers: Answers) -> None:
        super().__init__(decoder)
        self.answers = answers

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the scores [n, 1] of texts from their last tokens' states."""
        logits = self.decoder.logits_of(hidden)
        return (logits[:, self.answers.yes] - logits[:, self.answers.no])[:, None]


def require_answers(yes: int | None, no: int | None) -> Answers:
    """Returns the ids of yes and no; raises ModelLoadFailed if the tokenizer lacks one of them."""
    if yes is None or no is None:
        raise ModelLoadFailed(
            'tokenizer.json has no tokens "yes" and "no": a language model that rates needs their'
            " logits; take task out, or name another model"
        )
    return Answers(yes, no)
