"""Measures what speculation gains and costs: tokens/s with drafts and without, in pairs.

    python bench/speculation.py [--model FOLDER] [--speculation auto] [--draft MODEL]
        [--streams 1 8 32 128] [--tokens 128] [--rounds 5] [--loads edits completions ...]
        [--processor] [--json FILE]

Batches of requests run on one engine in this process, with the steps and generations of a worker's
compute thread, without its other threads: with drafts and without, in turn. Whose drafts these are
says `--speculation`, as the setting of that name: ngram, mtp, draft or auto. All prompts are read
before the time is taken, and every request has as many tokens. A pair is two batches that follow
each other; its ratio is the time without drafts divided by that with them, so above 1 drafts are
faster. The first pair is not counted. On a CPU that others use as well, `--processor` takes the
processor time. Also: drafts that were right, tokens that a step gave, time of the search for drafts
in a step, and whether both ways gave the same ids.

Four loads, of real text that every installation has:

    edits        a function of the standard library, and the begin of it again under another name:
                 the model writes it again, as far as it does
    prose        the same with paragraphs of the pages of this repository
    completions  the begin of a function of the standard library, greedy
    sampled      the same with temperature 1, so that hardly any draft is right
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlxpool.worker.system.mlx_environment import set_mlx_environment

set_mlx_environment()  # before MLX is imported

from mlxpool.broker.processes.blas import preload  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.common.protocol.resume import Facts  # noqa: E402
from mlxpool.worker.compute.drafting_rows import make_drafter  # noqa: E402
from mlxpool.worker.compute.generations import Generation, Generations  # noqa: E402
from mlxpool.worker.compute.messages import Admit  # noqa: E402
from mlxpool.worker.compute.progress import Progress  # noqa: E402
from mlxpool.worker.compute.steps import Steps  # noqa: E402
from mlxpool.worker.draft_model.opening import inspect_draft, load_draft  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prompt.detokenizer import Detokenizer  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.speculation.drafter import AUTO, DRAFT, MTP  # noqa: E402
from mlxpool.worker.speculation.speculator import Speculator, drafts_in_memory  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from mlxpool.worker.weights.locate import DEMO_FOLDER  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"
MODULES = ("argparse", "csv", "difflib", "fractions", "heapq", "inspect", "tarfile", "textwrap")
SHORTEST, LONGEST = 150, 400  # tokens of a text that is written again
REPEATED = 32  # tokens of it that the prompt has again
BEGIN = 24  # tokens of a prompt that is completed
COLUMNS = (
    "load",
    "streams",
    "tokens/s off",
    "on",
    "ratio",
    "right",
    "tokens a step",
    "drafting, us a step",
    "same ids",
)
LOADS = ("edits", "prose", "completions", "sampled")


# ---- texts ---------------------------------------------------------------------------------------


@cache  # to cut the sources out takes seconds
def functions() -> list[tuple[str, str]]:
    """Returns functions of the standard library: name and source."""
    found = []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        source = (folder / f"{module}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                found.append((node.name, ast.get_source_segment(source, node) or ""))
    return found


def paragraphs() -> Iterator[str]:
    """Yields paragraphs of the pages."""
    for page in sorted(DOCS.glob("*.md")):
        yield from (part for part in page.read_text("utf-8").split("\n\n") if part[:1].isalpha())


@cache  # to count the tokens of all texts takes a second
def fitting_texts(load: str, text: ChatTokenizer) -> list[tuple[str, str]]:
    """Returns the texts of a load that are neither short nor long, and how each begins again."""
    if load == "prose":
        texts = [(one, one) for one in paragraphs()]
    else:
        texts = [
            (one, one.replace(f"def {name}", f"def new_{name}", 1)) for name, one in functions()
        ]
    return [one for one in texts if SHORTEST <= len(text.encode(one[0])) <= LONGEST]


def prompts(load: str, text: ChatTokenizer, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Returns the prompts of a load; the same ones for a seed."""
    draw = random.Random(seed)
    fitting = [*fitting_texts(load, text)]
    found = []
    for number in range(count):
        if not number % len(fitting):
            draw.shuffle(fitting)
        first, again = fitting[number % len(fitting)]
        if load in ("edits", "prose"):
            repeated = text.decode(text.encode(again)[len(text.prefix) :][:REPEATED])
            found.append(tuple(text.encode(f"{first}\n\n\n{repeated}")))
        else:
            found.append(tuple(text.encode(first)[:BEGIN]))
    return found


# ---- batches -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Timed:
    """What one batch took: seconds, steps, and of these the seconds of the search for drafts."""

    seconds: float
    steps: int
    search: float
    tokens: int
    ids: list[list[int]]


