"""Speculative decoding: do drafts raise the tokens/s, and lower them if most drafts are wrong?

Batches of requests run on an engine in this process with drafts and without, in turn. Prefill is
not measured, and all requests have the same number of tokens. With `--acceptance` each draft is
accepted with this probability, independently of the model. So random weights also show the gain for
a shape. The loads consist of text that every installation has:

    edits        a function of the standard library, then its beginning under another name:
                 the model is to repeat the function
    completions  the beginning of a function of the standard library, greedy
    sampled      like completions, with temperature 1, so that hardly any draft is right
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from unittest import mock

from msgspec import Struct, field

from mlxpool.bench import models
from mlxpool.bench.batches import Batch
from mlxpool.bench.load.closed_loop import counted
from mlxpool.bench.measurement import OURS, Measurement, Progress, in_turn
from mlxpool.common.options import Options
from mlxpool.worker.compute.drafting_rows import make_drafter
from mlxpool.worker.draft_model.opening import inspect_draft, load_draft
from mlxpool.worker.engine import flight
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling.batch import SampledNumbers
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.speculation.drafter import AUTO, DRAFT, MTP, OFF, Drafter, Drafts
from mlxpool.worker.speculation.speculator import Speculator, max_drafts_of_step
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load

MODULES = ("argparse", "csv", "difflib", "fractions", "heapq", "inspect", "tarfile", "textwrap")
SHORTEST, LONGEST = 150, 400  # tokens of a text that is written again
REPEATED = 32  # tokens of this text with which the prompt ends
BEGIN = 24  # tokens of a prompt that is completed
EDITS, SAMPLED = "edits", "sampled"
LOADS = (EDITS, "completions", SAMPLED)
NO_DRAFTS = "no drafts"


# ---- texts ---------------------------------------------------------------------------------------


@cache  # cutting out the sources takes seconds
def functions() -> list[tuple[str, str]]:
    """Returns functions of the standard library: name and source."""
    sources = []
    folder = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        source = (folder / f"{module}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                sources.append((node.name, ast.get_source_segment(source, node) or ""))
    return sources


@cache  # counting the tokens of all texts takes a second
def fitting_texts(text: ChatTokenizer) -> list[tuple[str, str]]:
    """Returns pairs for functions of medium length: the source, and the source with a new name."""
    return [
        (source, source.replace(f"def {name}", f"def new_{name}", 1))
        for name, source in functions()
        if SHORTEST <= len(text.encode(source)) <= LONGEST
    ]


def prompts(load: str, text: ChatTokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Returns the prompts of a load; equal for equal seeds."""
    draw = random.Random(seed)
    fitting = [*fitting_texts(text)]
    prompts_drawn = []
    for number in range(count):
        if not number % len(fitting):
            draw.shuffle(fitting)
        first, again = fitting[number % len(fitting)]
        if load == EDITS:
            repeated = text.decode(text.encode(again)[len(text.prefix) :][:REPEATED])
            prompts_drawn.append(text.encode(f"{first}\n\n\n{repeated}"))
        else:
            prompts_drawn.append(text.encode(first)[:BEGIN])
    return prompts_drawn


# ---- drafts that are right with a chance ---------------------------------------------------------


class GivenAcceptance:
    """A Drafter whose drafts are accepted with a given probability, independently of the model."""

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
        """Replaces `accepted_tokens`: draws at random how many of the drafts are accepted."""
        wrong = (n for n in range(len(drafts)) if self._draw.random() >= self._chance)
        right = next(wrong, len(drafts))
        tokens = [*drafts[:right], max(0, sampled.tokens[row + right])]
        return [SampledToken(seq, token, None) for token in tokens]


# ---- batches -------------------------------------------------------------------------------------


