"""Answers of the demo model to requests with formats, computed in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from mlxpool.common.options import Options
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.constraints.compiler import Compiler
from mlxpool.worker.constraints.constraint import Constraint, Words
from mlxpool.worker.constraints.thought_bound import ThoughtBound
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.thoughts import MARKS, Thoughts
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.sequence import Phase
from mlxpool.worker.scheduling.sequence import Sequence as Row
from mlxpool.worker.speculation.speculator import Speculator
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import DEMO_FOLDER

PROMPT = "import json\n\n\ndef load(path):\n    "


@cache
def demo() -> tuple[ModelFolder, ChatTokenizer, TokenTable]:
    """Returns the folder of the demo model, its tokenizer, and the bytes of its tokens."""
    folder = inspect(DEMO_FOLDER)
    text = ChatTokenizer.from_folder(folder)
    return folder, text, text.table(folder.plan.vocab_size)


@cache
def compiler() -> Compiler:
    """Returns a compiler of formats for the demo model, which runs in the caller's thread."""
    folder, text, table = demo()

    def load() -> Any:
        return load_vocabulary(text.source, table.pieces, folder.eos_ids)

    return Compiler(load, text.source.sha256, folder.eos_ids, folder.plan.vocab_size)


def constraint(format: Mapping[str, Any]) -> Constraint:
    """Returns a new constraint of a format for the demo model."""
    return compiler().constraint(Options.parse({"format": format}).format or {})


@cache
def end_of_thoughts() -> list[int]:
    """Returns the ids of the mark that ends thoughts; in the demo model it has several tokens."""
    _, text, table = demo()
    ids = text.encode(MARKS["tags"].closings[0])[len(text.prefix) :]
    assert b"".join(map(table.piece, ids)) == b"</think>" and len(ids) > 2
    return ids


def thoughts_of(most: int) -> Thoughts:
    """Returns the state of open thoughts before an answer; the demo model has no thoughts."""
    _, text, _ = demo()
    marks = MARKS["tags"]
    return Thoughts(text.piece, marks, most=most, closings=[end_of_thoughts()])


def tokens_of(mask: Words) -> list[int]:
    """Returns the tokens that a mask [1, words] allows."""
    bits = mask[0][:, None] >> np.arange(32, dtype=np.uint32) & 1
    return [int(token) for token in np.nonzero(bits.reshape(-1))[0]]


@dataclass
class Answer:
    """The answer to one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: dict[str, Any] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)


class Answers:
    """Runs requests on an engine of the demo model, all in the same batch."""

    def __init__(self, engine: Engine, speculator: Speculator | None = None) -> None:
        self.engine = engine
        self.generations = Generations(engine)
        self.steps = Steps(engine, self.generations, Progress(lambda: None), speculator)
        self.answers: dict[int, Answer] = {}

    def admit(
        self,
        number: int,
        *,
        prompt: str = PROMPT,
        had: Sequence[int] = (),
        max_tokens: int = 60,
        **options: Any,
    ) -> Row:
        """Admits a request; `had` are the ids that a resumed request already has.

        With `thinking_budget` the answer begins within thoughts, as if the prompt had opened them.
        """
        chosen = Options.parse({"seed": number, **options})
        _, text, _ = demo()
        ids = tuple(text.encode(prompt))
        seed = options.get("seed", number)
        row = Row(bytes([number] * 16), 1, ids, chosen, seed, max_tokens, list(had))
        detokenizer = Detokenizer(text.piece, chosen.stop)
        detokenizer.replay(had)
        format_constraint = None if chosen.format is None else constraint(chosen.format)
        bound = None
        if chosen.thinking_budget >= 0:
            thoughts = thoughts_of(chosen.thinking_budget)
            if format_constraint is not None:
                format_constraint.begin_in_thoughts(thoughts)
            else:
                bound = ThoughtBound(thoughts, demo()[0].plan.vocab_size)
                bound.replay(had)
        if format_constraint is not None:
            format_constraint.replay(had)
        admit = Admit(row, Facts(), detokenizer, 0.0, constraint=format_constraint, bound=bound)
        self.answers[number] = Answer(list(had))
        self.generations.add(Generation.begin(admit, self.engine.piece))
        self._enter(row)
        return row

    def _enter(self, row: Row) -> None:
        assert self.engine.blocks.admit(row, alone=True)
        assert not self.steps.admit(row)

    def step(self) -> None:
        """Runs one step, and admits preempted sequences again."""
        for row in self.generations.sequences():
            if row.phase is Phase.WAITING:
                self._enter(row)
            elif self.engine.blocks.lacks_blocks(row):
                assert self.engine.blocks.grow(row, alone=True)
        for delta in self.steps.run():
            self._take(delta)

    def run(self) -> dict[int, Answer]:
        """Runs steps until every request has ended."""
        while len(self.generations):
            self.step()
        while self.steps.in_flight:
            self.steps.collect()
        return self.answers

    def _take(self, delta: Delta) -> None:
        answer = self.answers[delta.id[0]]
        answer.ids += unpack_ids(delta.ids)
        answer.text += delta.text
        answer.logprobs += delta.logprobs or []
        if delta.end is not None:
            answer.end = delta.end
            answer.text += delta.end.get("text", "")
