"""Inputs and outputs of the sampler: the options of a batch as arrays, and its sampled tokens.

Arrays of options are made once while the rows of a batch stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cached_property, partial
from itertools import repeat

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.common.options import Options
from mlxpool.worker.constraints.mask_table import ANY, only
from mlxpool.worker.kernels.sampling import packed_options
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed, TokenLogprob
from mlxpool.worker.transfers.uploads import Upload, upload_copy

NO_TOKEN = -1  # the result for logits that are not numbers
MIN_TEMPERATURE = 1e-7
_SEED = 2**64 - 1
NO_TOP_P = 2.0  # a top-p that keeps all tokens, for any rounding of sums
# Options that use every array and kernel: engines warm up with these.
ALL_OPTIONS = Options(
    min_p=0.01,
    repeat_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=True,
    top_logprobs=1,
)

Rows = dict[Sequence, int]  # sequence -> its row index in a SamplerOutput
# Makes a SampledToken from its fields in half the time of SampledToken(...).
_new_token: Callable[[tuple[Sequence, int, None]], SampledToken] = partial(
    tuple.__new__, SampledToken
)


# ---- inputs ------------------------------------------------------------------------------------


class SampleRequest(Struct, frozen=True):
    """The sampler input of one batch row.

    `position`: the number of completion tokens before the token to sample. `history`: prompt and
    completion so far, or at least the tokens that penalties count; unused without penalties.
    `scored`: tokens whose log-probabilities are requested.
    """

    options: Options
    seed: int
    position: int
    history: Many[int] = ()
    scored: tuple[int, ...] = ()


def penalty_history(seq: Sequence, awaited: int = 0) -> Many[int]:
    """Returns the newest tokens of a stream, at least those that its penalties count.

    Empty without penalties. Tokens that a context shift has discarded are included. `awaited`: the
    number of tokens before the token to sample that the host does not know yet. If penalties count
    the whole stream and its context can shift, returns as many tokens as the context holds, minus
    `awaited`.
    """
    if not has_penalties(seq.options):
        return ()
    count = seq.options.repeat_last_n
    if count < 0:
        whole = len(seq.prompt) + len(seq.ids)
        count = whole if seq.shift is None else seq.shift.context - awaited
    return seq.newest(count)


def last_token(seq: Sequence) -> int:
    """Returns the newest token; the next token is sampled after it."""
    return seq.ids[-1] if seq.ids else seq.prompt[-1]


def has_penalties(options: Options) -> bool:
    """Returns whether a request with these options needs its token history."""
    changed = options.repeat_penalty != 1 or options.presence_penalty or options.frequency_penalty
    return options.repeat_last_n != 0 and bool(changed)


def has_top_p(options: Options) -> bool:
    return options.temperature > 0 and 0 < options.top_p < 1


class SamplingBatch:
    """The sampling options and seeds of R batch rows; `size` is the size of the vocabulary.

    Arrays of options have the shape [R, 1], to broadcast over the vocabulary. `top_p_of_best`: some
    row has a top-p, and some row has a top-k, after which top-p examines only a few logits.
    `top_p_of_all`: some row has a top-p but no top-k. `scored` has for each row the tokens with
    requested log-probabilities. `upload` makes device arrays of the options; the first pass that
    needs an array evaluates it.
    """

    def __init__(
        self,
        options: Many[Options],
        seeds: Many[int],
        size: int,
        upload: Upload = upload_copy,
        scored: Many[tuple[int, ...]] = (),
    ) -> None:
        self.upload = upload
        self._size = size
        self.scored = scored if any(scored) else ()
        self.options = options
        self.seeds = seeds
        self.any_random = any(each.temperature > 0 for each in options)
        self.any_penalties = any(map(has_penalties, options))
        self.logprobs = bool(self.scored) or any(each.logprobs for each in options)
        most = max(each.top_logprobs for each in options)
        self.top_logprobs = min(max(most, int(bool(self.scored))), size)
        limits = [_top_k(each, size) for each in options]  # 0: no top-k
        self.top_ks = limits
        self.max_top_k = max(limits)
        self.top_p_of_best = self.max_top_k > 0 and any(map(has_top_p, options))
        self.top_p_of_all = any(
            has_top_p(each) and not limit for each, limit in zip(options, limits, strict=True)
        )
        self.biases = [
            (line, token, bias)
            for line, each in enumerate(options)
            for token, bias in each.logit_bias.items()
            if token < size
        ]

    def part(self, first: int, end: int) -> SamplingBatch:
        """Returns the batch of the rows [first, end).

        The part returns as many log-probabilities for each row as the batch, so outputs of parts
        can be joined.
        """
        width = max(map(len, self.scored), default=0)
        scored = [(*ids, *[0] * (width - len(ids))) for ids in self.scored[first:end]]
        options, seeds = self.options[first:end], self.seeds[first:end]
        batch = SamplingBatch(options, seeds, self._size, self.upload, scored)
        batch.logprobs, batch.top_logprobs = self.logprobs, self.top_logprobs
        return batch

    @cached_property
    def greedy(self) -> mx.array:
        """[R] bool: whether the row takes its most likely token."""
        return self._column(lambda o: o.temperature == 0)[:, 0] > 0

    @cached_property
    def temperature(self) -> mx.array:
        return self._column(lambda o: max(o.temperature, MIN_TEMPERATURE) if o.temperature else 1)

    @cached_property
    def min_p(self) -> mx.array:
        return self._column(lambda o: o.min_p)

    @cached_property
    def top_p(self) -> mx.array:
        return self._column(lambda o: o.top_p if has_top_p(o) else NO_TOP_P)

    @cached_property
    def top_k(self) -> mx.array:
        return self.upload(np.array(self.top_ks, dtype=np.int32))[:, None]

    @cached_property
    def repeat(self) -> mx.array:
        return self._column(lambda o: o.repeat_penalty if has_penalties(o) else 1.0)

    @cached_property
    def presence(self) -> mx.array:
        return self._column(lambda o: o.presence_penalty)

    @cached_property
    def frequency(self) -> mx.array:
        return self._column(lambda o: o.frequency_penalty)

    @cached_property
    def penalised_rows(self) -> mx.array:
        """[R] bool: whether the row has penalties, which need token counts."""
        return self._column(has_penalties)[:, 0] > 0

    @cached_property
    def bias_arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """The row [n], the token [n] and the value [n] of each bias that is added to a logit."""
        lines, tokens, biases = zip(*self.biases, strict=True)
        rows, ids = self.upload(np.array([lines, tokens], dtype=np.int32))
        return rows, ids, self.upload(np.array(biases, dtype=np.float32))

    @cached_property
    def bias_columns(self) -> tuple[mx.array, mx.array]:
        """Tokens [R, b] of each row, and the biases [R, b] to add to the logits of these tokens.

        Rows with fewer tokens are padded with NO_TOKEN.
        """
        width = max(len(options.logit_bias) for options in self.options)
        ids = np.full((len(self.options), width), NO_TOKEN, dtype=np.int32)
        biases = np.zeros(ids.shape, dtype=np.float32)
        for row, options in enumerate(self.options):
            bias = options.logit_bias
            ids[row, : len(bias)], biases[row, : len(bias)] = [*bias], [*bias.values()]
        return self.upload(ids), self.upload(biases)

    @cached_property
    def scored_ids(self) -> mx.array:
        """[R, s] the tokens with requested log-probabilities, padded with token 0."""
        width = max(map(len, self.scored))
        padded = [[*ids, *[0] * (width - len(ids))] for ids in self.scored]
        return self.upload(np.array(padded, dtype=np.int32))

    @cached_property
    def kernel_options(self) -> mx.array:
        """The options [R, OPTIONS] for kernels/sampling.py."""
        options = self.options
        heats, min_ps = [_heat(each) for each in options], [each.min_p for each in options]
        top_ps = [each.top_p if has_top_p(each) else NO_TOP_P for each in options]
        seeds = [seed & _SEED for seed in self.seeds]
        return self.upload(packed_options(heats, self.top_ks, top_ps, min_ps, seeds))

    @cached_property
    def zero_positions(self) -> mx.array:
        """[R] zeros, as positions of a batch without random choices."""
        return mx.zeros((len(self.options),), dtype=mx.int32)

    def _column(self, of: Callable[[Options], float]) -> mx.array:
        numbers = np.array([of(options) for options in self.options], dtype=np.float32)
        return self.upload(numbers)[:, None]


def _heat(options: Options) -> float:
    """Returns the temperature; 0 for greedy sampling."""
    return max(options.temperature, MIN_TEMPERATURE) if options.temperature else 0.0


def _top_k(options: Options, size: int) -> int:
    """Returns the top-k of a row; 0 if it would filter nothing."""
    return options.top_k if options.temperature > 0 and options.top_k < size else 0


class TokenMasks(Struct, frozen=True):
    """The masks of R batch rows: the tokens that each row may draw.

    The int32 array `numbers` begins with R mask indices, one for each row. The masks follow: K
    masks of ceil(vocabulary / 32) words, with a bit for each token. A row with the index -1 may
    draw any token; a row with the index -2 - t may draw only token t.
    """

    numbers: mx.array
    rows: int

    def bits(self, size: int) -> mx.array:
        """Returns [R, size] bool: the row may draw the token."""
        lines, words = self.numbers[: self.rows, None], self.numbers[self.rows :]
        allowed = (lines == ANY) | (mx.arange(size, dtype=mx.int32) == only(0) - lines)
        if words.size == 0:
            return allowed
        bytes_of = mx.take(words.reshape(-1, -(-size // 32)), mx.maximum(lines[:, 0], 0), axis=0)
        bits = bytes_of.view(mx.uint8)[:, :, None] >> mx.arange(8, dtype=mx.uint8) & 1
        return allowed | (bits.reshape(self.rows, -1)[:, :size].view(mx.bool_) & (lines >= 0))


# ---- outputs -----------------------------------------------------------------------------------


class SamplerOutput(Struct, frozen=True):
    """The sampled tokens of R rows, not evaluated yet, and requested log-probabilities."""

    tokens: mx.array  # [R] int32; NO_TOKEN for rows with NaN logits
    logprobs: mx.array | None = None  # [R] float32
    top_ids: mx.array | None = None  # [R, k] int32 of the likeliest tokens, in any order
    top_logprobs: mx.array | None = None  # [R, k] float32
    scored: mx.array | None = None  # [R, s] float32 of the requested tokens; None: not requested

    def arrays(self) -> list[mx.array]:
        """Returns all arrays, to evaluate them together."""
        arrays = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs, self.scored)
        return [array for array in arrays if array is not None]

    @classmethod
    def joined(cls, parts: Many[SamplerOutput]) -> SamplerOutput:
        """Returns the rows of all parts. All parts must have arrays in the same fields."""
        columns = zip(*(part.arrays() for part in parts), strict=True)
        return cls(*(mx.concatenate(list(column)) for column in columns))


class SampledNumbers(Struct, frozen=True):
    """A SamplerOutput on the host, as lists with an item for each row."""

    tokens: list[int]
    logprobs: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    scored: list[list[float]] | None = None


def sampled_tokens(
    sampled: SampledNumbers, rows: Rows
) -> tuple[list[SampledToken], list[SequenceFailed]]:
    """Returns the tokens of a computed pass, and the sequences with NaN logits.

    `rows` has the row index of each sequence that draws one token.
    """
    tokens = sampled.tokens
    if sampled.logprobs is None and NO_TOKEN not in tokens:  # as in most steps
        each = zip(rows, map(tokens.__getitem__, rows.values()), repeat(None))
        return list(map(_new_token, each)), []
    drawn = [
        SampledToken(seq, tokens[row], _logprob(sampled, seq, row))
        for seq, row in rows.items()
        if tokens[row] != NO_TOKEN
    ]
    if len(drawn) == len(rows):
        return drawn, []
    return drawn, [_no_numbers(seq) for seq, row in rows.items() if tokens[row] == NO_TOKEN]


def accepted_tokens(
    sampled: SampledNumbers, seq: Sequence, row: int, drafts: Many[int]
) -> list[SampledToken]:
    """Returns the tokens that a check of drafts accepts: the right drafts and one more token.

    Sampling without drafts would give the same tokens. `sampled` has a row for each draft, from
    `row` on, with the token that was sampled at the draft's position. One more row has the token
    after the last draft. If no token could be sampled at a position, returns the tokens before it;
    the next pass then fails at this position. Raises SequenceFailed if this is the first position.
    """
    drawn = sampled.tokens[row : row + len(drafts) + 1]
    right = next((n for n, draft in enumerate(drafts) if drawn[n] != draft), len(drafts))
    count = right + (drawn[right] != NO_TOKEN)  # drafts are valid ids: only the last token may fail
    if not count:
        raise _no_numbers(seq)
    return [SampledToken(seq, drawn[n], _logprob(sampled, seq, row + n)) for n in range(count)]


def _no_numbers(seq: Sequence) -> SequenceFailed:
    return SequenceFailed(
        seq,
        f"the logits after {seq.length} tokens are no numbers: "
        "the weights are damaged or overflow in their dtype",
    )


def _logprob(sampled: SampledNumbers, seq: Sequence, row: int) -> TokenLogprob | None:
    if sampled.logprobs is None:
        return None
    if seq.scored and sampled.scored is not None:
        scores = zip(seq.scored, sampled.scored[row], strict=False)
        return TokenLogprob(sampled.logprobs[row], tuple(scores))
    if not seq.options.logprobs:
        return None
    return logprob_of_row(sampled, sampled.logprobs, row, seq.options.top_logprobs)


def logprob_of_row(
    sampled: SampledNumbers, logprobs: Many[float], row: int, wanted: int
) -> TokenLogprob:
    """Returns the log-probability of a row's token, and the row's `wanted` likeliest tokens."""
    if not wanted or sampled.top_ids is None or sampled.top_logprobs is None:
        return TokenLogprob(logprobs[row])
    likely = zip(sampled.top_ids[row], sampled.top_logprobs[row], strict=True)
    top = sorted(likely, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(logprobs[row], tuple(top[:wanted]))
