"""Draws the drafts of a draft model, with a measure of the model's confidence in each draft."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx

from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.engine.token_draws import TokenDraws
from mlxpool.worker.sampling.batch import NO_TOKEN, SamplerOutput, SamplingBatch
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span

GROUP = 64  # tokens of a group; the largest logit of each group is found first


class DraftDraws(TokenDraws):
    """TokenDraws for drafts: it computes no log-probabilities.

    If all rows are greedy, the field for a token's log-probability has the distance between the two
    largest logits. Otherwise the field is empty. Log-probabilities would take longer than the draft
    model itself does on a CPU.
    """

    def draw(
        self,
        spans: Many[Span],
        logits: mx.array,
        before: Flight | None,
        masks: RowMasks,
    ) -> SamplerOutput:
        """Draws the tokens of spans, without probabilities if all rows are greedy.

        See TokenDraws.draw.
        """
        if any(span.sequence.options.temperature > 0 for span in spans):
            return super().draw(spans, logits, before, masks)
        return SamplerOutput(*likeliest(logits))

    def _batch(self, rows: list[Sequence]) -> SamplingBatch:
        batch = super()._batch(rows)
        batch.logprobs = False
        return batch


def likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the tokens [R] with the largest of logits [R, V], and their distances to the second.

    If V can be divided into groups, the largest logit outside of the token's group is used as the
    second, even if the group has a larger one. The token is NO_TOKEN if the logits are NaN.
    """
    rows, size = logits.shape
    if size % GROUP or size == GROUP:
        tokens = mx.argmax(logits, axis=-1)
        others = mx.where(mx.arange(size) == tokens[:, None], -mx.inf, logits)
        second = mx.max(others, axis=-1)
        top = mx.max(logits, axis=-1)
    else:
        grouped = logits.reshape(rows, -1, GROUP)
        tops = mx.max(grouped, axis=-1)
        group = mx.argmax(tops, axis=-1)
        inside = mx.take_along_axis(grouped, group[:, None, None], axis=1)[:, 0]
        tokens = group * GROUP + mx.argmax(inside, axis=-1)
        ordered = mx.sort(tops, axis=-1)
        top, second = mx.max(tops, axis=-1), ordered[:, -2]
    tokens = mx.where(mx.isfinite(top), tokens.astype(mx.int32), NO_TOKEN)
    return tokens, (top - second).astype(mx.float32)
