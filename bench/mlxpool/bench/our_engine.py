"""Our engine in this process, without a compute thread around it: steps to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.common.options import Options
from mlxpool.worker.attention.layouts import InPool
from mlxpool.worker.attention.row_cache import RowShape
from mlxpool.worker.engine import backend
from mlxpool.worker.engine.engine import ModelEngine
from mlxpool.worker.engine.sequence import Sequence as Job
from mlxpool.worker.prompt.tokenizer import Text
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from mlxpool.worker.weights.memory_estimate import dequantises_at_load

Burst = Callable[[int], float]  # so many steps -> mean seconds of one

FOR_EVER = 10**6  # tokens
SPARE = 4096  # tokens of a row's context beyond its prompt
ENDING = 256  # the same where only a first token follows
GREEDY: Mapping[str, Any] = {"temperature": 0.0}


def prompt(tokens: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Random ids; none of the special ones at the end of the vocabulary."""
    draw = np.random.default_rng([seed, tokens])
    ids: list[int] = draw.integers(0, vocabulary - 2, tokens).tolist()
    return ids


class Ours:
    """A loaded model, with a fresh engine for everything that is measured."""

    def __init__(self, folder: Path, *, deterministic: bool = False, spare: int = SPARE) -> None:
        """`spare`: tokens that running rows have room for beyond their prompts."""
        self._spare = spare
        found = inspect(folder)
        limit, float32 = backend.limit_of(0), not backend.on_gpu()
        opened = dequantises_at_load(found, limit=limit, float32=float32)
        self._loaded = load(found, deterministic=deterministic, dequantise=opened)
        self.vocabulary = self._loaded.folder.plan.vocab_size
        self.longest = self._loaded.folder.context
        self.weight_bytes = self._loaded.weight_bytes
        self.model, self.dtype = self._loaded.model, self._loaded.dtype

    @cached_property
    def text(self) -> Text:
        """The folder's tokenizer."""
        return Text.from_folder(self._loaded.folder)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        plan = self._loaded.folder.plan
        return RowShape(plan.caches, self.dtype, self.longest, 1).token_bytes

    def engine(self, streams: int, context: int, prefix: str = "off") -> ModelEngine:
        """One with room for so many rows."""
        context = min(context, self.longest)
        return ModelEngine(self._loaded, prefix=prefix, context=context, sequences=streams)

    def running(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY
    ) -> tuple[ModelEngine, list[Job]]:
        """Rows with prompts of these lengths, ready to decode; each has its own seed."""
        engine = self.engine(len(lengths), max(lengths) + self._spare)
        if isinstance(engine._layout, InPool) and engine._layout.lined:  # as a worker does at load
            engine._layout.batch.warm_steps([len(lengths)], engine.context, _nothing)
        settings = Options.parse({**options, "ignore_eos": True})
        jobs = []
        for number, length in enumerate(lengths):
            ids = tuple(prompt(length, self.vocabulary, number))
            jobs.append(Job(b"", 0, ids, settings, number, FOR_EVER))
            _enter(engine, jobs[-1])
        return engine, jobs

    def steps(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY
    ) -> Callable[[], object]:
        """A token for each row with every call."""
        engine, jobs = self.running(lengths, options)

        def step() -> None:
            for drawn in engine.decode(jobs):
                drawn.sequence.ids.append(drawn.token)

        return step

    def prefill(self, tokens: int) -> Callable[[], object]:
        """A prompt up to its first token with every call, of which nothing stays."""
        engine = self.engine(1, tokens + ENDING)
        ids = tuple(prompt(tokens, self.vocabulary))

        def once() -> None:
            engine.release(self._first(engine, ids))

        return once

    def turn(self, tokens: int, said: int = 32) -> Callable[[], tuple[float, float]]:
        """Seconds until the first token of a conversation of `tokens`: cold, and its next turn."""
        engine = self.engine(1, tokens + said + SPARE, prefix="tree")
        rounds = iter(range(FOR_EVER))

        def once() -> tuple[float, float]:
            ids = tuple(prompt(tokens + said, self.vocabulary, next(rounds)))
            return self._timed(engine, ids[:tokens]), self._timed(engine, ids)

        return once

    def _timed(self, engine: ModelEngine, ids: tuple[int, ...]) -> float:
        """Seconds to the first token; what it leaves for a next turn is kept after them."""
        mx.synchronize()
        started = time.perf_counter()
        job = self._first(engine, ids)
        took = time.perf_counter() - started
        engine.release(job)
        return took

    def _first(self, engine: ModelEngine, ids: tuple[int, ...]) -> Job:
        job = Job(b"", 0, ids, Options.parse(GREEDY), 0, 1)
        _enter(engine, job)
        engine.decode([job])
        return job


class Plain(Ours):
    """Ours without `deterministic`, as somebody to be measured beside."""

    NAME = "not deterministic"

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """See engine.Other."""
        return {self.NAME: partial(burst, self.steps(lengths))}

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """See engine.Other."""
        return {self.NAME: partial(burst, self.prefill(tokens))}


def _nothing() -> None: ...


def _enter(engine: ModelEngine, job: Job) -> None:
    engine.admit(job)
    while engine.prefill(job, engine.chunk):
        pass


def burst(step: Callable[[], object], steps: int) -> float:
    """Mean seconds of some steps; what was queued before is done before the clock starts."""
    mx.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps
