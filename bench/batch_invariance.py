"""Counts greedy completions that differ in a batch, after a prefix hit, a preemption or a resume.

    python bench/batch_invariance.py [--requests 48] [--tokens 64] [--deterministic] [--random]
                                     [--json FILE]

Each request is computed alone, then under each condition, and compared up to the first token that
differs. The margin is the difference of the two greatest log-probabilities at that token when the
request was alone: a near-tie is decided by the last bits, and these depend on how many rows a
matrix product has. The model is the embedded one; with `--random`, a random one of 16 layers in
bfloat16.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.broker.processes.blas import preload
from mlxpool.common.process import private_temp

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

BATCH_SIZE = 8
CORPUS = Path(__file__).read_text() + Path(report.__file__).read_text()
RANDOM_CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A completion computed alone, with the margin of each of its tokens."""

    prompt: tuple[int, ...]
    ids: list[int]
    margins: list[float]


class Conditions:
    """Computes the same requests under several conditions, each with an engine of its own."""

    def __init__(self, loaded: Any, tokens: int) -> None:
        self.loaded, self.tokens = loaded, tokens
        self.reference_engine = self.engine()

    def engine(self, prefix: str = "off") -> Any:
        from mlxpool.worker.engine.model_engine import ModelEngine

        return ModelEngine(self.loaded, prefix=prefix, max_sequences=BATCH_SIZE)

    def start(self, engine: Any, prompt: tuple[int, ...], ids: list[int] | None = None) -> Any:
        """A sequence whose prompt (and `ids`) the engine has read."""
        from mlxpool.common.options import Options
        from mlxpool.worker.scheduling.sequence import Sequence

        options = Options(temperature=0.0, logprobs=True, top_logprobs=2)
        seq = Sequence(b"", 1, prompt, options, 1, self.tokens, list(ids or []))
        self.prefill(engine, seq)
        return seq

    def prefill(self, engine: Any, seq: Any) -> None:
        from mlxpool.bench.our_engine import enter

        enter(engine, seq, 100)

    def step(self, engine: Any, rows: list[Any]) -> list[Any]:
        from mlxpool.bench.our_engine import decode

        return decode(engine, rows)

    def finish(self, engine: Any, seq: Any) -> list[float]:
        """Decode the rest; the margin of each token."""
        margins = []
        while len(seq.ids) < self.tokens:
            ((_, first), (_, second)) = self.step(engine, [seq])[0].logprob.top
            margins.append(first - second)
        engine.release(seq)
        return margins

    def alone(self, prompt: tuple[int, ...]) -> Reference:
        seq = self.start(self.reference_engine, prompt)
        return Reference(prompt, seq.ids, self.finish(self.reference_engine, seq))

    def batched(self, found: list[Reference]) -> list[list[int]]:
        """Eight at a time; one joins at every third step."""
        results: list[list[int]] = []
        for start in range(0, len(found), BATCH_SIZE):
            engine, waiting = self.engine(), found[start : start + BATCH_SIZE]
            every: list[Any] = []
            for turn in range(4 * BATCH_SIZE + self.tokens):
                if turn % 3 == 0 and len(every) < len(waiting):
                    every.append(self.start(engine, waiting[len(every)].prompt))
                running = [seq for seq in every if len(seq.ids) < self.tokens]
                if running:
                    self.step(engine, running)
            results += [seq.ids for seq in every]
        return results

    def prefix_hit(self, found: list[Reference]) -> list[list[int]]:
        """Half of the prompt is in the prefix tree."""
        engine, results = self.engine("tree"), []
        for one in found:
            engine.release(self.start(engine, one.prompt[: len(one.prompt) // 2]))
            seq = self.start(engine, one.prompt)
            assert seq.cached
            self.finish(engine, seq)
            results.append(seq.ids)
        return results

    def preempted(self, found: list[Reference]) -> list[list[int]]:
        """Preempted after a third of the tokens."""
        engine, results = self.engine(), []
        for one in found:
            seq = self.start(engine, one.prompt)
            for _ in range(self.tokens // 3):
                self.step(engine, [seq])
            engine.release(seq)
            seq.preempt()
            self.prefill(engine, seq)
            self.finish(engine, seq)
            results.append(seq.ids)
        return results

    def resumed(self, found: list[Reference]) -> list[list[int]]:
        """Resumed from half of the tokens."""
        engine, results = self.engine(), []
        for one in found:
            seq = self.start(engine, one.prompt, one.ids[: self.tokens // 2])
            self.finish(engine, seq)
            results.append(seq.ids)
        return results


def compare(found: list[Reference], results: list[list[int]]) -> dict[str, Any]:
    """How many differ, the sum of equal tokens before, and the margins where they differ."""
    margins, equal = [], 0
    for one, ids in zip(found, results, strict=True):
        same = [a == b for a, b in zip(one.ids, ids, strict=True)]
        first = same.index(False) if False in same else len(same)
        equal += first
        if first < len(same):
            margins.append(one.margins[first])
    return {"requests": len(found), "differ": len(margins), "equal": equal, "margins": margins}


def prompts(count: int, text: Any) -> list[tuple[int, ...]]:
    draw = random.Random(1)
    spans = [(draw.randrange(len(CORPUS) // 2), draw.randrange(200, 1500)) for _ in range(count)]
    return [tuple(text.encode(CORPUS[start : start + size])) for start, size in spans]


def random_checkpoint(path: Path) -> Path:
    """A random checkpoint in bfloat16."""
    import mlx.core as mx

    from support.worker_checkpoints import write_checkpoint

    file = write_checkpoint(path, **RANDOM_CONFIG) / "model.safetensors"
    weights: Any = mx.load(str(file))
    mx.save_safetensors(str(file), {name: one.astype(mx.bfloat16) for name, one in weights.items()})
    return path


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import mlx.core as mx

    from mlxpool.worker.prompt.tokenizer import ChatTokenizer
    from mlxpool.worker.weights.inspect import inspect
    from mlxpool.worker.weights.load import load

    loaded = load(inspect(folder), deterministic=arguments.deterministic)
    mx.random.seed(1)
    conditions = Conditions(loaded, arguments.tokens)
    text = ChatTokenizer.from_folder(loaded.folder)
    found = [conditions.alone(prompt) for prompt in prompts(arguments.requests, text)]
    runs: dict[str, Callable[[list[Reference]], list[list[int]]]] = {
        "again alone": lambda every: [conditions.alone(one.prompt).ids for one in every],
        "in company of eight": conditions.batched,
        "after a prefix hit": conditions.prefix_hit,
        "after a preemption": conditions.preempted,
        "after a resume": conditions.resumed,
    }
    return {name: compare(found, run(found)) for name, run in runs.items()}


def table(figures: dict[str, Any]) -> str:
    rows = []
    for name, one in figures.items():
        greatest = f"{max(one['margins']):.2g}" if one["margins"] else "-"
        rows.append([name, f"{one['differ']} of {one['requests']}", str(one["equal"]), greatest])
    head = ["way", "requests that differ", "equal tokens before that", "greatest margin there"]
    return report.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    private_temp.use()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    from mlxpool.worker.weights.locate import DEMO_FOLDER as DEMO

    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, random_checkpoint(Path(folder)) if arguments.random else DEMO)
    print(report.versions(), report.machine(), sep="; ")
    print(table(figures))
    report.save(arguments.json, figures)


if __name__ == "__main__":
    main()
