"""From sequences to what the sampler asks, and from what it drew back to sequences."""

from __future__ import annotations

from collections.abc import Sequence as Many

from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import has_penalties
from mlxpool.worker.sampling.sampler import Draw, Sampled
from mlxpool.worker.scheduling.sequence import Drawn, Logprob, RowFailed, Sequence


def draw_of(seq: Sequence, ahead: int = 0) -> Draw:
    """`ahead` tokens are drawn and not yet in `seq.ids`."""
    return Draw(seq.options, seq.seed, len(seq.ids) + ahead, history(seq))


def history(seq: Sequence) -> Many[int]:
    """What its penalties look back on."""
    return seq.tokens if has_penalties(seq.options) else ()


def last(seq: Sequence) -> int:
    """The newest token, whose logits the next one is drawn from."""
    return seq.ids[-1] if seq.ids else seq.prompt[-1]


def drawn(sampled: Sampled, lines: dict[Sequence, int]) -> list[Drawn]:
    """What is in the lines of a step that is done; RowFailed where one has no token."""
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    for seq, line in lines.items():
        if tokens[line] == sampler.NOT_A_TOKEN:
            raise RowFailed(
                seq,
                f"the logits after {seq.length} tokens are no numbers: "
                "the weights are damaged or overflow in their dtype",
            )
    return [Drawn(seq, tokens[line], _logprob(sampled, seq, line)) for seq, line in lines.items()]


def _logprob(sampled: Sampled, seq: Sequence, line: int) -> Logprob | None:
    if not seq.options.logprobs or sampled.logprobs is None:
        return None
    chosen = float(sampled.logprobs[line].item())  # type: ignore[arg-type]
    wanted = seq.options.top_logprobs
    if not wanted or sampled.top_ids is None or sampled.top_logprobs is None:
        return Logprob(chosen)
    ids: list[int] = sampled.top_ids[line].tolist()  # type: ignore[assignment]
    values: list[float] = sampled.top_logprobs[line].tolist()  # type: ignore[assignment]
    return Logprob(chosen, tuple(zip(ids, values, strict=True))[:wanted])
