"""llama.cpp with a GGUF file, with which our engine is compared on a CPU.

This module needs an environment with the package llama-cpp-python, and no MLX:

    PYTHONPATH=bench PYTHON -P -m mlxpool.bench.llama_cpp FILE.gguf   # answers as step_server does

llama.cpp runs on $OPENBLAS_NUM_THREADS threads, the number that our engine uses. Without the
variable it runs on a thread for each processor.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mlxpool.bench.step_server import SPARE, Step, private_output, serve

NAME = "llama.cpp"
MAX_ID = 40_000  # bound of the ids of random prompts; vocabularies have more ids


class Rows:
    """The sequences (rows) of a new llama.cpp context, and the number of tokens of each row."""

    def __init__(self, api: Any, model: Any, rows: int, tokens: int) -> None:
        """`tokens`: the greatest number of tokens of a row."""
        settings = api.llama_context_default_params()
        settings.n_seq_max, settings.n_ctx, settings.n_batch = rows, rows * tokens, tokens
        settings.n_threads = int(os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count() or 1)
        settings.n_threads_batch = settings.n_threads
        self._api, self._context = api, api.llama_init_from_model(model, settings)
        self._batch = api.llama_batch_init(max(rows, tokens), 0, 1)
        self._greedy = api.llama_sampler_init_greedy()
        self._lengths, self._drawn = [0] * rows, [0] * rows

    def read(self, row: int, tokens: int) -> None:
        """Replaces a row's tokens by a prompt of random ids, prefills it, and draws a token."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), row, -1, -1)
        self._lengths[row] = 0
        self._compute(
            [(token, row) for token in random.Random(row).choices(range(MAX_ID), k=tokens)]
        )

    def decode(self) -> None:
        """Decodes a token of each row."""
        self._compute([(token, row) for row, token in enumerate(self._drawn)])

    def _compute(self, entries: Sequence[tuple[int, int]]) -> None:
        """Appends tokens, given as (token, row), and draws the next token of each of the rows."""
        batch, last = self._batch, {row: at for at, (_, row) in enumerate(entries)}
        batch.n_tokens = len(entries)
        for at, (token, row) in enumerate(entries):
            batch.token[at], batch.pos[at] = token, self._lengths[row]
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = last[row] == at
            self._lengths[row] += 1
        failed = self._api.llama_decode(self._context, batch)
        if failed:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens gave {failed}")
        for row, at in last.items():
            self._drawn[row] = self._api.llama_sampler_sample(self._greedy, self._context, at)


def main() -> None:
    """The program that `engine_process.of_llama_cpp` starts: times steps as step_server does."""
    answers, api = private_output(), import_module("llama_cpp")
    api.llama_backend_init()
    file = os.fsencode(sys.argv[1])
    model = api.llama_model_load_from_file(file, api.llama_model_default_params())

    def begin(job: Mapping[str, Any]) -> Sequence[Step]:
        if "prefill" in job:
            rows = Rows(api, model, 1, job["prefill"] + 1)
            return [lambda: rows.read(0, job["prefill"])]
        rows = Rows(api, model, len(job["decode"]), max(job["decode"]) + SPARE)
        for row, length in enumerate(job["decode"]):
            rows.read(row, length)
        return [rows.decode]

    serve(begin, answers)


if __name__ == "__main__":
    main()
