"""Our engine in this process, without the compute thread, for scenarios that time its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.bench import bytes_bound
from mlxpool.bench.measurement import OURS
from mlxpool.common.options import Options
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.kernels import device
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load
from mlxpool.worker.scheduling.scheduler import longest_chunk, schedule
from mlxpool.worker.scheduling.sequence import Phase, SampledToken
from mlxpool.worker.scheduling.sequence import Sequence as EngineSequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load

Burst = Callable[[int], float]  # number of steps -> mean seconds of a step

UNLIMITED_TOKENS = 10**6
SPARE = 4096  # tokens of a row's context beyond its prompt
PREFILL_SPARE = 256  # SPARE of rows that get only one token
GREEDY: Mapping[str, Any] = {"temperature": 0.0}


def prompt(tokens: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Returns random ids without the two special tokens at the end of the vocabulary."""
    draw = np.random.default_rng([seed, tokens])
    ids: list[int] = draw.integers(0, vocabulary - 2, tokens).tolist()
    return ids


class OurEngine:
    """Our engine with a loaded model. Each measurement makes a new ModelEngine of this model."""

    def __init__(
        self, folder: Path, *, deterministic: bool = False, spare: int = SPARE, name: str = OURS
    ) -> None:
        """`spare`: the tokens of context that a row has after its prompt.

        `name`: the name of the engine in tables.
        """
        self._name, self._spare = name, spare
        model = inspect(folder)
        limit, float32 = device.memory_limit(0), not device.on_gpu()
        opened = dequantises_at_load(model, limit=limit, float32=float32)
        self._loaded = load(model, deterministic=deterministic, dequantise=opened)
        self.vocabulary = self._loaded.folder.plan.vocab_size
        self.longest = self._loaded.folder.context
        self.weight_bytes = self._loaded.weight_bytes
        self.model, self.dtype = self._loaded.model, self._loaded.dtype

    @cached_property
    def text(self) -> ChatTokenizer:
        """The folder's tokenizer."""
        return ChatTokenizer.from_folder(self._loaded.folder)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        plan = self._loaded.folder.plan
        return RowShape(plan.caches, self.dtype, self.longest, 1).token_bytes

    def step_bytes(self, lengths: Sequence[int]) -> float:
        """Returns the bytes that one decode step reads for rows of these lengths.

        These are the weights, as the folder stores them, and the keys and values in the KV cache.
        """
        folder = self._loaded.folder
        stored = {name: tensor.nbytes for name, tensor in folder.tensors.items()}
        routing = bytes_bound.Routing.from_config(folder.config)
        weights = bytes_bound.weight_bytes(stored, routing, len(lengths))
        return weights + bytes_bound.cache_bytes(folder.plan.caches, lengths, self.dtype.size)

    def engine(
        self, streams: int, context: int, prefix: str = "off", kv: str = AUTO
    ) -> ModelEngine:
        """Makes an engine for at most `streams` rows of `context` tokens.

        `prefix` and `kv` are values of the settings `prefix_cache` and `kv`.
        """
        context = min(context, self.longest)
        settings = EngineSettings(prefix=prefix, context=context, max_sequences=streams, kv=kv)
        return ModelEngine(self._loaded, None, settings)

    def running(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY, kv: str = AUTO
    ) -> tuple[ModelEngine, list[EngineSequence]]:
        """Returns an engine and its rows after prefill of prompts of these lengths."""
        engine = self.engine(len(lengths), max(lengths) + self._spare, kv=kv)
        settings = Options.parse({**options, "ignore_eos": True})
        sequences = []
        for number, length in enumerate(lengths):
            ids = tuple(prompt(length, self.vocabulary, number))
            sequences.append(EngineSequence(b"", 0, ids, settings, number, UNLIMITED_TOKENS))
            enter(engine, sequences[-1])
        return engine, sequences

    def steps(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY, kv: str = AUTO
    ) -> Callable[[], object]:
        """Returns a function whose call decodes one token of each row."""
        engine, sequences = self.running(lengths, options, kv)

        return partial(decode, engine, sequences)

    def prefill(self, tokens: int) -> Callable[[], object]:
        """Returns a function that prefills a prompt, draws its first token and releases the row."""
        engine = self.engine(1, tokens + PREFILL_SPARE)
        ids = tuple(prompt(tokens, self.vocabulary))

        def once() -> None:
            engine.release(self._first(engine, ids))

        return once

    def decodes(
        self, lengths: Sequence[int], options: Mapping[str, Any] = GREEDY
    ) -> Mapping[str, Burst]:
        """Returns a function that times decode steps, by the name of the engine.

        `lengths`: tokens of the prompts, one prompt per row. `options`: the sampling options.
        """
        return {self._name: partial(burst, self.steps(lengths, options))}

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Returns a function that times prefills of `tokens` tokens, by the name of the engine."""
        return {self._name: partial(burst, self.prefill(tokens))}

    def turn(self, tokens: int, answer_tokens: int = 32) -> Callable[[], tuple[float, float]]:
        """Returns a function whose call measures a conversation of `tokens` tokens.

        The call returns the seconds to the first token of the cold prompt, and of the next turn.
        """
        engine = self.engine(1, tokens + answer_tokens + SPARE, prefix="tree")
        rounds = iter(range(UNLIMITED_TOKENS))

        def once() -> tuple[float, float]:
            ids = tuple(prompt(tokens + answer_tokens, self.vocabulary, next(rounds)))
            return self._timed(engine, ids[:tokens]), self._timed(engine, ids)

        return once

    def _timed(self, engine: ModelEngine, ids: tuple[int, ...]) -> float:
        """Returns the seconds to the first token; then moves the row into the prefix cache."""
        mx.synchronize()
        started = time.perf_counter()
        sequence = self._first(engine, ids)
        took = time.perf_counter() - started
        engine.release(sequence)
        return took

    def _first(self, engine: ModelEngine, ids: tuple[int, ...]) -> EngineSequence:
        sequence = EngineSequence(b"", 0, ids, Options.parse(GREEDY), 0, 1)
        admit(engine, sequence)
        decode(engine, [sequence])
        return sequence


def admit(engine: Engine, sequence: EngineSequence) -> None:
    """Admits a sequence to a row of the engine; `decode` prefills its prompt."""
    engine.admit(sequence)
    sequence.phase = Phase.RUNNING


def enter(engine: Engine, sequence: EngineSequence, chunk: int = UNLIMITED_TOKENS) -> None:
    """Admits a sequence and prefills its prompt in chunks, except for the last token.

    Waits for the results of all submitted forward passes.
    """
    admit(engine, sequence)
    limits = engine.limits
    while sequence.unread > 1:
        start = sequence.submitted
        most = min(chunk, sequence.unread - 1, limits.lines, longest_chunk(start, limits.pairs))
        engine.submit([Span(sequence, start, engine.clip(sequence, most), draws=0)])
        while engine.in_flight:
            _collect(engine)


def decode(engine: Engine, rows: Sequence[EngineSequence]) -> list[SampledToken]:
    """Runs scheduled steps until each row has another token; returns all drawn tokens.

    The tokens are appended to the rows. If the engine submits a forward pass before the previous
    pass has its results, a row may get a second token while a new row gets its first.
    """
    lengths = [len(row.ids) for row in rows]
    drawn: list[SampledToken] = []
    while any(len(row.ids) <= count for row, count in zip(rows, lengths, strict=True)):
        limits = engine.limits
        step = schedule(rows, limits, engine.cost.seconds, engine.clip)
        if step.spans:
            engine.submit(step.spans)
        if not step.spans or engine.in_flight > limits.ahead:
            drawn += _collect(engine)
    return drawn


def _collect(engine: Engine) -> list[SampledToken]:
    collected = engine.collect()
    for failure in collected.failed:
        raise failure
    for drawn in collected.drawn:
        drawn.sequence.ids.append(drawn.token)
    return collected.drawn


def burst(step: Callable[[], object], steps: int) -> float:
    """Returns mean seconds of a step. Waits for queued work before the clock starts."""
    mx.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps
