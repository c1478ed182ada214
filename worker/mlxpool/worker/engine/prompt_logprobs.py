"""Log-probabilities of the tokens of prompts, of the hidden states of their chunks.

Logits are computed for some lines at a time and reduced on the device at once: those of a whole
chunk would take more memory than the pass itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from math import isnan
from typing import Any

import mlx.core as mx

from mlxpool.worker.sampling.batch import SampledNumbers, logprob_of_row
from mlxpool.worker.sampling.sampler import log_probabilities
from mlxpool.worker.scheduling.sequence import PromptLogprobs, SequenceFailed, TokenLogprob
from mlxpool.worker.scheduling.spans import Span

LOGIT_BYTES = 32 * 1024 * 1024  # of the logits that are in memory at a time, in float32
FLOAT_BYTES = 4


def lines_at_a_time(vocabulary: int) -> int:
    """Returns how many tokens have their logits in memory at a time."""
    return max(1, LOGIT_BYTES // (FLOAT_BYTES * vocabulary))


def logit_bytes(vocabulary: int, chunk: int) -> int:
    """Returns the bytes that logits of a chunk take at a time: themselves, shifted, their order."""
    return 3 * FLOAT_BYTES * vocabulary * min(chunk, lines_at_a_time(vocabulary))


def prompt_logprobs(
    spans: Many[tuple[Span, int]],
    states: mx.array,
    logits_of: Callable[[mx.array], mx.array],
    vocabulary: int,
) -> tuple[list[PromptLogprobs], list[SequenceFailed]]:
    """Returns what spans report of their prompts, and the sequences whose logits were no numbers.

    `states` [H, d] are those of the spans, which have the number of their first row.
    """
    found, failed = [], []
    for span, row in spans:
        seq = span.sequence
        # What was reported before is read again after a loss of the row, and not reported again.
        begin = max(span.start, seq.reported - 1)
        lines = states[row + begin - span.start : row + span.count]
        ids = seq.prompt[begin + 1 : span.end + 1]
        top = max(0, seq.options.prompt_alternatives)
        logprobs = tuple(_logprobs(lines, ids, logits_of, top, vocabulary))
        bad = next((n for n, one in enumerate(logprobs) if isnan(one.logprob)), None)
        if bad is None:
            found.append(PromptLogprobs(seq, begin + 1, logprobs))
        else:
            message = f"the logits after {begin + bad + 1} tokens of the prompt are no numbers"
            failed.append(SequenceFailed(seq, message))
    return found, failed


def _logprobs(
    states: mx.array,
    ids: Many[int],
    logits_of: Callable[[mx.array], mx.array],
    top: int,
    vocabulary: int,
) -> Iterator[TokenLogprob]:
    """Yields the log-probability of each of `ids`, which states [n, d] predict."""
    most, top = lines_at_a_time(vocabulary), min(top, vocabulary)
    for at in range(0, len(ids), most):
        logits = logits_of(states[at : at + most]).astype(mx.float32)
        tokens = mx.array([*ids[at : at + most]], dtype=mx.int32)
        arrays = log_probabilities(logits, tokens, top).arrays()
        mx.eval(*arrays)
        lists: list[Any] = [one.tolist() for one in arrays]
        numbers = SampledNumbers(*lists)
        assert numbers.logprobs is not None
        for row in range(len(numbers.tokens)):
            yield logprob_of_row(numbers, numbers.logprobs, row, top)
