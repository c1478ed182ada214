"""Computes log-probabilities of the tokens of prompts from the hidden states of their chunks.

Logits are computed for some tokens at a time and immediately reduced on the device: the logits of a
whole chunk would take more memory than the pass itself.
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

LOGIT_BYTES = 32 * 1024 * 1024  # the most bytes of logits in memory at a time, in float32
FLOAT_BYTES = 4


def lines_at_a_time(vocabulary: int) -> int:
    """Returns the most tokens whose logits are in memory at a time."""
    return max(1, LOGIT_BYTES // (FLOAT_BYTES * vocabulary))


def logit_bytes(vocabulary: int, chunk: int) -> int:
    """Returns the most bytes that a chunk's logits take at one time, with two copies.

    One copy of the logits is shifted, the other sorted.
    """
    return 3 * FLOAT_BYTES * vocabulary * min(chunk, lines_at_a_time(vocabulary))


def prompt_logprobs(
    spans: Many[tuple[Span, int]],
    states: mx.array,
    logits_of: Callable[[mx.array], mx.array],
    vocabulary: int,
) -> tuple[list[PromptLogprobs], list[SequenceFailed]]:
    """Returns the log-probabilities of the spans' prompts, and sequences whose logits were NaN.

    `states` [H, d] are the states of the spans. A span's number is its first row in `states`.
    """
    reported, failed = [], []
    for span, row in spans:
        seq = span.sequence
        # A sequence that lost its row reads reported tokens again, but does not report them again.
        begin = max(span.start, seq.reported - 1)
        lines = states[row + begin - span.start : row + span.count]
        ids = seq.prompt[begin + 1 : span.end + 1]
        top = max(0, seq.options.prompt_alternatives)
        logprobs = tuple(_logprobs(lines, ids, logits_of, top, vocabulary))
        bad = next((n for n, token in enumerate(logprobs) if isnan(token.logprob)), None)
        if bad is None:
            reported.append(PromptLogprobs(seq, begin + 1, logprobs))
        else:
            message = f"the logits after {begin + bad + 1} tokens of the prompt are no numbers"
            failed.append(SequenceFailed(seq, message))
    return reported, failed


def _logprobs(
    states: mx.array,
    ids: Many[int],
    logits_of: Callable[[mx.array], mx.array],
    top: int,
    vocabulary: int,
) -> Iterator[TokenLogprob]:
    """Yields the log-probability of each of `ids` [n], from the states [n, d] that predict them."""
    most, top = lines_at_a_time(vocabulary), min(top, vocabulary)
    for at in range(0, len(ids), most):
        logits = logits_of(states[at : at + most]).astype(mx.float32)
        tokens = mx.array([*ids[at : at + most]], dtype=mx.int32)
        arrays = log_probabilities(logits, tokens, top).arrays()
        mx.eval(*arrays)
        lists: list[Any] = [array.tolist() for array in arrays]
        numbers = SampledNumbers(*lists)
        assert numbers.logprobs is not None
        for row in range(len(numbers.tokens)):
            yield logprob_of_row(numbers, numbers.logprobs, row, top)
