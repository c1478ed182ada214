"""Measures what speculation gains and costs: tokens/s with drafts and without, in pairs.

    python bench/speculation.py [--model FOLDER] [--speculation auto] [--draft MODEL]
        [--streams 1 8 32 128] [--tokens 128] [--rounds 5] [--loads edits completions ...]
        [--processor] [--turns STEPS] [--acceptance CHANCE] [--json FILE]

Batches of requests run on an engine in this process, with the steps and generations of a worker's
compute thread, without its other threads: with drafts and without, in turn. Whose drafts these are
says `--speculation`, as the setting of that name: ngram, mtp, draft or auto; with off no batch has
drafts, which shows how far two equal batches differ. All prompts are read
before the time is taken, and every request has as many tokens. A pair is two batches that follow
each other; its ratio is the time without drafts divided by that with them, so above 1 drafts are
faster. The first pair is not counted. On a CPU that others use as well, `--processor` takes the
processor time, with one BLAS thread. With `--turns` each way has an engine of its own, that without
drafts as a worker with `speculation = "off"` has it, and the batches of a pair take turns of so
many steps, so that what others do to the machine for longer than that slows both. With
`--acceptance` each draft counts as right with this chance, whatever the model draws. So a model
with random weights shows what one of its shape gains by drafts as good as these. Also: drafts
that were right, tokens that a step gave, time of the search for drafts in a step, and whether both
ways gave the same ids, as they do without `--acceptance`.

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
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

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
from mlxpool.worker.engine import flight  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prompt.detokenizer import Detokenizer  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.sampling.batch import SampledNumbers  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence  # noqa: E402
from mlxpool.worker.speculation.drafter import (  # noqa: E402
    AUTO,
    DRAFT,
    MTP,
    NGRAM,
    OFF,
    Drafter,
    Drafts,
)
from mlxpool.worker.speculation.speculator import Speculator, max_drafts_of_step  # noqa: E402
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


class GivenAcceptance:
    """A Drafter whose drafts count as right with a chance, whatever the model draws."""

    name = "given acceptance"

    def __init__(self, chance: float) -> None:
        self._chance = chance
        self._draw = random.Random(0)

    def follow(self, seq: Sequence) -> bool:
        return True

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        return (self._chance,) * most

    def seconds(self, rows: int, depth: int) -> float:
        return 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        return {seq: (1,) * depth for seq, depth in depths.items()}

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        return ()

    def reset(self) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def accepted(
        self, sampled: SampledNumbers, seq: Sequence, row: int, drafts: Many[int]
    ) -> list[SampledToken]:
        """Takes the place of `accepted_tokens`."""
        wrong = (n for n in range(len(drafts)) if self._draw.random() >= self._chance)
        right = next(wrong, len(drafts))
        tokens = [*drafts[:right], max(0, sampled.tokens[row + right])]
        return [SampledToken(seq, token, None) for token in tokens]


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


class Pauses:
    """A clock that stands still while other batches have their turns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = 0.0  # seconds that it stood still
        self._stopped = clock()

    def __call__(self) -> float:
        return self._clock() - self._left

    def stop(self) -> None:
        self._stopped = self._clock()

    def go_on(self) -> None:
        self._left += self._clock() - self._stopped


@dataclass(slots=True)
class Way:
    """How batches are computed: with these drafts, or without. Each has a clock of its own."""

    engine: ModelEngine
    speculator: Speculator | None
    clock: Pauses
    searched: Searched


def run_batch(
    way: Way, given: list[tuple[int, ...]], options: Options, tokens: int, turn: int
) -> Generator[None, None, Timed]:
    """Runs a batch of requests to its end. The time begins when all prompts are read.

    It yields after that, and then each `turn` steps if that is not 0.
    """
    engine, clock = way.engine, way.clock
    clock.go_on()
    generations = Generations(engine)
    steps = Steps(engine, generations, Progress(lambda: None), way.speculator)
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
    clock.stop()
    yield
    clock.go_on()
    made, count = sum(len(row.ids) for row in rows), 0
    before, began = way.searched.seconds, clock()
    while len(generations):
        if turn and count and not count % turn:
            clock.stop()
            yield
            clock.go_on()
        step()
        count += 1
    took = clock() - began
    while steps.in_flight:
        steps.collect()
    done = sum(len(row.ids) for row in rows) - made
    clock.stop()
    return Timed(took, count, way.searched.seconds - before, done, [row.ids for row in rows])


