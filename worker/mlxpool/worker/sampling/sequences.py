"""Converts sequences to sampler inputs and sampler output to the tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Many

from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import has_penalties
from mlxpool.worker.sampling.sampler import SampleRequest, SamplerOutput
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed, TokenLogprob


def sample_request(seq: Sequence, ahead: int = 0) -> SampleRequest:
    """Returns the sampler input of a sequence; `ahead` tokens were sampled that `ids` lacks."""
    return SampleRequest(seq.options, seq.seed, len(seq.ids) + ahead, penalty_history(seq))


def penalty_history(seq: Sequence) -> Many[int]:
    """Returns the tokens that penalties count; empty without penalties."""
    return seq.tokens if has_penalties(seq.options) else ()


def last_token(seq: Sequence) -> int:
    """Returns the newest token, after which the next one is sampled."""
    return seq.ids[-1] if seq.ids else seq.prompt[-1]


def sampled_tokens(sampled: SamplerOutput, rows: dict[Sequence, int]) -> list[SampledToken]:
    """Returns the tokens of a computed step; `rows` has the row of each sequence.

    Raises SequenceFailed when a row has no token.
    """
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    for seq, row in rows.items():
        if tokens[row] == sampler.NO_TOKEN:
            raise SequenceFailed(
                seq,
                f"the logits after {seq.length} tokens are no numbers: "
                "the weights are damaged or overflow in their dtype",
            )
    return [
        SampledToken(seq, tokens[row], _logprob(sampled, seq, row)) for seq, row in rows.items()
    ]


def _logprob(sampled: SamplerOutput, seq: Sequence, row: int) -> TokenLogprob | None:
    if not seq.options.logprobs or sampled.logprobs is None:
        return None
    chosen = float(sampled.logprobs[row].item())  # type: ignore[arg-type]
    wanted = seq.options.top_logprobs
    if not wanted or sampled.top_ids is None or sampled.top_logprobs is None:
        return TokenLogprob(chosen)
    ids: list[int] = sampled.top_ids[row].tolist()  # type: ignore[assignment]
    values: list[float] = sampled.top_logprobs[row].tolist()  # type: ignore[assignment]
    return TokenLogprob(chosen, tuple(zip(ids, values, strict=True))[:wanted])