class Searched:
    """Adds up the time that a speculator takes in the steps of a batch."""

    def __init__(self, speculator: Speculator | None) -> None:
        self.seconds = 0.0
        if speculator is not None:
            for name in ("depths", "drafts"):
                setattr(speculator, name, self._timed(getattr(speculator, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = method(*arguments)
            self.seconds += time.perf_counter() - began
            return found

        return timed


def run_batch(
    engine: ModelEngine,
    speculator: Speculator | None,
    searched: Searched,
    given: list[tuple[int, ...]],
    options: Options,
    tokens: int,
    clock: Callable[[], float],
) -> Timed:
    """Runs a batch of requests to its end. The time begins when all prompts are read."""
    generations = Generations(engine)
    steps = Steps(engine, generations, Progress(lambda: None), speculator)
    rows = []
    for number, prompt in enumerate(given):
        row = Sequence(number.to_bytes(16, "big"), 1, prompt, options, number, tokens)
        text = Detokenizer(engine.piece, ())
        generations.add(Generation.begin(Admit(row, Facts(), text, time.monotonic()), engine.piece))
        if not engine.blocks.admit(row, alone=True):
            raise SystemExit(f"{len(given)} streams do not fit into the memory")
        steps.admit(row)
        rows.append(row)

    def step() -> None:
        for row in engine.blocks.lacking(generations.sequences()):
            engine.blocks.grow(row, alone=True)
        steps.run()

    while any(not row.ids for row in rows):
        step()
    made, count, before, began = sum(len(row.ids) for row in rows), 0, searched.seconds, clock()
    while len(generations):
        step()
        count += 1
    took = clock() - began
    while steps.in_flight:
        steps.collect()
    done = sum(len(row.ids) for row in rows) - made
    return Timed(took, count, searched.seconds - before, done, [row.ids for row in rows])


@dataclass(frozen=True, slots=True)
class Result:
    """The pairs of one load and number of streams."""

    load: str
    streams: int
    plain: list[float]  # tokens/s
    drafted: list[float]
    ratios: list[float]
    right: float  # share of checked tokens
    tokens_a_step: float  # of a stream
    search_us: float  # of a step
    same: int  # streams with the same ids, of `all`
    all: int


def measure(
    engine: ModelEngine, text: ChatTokenizer, load: str, streams: int, arguments: Any
) -> Result:
    """Returns the pairs, without the first one."""
    clock = time.process_time if arguments.processor else time.perf_counter
    temperature = 1.0 if load == "sampled" else 0.0
    options = Options.parse({"temperature": temperature, "ignore_eos": True})
    if engine.no_drafts:
        raise SystemExit(f"{arguments.model}: {engine.no_drafts}")
    ahead = engine.limits.ahead > 0
    drafter = make_drafter(arguments.speculation, engine, clock)
    most = drafts_in_memory(engine.vocab_size)
    speculator = Speculator(drafter, engine.cost.seconds, clock, ahead=ahead, most_drafts=most)
    searched, nothing = Searched(speculator), Searched(None)
    plain: list[Timed] = []
    drafted: list[Timed] = []
    for number in range(arguments.rounds + 1):
        given = prompts(load, text, streams, seed=number)
        ways = [(plain, None, nothing), (drafted, speculator, searched)]
        for found, way, search in ways if number % 2 else ways[::-1]:
            found.append(run_batch(engine, way, search, given, options, arguments.tokens, clock))
        if not number:
            speculator.drafted = speculator.accepted = 0
    pairs = list(zip(plain, drafted, strict=True))[1:]
    every = [
        one == other
        for first, second in pairs
        for one, other in zip(first.ids, second.ids, strict=True)
    ]
    steps = sum(two.steps for _, two in pairs)
    return Result(
        load,
        streams,
        [one.tokens / one.seconds for one, _ in pairs],
        [two.tokens / two.seconds for _, two in pairs],
        [one.seconds / two.seconds for one, two in pairs],
        speculator.accepted / max(1, speculator.drafted),
        sum(two.tokens for _, two in pairs) / steps / streams,
        sum(two.search for _, two in pairs) / steps * 1e6,
        sum(every),
        len(every),
    )


def shown(one: Result) -> str:
    """A row of the table."""
    ratio = f"{statistics.median(one.ratios):.2f} ({min(one.ratios):.2f} - {max(one.ratios):.2f})"
    cells = [
        one.load,
        str(one.streams),
        f"{statistics.median(one.plain):,.0f}",
        f"{statistics.median(one.drafted):,.0f}",
        ratio,
        f"{one.right:.0%}",
        f"{one.tokens_a_step:.2f}",
        f"{one.search_us:.0f}",
        f"{one.same}/{one.all}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER)
    parser.add_argument(
        "--speculation", choices=("ngram", MTP, DRAFT, AUTO), default=AUTO, help="whose drafts"
    )
    parser.add_argument("--draft", default="", help="the draft model, as the setting of this name")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128, help="that each request generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--processor", action="store_true", help="processor time, not the clock's")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):  # as workers have it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    folder = inspect(arguments.model, predicts=arguments.speculation in (MTP, AUTO))
    if arguments.speculation == MTP and not folder.plan.predicts:
        raise SystemExit(f"{arguments.model} has no head that predicts further tokens (MTP)")
    if arguments.speculation == DRAFT and not arguments.draft:
        parser.error("name the draft model, --draft MODEL")
    text = ChatTokenizer.from_folder(folder)
    most, draft = max(arguments.streams), None
    if arguments.draft:
        found_draft = inspect_draft(arguments.draft, folder)
        draft = load_draft(found_draft, lambda tensors, size: None, rows=most, limit=0)
    engine = ModelEngine(load(folder), text, prefix="off", max_sequences=most, draft=draft)
    engine.expect_drafts(drafts_in_memory(engine.vocab_size))
    engine.warm_up()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = []
    for name in arguments.loads:
        for streams in arguments.streams:
            one = measure(engine, text, name, streams, arguments)
            print(shown(one), flush=True)
            found.append(asdict(one))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