class Way(Struct):
    """A contestant, with or without drafts: computes batches, and counts their steps and tokens."""

    engine: ModelEngine
    text: ChatTokenizer
    clock: Callable[[], float]
    speculator: Speculator | None = None
    ids: list[list[list[int]]] = field(default_factory=list)  # ids of each batch
    steps: int = 0  # steps of all batches but the first
    tokens: int = 0  # mean tokens of a stream in these steps

    def run(self, load: str, streams: int, tokens: int) -> float:
        """Returns the tokens/s of the next batch, without its prefill.

        Each batch has other prompts.
        """
        temperature = 1.0 if load == SAMPLED else 0.0
        options = Options.parse({"temperature": temperature, "ignore_eos": True})
        batch = Batch(self.engine, self.speculator)
        for prompt in prompts(load, self.text, streams, seed=len(self.ids)):
            batch.add(prompt, options, tokens)
        batch.read_prompts()
        steps, before, began = 0, sum(len(row.ids) for row in batch.rows), self.clock()
        while batch.running:
            batch.step()
            steps += 1
        took = self.clock() - began
        batch.end()
        drawn = sum(len(row.ids) for row in batch.rows) - before
        if self.ids:
            self.steps += steps
            self.tokens += drawn // streams
        elif self.speculator is not None:
            self.speculator.drafted = self.speculator.accepted = 0
        self.ids.append([list(row.ids) for row in batch.rows])
        return drawn / took


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    of = "processor time" if options.processor else "the clock"
    right = f", right with a chance of {options.acceptance:g}" if options.acceptance else ""
    return (
        f"{models.named(options)}; drafts: {options.speculation}{right}; {options.tokens} tokens of"
        f" each request by {of}, {options.rounds} rounds."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the tokens/s with and without drafts, for each load and number of streams.

    Raises ValueError if a load is unknown, or if the model cannot make the requested drafts.
    """
    if unknown := set(options.loads) - set(LOADS):
        raise ValueError(f"--loads {min(unknown)}: unknown, must be one of {', '.join(LOADS)}")
    clock = time.process_time if options.processor else time.perf_counter
    with models.folder(options, progress) as folder:
        progress("loading the model")
        engine, text = _engine(folder, options)
        for load_ in options.loads:
            for streams in options.streams:
                progress(f"{load_}, {counted(streams)}")
                with _speculator(engine, options, clock) as speculator:
                    on, off = Way(engine, text, clock, speculator), Way(engine, text, clock)
                    work = (load_, streams, options.tokens)
                    contestants = {OURS: partial(on.run, *work), NO_DRAFTS: partial(off.run, *work)}
                    rates_of = in_turn(contestants, options.rounds + 1)  # the first round warms up
                sides = {name: rates[1:] for name, rates in rates_of.items()}
                name = counted(streams)
                note = _note(name, on, off)
                yield Measurement(load_, name, "tokens/s", sides, at=streams, note=note)


def _engine(folder: Path, options: argparse.Namespace) -> tuple[ModelEngine, ChatTokenizer]:
    model = inspect(folder, predicts=options.speculation in (MTP, AUTO))
    if options.speculation == MTP and not model.plan.predicts:
        raise ValueError(f"{folder} has no head that predicts further tokens (MTP)")
    if options.speculation == DRAFT and not options.draft:
        raise ValueError("name the draft model, --draft MODEL")
    text, most, draft = ChatTokenizer.from_folder(model), max(options.streams), None
    if options.draft:
        opened = inspect_draft(options.draft, model)
        draft = load_draft(opened, lambda tensors, size: None, rows=most, limit=0)
    settings = EngineSettings(prefix="off", max_sequences=most)
    engine = ModelEngine(load(model), text, settings, draft=draft)
    if engine.no_drafts:
        raise ValueError(f"{folder}: {engine.no_drafts}")
    engine.expect_drafts(max_drafts_of_step(engine.vocab_size))
    engine.warm_up()
    return engine, text


@contextmanager
def _speculator(
    engine: ModelEngine, options: argparse.Namespace, clock: Callable[[], float]
) -> Iterator[Speculator | None]:
    """Yields the speculator inside the context; None with `--speculation off`."""
    if options.speculation == OFF:
        yield None
        return
    fixed = GivenAcceptance(options.acceptance)
    drafter: Drafter = (
        fixed if options.acceptance else make_drafter(options.speculation, engine, clock)
    )
    most, ahead = max_drafts_of_step(engine.vocab_size), engine.limits.ahead > 0
    with ExitStack() as stack:
        if options.acceptance:
            stack.enter_context(mock.patch.object(flight, "accepted_tokens", fixed.accepted))
        yield Speculator(drafter, engine.cost.seconds, clock, ahead=ahead, most_drafts=most)


def _note(streams: str, on: Way, off: Way) -> str:
    """Returns a text about the measured batches: all batches except the first, which warms up.

    It has the fraction of right drafts, the tokens per step, and the number of streams that had the
    same ids with drafts (`on`) and without (`off`). `streams`: the number of streams in words.
    """
    pairs = zip(on.ids[1:], off.ids[1:], strict=True)
    same = [ids == other for pair in pairs for ids, other in zip(*pair, strict=True)]
    drafted = on.speculator.drafted if on.speculator else 0
    accepted = on.speculator.accepted if on.speculator else 0
    return (
        f"{streams}: {accepted / max(1, drafted):.0%} of {drafted:,} drafts were right,"
        f" {on.tokens / max(1, on.steps):.2f} tokens a step; {sum(same):,} of {len(same):,}"
        " streams had the same ids."
    )
