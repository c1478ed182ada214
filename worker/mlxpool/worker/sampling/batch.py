"""Rows that are drawn together: what of their options no token changes, made once for as long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import mlx.core as mx

from mlxpool.common.options import Options

LEAST_TEMPERATURE = 1e-7
_WORD = 0xFFFFFFFF
ALL_MASS = 2.0  # a top-p that keeps everything, whatever a sum is rounded to


def has_penalties(options: Options) -> bool:
    """Whether a row with these options needs its history."""
    changed = options.repeat_penalty != 1 or options.presence_penalty or options.frequency_penalty
    return options.repeat_last_n != 0 and bool(changed)


def has_top_p(options: Options) -> bool:
    return options.temperature > 0 and 0 < options.top_p < 1


class Company:
    """`options` and `seeds` are those of each row, [R]; `size` is that of the vocabulary.

    Columns are [R, 1], to broadcast over the vocabulary. `top_p_of_best`: some rows have a top-p,
    and some a top-k, which makes it cheap; `top_p_of_all`: one has it over the whole vocabulary.
    """

    def __init__(self, options: Sequence[Options], seeds: Sequence[int], size: int) -> None:
        self.options = options
        self.seeds = seeds
        self.draws = any(one.temperature > 0 for one in options)
        self.penalised = any(map(has_penalties, options))
        self.logprobs = any(one.logprobs for one in options)
        self.top_logprobs = min(max(one.top_logprobs for one in options), size)
        limits = [_top_k(one, size) for one in options]  # 0: no top-k
        self.limits = limits
        self.most = max(limits)
        self.top_p_of_best = self.most > 0 and any(map(has_top_p, options))
        self.top_p_of_all = any(
            has_top_p(one) and not limit for one, limit in zip(options, limits, strict=True)
        )
        self.biases = [
            (line, token, bias)
            for line, one in enumerate(options)
            for token, bias in one.logit_bias.items()
            if token < size
        ]

    @cached_property
    def greedy(self) -> mx.array:
        """[R] whether a row takes the most likely token."""
        return self._column(lambda o: o.temperature == 0)[:, 0]

    @cached_property
    def heat(self) -> mx.array:
        return self._column(lambda o: max(o.temperature, LEAST_TEMPERATURE) if o.temperature else 1)

    @cached_property
    def min_p(self) -> mx.array:
        return self._column(lambda o: o.min_p)

    @cached_property
    def top_p(self) -> mx.array:
        return self._column(lambda o: o.top_p if has_top_p(o) else ALL_MASS)

    @cached_property
    def top_k(self) -> mx.array:
        return mx.array(self.limits)[:, None]

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
    def counted(self) -> mx.array:
        """[R] whether a row's tokens are counted."""
        return mx.array([has_penalties(one) for one in self.options])

    @cached_property
    def bias_arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Lines, tokens, and what is added there."""
        lines, tokens, biases = zip(*self.biases, strict=True)
        return mx.array(lines), mx.array(tokens), mx.array(biases)

    @cached_property
    def for_kernel(self) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Temperatures, top-k, top-p, min-p [R] and seeds [R, 2], see kernels/draw.py."""
        top_p, min_p = (column[:, 0].astype(mx.float32) for column in (self.top_p, self.min_p))
        heats = mx.where(self.greedy, 0.0, self.heat[:, 0]).astype(mx.float32)
        halves = [(seed >> 32 & _WORD, seed & _WORD) for seed in self.seeds]
        seeds = mx.array(halves, dtype=mx.uint32)
        every = heats, mx.array(self.limits, dtype=mx.int32), top_p, min_p, seeds
        mx.eval(every)
        return every

    @cached_property
    def no_positions(self) -> mx.array:
        """[R] zeros, for rows that are all greedy."""
        return mx.zeros((len(self.options),), dtype=mx.int32)

    def _column(self, of: Callable[[Options], float]) -> mx.array:
        return mx.array([of(one) for one in self.options])[:, None]


def _top_k(options: Options, size: int) -> int:
    """The row's k, 0 where it filters nothing."""
    return options.top_k if options.temperature > 0 and options.top_k < size else 0
