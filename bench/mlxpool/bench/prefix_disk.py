"""Prefixes on disk: first tokens after a restart, and gaps of streams during saving.

A pool answers a new conversation, is restarted, and answers the conversation twice more. The client
measures the time to the first token: cold, after the restart, and from memory.

The gaps are measured on streams that decode while prefixes of earlier prompts are saved, because
the memory is nearly full. A pool with `prefix_disk` and one without take turns.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mlxpool.bench.measurement import OURS, Measurement, Progress, in_turn, percentile
from mlxpool.bench.pools import MODEL, serving, temporary_run_dir, toml_of
from mlxpool.client import Client
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.weights.inspect import inspect

STREAMS = 4
STREAM_TOKENS = 300
PROMPTS = 6  # prompts before the streams of a round
CACHED = 5  # prompts that fit into prefix_bytes while gaps are measured
REST = 2.0  # seconds for an idle worker to save the remaining prefixes


def measure(folder: Path, options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields measurements of first tokens and of gaps. Raises RuntimeError if an answer changes."""
    vocabulary = inspect(folder).plan.vocab_size
    draw = np.random.default_rng(1)

    def prompt(tokens: int) -> list[int]:
        ids: list[int] = draw.integers(0, vocabulary - 2, tokens).tolist()
        return ids

    with temporary_run_dir() as prefixes:
        progress("first tokens")
        rounds = [_restart(folder, prefixes, prompt(options.tokens)) for _ in range(options.rounds)]
    cold, back, memory, cached = (tuple(column) for column in zip(*rounds, strict=True))
    row = f"{options.tokens:,} tokens, behind a restart"
    note = f"Tokens from the disk: {', '.join(f'{count:,}' for count in cached)}."
    sides = {OURS: back, "cold": cold}
    yield Measurement("first token", row, "s", sides, less_is_better=True, digits=3, note=note)
    row, sides = f"{options.tokens:,} tokens, from memory", {OURS: memory, "cold": cold}
    yield Measurement("first token", row, "s", sides, less_is_better=True, digits=3)
    progress("gaps")
    beside = max(1, options.tokens // 10)
    prompts = [prompt(beside) for _ in range(PROMPTS * (options.rounds + 1))]
    sides = _gaps(folder, prompts, options.rounds, _token_bytes(folder) * beside * CACHED)
    row = f"p99 of {STREAMS} streams beside saving"
    yield Measurement("between tokens", row, "ms", sides, less_is_better=True, digits=2)


def _token_bytes(folder: Path) -> int:
    """Returns the bytes of a token's keys and values in float32.

    A GPU stores them in 16 bits, so the same memory holds twice as many tokens there.
    """
    import mlx.core as mx

    model = inspect(folder)
    return RowShape(model.plan.caches, mx.float32, model.context, 1).token_bytes


@contextmanager
def _pool(
    folder: Path, prefixes: Path | None, limits: Mapping[str, int] | None = None
) -> Iterator[Client]:
    """Yields a client of a pool with a loaded model; `prefixes`: the folder of saved prefixes."""
    model = {
        "path": str(folder),
        "keep_alive": "-1",
        "sequences": STREAMS + 2,
        **({"prefix_disk": "8GiB"} if prefixes else {}),
        **(limits or {}),
    }
    settings = {"prefix_dir": str(prefixes)} if prefixes else {}
    text = toml_of(model, {**settings, "stop_grace": 30.0})
    with temporary_run_dir() as at, serving(at, text), Client(at) as client:
        client.generate(MODEL, tokens=[1, 2, 3], max_tokens=1)
        yield client


def _restart(folder: Path, prefixes: Path, ids: Sequence[int]) -> tuple[float, float, float, int]:
    """Returns seconds to the first token: cold, after a restart, from memory.

    Also returns the number of tokens that the restarted pool read from the disk.
    """
    with _pool(folder, prefixes) as client:
        cold, none, expected = _first_token(client, ids)
    with _pool(folder, prefixes) as client:
        back, cached, answer = _first_token(client, ids)
        memory, _, again = _first_token(client, ids)
    if none or not answer == again == expected:
        raise RuntimeError(
            f"the answers differ: {expected}, {answer}, {again}; {none} tokens cached"
        )
    return cold, back, memory, cached


def _first_token(client: Client, ids: Sequence[int]) -> tuple[float, int, list[int]]:
    """Returns seconds to the first token, the number of cached tokens, and the answer's ids."""
    began = time.perf_counter()
    with client.stream(MODEL, tokens=list(ids), max_tokens=4, temperature=0) as stream:
        deltas = iter(stream)
        ids_drawn = list(next(deltas).ids)
        seconds = time.perf_counter() - began
        for delta in deltas:
            ids_drawn += delta.ids
        usage = stream.result.usage or {}
    return seconds, int(usage["cached_tokens"]), ids_drawn


def _gaps(
    folder: Path, prompts: Sequence[Sequence[int]], rounds: int, memory: int
) -> dict[str, tuple[float, ...]]:
    """Returns the p99 of gaps in ms for each round, with a prefix disk and without it.

    Round 0 is the warm-up.
    """
    limits = {"prefix_bytes": memory}
    with ExitStack() as stack:
        prefixes = stack.enter_context(temporary_run_dir())
        clients = {
            OURS: stack.enter_context(_pool(folder, prefixes, limits)),
            "no disk": stack.enter_context(_pool(folder, None, limits)),
        }
        prompts_left = {name: iter(prompts) for name in clients}

        def once(name: str) -> float:
            for _ in range(PROMPTS):
                client, ids = clients[name], list(next(prompts_left[name]))
                client.generate(MODEL, tokens=ids, max_tokens=2, temperature=0)
            gap = percentile(_gaps_of_streams(clients[name]), 99)
            time.sleep(REST)  # an idle worker's saving must not disturb the other pool
            return 1000 * gap

        contestants = {name: lambda name=name: once(name) for name in clients}
        return {name: values[1:] for name, values in in_turn(contestants, rounds + 1).items()}


def _gaps_of_streams(client: Client) -> list[float]:
    """Returns the seconds between the deltas of STREAMS streams."""
    gaps_of_all: list[list[float]] = [[] for _ in range(STREAMS)]

    def streaming(seed: int, gaps: list[float]) -> None:
        before = 0.0
        first = [seed + 5, 7, 9]
        with client.stream(
            MODEL, tokens=first, max_tokens=STREAM_TOKENS, ignore_eos=True, seed=seed
        ) as stream:
            for _ in stream:
                now = time.perf_counter()
                if before:
                    gaps.append(now - before)
                before = now

    threads = [
        threading.Thread(target=streaming, args=arguments) for arguments in enumerate(gaps_of_all)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [gap for gaps in gaps_of_all for gap in gaps]
