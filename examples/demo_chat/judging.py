"""Measures how often demo-chat writes exactly the expected answer.

The tests use conversations of words that the training does not use, and the conversations from the
project's pages. A few of the conversations from the pages are in the training data, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_chat.batches import encode
from demo_chat.conversations import UNASKED, Conversation, Round, with_tools, without_tools
from demo_chat.shown import SHOWN
from demo_chat.tools import FAMILIES, drawn
from demo_chat.words import Words

Expected = Callable[[list[int]], npt.NDArray[np.int64]]  # the most likely token after each token

# The sets have other invented words than the training, and tools with names from other lists.
SETS: dict[str, tuple[int, Callable[[Words], Conversation]]] = {
    "known tools": (10**7 + 1, lambda words: with_tools(words, FAMILIES)),
    "unseen tools": (10**7 + 2, lambda words: with_tools(words, (drawn,))),
    "no tools": (10**7 + 3, without_tools),
}


@dataclass(frozen=True, slots=True)
class Miss:
    """A wrong answer. `written`: the most likely token after each prefix of the wanted answer."""

    kind: str
    user: str
    wanted: str
    written: str


Results = dict[str, dict[str, list[int]]]  # set -> kind of answer -> [right, all]


def judge(
    expected: Expected, tokenizer: Tokenizer, count: int, longest: int
) -> tuple[Results, list[Miss]]:
    """Returns counts [right answers, all answers] and the wrong answers.

    The counts are by set of conversations (such as "unseen tools, thinking") and kind of answer.
    An answer is right if each of its tokens, with its thought and end mark, is the most likely
    token after the tokens before it. Then the model writes this answer at temperature 0.
    """
    results: Results = {}
    misses: list[Miss] = []
    sets = {name: [*_drawn(seed, draw, count)] for name, (seed, draw) in SETS.items()}
    for name, conversations in {**sets, "the pages' own": SHOWN}.items():
        for thinks in (False, True):
            label = f"{name}, thinking" if thinks else name
            right, tried = Counter[str](), Counter[str]()
            for conversation in conversations:
                conversation = replace(conversation, thinks=(thinks,) * len(conversation.rounds))
                for kind, miss in _answers(expected, tokenizer, conversation, longest):
                    tried[kind] += 1
                    right[kind] += miss is None
                    misses += [] if miss is None else [replace(miss, kind=f"{label}: {kind}")]
            results[label] = {kind: [right[kind], tried[kind]] for kind in sorted(tried)}
    return results, misses


def _drawn(seed: int, draw: Callable[[Words], Conversation], count: int) -> Iterator[Conversation]:
    words = Words(random.Random(seed), unseen=True)
    for _ in range(count):
        yield draw(words)


def _answers(
    expected: Expected, tokenizer: Tokenizer, conversation: Conversation, longest: int
) -> Iterator[tuple[str, Miss | None]]:
    """Yields the kind of each judged answer, with its Miss if the answer is wrong, else None."""
    encoded = encode(tokenizer, conversation)
    if len(encoded.ids) > longest:
        return
    likeliest = expected(encoded.ids).tolist()
    spans = iter(encoded.spans)
    for turn in conversation.rounds:
        for number, kind in enumerate(_kinds(turn)):
            parts = 1 if number else max(len(turn.given), 1)  # parts that the model writes
            wanted, written = list[int](), list[int]()
            for begin, end in islice(spans, parts):
                wanted += encoded.ids[begin:end]
                written += likeliest[begin - 1 : end - 1]
            if kind == UNASKED:
                continue
            shown = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (wanted, written)]
            yield kind, None if wanted == written else Miss(kind, turn.user, *shown)


def _kinds(turn: Round) -> Sequence[str]:
    if turn.call is None:
        return (turn.family,)
    return ("forced call" if turn.given else "call", "answer")


def table(results: Results) -> str:
    """Returns a table in Markdown with the fractions of right answers."""
    rows = [
        "| conversations with | calls | forced calls | answers to a result | other answers |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in results.items():
        own = ("call", "forced call", "answer")
        others = [pair for kind, pair in kinds.items() if kind not in own]
        groups = [*map(kinds.get, own), [sum(counts) for counts in zip(*others, strict=True)]]
        rows.append(f"| {name} | {' | '.join(_share(pair) for pair in groups)} |")
    return "\n".join(rows) + "\n"


def _share(pair: Sequence[int] | None) -> str:
    if not pair or not pair[1]:
        return ""
    right, tried = pair
    return f"{right / tried:.3f} of {tried}"