def run_in_turns(batches: list[Generator[None, None, Timed]]) -> list[Timed]:
    """Returns what batches took that have turns, the first one first."""
    found: dict[int, Timed] = {}
    while len(found) < len(batches):
        for number, one in enumerate(batches):
            if number in found:
                continue
            try:
                next(one)
            except StopIteration as end:
                found[number] = end.value
    return [found[number] for number in range(len(batches))]


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
    engines: list[ModelEngine], text: ChatTokenizer, load: str, streams: int, arguments: Any
) -> Result:
    """Returns the pairs, without the first one. The last engine computes those with drafts."""
    seconds = time.process_time if arguments.processor else time.perf_counter
    temperature = 1.0 if load == "sampled" else 0.0
    options = Options.parse({"temperature": temperature, "ignore_eos": True})
    engine, clock = engines[-1], Pauses(seconds)
    if engine.no_drafts:
        raise SystemExit(f"{arguments.model}: {engine.no_drafts}")
    speculator = None
    if arguments.speculation != OFF:
        drafter: Drafter
        if arguments.acceptance:
            drafter = given_acceptance = GivenAcceptance(arguments.acceptance)
            mock.patch.object(flight, "accepted_tokens", given_acceptance.accepted).start()
        else:
            drafter = make_drafter(arguments.speculation, engine, clock)
        most, ahead = max_drafts_of_step(engine.vocab_size), engine.limits.ahead > 0
        speculator = Speculator(drafter, engine.cost.seconds, clock, ahead=ahead, most_drafts=most)
    off = Way(engines[0], None, Pauses(seconds), Searched(None))
    on = Way(engine, speculator, clock, Searched(speculator))
    plain: list[Timed] = []
    drafted: list[Timed] = []
    for number in range(arguments.rounds + 1):
        given = prompts(load, text, streams, seed=number)
        ways = [(plain, off), (drafted, on)]
        ordered = ways if number % 2 else ways[::-1]
        batches = [
            run_batch(way, given, options, arguments.tokens, arguments.turns) for _, way in ordered
        ]
        took = run_in_turns(batches) if arguments.turns else [run_in_turns([b])[0] for b in batches]
        for (found, _), one in zip(ordered, took, strict=True):
            found.append(one)
        if not number and speculator is not None:
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
        speculator.accepted / max(1, speculator.drafted) if speculator is not None else 0.0,
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
    parser.add_argument("--speculation", choices=(OFF, NGRAM, MTP, DRAFT, AUTO), default=AUTO)
    parser.add_argument("--draft", default="", help="the draft model, as the setting of this name")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128, help="that each request generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--processor", action="store_true", help="processor time, not the clock's")
    parser.add_argument(
        "--turns", type=int, default=0, help="steps of a batch before the other of its pair goes on"
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.0, help="drafts count as right with this chance"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):  # as workers have it
        alone = {"OPENBLAS_NUM_THREADS": "1"} if arguments.processor else {}  # none that waits
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload(), **alone})
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
    opened = [(folder, draft)]
    if arguments.turns:  # the engine without drafts is as a worker with `off` has it
        opened.insert(0, (inspect(arguments.model, predicts=False), None))
    engines = []
    for each, drafts in opened:
        engine = ModelEngine(load(each), text, prefix="off", max_sequences=most, draft=drafts)
        engine.expect_drafts(max_drafts_of_step(engine.vocab_size))
        engine.warm_up()
        engines.append(engine)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    found = []
    for name in arguments.loads:
        for streams in arguments.streams:
            one = measure(engines, text, name, streams, arguments)
            print(shown(one), flush=True)
            found.append(asdict(one))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
