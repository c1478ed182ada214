"""Formats of answers: how much do they slow a batch, and its requests without a format?

Batches run in turn on one engine in this process: no request, all requests, or one request has a
format. Prompts are short, and their prefill is not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlxpool.bench import models
from mlxpool.bench.batches import Batch
from mlxpool.bench.measurement import OURS, Measurement, Progress, in_turn
from mlxpool.common.options import Options
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load

# Formats of answers that do not end within the measurement, with values as real answers have.
RECORDS: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", "horse"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "schema": RECORDS}
PROMPT = "import json\n\n\ndef load(path):\n    "
CONTEXT = 4096  # tokens, at most
NONE, ALL, ONE = "no row", "all rows", "one row"  # rows that have a format


class Bench:
    """An engine with a loaded model, and the compiler of answer formats for its vocabulary."""

    def __init__(self, path: Path, rows: int, clock: Callable[[], float]) -> None:
        """`clock` returns seconds: of the wall clock, or of processor time of this process."""
        self._clock = clock
        folder = inspect(path)
        self._text = ChatTokenizer.from_folder(folder)
        size = folder.plan.vocab_size
        settings = EngineSettings(prefix="off", max_sequences=rows, context=CONTEXT)
        self._engine = ModelEngine(load(folder), self._text, settings)
        self._engine.warm_up(lambda: None)
        pieces = self._text.table(size).pieces
        vocabulary = partial(load_vocabulary, self._text.source, pieces, folder.eos_ids)
        self._compiler = Compiler(vocabulary, "", folder.eos_ids, size)
        self._compiler.load()

    def tokens_per_second(self, rows: int, tokens: int, kind: str) -> float:
        """Measures tokens/s of a batch while all rows decode.

        `kind` says which rows have a format: NONE, ALL or ONE. With ONE only the tokens of the
        other rows are counted; the result is multiplied so that it counts for all rows.
        """
        batch, prompt = Batch(self._engine), self._text.encode(PROMPT)
        for number in range(rows):
            if kind == ALL or (kind == ONE and number == 0):
                options = Options.parse({"format": FORMAT, "seed": number})
                most = tokens * (2 if kind == ONE else 1)  # so that the other rows end first
                batch.add(prompt, options, most + 2, self._compiler.constraint(FORMAT))
            else:
                options = Options.parse({"ignore_eos": True, "seed": number})
                batch.add(prompt, options, tokens + 2)
        counted = batch.rows[1:] if kind == ONE else batch.rows
        batch.read_prompts()
        before, began = sum(len(row.ids) for row in counted), self._clock()
        while batch.running == rows:
            batch.step()
        seconds = self._clock() - began
        drawn = sum(len(row.ids) for row in counted) - before
        batch.end()
        return drawn / seconds * rows / len(counted)


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    of = "processor time" if options.processor else "the clock"
    return (
        f"{models.named(options)}; {options.tokens} tokens of each row by {of}, {options.rounds}"
        " rounds. With one row that has a format the figures are those of the others."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the tokens/s for each number of rows. Raises ValueError for a batch of one row."""
    if min(options.rows) < 2:
        raise ValueError(f"--rows {min(options.rows)} must be at least 2")
    clock = time.process_time if options.processor else time.perf_counter
    with models.folder(options, progress) as folder:
        progress("loading the model")
        bench = Bench(folder, max(options.rows), clock)
        for rows in options.rows:
            progress(f"{rows} rows")
            once = partial(bench.tokens_per_second, rows, options.tokens)
            kinds = {kind: partial(once, kind) for kind in (NONE, ALL, ONE)}
            rates = in_turn(kinds, options.rounds + 1)  # the first round is not counted
            for kind in (ALL, ONE):
                sides = {OURS: rates[kind][1:], NONE: rates[NONE][1:]}
                name = f"{rows} rows"
                yield Measurement(f"a format: {kind}", name, "tokens/s", sides, at=rows)
