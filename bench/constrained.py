"""Measures what a format costs: tokens/s of batches with constrained rows, beside none.

    python bench/constrained.py [--model FOLDER | --shape NAME] [--rows 8 32] [--tokens 96]
                                [--rounds 7] [--processor] [--parts] [--json FILE]

Four kinds of batches run in turn on one engine in this process, the steps and generations of a
worker's compute thread, without its other threads: no row has a format; all have one; one has
one; all have one with long keys. The last kind runs with forced tokens appended together, and one
by one. Prompts are short and read before the time is taken. Also: the time of a mask, of taking an
id, of replaying one, of reading a vocabulary, and of compiling a schema of 50 properties. With
`--parts` another round of each kind tells the milliseconds of a step by part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from mlxpool.bench import checkpoint
from mlxpool.bench.formats import FORMAT
from mlxpool.bench.shapes import SHAPES
from mlxpool.bench.step_parts import StepParts
from mlxpool.common.options import Options
from mlxpool.common.process import private_temp
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.constraints import grammar
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.kernels import device
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from mlxpool.worker.weights.locate import DEMO_FOLDER

PROMPT = "import json\n\n\ndef load(path):\n    "
NAMES = (
    "name_of_the_customer_who_asked",
    "number_of_items_in_the_order",
    "date_on_which_it_was_sent",
    "reason_why_it_came_back",
)
LONG_KEYS: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 12} for name in NAMES},
        "required": [*NAMES],
        "additionalProperties": False,
    },
}
LONG_FORMAT = {"type": "json_schema", "schema": LONG_KEYS}
MASKS = 300  # that are timed one by one
CONTEXT = 4096  # tokens, at most


class Kind(Enum):
    """What the rows of a batch have. The second kind of a pair is what the first is divided by."""

    NONE = "none"
    ALL = "all"
    ONE = "one"
    LONG = "long keys"
    SINGLE = "long keys, one by one"


PAIRS = ((Kind.ALL, Kind.NONE), (Kind.ONE, Kind.NONE), (Kind.LONG, Kind.SINGLE))


class Bench:
    """An engine with a model, and the grammars of its vocabulary."""

    def __init__(self, path: Path, rows: int, clock: Callable[[], float]) -> None:
        """`clock` gives seconds: of the wall, or of this process on its processors."""
        self.clock = clock
        folder = inspect(path)
        self.text = ChatTokenizer.from_folder(folder)
        self.table: TokenTable = self.text.table(folder.plan.vocab_size)
        self.engine = ModelEngine(
            load(folder), self.text, prefix="off", max_sequences=rows, context=CONTEXT
        )
        self.engine.warm_up(lambda: None)
        vocabulary = partial(load_vocabulary, self.text.source, self.table.pieces, folder.eos_ids)
        self.compiler = Compiler(vocabulary, "", folder.eos_ids, folder.plan.vocab_size)
        began = clock()
        self.compiler.load()
        self.vocabulary_ms = 1e3 * (clock() - began)

    def tokens_per_second(
        self, rows: int, tokens: int, kind: Kind, parts: StepParts | None = None
    ) -> float:
        """Returns the tokens/s of a batch while all its rows decode; of ONE, those without one.

        `parts` gets the times of each step, if it is given.
        """
        generations = Generations(self.engine)
        steps = Steps(self.engine, generations, Progress(lambda: None))
        live = [self._admit(number, tokens, kind, generations, steps) for number in range(rows)]
        counted = live[1:] if kind is Kind.ONE else live
        while not all(row.ids for row in live):
            steps.run()
        before, began = sum(len(row.ids) for row in counted), self.clock()
        while len(generations) == rows:
            steps.run()
            if parts is not None:
                reads = any(row.unread > 1 for row in live)
                parts.end_step("a run is read next" if reads else "single tokens")
        seconds = self.clock() - began
        drawn = sum(len(row.ids) for row in counted) - before
        generations.forget_all()
        while steps.in_flight:
            steps.collect()
        return drawn / seconds * rows / len(counted)

    def _admit(
        self, number: int, tokens: int, kind: Kind, generations: Generations, steps: Steps
    ) -> Sequence:
        """Gives a row to the request of this number."""
        format = LONG_FORMAT if kind in (Kind.LONG, Kind.SINGLE) else FORMAT
        constrained = kind is not Kind.NONE and (kind is not Kind.ONE or number == 0)
        raw: dict[str, Any] = {"format": format} if constrained else {"ignore_eos": True}
        if constrained and kind is Kind.ONE:
            tokens *= 2  # the others end first
        options = Options.parse({**raw, "seed": number})
        prompt = tuple(self.text.encode(PROMPT))
        row = Sequence(bytes([number] * 16), 1, prompt, options, number, tokens + 2)
        rule = self.compiler.constraint(format) if constrained else None
        if rule is not None and kind is Kind.SINGLE:
            rule.forced = lambda *, find: []  # type: ignore[method-assign]
        admit = Admit(row, Facts(), Detokenizer(self.table.piece, ()), 0.0, constraint=rule)
        generations.add(Generation.begin(admit, self.table.piece))
        steps.admit(row)
        return row

    def pairs(self, rows: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
        """Returns the medians of all kinds, and of the ratios of pairs."""
        found: dict[Kind, list[float]] = {kind: [] for kind in Kind}
        for number in range(rounds + 1):  # the first round is not counted
            for kind in [*Kind][:: 1 if number % 2 else -1]:
                found[kind].append(self.tokens_per_second(rows, tokens, kind))
        return [self._pair(rows, kind, other, found) for kind, other in PAIRS]

    def _pair(
        self, rows: int, kind: Kind, other: Kind, found: Mapping[Kind, list[float]]
    ) -> dict[str, Any]:
        with_format, without = found[kind][1:], found[other][1:]
        ratios = sorted(one / two for one, two in zip(with_format, without, strict=True))
        return {
            "rows": rows,
            "kinds": f"{kind.value} / {other.value}",
            "with": statistics.median(with_format),
            "without": statistics.median(without),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }

    def parts(self, rows: int, tokens: int, kind: Kind) -> Iterator[str]:
        """Yields lines with the milliseconds of a step by part."""
        found = StepParts()
        with found.timing():
            self.tokens_per_second(rows, tokens, kind, found)
        for line in found.lines():
            yield f"{rows} rows, {kind.value}: {line}"

    def times(self) -> dict[str, float]:
        """Returns microseconds of a mask (median, 95 %), of taking an id and of replaying one."""
        rule = self.compiler.constraint(FORMAT)
        ids = self.text.encode(
            '[{"name": "Anna Ann", "age": 31, "kind": "cat", "tags": ["a b", "c"]}'
        )
        ids = (ids[len(self.text.prefix) :] + self.text.encode(", ")[len(self.text.prefix) :])[:-1]
        masks: list[float] = []
        takes: list[float] = []
        while len(masks) < MASKS:
            rule = self.compiler.constraint(FORMAT)
            for token in ids:
                began = self.clock()
                rule.mask()
                masked = self.clock()
                rule.take(token)
                masks.append(masked - began)
                takes.append(self.clock() - masked)
        again = self.compiler.constraint(FORMAT)
        began = self.clock()
        again.replay(ids)
        replay = (self.clock() - began) / len(ids)
        twentieths = statistics.quantiles(masks, n=20)
        return {
            "mask": 1e6 * statistics.median(masks),
            "mask, 95 %": 1e6 * twentieths[-1],
            "take": 1e6 * statistics.median(takes),
            "replay": 1e6 * replay,
        }

    def compile_ms(self, rounds: int) -> dict[str, float]:
        """Returns milliseconds for a schema of 50 properties, by what is done with it."""
        checks, compiles, cached = [], [], []
        for number in range(rounds):
            format = {"type": "json_schema", "schema": schema_of(50, number)}
            began = self.clock()
            grammar.check(format)
            checked = self.clock()
            self.compiler.constraint(format)
            compiled = self.clock()
            self.compiler.constraint(format)
            cached.append(self.clock() - compiled)
            checks.append(checked - began)
            compiles.append(compiled - checked)
        every = {"check": checks, "compile": compiles, "again": cached}
        return {name: 1e3 * statistics.median(found) for name, found in every.items()}


def schema_of(properties: int, number: int) -> dict[str, Any]:
    """Returns a schema of so many properties of four kinds; `number` makes it another one."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": number},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}},
    ]
    names = [f"property_{at}" for at in range(properties)]
    return {
        "type": "object",
        "properties": {name: kinds[at % len(kinds)] for at, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }


def main() -> int:
    """Print the figures as tables. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=DEMO_FOLDER, help="a folder (default: demo)")
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=96, help="of each row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="measure processor time, which the load of other programs changes less",
    )
    parser.add_argument("--parts", action="store_true", help="print the parts of a step as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    private_temp.use()
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            options.model = checkpoint.write(Path(folder) / options.shape, options.shape)
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    clock = time.process_time if options.processor else time.perf_counter
    bench = Bench(options.model, max(options.rows), clock)
    where = "GPU" if device.on_gpu() else "CPU"
    print(f"{options.model.name}, {bench.engine.vocab_size} tokens, {where}")
    print(f"\n{'rows':>5} {'pair':>34} {'tok/s':>17} {'ratio':>6}  of pairs")
    pairs: list[dict[str, Any]] = []
    for rows in options.rows:
        pairs += bench.pairs(rows, options.tokens, options.rounds)
        for found in pairs[-len(PAIRS) :]:
            low, high = found["ratios"][0], found["ratios"][-1]
            rates = f"{found['with']:8.0f} {found['without']:8.0f}"
            figures = f"{rows:5} {found['kinds']:>34} {rates} {found['ratio']:6.3f}"
            print(f"{figures}  {low:.3f} to {high:.3f}", flush=True)
        for kind in Kind if options.parts else ():
            for line in bench.parts(rows, options.tokens, kind):
                print(line, flush=True)
    times, compiling = bench.times(), bench.compile_ms(options.rounds)
    print("\nmicroseconds:", ", ".join(f"{name} {value:.1f}" for name, value in times.items()))
    print(f"the vocabulary is read in {bench.vocabulary_ms:.0f} ms")
    print("a schema of 50 properties, ms:", ", ".join(f"{n} {v:.2f}" for n, v in compiling.items()))
    if options.json:
        options.json.write_text(json.dumps({"pairs": pairs, "us": times, "compile_ms": compiling}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
